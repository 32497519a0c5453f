"""Every document of a pack as token ids, computed once per tokenizer and kept beside the pack."""

import hashlib
import warnings
from pathlib import Path
from typing import NamedTuple

import numpy as np
import safetensors
import safetensors.numpy

from msa_jax.data.pack import Pack, write_atomically
from msa_jax.data.tokenizer import Tokenizer

DOCUMENTS_AT_ONCE = 64


class TokenizedText(NamedTuple):
    """Ids of the n documents of a pack, in its order, without <bos> and <eos>."""

    tokens: np.ndarray  # uint16 or int32: all documents, one after another
    ends: np.ndarray  # int64 [n]

    def document(self, index: int) -> np.ndarray:
        start = int(self.ends[index - 1]) if index else 0
        return self.tokens[start : int(self.ends[index])]


def tokenize(pack: Pack, tokenizer: Tokenizer) -> TokenizedText:
    """Reads the ids kept beside the pack, or computes and keeps them. Damaged ones are computed again."""
    path = pack.folder / f"tokens-{tokenizer.digest[:16]}-{pack.digest[:16]}.safetensors" if pack.folder else None
    kept = _read(path) if path else None
    if kept is not None:
        return kept
    made = _tokenize(pack, tokenizer)
    if path:
        _write(path, made)
    return made


def _tokenize(pack: Pack, tokenizer: Tokenizer) -> TokenizedText:
    dtype = np.uint16 if tokenizer.vocab_size <= 2**16 else np.int32
    ids: list[np.ndarray] = []
    for first in range(0, len(pack.document_ends), DOCUMENTS_AT_ONCE):
        indices = range(first, min(first + DOCUMENTS_AT_ONCE, len(pack.document_ends)))
        ids += [document.astype(dtype) for document in tokenizer.encode_batch([pack.document(i) for i in indices])]
    return TokenizedText(np.concatenate(ids), np.cumsum([len(document) for document in ids], dtype=np.int64))


def _checksum(text: TokenizedText) -> str:
    return hashlib.sha256(text.tokens.tobytes() + text.ends.tobytes()).hexdigest()


def _write(path: Path, text: TokenizedText) -> None:
    """Keeping the ids only saves time: where it fails (read-only folder, full disk), a warning says so and work goes on."""
    try:
        write_atomically(path, safetensors.numpy.save(text._asdict(), metadata={"sha256": _checksum(text)}))
    except OSError as error:
        warnings.warn(f"tokens are not kept for the next run: {error}", stacklevel=3)


def _read(path: Path) -> TokenizedText | None:
    try:
        with safetensors.safe_open(path, framework="numpy") as file:
            text = TokenizedText(file.get_tensor("tokens"), file.get_tensor("ends"))
            return text if (file.metadata() or {}).get("sha256") == _checksum(text) else None
    except (FileNotFoundError, safetensors.SafetensorError):
        return None
