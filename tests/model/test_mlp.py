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


def test_compute_dtype_leaves_the_weights_float32() -> None:
    graphdef, params = nnx.split(nnx.eval_shape(lambda: SwiGLU(6, 10, rngs=nnx.Rngs(0), dtype=jnp.bfloat16)))
    y = jax.eval_shape(lambda params, x: nnx.merge(graphdef, params)(x), params, jnp.ones((1, 2, 6)))
    assert y.dtype == jnp.bfloat16
    assert {leaf.dtype for leaf in jax.tree.leaves(params)} == {jnp.dtype("float32")}
