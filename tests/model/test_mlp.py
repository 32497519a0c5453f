import jax
import jax.numpy as jnp
import numpy as np
from flax import nnx

from msa_jax.model.mlp import SwiGLU


def test_equation() -> None:
    mlp = SwiGLU(6, 10, rngs=nnx.Rngs(0))
    x = np.random.default_rng(0).normal(size=(2, 3, 6)).astype(np.float32)
    gate, up, down = (np.asarray(linear.kernel[...], np.float64) for linear in (mlp.gate, mlp.up, mlp.down))
    hidden = (x @ gate) / (1 + np.exp(-(x @ gate))) * (x @ up)
    np.testing.assert_allclose(mlp(jnp.asarray(x)), hidden @ down, rtol=1e-5, atol=1e-6)


def test_compute_dtype_leaves_the_weights_float32() -> None:
    mlp = SwiGLU(6, 10, rngs=nnx.Rngs(0), dtype=jnp.bfloat16)
    assert mlp(jnp.ones((1, 2, 6), jnp.bfloat16)).dtype == jnp.bfloat16
    assert {leaf.dtype for leaf in jax.tree.leaves(nnx.state(mlp))} == {jnp.dtype("float32")}
