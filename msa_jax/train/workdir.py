"""The run folder: whose it is, which configuration it holds, and what stood there before.

runs/x/config.json    {"format": 1, "hash": ..., "commit": ..., "versions": ..., "device": ..., "experiment": {...}}
runs/x/lock           held while a process trains there; the system frees it however that process ends
"""

import contextlib
import fcntl
import json
import os
import platform
import socket
import subprocess
from collections.abc import Iterator, Mapping
from importlib.metadata import version
from pathlib import Path
from typing import Any

from msa_jax.config import Experiment, config_hash, difference, to_dict
from msa_jax.train.checkpoint import CHECKPOINTS
from msa_jax.train.records import METRICS

FORMAT = 1
CONFIG, UNFINISHED, LOCK = "config.json", "config.json.new", "lock"
PACKAGES = ("jax", "jaxlib", "flax", "optax", "orbax-checkpoint", "grain", "numpy")


class WorkdirError(ValueError):
    """A run folder that cannot be used; the message says why and what to do."""


@contextlib.contextmanager
def open_workdir(path: str | Path, experiment: Experiment, facts: Mapping[str, Any], *, force_new: bool = False) -> Iterator[Path]:
    """Makes or reopens the run folder of `experiment` and holds its lock; yields its path.

    `facts` (commit, versions, device, ...) go into config.json. `force_new` moves a run that is there aside, it deletes nothing.
    Raises WorkdirError for a folder that is another run's, in use, or no run folder at all.
    """
    path = Path(path)
    if path.exists() and not path.is_dir():
        raise WorkdirError(f"{path} is a file; --workdir names a folder")
    if path.is_dir() and not (path / CONFIG).exists() and {entry.name for entry in path.iterdir()} - {LOCK, UNFINISHED}:
        raise WorkdirError(f"{path} holds other files and no {CONFIG}; choose another --workdir")
    with contextlib.ExitStack() as stack:
        path.mkdir(parents=True, exist_ok=True)
        stack.enter_context(_lock(path))
        if force_new and (path / CONFIG).exists():
            path.rename(_free_name(path))
            path.mkdir()
            stack.enter_context(_lock(path))
        _claim(path, experiment)
        record(path, facts)
        yield path


def provenance(repository: Path) -> dict[str, Any]:
    """{"commit": ..., "versions": {...}}: what makes a number quotable. A commit that ends in "+" had uncommitted changes."""
    return {"commit": _commit(repository), "versions": {name: version(name) for name in PACKAGES} | {"python": platform.python_version()}}


def _commit(repository: Path) -> str:
    def git(*arguments: str) -> str:
        return subprocess.run(["git", "-C", str(repository), *arguments], check=True, capture_output=True, text=True).stdout.strip()

    try:
        return git("rev-parse", "HEAD") + ("+" if git("status", "--porcelain", "--untracked-files=no") else "")
    except (FileNotFoundError, subprocess.CalledProcessError):
        return "unknown"  # no git, or the sources came without their history


def record(path: Path, facts: Mapping[str, Any]) -> None:
    """Adds facts to config.json. One that differs from the first is kept beside it, under "resumed_with"."""
    content = _read(path)
    changed = {name: value for name, value in facts.items() if content.setdefault(name, value) != value}
    if changed and changed not in content.get("resumed_with", []):
        content.setdefault("resumed_with", []).append(changed)
    _write(path, content)


def _claim(path: Path, experiment: Experiment) -> None:
    metrics = path / METRICS
    has_steps = (path / CHECKPOINTS).exists() or (metrics.exists() and metrics.stat().st_size > 0)
    if not (path / CONFIG).exists() or not has_steps:  # what failed before its first step holds no work and binds nobody
        _write(path, {"format": FORMAT, "hash": config_hash(experiment), "experiment": to_dict(experiment)})
        return
    stored = _read(path)
    if stored.get("format") != FORMAT:
        raise WorkdirError(f"{path / CONFIG} has format {stored.get('format')}, this code writes {FORMAT}; choose another --workdir")
    changed = difference(experiment, stored["experiment"])
    if changed:
        lines = "".join(f"\n  {name}: {theirs!r} there, {ours!r} now" for name, (ours, theirs) in changed.items())
        raise WorkdirError(
            f"{path} holds a run of another configuration:{lines}\nchoose another --workdir, or move that run aside with --force-new"
        )


def _read(path: Path) -> dict[str, Any]:
    try:
        return json.loads((path / CONFIG).read_text(encoding="utf-8"))
    except ValueError as error:
        raise WorkdirError(f"{path / CONFIG} is no readable JSON ({error}); mend it, or choose another --workdir") from error


def _write(path: Path, content: dict[str, Any]) -> None:
    (path / UNFINISHED).write_text(json.dumps(content, indent=1) + "\n", encoding="utf-8")
    os.replace(path / UNFINISHED, path / CONFIG)


@contextlib.contextmanager
def _lock(path: Path) -> Iterator[None]:
    with (path / LOCK).open("a+") as file:
        try:
            fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            file.seek(0)
            raise WorkdirError(f"{path} is in use by {file.read().strip()}; wait for it or choose another --workdir") from None
        file.truncate(0)
        file.write(f"process {os.getpid()} on {socket.gethostname()}\n")
        file.flush()
        yield


def _free_name(path: Path) -> Path:
    number = 1
    while (aside := path.with_name(f"{path.name}.old-{number}")).exists():
        number += 1
    return aside
