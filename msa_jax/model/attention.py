"""What every attention kind shares: the call's rules and result, and the projections to heads."""

from typing import Literal, NamedTuple, get_args

import jax.numpy as jnp
from flax import nnx
from jax.typing import DTypeLike
from jaxtyping import Array, Float, Int

from msa_jax.config import MsaConfig
from msa_jax.model.init import fan_in_normal, rngs_by_name
from msa_jax.model.norm import RMSNorm
from msa_jax.model.rope import rope_angles, rotate

Phase = Literal["sparse", "warmup"]


class AttentionAux(NamedTuple):
    """What a layer returns beside its output. Kinds without an index branch return kl = 0 and no selection."""

    kl: Float[Array, ""]  # float32: sum over real tokens of mean over KV heads of KL, divided by `tokens`
    tokens: Float[Array, ""]  # float32: that denominator
    ids: Int[Array, "B K T R"] | None  # selected blocks, -1 = unused slot; only with return_selection=True
    lse: Float[Array, "B K T"] | None  # float32: log-sum-exp of the index scores over the selection


def check_call(config: MsaConfig, x_BTD: Array, segments_BT: Array | None, positions_BT: Array | None, phase: str) -> None:
    """Raises ValueError for inputs that contradict the layer or each other."""
    if x_BTD.ndim != 3 or x_BTD.shape[-1] != config.d_model:
        raise ValueError(f"attention: x has shape {x_BTD.shape}; expected [B, T, d_model={config.d_model}]")
    if phase not in get_args(Phase):
        raise ValueError(f"attention: phase={phase!r}; choose one of {', '.join(get_args(Phase))}")
    for name, value in (("segments", segments_BT), ("positions", positions_BT)):
        if value is not None and value.shape != x_BTD.shape[:2]:
            raise ValueError(f"attention: {name} has shape {value.shape}; x has [B, T] = {x_BTD.shape[:2]}")
    if positions_BT is not None and segments_BT is None:
        raise ValueError("attention: positions without segments; pass segments too (all 1 for one document)")


def document_positions(length: int, segments_BT: Array | None) -> Int[Array, "rows T"]:
    """Positions counted from the start of each run of equal segment ids; [1, T] for segments = None."""
    index_1T = jnp.arange(length, dtype=jnp.int32)[None]
    if segments_BT is None:
        return index_1T
    starts_BT = jnp.diff(segments_BT, axis=1, prepend=-1) != 0
    return index_1T - jnp.maximum.accumulate(jnp.where(starts_BT, index_1T, 0), axis=1)


def kl_tokens(x_BTD: Array, segments_BT: Array | None, denominator: Float[Array, ""] | float | None) -> Float[Array, ""]:
    """The KL's denominator: `denominator`, or the number of real tokens (segment > 0)."""
    if denominator is not None:
        return jnp.asarray(denominator, jnp.float32)
    if segments_BT is None:
        return jnp.asarray(x_BTD.shape[0] * x_BTD.shape[1], jnp.float32)
    return jnp.sum(segments_BT > 0, dtype=jnp.float32)


class Heads(nnx.Module):
    """Projects x to `num_heads` heads of width H, without bias; optionally normalises each head and turns it by RoPE."""

    def __init__(
        self, config: MsaConfig, num_heads: int, head_dim: int, *, rngs: nnx.Rngs, dtype: DTypeLike, positional: bool = True
    ) -> None:
        self.config, self.positional = config, positional
        self.linear = nnx.LinearGeneral(
            config.d_model, (num_heads, head_dim), use_bias=False, dtype=dtype, kernel_init=fan_in_normal(), rngs=rngs
        )
        self.norm = RMSNorm(head_dim, eps=config.norm_eps) if positional and config.qk_norm else None

    def __call__(self, x_BTD: Float[Array, "B T D"], positions_BT: Int[Array, "_ T"]) -> Float[Array, "B T heads width"]:
        heads = self.linear(x_BTD)
        if self.norm is not None:
            heads = self.norm(heads)
        if self.positional:
            heads = rotate(heads, rope_angles(positions_BT, self.config.rotary_channels, self.config.rope_theta))
        return heads


class MainProjections(nnx.Module):
    """q, k and v of GQA with QK norm and partial RoPE, and the projection of the heads' outputs back to the model width."""

    def __init__(self, config: MsaConfig, *, rngs: nnx.Rngs, dtype: DTypeLike, output_scale: float) -> None:
        child = rngs_by_name(rngs)
        self.q = Heads(config, config.num_heads, config.head_dim, rngs=child("q"), dtype=dtype)
        self.k = Heads(config, config.num_kv_heads, config.head_dim, rngs=child("k"), dtype=dtype)
        self.v = Heads(config, config.num_kv_heads, config.head_dim, rngs=child("v"), dtype=dtype, positional=False)
        self.out = nnx.LinearGeneral(
            (config.num_heads, config.head_dim), config.d_model, axis=(-2, -1), use_bias=False, dtype=dtype,
            kernel_init=fan_in_normal(output_scale), rngs=child("out"),
        )  # fmt: skip

    def __call__(
        self, x_BTD: Float[Array, "B T D"], positions_BT: Int[Array, "_ T"]
    ) -> tuple[Float[Array, "B T N H"], Float[Array, "B T K H"], Float[Array, "B T K H"]]:
        return self.q(x_BTD, positions_BT), self.k(x_BTD, positions_BT), self.v(x_BTD, positions_BT)
