"""What an experiment is: frozen values, checked where they are made.

`Experiment` is a tree of frozen dataclasses; `load` reads one from a config file, `override` changes leaves by dotted path
("optim.learning_rate"), `smoke` shrinks any experiment to a CPU minute. A layer takes its own sub-config (`MsaConfig`,
`VisionConfig`), never the whole `Experiment`.
"""

import dataclasses
import math
from typing import Any

from msa_jax.config_tree import ConfigError, config_hash, difference, flatten, from_dict, load, override, parse_changes, to_dict

__all__ = [
    "ConfigError", "DataConfig", "EvalConfig", "Experiment", "GroupConfig", "ModelConfig", "MsaConfig", "OptimConfig",
    "StreamConfig", "TrainConfig", "VisionConfig", "config_hash", "difference", "flatten", "from_dict", "load", "override",
    "parse_changes", "smoke", "to_dict",
]  # fmt: skip

KINDS = {"D": "dense GQA", "M": "MiniMax Sparse Attention"}
IMPLEMENTATIONS = ("auto", "reference", "xla", "mosaic_gpu", "triton")


def _require(condition: bool, message: str) -> None:
    if not condition:
        raise ConfigError(message)


def _require_positive(config: Any, *names: str) -> None:
    for name in names:
        value = getattr(config, name)
        _require(value >= 1, f"{type(config).__name__}.{name}={value}; it must be >= 1")


def _require_within(config: Any, low: float, high: float, *names: str) -> None:
    """Real numbers in [low, high); infinity and NaN never pass."""
    for name in names:
        value = getattr(config, name)
        bound = f">= {low} and finite" if math.isinf(high) else f"in [{low}, {high})"
        _require(low <= value < high, f"{type(config).__name__}.{name}={value}; it must be {bound}")


