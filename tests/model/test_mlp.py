from collections.abc import Callable

import jax
import jax.numpy as jnp
import numpy as np
from flax import nnx

from msa_jax.model.mlp import SwiGLU


def test_equation(filled: Callable) -> None:
    mlp = filled(lambda: SwiGLU(6, 10, rngs=nnx.Rngs(0)))
    x = np.random.default_rng(0).normal(size=(2, 3, 6)).astype(np.float32)
    gate, up, down = (np.asarray(linear.kernel[...], np.float64) for linear in (mlp.gate, mlp.up, mlp.down))
    hidden = (x @ gate) / (1 + np.exp(-(x @ gate))) * (x @ up)
    np.testing.assert_allclose(mlp(jnp.asarray(x)), hidden @ down, rtol=1e-5, atol=1e-6)


def test_clamped_equation(filled: Callable) -> None:
    """The gate is cut above, the other half on both sides; both cuts are met by these weights."""
    mlp = filled(lambda: SwiGLU(6, 10, rngs=nnx.Rngs(0), limit=0.5))
    x = np.random.default_rng(0).normal(size=(2, 3, 6)).astype(np.float32)
    gate, up, down = (np.asarray(linear.kernel[...], np.float64) for linear in (mlp.gate, mlp.up, mlp.down))
    assert min((x @ gate).max(), (x @ up).max(), -(x @ gate).min(), -(x @ up).min()) > 0.5
    g, u = np.minimum(x @ gate, 0.5), np.clip(x @ up, -0.5, 0.5)
    np.testing.assert_allclose(mlp(jnp.asarray(x)), (g / (1 + np.exp(-1.702 * g)) * (u + 1)) @ down, rtol=1e-5, atol=1e-6)


def test_compute_dtype_leaves_the_weights_float32() -> None:
    graphdef, params = nnx.split(nnx.eval_shape(lambda: SwiGLU(6, 10, rngs=nnx.Rngs(0), dtype=jnp.bfloat16)))
    y = jax.eval_shape(lambda params, x: nnx.merge(graphdef, params)(x), params, jnp.ones((1, 2, 6)))
    assert y.dtype == jnp.bfloat16
    assert {leaf.dtype for leaf in jax.tree.leaves(params)} == {jnp.dtype("float32")}
