"""What an experiment is: frozen values, checked where they are made.

`Experiment` is a tree of frozen dataclasses; `load` reads one from a config file, `override` changes leaves by dotted path
("optim.learning_rate"), `smoke` shrinks any experiment to a CPU minute. A layer takes its own sub-config (`MsaConfig`,
`VisionConfig`), never the whole `Experiment`.
"""

import dataclasses
import math

from msa_jax.config_checks import require, require_above_zero, require_positive, require_within
from msa_jax.config_model import KINDS, LayerKind, ModelConfig, MoeConfig, MsaConfig, VisionConfig
from msa_jax.config_tree import (
    ConfigError,
    config_hash,
    difference,
    flatten,
    from_dict,
    load,
    load_module,
    override,
    parse_changes,
    to_dict,
)

__all__ = [
    "KINDS", "ConfigError", "DataConfig", "EvalConfig", "Experiment", "GroupConfig", "LayerKind", "ModelConfig", "MoeConfig",
    "MsaConfig", "OptimConfig", "RewarmConfig", "StreamConfig", "TrainConfig", "VisionConfig", "config_hash", "difference",
    "flatten", "from_dict", "load", "load_module", "override", "parse_changes", "smoke", "to_dict",
]  # fmt: skip


@dataclasses.dataclass(frozen=True)
class StreamConfig:
    """One stream of the mixture. `rows` is a schedule: ((first_step, rows a batch), ...), ascending from step 0."""

    name: str
    kind: str = "text"  # "text", or "captions": pictures with their names
    rows: tuple[tuple[int, int], ...] = ((0, 8),)
    sources: tuple[str, ...] = ()  # of the pack; () = all of this kind
    loss_weight: float = 1.0  # of each predicted token, beside those of the other streams
    skip_rows: int = 0  # of the stream's order: those that the run of train.init_from has used

    def __post_init__(self) -> None:
        require(self.kind in ("text", "captions"), f"StreamConfig {self.name!r}: kind={self.kind!r}; choose text or captions")
        require_above_zero(self, "loss_weight")
        require(self.skip_rows >= 0, f"StreamConfig {self.name!r}: skip_rows={self.skip_rows}; it must be >= 0")
        starts = [start for start, _ in self.rows]
        require(
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
        require_positive(self, "sequence_length", "align_documents")
        require(self.prefetch >= 0, f"DataConfig: prefetch={self.prefetch}; it must be >= 0")
        names = [stream.name for stream in self.streams]
        require(len(names) == len(set(names)) and bool(names), f"DataConfig: streams={names}; name at least one, each once")
        require(self.sequence_length >= 8, f"DataConfig.sequence_length={self.sequence_length}; evaluation cuts rows into eighths, so >= 8")
        for start in sorted({start for stream in self.streams for start, _ in stream.rows}):
            require(self.rows_at(start) >= 1, f"DataConfig: no stream has rows at step {start}; a batch would be empty")

    def rows_at(self, step: int) -> int:
        return sum(stream.rows_at(step) for stream in self.streams)


@dataclasses.dataclass(frozen=True)
class GroupConfig:
    """How one parameter group is optimised, relative to the trunk's schedule."""

    learning_rate_scale: float = 1.0  # 0 freezes the group: parameters and optimiser state stay in the tree
    warmup_steps: int | None = None  # None = as the trunk
    weight_decay: float = 0.1
    clip_norm: float = 1.0  # of this group's own gradient norm; 0 = off
    start_step: int = 0  # of new modules: they stand still before, and then warm up to the full peak whatever the trunk does

    def __post_init__(self) -> None:
        require_within(self, 0, math.inf, "learning_rate_scale", "weight_decay", "clip_norm")
        require(
            self.warmup_steps is None or self.warmup_steps >= 0,
            f"GroupConfig.warmup_steps={self.warmup_steps}; it must be >= 0, or none to follow optim.warmup_steps",
        )
        require(self.start_step >= 0, f"GroupConfig.start_step={self.start_step}; it must be >= 0")


@dataclasses.dataclass(frozen=True)
class RewarmConfig:
    """Training that goes on after a decay: up again to `peak_fraction` of optim.learning_rate, then linear decay as before."""

    start_step: int  # where the decay before it arrives
    warmup_steps: int = 0
    peak_fraction: float = 1.0

    def __post_init__(self) -> None:
        require_positive(self, "start_step")
        require(self.warmup_steps >= 0, f"RewarmConfig.warmup_steps={self.warmup_steps}; it must be >= 0")
        require_above_zero(self, "peak_fraction")


@dataclasses.dataclass(frozen=True)
class OptimConfig:
    """An optimiser under a WSD schedule: linear warm-up, stable, linear decay to `final_fraction` of the peak; `rewarms` may follow."""

    learning_rate: float = 3e-3
    warmup_steps: int = 50
    decay_fraction: float = 0.2  # of all steps, or of those before the first rewarm
    final_fraction: float = 0.1  # of learning_rate
    rewarms: tuple[RewarmConfig, ...] = ()
    optimizer: str = "adamw"  # or "muon", whose updates have the size of AdamW's, so that rates and weight decay carry over
    muon_beta: float = 0.95
    ema_decay: float = 0.0  # of a moving average of the weights, which evaluation then uses; 0.999 is usual, 0 keeps none
    b1: float = 0.9
    b2: float = 0.95
    eps: float = 1e-8
    trunk: GroupConfig = GroupConfig()
    index: GroupConfig = GroupConfig()
    vision: GroupConfig = GroupConfig()  # the ViT and the projector

    def __post_init__(self) -> None:
        require_above_zero(self, "learning_rate", "eps")
        require_within(self, 0, 1, "b1", "b2", "muon_beta", "ema_decay")
        require(self.optimizer in ("adamw", "muon"), f"OptimConfig.optimizer={self.optimizer!r}; choose adamw or muon")
        require(self.warmup_steps >= 0, f"OptimConfig.warmup_steps={self.warmup_steps}; it must be >= 0")
        for name in ("decay_fraction", "final_fraction"):
            value = getattr(self, name)
            require(0 <= value <= 1, f"OptimConfig.{name}={value}; it must lie in [0, 1]")
        starts = [rewarm.start_step for rewarm in self.rewarms]
        require(starts == sorted(set(starts)), f"OptimConfig: rewarms start at {starts}; give them in rising order")

    @property
    def groups(self) -> dict[str, GroupConfig]:
        """By the names that `msa_jax.model.groups.parameter_group` gives."""
        return {"trunk": self.trunk, "index": self.index, "vision": self.vision}

    def first_decay(self, steps: int) -> tuple[int, int]:
        """(first step, end) of the decay that ends the first warm-up and stable phase of a run of so many steps."""
        end = self.rewarms[0].start_step if self.rewarms else steps
        return end - math.ceil(end * self.decay_fraction), end

    def warmup_of(self, group: GroupConfig) -> int:
        return self.warmup_steps if group.warmup_steps is None else group.warmup_steps


@dataclasses.dataclass(frozen=True)
class TrainConfig:
    """Length, phases and safety of a run.

    A language loss is a sum over predicted tokens divided by their number in the batch, or, with `loss_rows`, by the tokens of
    so many full rows: rows that are added to a batch then leave the gradient of the others as it was.
    """

    steps: int = 400
    index_warmup_steps: int = 40  # full attention and full-prefix KL before selection starts
    kl_weight: float = 1.0  # lambda of msa.md; the mean (not the sum) over MSA layers is weighted
    z_loss_weight: float = 0.0  # of the squared log-sum-exp of the logits; 1e-4 is usual, 0 leaves it out
    loss_rows: int | None = None
    microbatches: int = 1
    checkpoint_every: int = 100
    keep_checkpoints: int = 2
    evaluate_every: int = 0  # 0 = only at the end
    init_from: str | None = None  # run folder whose parameters and optimiser moments, not whose step, are the start; may hold {seed}

    def __post_init__(self) -> None:
        require_positive(self, "steps", "microbatches", "checkpoint_every", "keep_checkpoints")
        require(
            0 <= self.index_warmup_steps <= self.steps,
            f"TrainConfig: index_warmup_steps={self.index_warmup_steps} must lie in [0, steps={self.steps}]",
        )
        require_within(self, 0, math.inf, "kl_weight", "z_loss_weight")
        require(self.evaluate_every >= 0, f"TrainConfig: evaluate_every={self.evaluate_every}; it must be >= 0")
        require(self.loss_rows is None or self.loss_rows >= 1, f"TrainConfig: loss_rows={self.loss_rows}; it must be >= 1, or none")


@dataclasses.dataclass(frozen=True)
class EvalConfig:
    """How much is evaluated."""

    text_rows: int = 32  # held-out rows a source
    pictures: int = 200  # pictures a split
    candidates: int = 50  # 1-of-n retrieval

    def __post_init__(self) -> None:
        require_positive(self, "text_rows", "pictures")
        require(self.candidates >= 2, f"EvalConfig: candidates={self.candidates}; retrieval needs >= 2")


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
        require(bool(self.name) and "/" not in self.name, f"Experiment: name={self.name!r}; it names a folder, so no '/' and not empty")
        require(0 <= self.seed < 2**32, f"Experiment {self.name!r}: seed={self.seed}; it must lie in [0, 2^32)")
        pictures = [stream.name for stream in self.data.streams if stream.kind == "captions"]
        require(
            self.model.vision is not None or not pictures,
            f"Experiment {self.name!r}: streams {pictures} hold pictures but model.vision is None; give a VisionConfig or drop them",
        )
        for start in {start for stream in self.data.streams for start, _ in stream.rows}:
            rows = self.data.rows_at(start)
            require(
                rows % self.train.microbatches == 0,
                f"Experiment {self.name!r}: {rows} rows at step {start} are not divisible by train.microbatches={self.train.microbatches}",
            )
        self._check_schedule()

    def _check_schedule(self) -> None:
        """Every group has warmed up where its decay starts, and every rewarm has where the next one, or the end, comes."""
        optim, steps = self.optim, self.train.steps
        decay_start, _ = optim.first_decay(steps)
        for name, group in optim.groups.items():
            warmup = optim.warmup_of(group)
            require(
                group.start_step > 0 or warmup <= decay_start,
                f"Experiment {self.name!r}: the {name} group warms up for {warmup} steps but decay starts at step {decay_start} "
                "of train.steps; shorten the warm-up, shorten optim.decay_fraction or train longer",
            )
            require(
                group.start_step == 0 or group.start_step + warmup <= steps,
                f"Experiment {self.name!r}: the {name} group starts at step {group.start_step} and warms up for {warmup} steps, which "
                f"ends beyond train.steps={steps}",
            )
        ends = [*(rewarm.start_step for rewarm in optim.rewarms), steps][1:]
        for rewarm, end in zip(optim.rewarms, ends, strict=True):
            require(
                rewarm.start_step + rewarm.warmup_steps <= end,
                f"Experiment {self.name!r}: the rewarm at step {rewarm.start_step} takes {rewarm.warmup_steps} steps, beyond step {end}, "
                "where the next one or the end of the run comes",
            )


def smoke(experiment: Experiment, steps: int = 40) -> Experiment:
    """The same experiment small enough for a minute on two CPU cores: same layer kinds, streams, phases and groups.

    Widths, depth, rows and lengths shrink, every schedule is scaled to `steps`, and the data are synthetic, so that
    no pack is needed. It starts anew: another run's checkpoint would not fit.
    """
    model, attention, optim, train = experiment.model, experiment.model.attention, experiment.optim, experiment.train
    scale = steps / train.steps
    kv_heads = min(attention.num_kv_heads, 2)
    pattern = model.pattern if len(model.pattern) <= 4 else "".join(dict.fromkeys(model.pattern))
    vision = model.vision and VisionConfig(
        width=32, num_layers=1, num_heads=2, mlp_dim=64, temporal_patch_size=model.vision.temporal_patch_size,
        frames_per_segment=model.vision.frames_per_segment, temporal_pool=model.vision.temporal_pool,
    )  # fmt: skip
    num_layers = max(2, len(pattern))
    moe = model.moe and dataclasses.replace(
        model.moe, num_experts=min(model.moe.num_experts, 8), experts_per_token=min(model.moe.experts_per_token, 2), expert_dim=32,
        shared_dim=min(model.moe.shared_dim, 32), dense_layers=min(model.moe.dense_layers, num_layers - 1),
    )  # fmt: skip
    streams = tuple(
        dataclasses.replace(stream, rows=_scaled_rows(stream.rows, scale, train.microbatches), sources=(), skip_rows=0)
        for stream in experiment.data.streams
    )
    warmups = {f"optim.{name}.warmup_steps": group.warmup_steps for name, group in optim.groups.items()}
    starts = {f"optim.{name}.start_step": round(group.start_step * scale) for name, group in optim.groups.items()}
    rewarms = tuple(
        dataclasses.replace(rewarm, start_step=round(rewarm.start_step * scale), warmup_steps=int(rewarm.warmup_steps * scale))
        for rewarm in optim.rewarms
    )
    return override(experiment, {
        "model.attention.d_model": 64, "model.attention.head_dim": 16, "model.attention.index_dim": 16, "model.attention.rotary_dim": 8,
        "model.attention.num_heads": kv_heads * min(attention.num_heads // attention.num_kv_heads, 2),
        "model.attention.num_kv_heads": kv_heads,
        "model.attention.block_size": min(attention.block_size, 8),
        "model.attention.num_blocks": max(min(attention.num_blocks, 4), attention.local_blocks + attention.init_blocks),
        "model.num_layers": num_layers, "model.pattern": pattern, "model.mlp_dim": 128, "model.vocab_size": 4096,
        "model.vision": vision, "model.moe": moe,
        "data.pack": "synthetic", "data.tokenizer": "bpe4096", "data.sequence_length": 128, "data.streams": streams,
        "optim.learning_rate": max(optim.learning_rate, 3e-3), "optim.warmup_steps": min(5, int(optim.warmup_steps * scale)),
        **{path: None if warmup is None else int(warmup * scale) for path, warmup in warmups.items()}, **starts, "optim.rewarms": rewarms,
        "train.loss_rows": train.loss_rows and _few_rows(train.loss_rows, train.microbatches), "train.init_from": None,
        "train.steps": steps, "train.index_warmup_steps": min(steps // 2, math.ceil(train.index_warmup_steps * scale)),
        "train.checkpoint_every": steps // 2, "train.evaluate_every": 0,
        "eval": EvalConfig(text_rows=2, pictures=8, candidates=4),
    })  # fmt: skip


def _scaled_rows(rows: tuple[tuple[int, int], ...], scale: float, microbatches: int) -> tuple[tuple[int, int], ...]:
    """The schedule with steps times `scale` and at most two rows a microbatch; entries that fall onto one step keep the last."""
    few = {round(start * scale): _few_rows(count, microbatches) for start, count in rows}
    return tuple(sorted(few.items()))


def _few_rows(count: int, microbatches: int) -> int:
    return min(math.ceil(count / microbatches), 2) * microbatches
