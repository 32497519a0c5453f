"""A data pack: whole documents and captioned pictures with their splits, in one file of plain arrays and one manifest.

data/small/pack.safetensors   uint8 text and pixels, int32/int64 tables; no code, nothing compressed
data/small/manifest.json      format, sha256 of the file above, counts, licences
"""

import dataclasses
import functools
import hashlib
import json
import os
import tempfile
from collections.abc import Iterable
from pathlib import Path
from typing import Any

import numpy as np
import safetensors.numpy

from msa_jax.data import synthetic
from msa_jax.data.records import PICTURE_SPLITS, TEXT_SPLITS, Document, Picture, split_pictures, text_split

FORMAT = 1
ARRAYS = "pack.safetensors"
MANIFEST = "manifest.json"


class PackError(ValueError):
    """A pack that is missing, damaged or of another format; the message says which command builds it."""


@dataclasses.dataclass(frozen=True, eq=False)
class Pack:
    """n documents and m pictures. Tables of indices refer to `sources`, `TEXT_SPLITS`, `PICTURE_SPLITS` and `groups`."""

    name: str
    sources: tuple[str, ...]  # of text first, then of pictures
    text_sources: tuple[str, ...]
    groups: tuple[str, ...]
    text: np.ndarray  # uint8: every document's UTF-8 bytes, one after another
    document_ends: np.ndarray  # int64 [n]
    document_sources: np.ndarray  # int32 [n]
    document_splits: np.ndarray  # int32 [n]
    document_names: tuple[str, ...]
    pictures: np.ndarray  # uint8 [m, height, width, 3]
    captions: tuple[str, ...]
    picture_sources: np.ndarray  # int32 [m]
    picture_groups: np.ndarray  # int32 [m]
    picture_splits: np.ndarray  # int32 [m]
    folder: Path | None = None  # None = lives in memory only

    @property
    def picture_source_names(self) -> tuple[str, ...]:
        return self.sources[len(self.text_sources) :]

    @functools.cached_property
    def digest(self) -> str:
        """sha256 of the pack file; it names the data wherever results are kept."""
        return hashlib.sha256(_to_bytes(self)).hexdigest()

    def document(self, index: int) -> str:
        start = int(self.document_ends[index - 1]) if index else 0
        return self.text[start : int(self.document_ends[index])].tobytes().decode()

    def documents(self, split: str, sources: Iterable[str] | None = None) -> np.ndarray:
        """Indices of the documents of a split, of all or of the named text sources."""
        wanted = [self.sources.index(source) for source in (self.text_sources if sources is None else sources)]
        keep = (self.document_splits == TEXT_SPLITS.index(split)) & np.isin(self.document_sources, wanted)
        return np.flatnonzero(keep)

    def picture_ids(self, split: str, sources: Iterable[str] | None = None) -> np.ndarray:
        """Indices of the pictures of a split, of all or of the named picture sources."""
        wanted = [self.sources.index(source) for source in (self.picture_source_names if sources is None else sources)]
        keep = (self.picture_splits == PICTURE_SPLITS.index(split)) & np.isin(self.picture_sources, wanted)
        return np.flatnonzero(keep)

    def counts(self) -> dict[str, dict[str, dict[str, int]]]:
        """{"text": {source: {split: documents, split + "_bytes": bytes}}, "pictures": {source: {split: pictures}}}."""
        sizes = np.diff(self.document_ends, prepend=0)
        text: dict[str, dict[str, int]] = {}
        for source in self.text_sources:
            text[source] = {}
            for split in TEXT_SPLITS:
                chosen = self.documents(split, [source])
                text[source] |= {split: len(chosen), f"{split}_bytes": int(sizes[chosen].sum())}
        pictures = {
            source: {split: len(self.picture_ids(split, [source])) for split in PICTURE_SPLITS} for source in self.picture_source_names
        }
        return {"text": text, "pictures": pictures}

    @classmethod
    def from_records(cls, name: str, documents: Iterable[Document], pictures: Iterable[Picture]) -> "Pack":
        """Splits and lays out records; the order of the input does not matter. Captions and names must hold no line break."""
        documents = sorted(documents, key=lambda d: (d.source, d.name))
        split = split_pictures(sorted(pictures, key=lambda p: (p.source, p.caption, p.pixels_HW3.tobytes())))
        text_sources = tuple(sorted({d.source for d in documents}))
        sources = text_sources + tuple(sorted({p.source for p, _ in split}))
        groups = tuple(sorted({p.group for p, _ in split}))
        encoded = [d.text.encode() for d in documents]
        return cls(
            name=name,
            sources=sources,
            text_sources=text_sources,
            groups=groups,
            text=np.frombuffer(b"".join(encoded), np.uint8),
            document_ends=np.cumsum([len(text) for text in encoded], dtype=np.int64),
            document_sources=np.array([sources.index(d.source) for d in documents], np.int32),
            document_splits=np.array([TEXT_SPLITS.index(text_split(d)) for d in documents], np.int32),
            document_names=tuple(d.name for d in documents),
            pictures=np.stack([p.pixels_HW3 for p, _ in split]),
            captions=tuple(p.caption for p, _ in split),
            picture_sources=np.array([sources.index(p.source) for p, _ in split], np.int32),
            picture_groups=np.array([groups.index(p.group) for p, _ in split], np.int32),
            picture_splits=np.array([PICTURE_SPLITS.index(s) for _, s in split], np.int32),
        )

    @classmethod
    def synthetic(cls, seed: int = 0) -> "Pack":
        """A tiny rule-made pack with the structure of a real one; the same seed gives the same bytes."""
        return cls.from_records("synthetic", synthetic.documents(seed), synthetic.pictures(seed))

    @classmethod
    def open(cls, pack: str, seed: int = 0) -> "Pack":
        """`DataConfig.pack`: "synthetic" or the folder of a built pack."""
        return cls.synthetic(seed) if pack == "synthetic" else cls.load(pack)

    @classmethod
    def load(cls, folder: str | Path) -> "Pack":
        """Reads a built pack. Raises PackError unless the manifest's format and sha256 fit the file."""
        folder = Path(folder)
        manifest = read_manifest(folder)
        data = _read(folder / ARRAYS)
        digest = hashlib.sha256(data).hexdigest()
        if digest != manifest["sha256"]:
            raise PackError(
                f"{folder / ARRAYS} is damaged: sha256 {digest}, the manifest says {manifest['sha256']}. "
                f"Delete the folder and run `{build_command(folder)}`"
            )
        arrays = safetensors.numpy.load(data)
        strings = json.loads(arrays.pop("strings").tobytes())
        pack = cls(folder=folder, **arrays, **{key: tuple(v) if isinstance(v, list) else v for key, v in strings.items()})
        pack.__dict__["digest"] = digest  # already known: fills the cached property
        return pack


