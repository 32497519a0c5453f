"""What a model is: attention, vision tower and decoder as frozen values, checked where they are made."""

import dataclasses
import math
from typing import NamedTuple

from msa_jax.config_checks import require, require_above_zero, require_positive, require_within

KINDS = {"D": "dense GQA", "M": "MiniMax Sparse Attention"}
IMPLEMENTATIONS = ("auto", "reference", "xla", "mosaic_gpu", "triton")


@dataclasses.dataclass(frozen=True)
class MsaConfig:
    """One attention layer. Every kind (dense GQA, MSA, ...) reads the fields it needs, so kinds swap in place.

    MiniMax-M3: num_heads=64, num_kv_heads=4, head_dim=index_dim=block_size=128, num_blocks=16, rotary_dim=64.
    """

    d_model: int
    num_heads: int
    num_kv_heads: int
    head_dim: int
    index_dim: int = 128
    block_size: int = 128
    num_blocks: int = 16  # blocks kept per query and KV head, the local block included
    rotary_dim: int | None = None  # channels turned by RoPE; None = half of head_dim, as in M3
    rope_theta: float = 5e6
    local_blocks: int = 1
    init_blocks: int = 0
    qk_norm: bool = True
    norm_eps: float = 1e-6
    index_stop_gradient: bool = True  # False only for the ablation: the KL then reaches the trunk
    implementation: str = "auto"

    def __post_init__(self) -> None:
        require_positive(self, "d_model", "num_heads", "num_kv_heads", "head_dim", "index_dim", "block_size", "num_blocks")
        require_above_zero(self, "rope_theta", "norm_eps")
        require(
            self.num_heads % self.num_kv_heads == 0,
            f"MsaConfig: num_heads={self.num_heads} is not divisible by num_kv_heads={self.num_kv_heads}; "
            "every KV head serves the same number of query heads",
        )
        require(
            self.local_blocks >= 0 and self.init_blocks >= 0 and self.local_blocks + self.init_blocks <= self.num_blocks,
            f"MsaConfig: local_blocks={self.local_blocks} + init_blocks={self.init_blocks} must be >= 0 and fit into "
            f"num_blocks={self.num_blocks}",
        )
        widest = min(self.head_dim, self.index_dim)
        rotary = self.rotary_channels
        require(
            0 <= rotary <= widest and rotary % 2 == 0,
            f"MsaConfig: rotary_dim={rotary} must be even, >= 0 and at most min(head_dim, index_dim)={widest}",
        )
        require(
            self.implementation in IMPLEMENTATIONS,
            f"MsaConfig: implementation={self.implementation!r}; choose one of {', '.join(IMPLEMENTATIONS)}",
        )

    @property
    def rotary_channels(self) -> int:
        return self.head_dim // 4 * 2 if self.rotary_dim is None else self.rotary_dim


@dataclasses.dataclass(frozen=True)
class VisionConfig:
    """The 3D-attention ViT and its projector. Study size by default; M3 uses patch 14, temporal patch 2, width 1280."""

    width: int = 64
    num_layers: int = 3
    num_heads: int = 2
    mlp_dim: int = 256
    patch_size: int = 4
    temporal_patch_size: int = 1
    merge: int = 2  # merge x merge neighbouring patches become one visual token
    frames_per_segment: int = 4  # time steps that attend to one another
    temporal_pool: int = 1  # time steps averaged into one after the encoder
    rope_theta: float = 1e4
    norm_eps: float = 1e-6
    channels: int = 3
    sequence_length: int = 64  # patches a packed sequence (L); a segment must fit

    def __post_init__(self) -> None:
        require_positive(
            self, "width", "num_layers", "num_heads", "mlp_dim", "patch_size", "temporal_patch_size", "merge",
            "frames_per_segment", "temporal_pool", "channels", "sequence_length",
        )  # fmt: skip
        require_above_zero(self, "rope_theta", "norm_eps")
        require(self.width % self.num_heads == 0, f"VisionConfig: width={self.width} is not divisible by num_heads={self.num_heads}")
        require(
            self.width // self.num_heads >= 6,
            f"VisionConfig: head width {self.width // self.num_heads} is below 6, too small for three rotary axes",
        )
        require(
            self.sequence_length % self.merge**2 == 0,
            f"VisionConfig: sequence_length={self.sequence_length} is not divisible by merge^2={self.merge**2}",
        )
        require(
            self.frames_per_segment % self.temporal_pool == 0,
            f"VisionConfig: temporal_pool={self.temporal_pool} must divide frames_per_segment={self.frames_per_segment}",
        )

    @property
    def patch_dim(self) -> int:
        return self.temporal_patch_size * self.patch_size**2 * self.channels


