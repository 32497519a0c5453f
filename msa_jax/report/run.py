"""A run folder as values: configuration, curves, evaluation and figure arrays.

    runs/x/config.json       who made the run: commit, hash, device, implementations, experiment
    runs/x/metrics.jsonl     one object a logged step
    runs/x/evaluation.jsonl  one object a value: {"step": 400, "name": "text/bits_per_byte/plays", "value": 2.5}
    runs/x/arrays/*.npz      arrays for figures

A run that was killed may end in half a line, and a resumed run writes some steps twice: unreadable lines are counted, not
fatal, and the last line of a step wins.
"""

import dataclasses
import json
import re
import zipfile
from pathlib import Path
from typing import Any

import numpy as np

FORMAT = 1


class RunFolderError(ValueError):
    """A folder that is not a readable run; the message names the path and the remedy."""


@dataclasses.dataclass(frozen=True)
class Run:
    """One run. `evaluation` is {name: last value}; `problems` says in words what was missing or unreadable."""

    path: Path
    config: dict[str, Any]
    metrics: list[dict[str, Any]]
    evaluation: dict[str, float]
    evaluated_at: int | None
    arrays: dict[str, dict[str, np.ndarray]]
    problems: tuple[str, ...]

    @property
    def name(self) -> str:
        return self.path.name

    @property
    def experiment(self) -> dict[str, Any]:
        return self.config["experiment"]

    @property
    def finished(self) -> bool:
        """Trained to its last step and evaluated there."""
        return self.evaluated_at == self.experiment["train"]["steps"]

    def mean(self, name: str) -> float | None:
        """The value of this name, or the mean over its sources, splits or layers (`name/...`); None if there is none."""
        values = [self.evaluation[name]] if name in self.evaluation else [self.evaluation[f"{name}/{key}"] for key in self.keys(name)]
        return sum(values) / len(values) if values else None

    def curve(self, name: str) -> tuple[np.ndarray, np.ndarray]:
        """(steps, values) of one metric, empty when it was never logged."""
        points = [(row["step"], row[name]) for row in self.metrics if isinstance(row.get(name), int | float)]
        return np.array([step for step, _ in points], int), np.array([value for _, value in points], float)

    def keys(self, prefix: str) -> list[str]:
        """What follows `prefix/` in the names of the evaluation: sources, splits or layers, in order of appearance."""
        return [name[len(prefix) + 1 :] for name in self.evaluation if name.startswith(prefix + "/")]

    def layers(self, prefix: str) -> list[str]:
        """`keys` in numeric order: layer_2 before layer_10."""
        return sorted(self.keys(prefix), key=lambda key: [int(part) if part.isdigit() else part for part in re.split(r"(\d+)", key)])

    def provenance(self) -> dict[str, str]:
        """What makes a number quotable: commit, config hash, seed, device and implementation."""
        ops = self.config.get("implementations", {})
        kinds = sorted(set(ops.values()))
        return {
            "commit": str(self.config.get("commit", "unknown"))[:12],
            "config": str(self.config.get("hash", "unknown")),
            "seed": str(self.experiment.get("seed", "unknown")),
            "device": str(self.config.get("device", "unknown")),
            "implementation": kinds[0] if len(kinds) == 1 else ", ".join(f"{op}={kind}" for op, kind in ops.items()) or "unknown",
        }


def load_run(path: str | Path) -> Run:
    """Reads a run folder. Raises RunFolderError when it is none, or was written in another format."""
    path = Path(path)
    config = _read_config(path)
    problems = [f"config.json: resumed with another {', '.join(facts)}" for facts in config.get("resumed_with", [])]
    metrics = _read_lines(path / "metrics.jsonl", ("step",), problems)
    values = _read_lines(path / "evaluation.jsonl", ("step", "name", "value"), problems)
    by_step = {row["step"]: row for row in metrics}
    return Run(
        path=path,
        config=config,
        metrics=[by_step[step] for step in sorted(by_step)],
        evaluation={row["name"]: _number(row["value"]) for row in sorted(values, key=lambda row: row["step"])},
        evaluated_at=max((row["step"] for row in values), default=None),
        arrays=_read_arrays(path / "arrays", problems),
        problems=tuple(problems),
    )


def _read_config(path: Path) -> dict[str, Any]:
    if not path.is_dir():
        raise RunFolderError(f"{path}: no such folder; give the --workdir of a run")
    file = path / "config.json"
    if not file.is_file():
        raise RunFolderError(f"{path}: not a run folder, config.json is missing; `python train.py --workdir {path}` makes one")
    try:
        config = json.loads(file.read_text(encoding="utf-8"))
    except ValueError as error:
        raise RunFolderError(f"{file}: not valid JSON ({error}); restore it or start the run anew") from error
    if not isinstance(config, dict) or config.get("format") != FORMAT or "experiment" not in config:
        found = config.get("format") if isinstance(config, dict) else type(config).__name__
        raise RunFolderError(f"{file}: format {found!r}, this report reads format {FORMAT}; use the version of the commit that wrote it")
    return config


def _read_lines(file: Path, required: tuple[str, ...], problems: list[str]) -> list[dict[str, Any]]:
    """The objects of a JSONL file that have all `required` keys; the others are counted in `problems`."""
    if not file.is_file():
        problems.append(f"{file.name} is missing")
        return []
    rows, unreadable = [], 0
    for line in file.read_bytes().splitlines():
        if not line.strip():
            continue
        row = _parse(line)
        if row is None or not all(key in row for key in required):
            unreadable += 1
        else:
            rows.append(row)
    if unreadable:
        problems.append(f"{file.name}: {unreadable} of {unreadable + len(rows)} lines are unreadable and left out")
    return rows


def _number(value: float | None) -> float:
    """JSON has no NaN: what was not finite is written as null."""
    return float("nan") if value is None else value


def _parse(line: bytes) -> dict[str, Any] | None:
    try:
        row = json.loads(line)
    except ValueError:  # half a line, or bytes that are not text
        return None
    readable = isinstance(row, dict) and isinstance(row.get("step"), int) and isinstance(row.get("value"), int | float | None)
    return row if readable else None


def _read_arrays(folder: Path, problems: list[str]) -> dict[str, dict[str, np.ndarray]]:
    arrays = {}
    for file in sorted(folder.glob("*.npz")):
        try:
            with np.load(file, allow_pickle=False) as content:
                arrays[file.stem] = dict(content)
        except (OSError, ValueError, zipfile.BadZipFile) as error:
            problems.append(f"arrays/{file.name} is unreadable ({error}) and its figure is left out")
    return arrays