def build_command(folder: Path) -> str:
    """What a user types to get the pack of this folder."""
    return "make data" if folder == Path("data/small") else f"python -m msa_jax.data.build small --out {folder}"


def read_manifest(folder: Path) -> dict[str, Any]:
    """The manifest of a built pack. Raises PackError when it is missing, unreadable or of another format."""
    path = folder / MANIFEST
    try:
        manifest = json.loads(_read(path))
        found = manifest["format"], manifest["sha256"]
    except (UnicodeDecodeError, json.JSONDecodeError, KeyError, TypeError) as error:
        raise PackError(f"{path} is damaged ({error}). Delete the folder and run `{build_command(folder)}`") from error
    if found[0] != FORMAT:
        raise PackError(f"{path} has format {found[0]}, this version reads format {FORMAT}. Run `{build_command(folder)}`")
    return manifest


def _read(path: Path) -> bytes:
    try:
        return path.read_bytes()
    except (FileNotFoundError, NotADirectoryError) as error:
        raise PackError(f"no data pack: {path} does not exist. Run `{build_command(path.parent)}` to build it") from error


def _to_bytes(pack: Pack) -> bytes:
    values = {field.name: getattr(pack, field.name) for field in dataclasses.fields(pack) if field.name != "folder"}
    arrays = {name: value for name, value in values.items() if isinstance(value, np.ndarray)}
    strings = {name: value for name, value in values.items() if name not in arrays}
    arrays["strings"] = np.frombuffer(json.dumps(strings, sort_keys=True).encode(), np.uint8)
    return safetensors.numpy.save(arrays)


def save(pack: Pack, folder: Path, *, extra: dict[str, Any]) -> Pack:
    """Writes the pack, the manifest last: a folder with a manifest is complete. `extra` joins the manifest."""
    folder.mkdir(parents=True, exist_ok=True)
    data = _to_bytes(pack)
    digest = hashlib.sha256(data).hexdigest()
    manifest = {"format": FORMAT, "name": pack.name, "sha256": digest, "bytes": len(data), "counts": pack.counts(), **extra}
    write_atomically(folder / ARRAYS, data)
    write_atomically(folder / MANIFEST, (json.dumps(manifest, indent=1, sort_keys=True) + "\n").encode())
    return Pack.load(folder)


def write_atomically(path: Path, data: bytes) -> None:
    """The file is there whole or not at all, also when the disk fills up or the process dies."""
    descriptor, partial = tempfile.mkstemp(dir=path.parent, prefix=f".{path.name}.")
    try:
        with open(descriptor, "wb") as file:
            file.write(data)
            file.flush()
            os.fsync(file.fileno())
        os.chmod(partial, 0o644)
        os.replace(partial, path)
    except BaseException:
        os.unlink(partial)
        raise
