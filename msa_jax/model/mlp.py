"""SwiGLU, the gated MLP of every block (Shazeer, arXiv 2002.05202), plain or clamped as in MiniMax-M3."""

import jax
import jax.numpy as jnp
from flax import nnx
from jax.typing import DTypeLike
from jaxtyping import Array, Float

from msa_jax.model.init import fan_in_normal, rngs_by_name

CLAMPED_SLOPE = 1.702  # of the sigmoid, where x sigmoid(1.702 x) is close to GELU


def gated(gate: Float[Array, "*rows F"], up: Float[Array, "*rows F"], limit: float | None) -> Float[Array, "*rows F"]:
    """silu(gate) * up; with a limit c, g sigmoid(1.702 g) * (u + 1) of g = min(gate, c) and u = up clamped to [-c, c]."""
    if limit is None:
        return jax.nn.silu(gate) * up
    gate = jnp.minimum(gate, limit)
    return gate * jax.nn.sigmoid(CLAMPED_SLOPE * gate) * (jnp.clip(up, -limit, limit) + 1)


class SwiGLU(nnx.Module):
    """y = (silu(x Wgate) * (x Wup)) Wdown, without biases; width D -> F -> D. `limit` as in `gated`."""

    def __init__(
        self,
        d_model: int,
        mlp_dim: int,
        *,
        rngs: nnx.Rngs,
        dtype: DTypeLike = jnp.float32,
        output_scale: float = 1.0,
        limit: float | None = None,
    ) -> None:
        child, self.limit = rngs_by_name(rngs), limit

        def linear(name: str, width_in: int, width_out: int, scale: float = 1.0) -> nnx.Linear:
            return nnx.Linear(width_in, width_out, use_bias=False, dtype=dtype, kernel_init=fan_in_normal(scale), rngs=child(name))

        self.gate = linear("gate", d_model, mlp_dim)
        self.up = linear("up", d_model, mlp_dim)
        self.down = linear("down", mlp_dim, d_model, output_scale)

    def __call__(self, x_BTD: Float[Array, "B T D"]) -> Float[Array, "B T D"]:
        return self.down(gated(self.gate(x_BTD), self.up(x_BTD), self.limit))
