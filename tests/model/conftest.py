"""What the model's tests share: comparison by error ratio, and rows of documents as a Batch."""

from collections.abc import Callable, Sequence
from typing import Any

import jax
import numpy as np
import pytest

from msa_jax.data.batch import Batch, check_batch


def error_ratio(actual: Any, expected: Any) -> float:
    """RMS(error) / RMS(expected); 0 where both are exactly zero, infinite where NaN or only the expected value is zero."""
    actual, expected = np.asarray(actual, np.float64), np.asarray(expected, np.float64)
    assert actual.shape == expected.shape, f"shapes {actual.shape} and {expected.shape}"
    error, size = np.sqrt(np.mean((actual - expected) ** 2)), np.sqrt(np.mean(expected**2))
    if not np.isfinite(error) or (size == 0 and error > 0):
        return float("inf")
    return 0.0 if size == 0 else float(error / size)


def compare_trees(actual: Any, expected: Any, limit: float = 1e-5) -> None:
    paths = jax.tree_util.tree_leaves_with_path(expected)
    leaves = jax.tree.leaves(actual)
    assert len(leaves) == len(paths) > 0
    for leaf, (path, reference) in zip(leaves, paths, strict=True):
        ratio = error_ratio(leaf, reference)
        print(f"{jax.tree_util.keystr(path)}: error ratio {ratio:.2e}")
        assert ratio <= limit, f"{jax.tree_util.keystr(path)}: error ratio {ratio:.2e} > {limit:.0e}"


@pytest.fixture(scope="session")
def assert_close() -> Callable[..., None]:
    """assert_close(actual, expected, limit=1e-5): every leaf of two trees by its error ratio."""
    return compare_trees


def documents_batch(rows: Sequence[Sequence[np.ndarray]], length: int, left: int = 0) -> Batch:
    """One row a list of documents (token arrays), packed one after the other after `left` padding tokens."""
    tokens, segments, positions = (np.zeros((len(rows), length), np.int32) for _ in range(3))
    for row, documents in enumerate(rows):
        start = left
        for number, document in enumerate(documents, 1):
            span = slice(start, start + len(document))
            tokens[row, span], segments[row, span], positions[row, span] = document, number, np.arange(len(document))
            start += len(document)
    empty = np.full((len(rows), length), -1, np.int32)
    weights = (segments > 0) & (segments == np.pad(segments[:, 1:], ((0, 0), (0, 1))))
    batch = Batch(tokens, segments, positions, weights.astype(np.float32), empty, empty, None)
    check_batch(batch, None)
    return batch


@pytest.fixture(scope="session")
def pack() -> Callable[..., Batch]:
    """pack([[document, ...], ...], length, left=0) -> Batch without pictures."""
    return documents_batch
