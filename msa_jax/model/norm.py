"""RMSNorm (Zhang & Sennrich, arXiv 1910.07467), with the weight stored as its distance from one."""

import jax
import jax.numpy as jnp
from flax import nnx
from jaxtyping import Array, Float


class RMSNorm(nnx.Module):
    """y = x / sqrt(mean(x^2) + eps) * (1 + w) over the last axis, w = 0 at the start.

    Statistics and the product are in float32 (or wider); y has the dtype of x.
    """

    def __init__(self, width: int, *, eps: float = 1e-6) -> None:
        self.eps = eps
        self.w = nnx.Param(jnp.zeros(width, jnp.float32))

    def __call__(self, x: Float[Array, "*rows width"]) -> Float[Array, "*rows width"]:
        wide = x.astype(jnp.promote_types(x.dtype, jnp.float32))
        mean_square = jnp.mean(jnp.square(wide), axis=-1, keepdims=True)
        return (wide * jax.lax.rsqrt(mean_square + self.eps) * (1 + self.w[...])).astype(x.dtype)
