"""A decoder layer: pre-norm attention of any kind, then a pre-norm SwiGLU or mixture of experts."""

import jax.numpy as jnp
from flax import nnx
from jaxtyping import Array, Float, Int

from msa_jax.config import LayerKind, ModelConfig
from msa_jax.model.attention import AttentionAux, Phase
from msa_jax.model.dense import DenseAttention
from msa_jax.model.init import residual_scale, rngs_by_name
from msa_jax.model.mlp import SwiGLU
from msa_jax.model.moe import MixtureOfExperts
from msa_jax.model.msa import MsaAttention
from msa_jax.model.norm import RMSNorm

KINDS: dict[str, type[nnx.Module]] = {"D": DenseAttention, "M": MsaAttention}


class Block(nnx.Module):
    """x + attention(norm(x)), then x + mlp(norm(x)). `kind.attention` is a letter of `KINDS`."""

    def __init__(self, config: ModelConfig, kind: LayerKind, rngs: nnx.Rngs) -> None:
        child, dtype, scale = rngs_by_name(rngs), jnp.dtype(config.dtype), residual_scale(config.num_layers)
        self.attention_norm = RMSNorm(config.d_model, eps=config.norm_eps)
        self.attention = KINDS[kind.attention](config.attention, rngs=child("attention"), dtype=dtype, output_scale=scale)
        self.mlp_norm = RMSNorm(config.d_model, eps=config.norm_eps)
        mlp, size = (MixtureOfExperts, config.moe) if kind.experts else (SwiGLU, config.mlp_dim)
        self.mlp = mlp(config.d_model, size, rngs=child("mlp"), dtype=dtype, output_scale=scale, limit=config.mlp_limit)

    def __call__(
        self,
        x_BTD: Float[Array, "B T D"],
        segments: Int[Array, "B T"] | None = None,
        positions: Int[Array, "B T"] | None = None,
        phase: Phase = "sparse",
        *,
        kl: bool = True,
        kl_denominator: Float[Array, ""] | float | None = None,
        return_selection: bool = False,
    ) -> tuple[Float[Array, "B T D"], AttentionAux, Int[Array, "O"] | None]:
        """Arguments and first results as the attention kinds' (`MsaAttention.__call__`); then the experts' load, None without experts."""
        y_BTD, aux = self.attention(
            self.attention_norm(x_BTD), segments, positions, phase,
            kl=kl, kl_denominator=kl_denominator, return_selection=return_selection,
        )  # fmt: skip
        x_BTD = x_BTD + y_BTD
        normed_BTD = self.mlp_norm(x_BTD)
        y_BTD, load_O = self.mlp(normed_BTD, segments) if isinstance(self.mlp, MixtureOfExperts) else (self.mlp(normed_BTD), None)
        return x_BTD + y_BTD, aux, load_O
