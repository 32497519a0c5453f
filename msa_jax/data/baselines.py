"""What a model must beat: bits per byte of byte n-gram models learned from the same training text, on the same held-out text."""

from collections.abc import Iterable, Sequence
from typing import NamedTuple

import numpy as np

START = 256  # stands before the first byte of a document


class Passage(NamedTuple):
    """Bytes to be predicted, after the bytes that a model has seen (nothing at the start of a document)."""

    seen: bytes
    scored: bytes


class ByteCounts(NamedTuple):
    """How often each byte follows each byte of the training text; [257, 256], row START counts first bytes."""

    pairs: np.ndarray

    @classmethod
    def of(cls, documents: Iterable[bytes]) -> "ByteCounts":
        pairs = np.zeros((START + 1) * 256, np.int64)
        for document in documents:
            following = np.frombuffer(document, np.uint8).astype(np.int64)
            before = np.concatenate([[START], following[:-1]])[: len(following)]
            pairs += np.bincount(before * 256 + following, minlength=len(pairs))
        return cls(pairs.reshape(START + 1, 256))


def unigram_bits_per_byte(counts: ByteCounts, passages: Sequence[Passage]) -> float:
    """-log2 P(byte) on average, with P(b) = (count(b) + 1) / (total + 256)."""
    totals = counts.pairs.sum(0)
    bits = -np.log2((totals + 1) / (totals.sum() + 256))
    return _mean([bits[np.frombuffer(passage.scored, np.uint8)] for passage in passages])


def bigram_bits_per_byte(counts: ByteCounts, passages: Sequence[Passage]) -> float:
    """-log2 P(byte | byte before) on average, with P(b | a) = (count(a b) + 1) / (count(a) + 256)."""
    bits = -np.log2((counts.pairs + 1) / (counts.pairs.sum(1, keepdims=True) + 256))
    found = []
    for passage in passages:
        scored = np.frombuffer(passage.scored, np.uint8).astype(np.int64)
        first = passage.seen[-1] if passage.seen else START
        found.append(bits[np.concatenate([[first], scored[:-1]])[: len(scored)], scored])
    return _mean(found)


def _mean(bits: list[np.ndarray]) -> float:
    size = sum(map(len, bits))
    if not size:
        raise ValueError("bits per byte of no text: give at least one passage with a scored byte")
    return float(sum(part.sum() for part in bits) / size)
