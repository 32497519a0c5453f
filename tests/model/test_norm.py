import jax.numpy as jnp
import numpy as np
from flax import nnx

from msa_jax.model.norm import RMSNorm


def test_the_weight_is_stored_as_distance_from_one() -> None:
    norm = RMSNorm(8, eps=1e-3)
    assert not norm.w[...].any()
    x = np.random.default_rng(0).normal(size=(3, 5, 8)).astype(np.float32)
    unit = x / np.sqrt((x**2).mean(-1, keepdims=True) + 1e-3)
    np.testing.assert_allclose(norm(jnp.asarray(x)), unit, rtol=1e-6)
    w = np.linspace(-2, 2, 8, dtype=np.float32)
    norm.w = nnx.Param(jnp.asarray(w))
    np.testing.assert_allclose(norm(jnp.asarray(x)), unit * (1 + w), rtol=2e-6, atol=1e-7)


def test_statistics_are_float32_whatever_the_input() -> None:
    """256 + small numbers: a bfloat16 sum of squares would lose every one of them."""
    x = jnp.concatenate([jnp.full(1, 256.0), jnp.ones(4095)]).astype(jnp.bfloat16)
    y = RMSNorm(4096)(x)
    assert y.dtype == jnp.bfloat16
    expected = 256.0 / np.sqrt((256.0**2 + 4095) / 4096)
    np.testing.assert_allclose(float(y[0]), expected, rtol=2**-8)


def test_a_zero_row_stays_zero() -> None:
    assert not RMSNorm(4)(jnp.zeros((2, 4))).any()
