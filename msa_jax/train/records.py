"""What a run writes down: metrics.jsonl, evaluation.jsonl and TensorBoard. One writer a job.

    metrics.jsonl      one object a step: {"step": 10, "seed": 0, "loss": 5.1, "loss/lm": 4.9, ..., "tokens_per_second": 21000.0}
    evaluation.jsonl   one object a value: {"step": 400, "name": "text/bits_per_byte/plays", "value": 2.5}

Step n is the state after n updates. A resumed run takes back what lies beyond its checkpoint, so that every step stands once.
"""

import contextlib
import json
import math
import os
import time
from collections.abc import Iterable, Iterator, Mapping
from pathlib import Path
from typing import Any

from tensorboardX.event_file_writer import EventsWriter
from tensorboardX.proto.event_pb2 import Event, SessionLog
from tensorboardX.proto.summary_pb2 import Summary

METRICS, EVALUATION, TENSORBOARD = "metrics.jsonl", "evaluation.jsonl", "tensorboard"


class Records:
    """Opens the records of `folder` for a run that continues at `step`; a context manager. Every row carries the run's seed."""

    def __init__(self, folder: Path, step: int = 0, seed: int = 0) -> None:
        self.seed = seed
        self._evaluation = folder / EVALUATION
        _take_back(folder / METRICS, step)
        self._evaluated = _take_back(self._evaluation, step)
        self._metrics = (folder / METRICS).open("a", encoding="utf-8")
        self._board = Board(folder / TENSORBOARD, step)

    def __enter__(self) -> "Records":
        return self

    def __exit__(self, *exception: Any) -> None:
        try:
            with _explained(self._evaluation.parent):  # a full disk stops the last flush too, and this error is the one that is seen
                self._board.close()
        finally:
            self._metrics.close()

    def write(self, step: int, scalars: Mapping[str, float]) -> None:
        """One step."""
        row = {"step": step, "seed": self.seed} | {name: _or_null(value) for name, value in scalars.items()}
        with _explained(self._evaluation.parent):
            self._metrics.write(json.dumps(row) + "\n")
            self._metrics.flush()
            self._board.show(step, scalars.items())

    def write_evaluation(self, step: int, values: Iterable[tuple[str, float]]) -> None:
        """All values of one evaluation, at once: a killed run leaves none or all of them."""
        values = list(values)
        rows = [json.dumps({"step": step, "name": name, "value": _or_null(value)}) + "\n" for name, value in values]
        before = self._evaluation.read_text(encoding="utf-8") if self._evaluation.exists() else ""
        with _explained(self._evaluation.parent):
            _replace(self._evaluation, before + "".join(rows))
            self._evaluated.append(step)
            self._board.show(step, values)

    def has_evaluation(self, step: int) -> bool:
        return step in self._evaluated


class Board:
    """TensorBoard events of a run that continues at `step`, each on disk when `show` returns.

    tensorboardX's SummaryWriter leaves the writing to a thread: a full disk ends that thread, and training then waits for it for ever.
    """

    def __init__(self, folder: Path, step: int) -> None:
        folder.mkdir(parents=True, exist_ok=True)
        self._events = EventsWriter(str(folder / "events"), f".from-{step}")
        # tells TensorBoard to forget what an earlier process wrote beyond `step`
        self._events.write_event(Event(wall_time=time.time(), step=step + 1, session_log=SessionLog(status=SessionLog.START)))

    def show(self, step: int, values: Iterable[tuple[str, float]]) -> None:
        for name, value in values:
            summary = Summary(value=[Summary.Value(tag=name, simple_value=value)])
            self._events.write_event(Event(wall_time=time.time(), step=step, summary=summary))
        self._events.flush()

    def close(self) -> None:
        self._events.close()


@contextlib.contextmanager
def _explained(folder: Path) -> Iterator[None]:
    """Adds folder and remedy to the system's word for a file that cannot be written."""
    try:
        yield
    except OSError as error:
        reason = f"{error.strerror}; make room or mend the folder, then run the same command to continue"
        raise OSError(error.errno, reason, str(folder)) from error


class NotLearned(RuntimeError):
    """A smoke run whose loss did not fall."""


def check_learning(folder: Path) -> str:
    """One line about the language loss of the first and the last five steps. Raises NotLearned unless it fell."""
    losses = [json.loads(line)["loss/lm"] for line in (folder / METRICS).read_text(encoding="utf-8").splitlines()]
    first, last = (sum(few) / len(few) for few in (losses[:5], losses[-5:]))
    line = f"language loss {first:.3f} -> {last:.3f} nats a token (means of the first and the last five of {len(losses)} steps)"
    if not last < first:
        raise NotLearned(f"{line}: it did not fall")
    return line


def _or_null(value: float) -> float | None:
    """JSON has neither NaN nor infinity."""
    return value if math.isfinite(value) else None


def _take_back(path: Path, last_step: int) -> list[int]:
    """Drops lines beyond `last_step` and the half line of a killed writer; returns the steps that stay."""
    if not path.exists():
        return []
    kept = [(step, line) for line in path.read_text(encoding="utf-8").splitlines() if (step := _step(line)) <= last_step]
    _replace(path, "".join(line + "\n" for _, line in kept))
    return [step for step, _ in kept]


def _step(line: str) -> float:
    try:
        return json.loads(line)["step"]
    except json.JSONDecodeError:
        return math.inf


def _replace(path: Path, text: str) -> None:
    new = path.with_suffix(".new")
    new.write_text(text, encoding="utf-8")
    os.replace(new, path)
