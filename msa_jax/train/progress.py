"""Progress on stderr: a bar with loss, tokens a second and time left on a terminal, plain lines elsewhere."""

import time
from typing import Any

from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, TextColumn, TimeRemainingColumn
from rich.progress import Progress as RichProgress

PLAIN_SECONDS = 15.0  # between lines where there is no terminal


class Progress:
    """A context manager around the steps of one run."""

    def __init__(self, total: int, start: int = 0, console: Console | None = None) -> None:
        self._console = console or Console(stderr=True, highlight=False)
        self._total, self._first, self._last_line = total, None, -PLAIN_SECONDS
        self._bar = RichProgress(
            TextColumn("step"), MofNCompleteColumn(), BarColumn(), TextColumn("{task.fields[figures]}"), TimeRemainingColumn(),
            TextColumn("left"), console=self._console, disable=not self._console.is_terminal,
        )  # fmt: skip
        self._task = self._bar.add_task("train", total=total, completed=start, figures="")

    def __enter__(self) -> "Progress":
        self._bar.start()
        return self

    def __exit__(self, *exception: Any) -> None:
        self._bar.stop()

    def step(self, step: int, loss: float, tokens_per_second: float) -> None:
        """`step` updates are done."""
        figures = f"loss {loss:.3f}  {tokens_per_second:,.0f} tokens/s"
        self._bar.update(self._task, completed=step, figures=figures)
        now = time.monotonic()
        if not self._console.is_terminal and (now - self._last_line >= PLAIN_SECONDS or step == self._total):
            self._last_line = now
            self.say(f"step {step}/{self._total}  {figures}{self._left(step, now)}")

    def _left(self, step: int, now: float) -> str:
        """Unknown at the first step, which came after compilation."""
        first_step, began = self._first = self._first or (step, now)
        return f"  {(now - began) / (step - first_step) * (self._total - step) / 60:.1f} min left" if step > first_step else ""

    def say(self, text: str) -> None:
        """A line above the bar."""
        self._console.print(text, markup=False, soft_wrap=True)
