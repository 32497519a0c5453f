"""A bar on a terminal, plain lines elsewhere."""

import io
import itertools

import pytest
from rich.console import Console

from msa_jax.train import progress
from msa_jax.train.progress import Progress


def shown(terminal: bool, steps: int = 20) -> str:
    out = io.StringIO()
    with Progress(20, 0, Console(file=out, force_terminal=terminal, width=100, highlight=False)) as bar:
        for step in range(1, steps + 1):
            bar.step(step, 3.14159, 12345.6)
        bar.say("step 20: evaluating [text]")
    return out.getvalue()


def test_plain_lines_without_a_terminal() -> None:
    lines = shown(terminal=False).splitlines()
    assert lines[0] == "step 1/20  loss 3.142  12,346 tokens/s"
    assert lines[1] == "step 20/20  loss 3.142  12,346 tokens/s  0.0 min left", "the lines between came within PLAIN_SECONDS"
    assert lines[2:] == ["step 20: evaluating [text]"]
    assert "\x1b" not in "".join(lines)


def test_plain_lines_come_again_after_a_while(monkeypatch: pytest.MonkeyPatch) -> None:
    clock = itertools.count(100, 20)  # every step takes 20 seconds
    monkeypatch.setattr(progress.time, "monotonic", lambda: float(next(clock)))
    lines = shown(terminal=False).splitlines()
    assert lines[1] == "step 2/20  loss 3.142  12,346 tokens/s  6.0 min left"
    assert len(lines) == 21


def test_a_bar_with_loss_speed_and_time_left() -> None:
    text = shown(terminal=True, steps=10)
    assert "10/20" in text
    assert "loss 3.142  12,346 tokens/s" in text
    assert "left" in text
    assert "evaluating [text]" in text
