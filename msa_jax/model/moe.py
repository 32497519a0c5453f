"""Mixture of experts without dropped tokens and without an auxiliary loss, as in MiniMax-M3 (router of DeepSeek-V3, arXiv 2412.19437).

    s = sigmoid(x Wr)                               affinity of every token to each of O experts
    chosen = the Q best of s + b                    b decides who is chosen and nothing else; no gradient reaches it
    w = routed_scale * s[chosen] / sum s[chosen]
    y = sum_chosen w SwiGLU_chosen(x) + SwiGLU_shared(x)

After every step b moves by bias_rate * sign(mean load - load), so that loads become equal (Wang et al., arXiv 2408.15664); see
`msa_jax.train.balance`. One row of work a token and chosen expert, sorted by expert, makes every projection one ragged
matrix product. Tokens 0 1 2 that choose two of the experts a b c:

    chosen   0: a c    1: b c    2: a b
    rows     0a 0c 1b 1c 2a 2b
    sorted   0a 2a | 1b 2b | 0c 1c        2, 2 and 2 rows times the experts' own matrices
"""

import jax
import jax.numpy as jnp
from flax import nnx
from jax.typing import DTypeLike
from jaxtyping import Array, Float, Int

from msa_jax.config import MoeConfig
from msa_jax.model.init import fan_in_normal, rngs_by_name
from msa_jax.model.mlp import SwiGLU, gated


class Router(nnx.Module):
    """Chooses experts. All in float32: close affinities are told apart however the experts compute."""

    def __init__(self, d_model: int, config: MoeConfig, *, rngs: nnx.Rngs) -> None:
        self.config = config
        self.kernel = nnx.Param(fan_in_normal()(rngs.params(), (d_model, config.num_experts), jnp.float32))
        self.bias = nnx.Param(jnp.zeros(config.num_experts, jnp.float32))

    def __call__(self, x_TD: Float[Array, "T D"]) -> tuple[Int[Array, "T Q"], Float[Array, "T Q"]]:
        """Experts of every token, best first, and their weights. Ties go to the lower number."""
        logits_TO = jnp.einsum(
            "td,do->to", x_TD.astype(jnp.float32), self.kernel[...].astype(jnp.float32), precision=jax.lax.Precision.HIGHEST
        )
        affinity_TO = jax.lax.stop_gradient(jax.nn.sigmoid(logits_TO))
        _, chosen_TQ = jax.lax.top_k(affinity_TO + self.bias[...], self.config.experts_per_token)
        # sigmoid / sum of sigmoids, without dividing zero by zero where all of them underflow
        log_affinity_TQ = jax.nn.log_sigmoid(jnp.take_along_axis(logits_TO, chosen_TQ, axis=-1))
        return chosen_TQ, self.config.routed_scale * jax.nn.softmax(log_affinity_TQ, axis=-1)


class ExpertLinear(nnx.Module):
    """One matrix an expert, without bias. Row i is multiplied by the matrix of its expert; rows are sorted by expert."""

    def __init__(self, num_experts: int, width_in: int, width_out: int, *, rngs: nnx.Rngs, dtype: DTypeLike, scale: float = 1.0) -> None:
        self.dtype = dtype
        shape = (num_experts, width_in, width_out)
        self.kernel = nnx.Param(fan_in_normal(scale, batch_axes=(0,))(rngs.params(), shape, jnp.float32))

    def __call__(self, rows: Float[Array, "rows width_in"], sizes_O: Int[Array, "O"]) -> Float[Array, "rows width_out"]:
        return jax.lax.ragged_dot(rows.astype(self.dtype), self.kernel[...].astype(self.dtype), sizes_O)


class Experts(nnx.Module):
    """O independent SwiGLUs on rows sorted by expert."""

    def __init__(
        self, d_model: int, config: MoeConfig, *, rngs: nnx.Rngs, dtype: DTypeLike, output_scale: float, limit: float | None
    ) -> None:
        child, experts, width, self.limit = rngs_by_name(rngs), config.num_experts, config.expert_dim, limit
        self.gate = ExpertLinear(experts, d_model, width, rngs=child("gate"), dtype=dtype)
        self.up = ExpertLinear(experts, d_model, width, rngs=child("up"), dtype=dtype)
        self.down = ExpertLinear(experts, width, d_model, rngs=child("down"), dtype=dtype, scale=output_scale)

    def __call__(self, rows: Float[Array, "rows D"], sizes_O: Int[Array, "O"]) -> Float[Array, "rows D"]:
        return self.down(gated(self.gate(rows, sizes_O), self.up(rows, sizes_O), self.limit), sizes_O)


class MixtureOfExperts(nnx.Module):
    """Routed experts and optionally one shared expert, in place of a SwiGLU.

        moe = MixtureOfExperts(64, MoeConfig(num_experts=8, experts_per_token=2, expert_dim=32), rngs=nnx.Rngs(0))
        y_BTD, load_O = moe(x_BTD, segments)

    Parameters are float32, compute is in `dtype`, routing in float32. `limit` as in `msa_jax.model.mlp.gated`.
    """

    def __init__(
        self,
        d_model: int,
        config: MoeConfig,
        *,
        rngs: nnx.Rngs,
        dtype: DTypeLike = jnp.float32,
        output_scale: float = 1.0,
        limit: float | None = None,
    ) -> None:
        child = rngs_by_name(rngs)
        options = {"dtype": dtype, "output_scale": output_scale, "limit": limit}
        self.router = Router(d_model, config, rngs=child("router"))
        self.experts = Experts(d_model, config, rngs=child("experts"), **options)
        self.shared = SwiGLU(d_model, config.shared_dim, rngs=child("shared"), **options) if config.shared_dim else None

    def __call__(
        self, x_BTD: Float[Array, "B T D"], segments: Int[Array, "B T"] | None = None
    ) -> tuple[Float[Array, "B T D"], Int[Array, "O"]]:
        """y, and how many real tokens (segment > 0; all where segments is None) chose each expert: int32, sum = tokens * Q.

        Padding is computed like any token, but its choices do not count.
        """
        x_TD = x_BTD.reshape(-1, x_BTD.shape[-1])  # the tokens of all rows
        chosen_TQ, weight_TQ = self.router(x_TD)
        num_experts, per_token = self.router.config.num_experts, self.router.config.experts_per_token
        expert_of_row = chosen_TQ.reshape(-1)
        order = jnp.argsort(expert_of_row, stable=True)
        sizes_O = jnp.bincount(expert_of_row, length=num_experts)
        rows = self.experts(jnp.repeat(x_TD, per_token, axis=0)[order], sizes_O)
        y_TQD = rows[jnp.argsort(order)].reshape(*chosen_TQ.shape, -1)
        y_TD = jnp.einsum("tqd,tq->td", y_TQD, weight_TQ.astype(y_TQD.dtype), preferred_element_type=jnp.float32)
        y_BTD = y_TD.astype(y_TQD.dtype).reshape(x_BTD.shape)
        if self.shared is not None:
            y_BTD = y_BTD + self.shared(x_BTD)
        if segments is None:
            return y_BTD, sizes_O
        real_row = jnp.repeat(segments.reshape(-1) > 0, per_token)
        return y_BTD, jnp.bincount(jnp.where(real_row, expert_of_row, num_experts), length=num_experts + 1)[:-1]
