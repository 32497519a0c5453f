"""What the model's tests share: comparison by error ratio, weights without an initialiser, rows of documents as a Batch."""

from collections.abc import Callable, Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx

from msa_jax.data.batch import Batch, check_batch
from msa_jax.model.groups import path_names
from pallas_kernels import testing


def compare_trees(actual: Any, expected: Any, limit: float = 1e-5) -> None:
    names, references = zip(*jax.tree_util.tree_leaves_with_path(expected), strict=True)
    names = [jax.tree_util.keystr(path) for path in names]
    testing.assert_close(dict(zip(names, jax.tree.leaves(actual), strict=True)), dict(zip(names, references, strict=True)), limit)


@pytest.fixture(scope="session")
def assert_close() -> Callable[..., None]:
    """assert_close(actual, expected, limit=1e-5): every leaf of two trees by its error ratio."""
    return compare_trees


def filled_module(make: Callable[[], Any], seed: int = 0) -> Any:
    """The module that `make` describes, with random weights everywhere: norms and biases off their start, so that a forgotten
    one shows. Compiles nothing; how weights really start has tests of its own."""
    graphdef, state = nnx.split(nnx.eval_shape(make))
    rng = np.random.default_rng(seed)

    def draw(path: tuple, leaf: jax.ShapeDtypeStruct) -> jax.Array:
        at_start = 1.0 if path_names(path)[-1] == "scale" else 0.0
        return jnp.asarray(at_start + 0.2 * rng.normal(size=leaf.shape), jnp.float32)

    return nnx.merge(graphdef, jax.tree_util.tree_map_with_path(draw, state))


@pytest.fixture(scope="session")
def filled() -> Callable[..., Any]:
    """filled(lambda: Module(...), seed=0) -> module."""
    return filled_module


def with_weights_of(module: Any, make: Callable[[], Any]) -> Any:
    other = nnx.eval_shape(make)
    nnx.update(other, nnx.state(module))
    return other


@pytest.fixture(scope="session")
def rebuilt() -> Callable[..., Any]:
    """rebuilt(module, lambda: Module(...)) -> the module so described, with the weights of the given one."""
    return with_weights_of


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