def _require_above_zero(config: Any, *names: str) -> None:
    for name in names:
        value = getattr(config, name)
        _require(0 < value < math.inf, f"{type(config).__name__}.{name}={value}; it must be > 0 and finite")


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
        _require_positive(self, "d_model", "num_heads", "num_kv_heads", "head_dim", "index_dim", "block_size", "num_blocks")
        _require_above_zero(self, "rope_theta", "norm_eps")
        _require(
            self.num_heads % self.num_kv_heads == 0,
            f"MsaConfig: num_heads={self.num_heads} is not divisible by num_kv_heads={self.num_kv_heads}; "
            "every KV head serves the same number of query heads",
        )
        _require(
            self.local_blocks >= 0 and self.init_blocks >= 0 and self.local_blocks + self.init_blocks <= self.num_blocks,
            f"MsaConfig: local_blocks={self.local_blocks} + init_blocks={self.init_blocks} must be >= 0 and fit into "
            f"num_blocks={self.num_blocks}",
        )
        widest = min(self.head_dim, self.index_dim)
        rotary = self.rotary_channels
        _require(
            0 <= rotary <= widest and rotary % 2 == 0,
            f"MsaConfig: rotary_dim={rotary} must be even, >= 0 and at most min(head_dim, index_dim)={widest}",
        )
        _require(
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
        _require_positive(
            self, "width", "num_layers", "num_heads", "mlp_dim", "patch_size", "temporal_patch_size", "merge",
            "frames_per_segment", "temporal_pool", "channels", "sequence_length",
        )  # fmt: skip
        _require_above_zero(self, "rope_theta", "norm_eps")
        _require(self.width % self.num_heads == 0, f"VisionConfig: width={self.width} is not divisible by num_heads={self.num_heads}")
        _require(
            self.width // self.num_heads >= 6,
            f"VisionConfig: head width {self.width // self.num_heads} is below 6, too small for three rotary axes",
        )
        _require(
            self.sequence_length % self.merge**2 == 0,
            f"VisionConfig: sequence_length={self.sequence_length} is not divisible by merge^2={self.merge**2}",
        )
        _require(
            self.frames_per_segment % self.temporal_pool == 0,
            f"VisionConfig: temporal_pool={self.temporal_pool} must divide frames_per_segment={self.frames_per_segment}",
        )

    @property
    def patch_dim(self) -> int:
        return self.temporal_patch_size * self.patch_size**2 * self.channels


@dataclasses.dataclass(frozen=True)
class ModelConfig:
    """A decoder of `num_layers` blocks whose kinds follow `pattern`, tiled over depth ("M", "DMMM", ...)."""

    attention: MsaConfig
    vocab_size: int = 4096
    num_layers: int = 4
    pattern: str = "M"
    mlp_dim: int = 352
    tie_embeddings: bool = True
    norm_eps: float = 1e-6
    dtype: str = "float32"  # compute; parameters are always float32 ("master weights")
    remat: bool = False
    vision: VisionConfig | None = None

    def __post_init__(self) -> None:
        _require_positive(self, "vocab_size", "num_layers", "mlp_dim")
        _require_above_zero(self, "norm_eps")
        unknown = sorted(set(self.pattern) - set(KINDS))
        _require(bool(self.pattern) and not unknown, f"ModelConfig: pattern={self.pattern!r}; use the letters {KINDS}")
        _require(
            len(self.pattern) <= self.num_layers,
            f"ModelConfig: pattern={self.pattern!r} names {len(self.pattern)} layers but num_layers={self.num_layers}",
        )
        _require(
            self.dtype in ("float32", "bfloat16"),
            f"ModelConfig: dtype={self.dtype!r}; choose float32 or bfloat16 (float16 would need a scaled loss)",
        )

    @property
    def d_model(self) -> int:
        return self.attention.d_model

    @property
    def layer_kinds(self) -> str:
        """One letter a layer: the pattern tiled over depth."""
        return (self.pattern * self.num_layers)[: self.num_layers]


@dataclasses.dataclass(frozen=True)
class StreamConfig:
    """One stream of the mixture. `rows` is a schedule: ((first_step, rows a batch), ...), ascending from step 0."""

    name: str
    kind: str = "text"  # "text", or "captions": pictures with their names
    rows: tuple[tuple[int, int], ...] = ((0, 8),)
    sources: tuple[str, ...] = ()  # of the pack; () = all of this kind
    loss_weight: float = 1.0  # of each predicted token, beside those of the other streams

    def __post_init__(self) -> None:
        _require(self.kind in ("text", "captions"), f"StreamConfig {self.name!r}: kind={self.kind!r}; choose text or captions")
        _require_above_zero(self, "loss_weight")
        starts = [start for start, _ in self.rows]
        _require(
            bool(self.rows) and starts[0] == 0 and starts == sorted(set(starts)) and all(n >= 0 for _, n in self.rows),
            f"StreamConfig {self.name!r}: rows={self.rows}; give (first_step, rows) pairs with rising steps from 0 and rows >= 0",
        )

    def rows_at(self, step: int) -> int:
        return [rows for start, rows in self.rows if start <= step][-1]


@dataclasses.dataclass(frozen=True)
class DataConfig:
    """Where rows come from. `pack` is a folder built by `make data`, or "synthetic" (made in memory, for smoke and tests)."""

    pack: str = "data/small"
    tokenizer: str = "bpe4096"  # a committed one by name, or the path of any Hugging Face tokenizer.json
    sequence_length: int = 512
    streams: tuple[StreamConfig, ...] = (StreamConfig("text"), StreamConfig("captions", kind="captions"))
    align_documents: int = 1  # document starts are moved to multiples of this; block_size makes blocks and documents line up
    prefetch: int = 2

    def __post_init__(self) -> None:
        _require_positive(self, "sequence_length", "align_documents")
        _require(self.prefetch >= 0, f"DataConfig: prefetch={self.prefetch}; it must be >= 0")
        names = [stream.name for stream in self.streams]
        _require(len(names) == len(set(names)) and bool(names), f"DataConfig: streams={names}; name at least one, each once")
        _require(self.rows_at(0) >= 1, "DataConfig: no stream has rows at step 0; the first batch would be empty")

    def rows_at(self, step: int) -> int:
        return sum(stream.rows_at(step) for stream in self.streams)


@dataclasses.dataclass(frozen=True)
class GroupConfig:
    """How one parameter group is optimised, relative to the trunk's schedule."""

    learning_rate_scale: float = 1.0  # 0 freezes the group: parameters and optimiser state stay in the tree
    warmup_steps: int | None = None  # None = as the trunk
    weight_decay: float = 0.1
    clip_norm: float = 1.0  # of this group's own gradient norm; 0 = off

    def __post_init__(self) -> None:
        _require_within(self, 0, math.inf, "learning_rate_scale", "weight_decay", "clip_norm")
        _require(
            self.warmup_steps is None or self.warmup_steps >= 0,
            f"GroupConfig.warmup_steps={self.warmup_steps}; it must be >= 0, or none to follow optim.warmup_steps",
        )


@dataclasses.dataclass(frozen=True)
class OptimConfig:
    """AdamW under a WSD schedule: linear warm-up, stable, linear decay to `final_fraction` of the peak."""

    learning_rate: float = 3e-3
    warmup_steps: int = 50
    decay_fraction: float = 0.2
    final_fraction: float = 0.1
    b1: float = 0.9
    b2: float = 0.95
    eps: float = 1e-8
    trunk: GroupConfig = GroupConfig()
    index: GroupConfig = GroupConfig()
    vision: GroupConfig = GroupConfig()  # the ViT and the projector

    def __post_init__(self) -> None:
        _require_above_zero(self, "learning_rate", "eps")
        _require_within(self, 0, 1, "b1", "b2")
        _require(self.warmup_steps >= 0, f"OptimConfig.warmup_steps={self.warmup_steps}; it must be >= 0")
        for name in ("decay_fraction", "final_fraction"):
            value = getattr(self, name)
            _require(0 <= value <= 1, f"OptimConfig.{name}={value}; it must lie in [0, 1]")

    @property
    def groups(self) -> dict[str, GroupConfig]:
        """By the names that `msa_jax.model.groups.parameter_group` gives."""
        return {"trunk": self.trunk, "index": self.index, "vision": self.vision}


@dataclasses.dataclass(frozen=True)
class TrainConfig:
    """Length, phases and safety of a run."""

    steps: int = 400
    index_warmup_steps: int = 40  # full attention and full-prefix KL before selection starts
    kl_weight: float = 1.0  # lambda of msa.md; the mean (not the sum) over MSA layers is weighted
    microbatches: int = 1
    checkpoint_every: int = 100
    keep_checkpoints: int = 2
    evaluate_every: int = 0  # 0 = only at the end

    def __post_init__(self) -> None:
        _require_positive(self, "steps", "microbatches", "checkpoint_every", "keep_checkpoints")
        _require(
            0 <= self.index_warmup_steps <= self.steps,
            f"TrainConfig: index_warmup_steps={self.index_warmup_steps} must lie in [0, steps={self.steps}]",
        )
        _require_within(self, 0, math.inf, "kl_weight")
        _require(self.evaluate_every >= 0, f"TrainConfig: evaluate_every={self.evaluate_every}; it must be >= 0")


@dataclasses.dataclass(frozen=True)
class EvalConfig:
    """How much is evaluated."""

    text_rows: int = 32  # held-out rows a source
    pictures: int = 200  # pictures a split
    candidates: int = 50  # 1-of-n retrieval

    def __post_init__(self) -> None:
        _require_positive(self, "text_rows", "pictures")
        _require(self.candidates >= 2, f"EvalConfig: candidates={self.candidates}; retrieval needs >= 2")


@dataclasses.dataclass(frozen=True)
class Experiment:
    """Everything that decides a run. The same Experiment and seed give the same losses."""

    name: str
    model: ModelConfig
    data: DataConfig = DataConfig()
    optim: OptimConfig = OptimConfig()
    train: TrainConfig = TrainConfig()
    eval: EvalConfig = EvalConfig()
    seed: int = 0

    def __post_init__(self) -> None:
        _require(bool(self.name) and "/" not in self.name, f"Experiment: name={self.name!r}; it names a folder, so no '/' and not empty")
        _require(self.seed >= 0, f"Experiment {self.name!r}: seed={self.seed}; it must be >= 0")
        pictures = [stream.name for stream in self.data.streams if stream.kind == "captions"]
        _require(
            self.model.vision is not None or not pictures,
            f"Experiment {self.name!r}: streams {pictures} hold pictures but model.vision is None; give a VisionConfig or drop them",
        )
        for start in {start for stream in self.data.streams for start, _ in stream.rows}:
            rows = self.data.rows_at(start)
            _require(
                rows % self.train.microbatches == 0,
                f"Experiment {self.name!r}: {rows} rows at step {start} are not divisible by train.microbatches={self.train.microbatches}",
            )
        stable_until = self.train.steps - math.ceil(self.train.steps * self.optim.decay_fraction)
        for name, group in self.optim.groups.items():
            warmup = self.optim.warmup_steps if group.warmup_steps is None else group.warmup_steps
            _require(
                warmup <= stable_until,
                f"Experiment {self.name!r}: the {name} group warms up for {warmup} steps but decay starts at step {stable_until} "
                "of train.steps; shorten the warm-up, shorten optim.decay_fraction or train longer",
            )


def smoke(experiment: Experiment, steps: int = 40) -> Experiment:
    """The same experiment small enough for a minute on two CPU cores: same layer kinds, streams, phases and groups.

    Widths, depth, rows and lengths shrink, every schedule is scaled to `steps`, and the data are synthetic, so that
    no pack is needed.
    """
    model, attention, optim, train = experiment.model, experiment.model.attention, experiment.optim, experiment.train
    scale = steps / train.steps
    kv_heads = min(attention.num_kv_heads, 2)
    pattern = model.pattern if len(model.pattern) <= 4 else "".join(dict.fromkeys(model.pattern))
    vision = model.vision and VisionConfig(
        width=32, num_layers=1, num_heads=2, mlp_dim=64, temporal_patch_size=model.vision.temporal_patch_size,
        frames_per_segment=model.vision.frames_per_segment, temporal_pool=model.vision.temporal_pool,
    )  # fmt: skip
    streams = tuple(
        dataclasses.replace(stream, rows=_scaled_rows(stream.rows, scale, train.microbatches), sources=())
        for stream in experiment.data.streams
    )
    warmups = {f"optim.{name}.warmup_steps": group.warmup_steps for name, group in optim.groups.items()}
    return override(experiment, {
        "model.attention.d_model": 64, "model.attention.head_dim": 16, "model.attention.index_dim": 16, "model.attention.rotary_dim": 8,
        "model.attention.num_heads": kv_heads * min(attention.num_heads // attention.num_kv_heads, 2),
        "model.attention.num_kv_heads": kv_heads,
        "model.attention.block_size": min(attention.block_size, 8),
        "model.attention.num_blocks": max(min(attention.num_blocks, 4), attention.local_blocks + attention.init_blocks),
        "model.num_layers": max(2, len(pattern)), "model.pattern": pattern, "model.mlp_dim": 128, "model.vocab_size": 4096,
        "model.vision": vision,
        "data.pack": "synthetic", "data.tokenizer": "bpe4096", "data.sequence_length": 128, "data.streams": streams,
        "optim.learning_rate": max(optim.learning_rate, 3e-3), "optim.warmup_steps": min(5, int(optim.warmup_steps * scale)),
        **{path: None if warmup is None else int(warmup * scale) for path, warmup in warmups.items()},
        "train.steps": steps, "train.index_warmup_steps": min(steps // 2, math.ceil(train.index_warmup_steps * scale)),
        "train.checkpoint_every": steps // 2, "train.evaluate_every": 0,
        "eval": EvalConfig(text_rows=2, pictures=8, candidates=4),
    })  # fmt: skip


def _scaled_rows(rows: tuple[tuple[int, int], ...], scale: float, microbatches: int) -> tuple[tuple[int, int], ...]:
    """The schedule with steps times `scale` and at most two rows a microbatch; entries that fall onto one step keep the last."""
    few = {round(start * scale): min(math.ceil(count / microbatches), 2) * microbatches for start, count in rows}
    return tuple(sorted(few.items()))
