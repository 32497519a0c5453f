"""Ctrl-C and the signal that schedulers send before they take a machine: finish the step, save, leave."""

import os
import signal
import threading
from types import FrameType
from typing import Any

SEEN = b"\ninterrupted: stops and saves after what is under way; a second signal stops at once, without saving\n"


class Interrupted(Exception):
    """The run stopped on request, after saving. `exit_code` is the shell's: 130 for Ctrl-C, 143 for SIGTERM."""

    def __init__(self, step: int, signal_number: int) -> None:
        super().__init__(f"interrupted at step {step}, which is saved")
        self.exit_code = 128 + signal_number


class InterruptWatch:
    """While open, the first signal is noted in `received` and the second one acts at once (KeyboardInterrupt).

    A step in flight owns donated buffers: it is never cut short by the first signal.
    """

    SIGNALS = (signal.SIGINT, signal.SIGTERM)

    def __init__(self) -> None:
        self.received: int | None = None

    def __enter__(self) -> "InterruptWatch":
        may_listen = threading.current_thread() is threading.main_thread()  # Python delivers signals nowhere else
        self._before = {number: signal.signal(number, self._note) for number in self.SIGNALS if may_listen}
        return self

    def __exit__(self, *exception: Any) -> None:
        for number, handler in self._before.items():
            signal.signal(number, handler)

    def _note(self, number: int, frame: FrameType | None) -> None:
        if self.received is not None:
            raise KeyboardInterrupt
        self.received = number
        os.write(2, SEEN)  # to stderr, but not by print: a signal may come in the middle of one