@dataclasses.dataclass(frozen=True)
class MoeConfig:
    """Experts in place of the MLP. MiniMax-M3: 128 experts of width 3072, 4 a token, one shared expert, the first 3 layers dense."""

    num_experts: int
    experts_per_token: int
    expert_dim: int
    shared_dim: int = 0  # width of the expert that sees every token; 0 = none
    dense_layers: int = 0  # leading layers that keep an MLP of ModelConfig.mlp_dim
    routed_scale: float = 1.0  # what the weights of a token's experts add up to
    bias_rate: float = 1e-3  # what the selection bias of an expert moves by each step, towards equal loads; 0 = stands still

    def __post_init__(self) -> None:
        require_positive(self, "expert_dim")
        require_within(self, 0, math.inf, "shared_dim", "dense_layers", "bias_rate")
        require_above_zero(self, "routed_scale")
        require(
            2 <= self.experts_per_token <= self.num_experts,
            f"MoeConfig: experts_per_token={self.experts_per_token} must lie in [2, num_experts={self.num_experts}]; weights add up to a "
            "constant, so that with a single expert the router would never learn",
        )


class LayerKind(NamedTuple):
    """What a layer is made of; layers of one kind have equal structure."""

    attention: str  # a letter of KINDS
    experts: bool  # a mixture of experts, or else an MLP


@dataclasses.dataclass(frozen=True)
class ModelConfig:
    """A decoder of `num_layers` blocks whose kinds follow `pattern`, tiled over depth ("M", "DMMM", ...)."""

    attention: MsaConfig
    vocab_size: int = 4096
    num_layers: int = 4
    pattern: str = "M"
    mlp_dim: int = 352
    mlp_limit: float | None = None  # of the clamped SwiGLU of MiniMax-M3 (7.0), in MLPs and experts; None = plain SwiGLU
    tie_embeddings: bool = True
    norm_eps: float = 1e-6
    dtype: str = "float32"  # compute; parameters are always float32 ("master weights")
    remat: bool = False
    vision: VisionConfig | None = None
    moe: MoeConfig | None = None

    def __post_init__(self) -> None:
        require_positive(self, "vocab_size", "num_layers", "mlp_dim")
        require_above_zero(self, "norm_eps", *(["mlp_limit"] if self.mlp_limit is not None else []))
        unknown = sorted(set(self.pattern) - set(KINDS))
        require(bool(self.pattern) and not unknown, f"ModelConfig: pattern={self.pattern!r}; use the letters {KINDS}")
        require(
            len(self.pattern) <= self.num_layers,
            f"ModelConfig: pattern={self.pattern!r} names {len(self.pattern)} layers but num_layers={self.num_layers}",
        )
        require(
            self.dtype in ("float32", "bfloat16"),
            f"ModelConfig: dtype={self.dtype!r}; choose float32 or bfloat16 (float16 would need a scaled loss)",
        )
        require(
            self.moe is None or self.moe.dense_layers < self.num_layers,
            f"ModelConfig: moe.dense_layers={self.moe and self.moe.dense_layers} leaves none of num_layers={self.num_layers} to the "
            "experts; lower it, or set moe=none",
        )

    @property
    def d_model(self) -> int:
        return self.attention.d_model

    @property
    def layer_kinds(self) -> str:
        """One letter of KINDS a layer: the pattern tiled over depth."""
        return (self.pattern * self.num_layers)[: self.num_layers]

    @property
    def layers(self) -> tuple[LayerKind, ...]:
        """What every layer is made of, in order of depth."""
        first_experts = self.num_layers if self.moe is None else self.moe.dense_layers
        return tuple(LayerKind(letter, depth >= first_experts) for depth, letter in enumerate(self.layer_kinds))
