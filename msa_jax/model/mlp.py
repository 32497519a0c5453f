"""SwiGLU, the gated MLP of every block (Shazeer, arXiv 2002.05202)."""

import jax
import jax.numpy as jnp
from flax import nnx
from jax.typing import DTypeLike
from jaxtyping import Array, Float

from msa_jax.model.init import fan_in_normal, rngs_by_name


class SwiGLU(nnx.Module):
    """y = (silu(x Wgate) * (x Wup)) Wdown, without biases; width D -> F -> D."""

    def __init__(self, d_model: int, mlp_dim: int, *, rngs: nnx.Rngs, dtype: DTypeLike = jnp.float32, output_scale: float = 1.0) -> None:
        child = rngs_by_name(rngs)

        def linear(name: str, width_in: int, width_out: int, scale: float = 1.0) -> nnx.Linear:
            return nnx.Linear(width_in, width_out, use_bias=False, dtype=dtype, kernel_init=fan_in_normal(scale), rngs=child(name))

        self.gate = linear("gate", d_model, mlp_dim)
        self.up = linear("up", d_model, mlp_dim)
        self.down = linear("down", mlp_dim, d_model, output_scale)

    def __call__(self, x_BTD: Float[Array, "B T D"]) -> Float[Array, "B T D"]:
        return self.down(jax.nn.silu(self.gate(x_BTD)) * self.up(x_BTD))
