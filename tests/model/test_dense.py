"""Dense GQA against attention written out in numpy, inside documents, for every layout of heads."""

import dataclasses
from collections.abc import Callable

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx

from msa_jax.config import MsaConfig
from msa_jax.model.attention import document_positions
from msa_jax.model.dense import DenseAttention, full_attention

CONFIG = MsaConfig(d_model=24, num_heads=4, num_kv_heads=2, head_dim=8, index_dim=8, block_size=4, num_blocks=2)
SEGMENTS = np.array([[0, 0, 1, 1, 1, 1, 1, 2, 2, 2, 0], [1] * 11, [1, 1, 1, 2, 3, 3, 3, 3, 0, 0, 0]], np.int32)


def attention_by_hand(q: np.ndarray, k: np.ndarray, v: np.ndarray, segments: np.ndarray) -> np.ndarray:
    """One softmax a query and head, over a python list of the keys it may see."""
    out = np.zeros_like(q)
    group = q.shape[2] // k.shape[2]
    for b, t, n in np.ndindex(*q.shape[:3]):
        keys = [s for s in range(t + 1) if segments[b, s] == segments[b, t] > 0]
        if keys:
            logits = k[b, keys, n // group] @ q[b, t, n] / np.sqrt(q.shape[-1])
            weights = np.exp(logits - logits.max())
            out[b, t, n] = weights / weights.sum() @ v[b, keys, n // group]
    return out


@pytest.mark.parametrize("num_kv_heads", [1, 2, 6], ids=["mqa", "gqa", "mha"])
def test_full_attention_by_hand(num_kv_heads: int) -> None:
    rng = np.random.default_rng(0)
    q, k, v = (rng.normal(size=(3, 11, heads, 8)) for heads in (6, num_kv_heads, num_kv_heads))
    arrays = [jnp.asarray(x, jnp.float32) for x in (q, k, v)]
    attend = jax.jit(full_attention)
    np.testing.assert_allclose(attend(*arrays, jnp.asarray(SEGMENTS)), attention_by_hand(q, k, v, SEGMENTS), atol=2e-6)
    np.testing.assert_allclose(attend(*arrays, None), attention_by_hand(q, k, v, np.ones_like(SEGMENTS)), atol=2e-6)


def test_positions_restart_in_every_document() -> None:
    expected = [[0, 1, 0, 1, 2, 3, 4, 0, 1, 2, 0], list(range(11)), [0, 1, 2, 0, 0, 1, 2, 3, 0, 1, 2]]
    np.testing.assert_array_equal(document_positions(11, jnp.asarray(SEGMENTS)), expected)
    np.testing.assert_array_equal(document_positions(3, None), [[0, 1, 2]])


def test_the_layer_is_its_parts(filled: Callable) -> None:
    """Projections (by hand in tests/model/test_msa.py), attention, output projection; padding rows give zero."""
    layer = filled(lambda: DenseAttention(CONFIG, rngs=nnx.Rngs(0)))
    x = np.random.default_rng(1).normal(size=(3, 11, 24)).astype(np.float32)
    parts = nnx.jit(lambda layer, x, segments: (*layer(x, segments), layer.main(x, document_positions(11, segments))))
    y, aux, qkv = parts(layer, x, SEGMENTS)
    q, k, v = (np.asarray(array, np.float64) for array in qkv)
    expected = np.einsum("btnh,nhd->btd", attention_by_hand(q, k, v, SEGMENTS), np.asarray(layer.main.out.kernel[...], np.float64))
    np.testing.assert_allclose(y, expected, atol=2e-6)
    assert not y[SEGMENTS == 0].any()
    assert aux.kl == 0
    assert aux.tokens == (SEGMENTS > 0).sum()
    assert aux.ids is None


def test_without_qk_norm_there_is_no_norm() -> None:
    layer = nnx.eval_shape(lambda: DenseAttention(dataclasses.replace(CONFIG, qk_norm=False), rngs=nnx.Rngs(0)))
    assert not [path for path, _ in nnx.to_flat_state(nnx.state(layer)) if "norm" in path]
    graphdef, params = nnx.split(layer)
    y, _ = jax.eval_shape(lambda params, x: nnx.merge(graphdef, params)(x), params, jnp.ones((1, 3, 24)))
    assert y.shape == (1, 3, 24)


@pytest.mark.parametrize(
    ("shape", "options", "message"),
    [
        ((2, 5, 23), {}, r"d_model=24"),
        ((5, 24), {}, r"\[B, T, d_model=24\]"),
        ((2, 5, 24), {"phase": "warm"}, r"phase='warm'; choose one of sparse, warmup"),
        ((2, 5, 24), {"segments": jnp.ones((2, 4), int)}, r"segments has shape \(2, 4\)"),
        ((2, 5, 24), {"positions": jnp.ones((2, 5), int)}, r"positions without segments"),
    ],
)
def test_contradictory_calls_are_refused(shape: tuple, options: dict, message: str) -> None:
    layer = nnx.eval_shape(lambda: DenseAttention(CONFIG, rngs=nnx.Rngs(0)))
    with pytest.raises(ValueError, match=message):
        layer(jnp.ones(shape), **options)
