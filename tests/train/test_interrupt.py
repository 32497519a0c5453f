"""The first signal is noted, the second acts, and earlier handlers come back."""

import os
import signal
import threading

import pytest

from msa_jax.train.interrupt import Interrupted, InterruptWatch


@pytest.mark.parametrize("number", InterruptWatch.SIGNALS)
def test_the_first_signal_is_noted_and_the_second_acts(number: int, capfd: pytest.CaptureFixture[str]) -> None:
    before = signal.getsignal(number)
    with InterruptWatch() as watch:
        assert watch.received is None
        os.kill(os.getpid(), number)
        assert watch.received == number
        assert "stops and saves after what is under way" in capfd.readouterr().err
        with pytest.raises(KeyboardInterrupt):
            os.kill(os.getpid(), number)
    assert signal.getsignal(number) is before


def test_the_exit_code_is_the_shells() -> None:
    assert Interrupted(3, signal.SIGINT).exit_code == 130
    assert Interrupted(3, signal.SIGTERM).exit_code == 143
    assert str(Interrupted(3, signal.SIGINT)) == "interrupted at step 3, which is saved"


def test_other_threads_may_train_too() -> None:
    """Python allows signal handlers in the main thread only."""
    received = []

    def work() -> None:
        with InterruptWatch() as watch:
            received.append(watch.received)

    thread = threading.Thread(target=work)
    thread.start()
    thread.join()
    assert received == [None]
