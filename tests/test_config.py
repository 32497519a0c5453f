"""The configuration tree: what is refused, with which words, and that nothing is lost on the way to JSON and back."""

import dataclasses
import json
from pathlib import Path
from typing import Any

import pytest

from msa_jax.config import (
    ConfigError,
    DataConfig,
    EvalConfig,
    Experiment,
    GroupConfig,
    ModelConfig,
    MsaConfig,
    OptimConfig,
    RewarmConfig,
    StreamConfig,
    TrainConfig,
    VisionConfig,
    config_hash,
    difference,
    flatten,
    from_dict,
    load,
    override,
    parse_changes,
    smoke,
    to_dict,
)

ATTENTION = MsaConfig(d_model=32, num_heads=4, num_kv_heads=2, head_dim=8, index_dim=8, block_size=4, num_blocks=3)
STREAMS = (StreamConfig("text", rows=((0, 6),)), StreamConfig("captions", kind="captions", rows=((0, 0), (100, 2))))
EXPERIMENT = Experiment(
    "tiny",
    ModelConfig(ATTENTION, vision=VisionConfig()),
    data=DataConfig(streams=STREAMS),
    optim=OptimConfig(vision=GroupConfig(warmup_steps=7)),
)


def attention(**changes: Any) -> MsaConfig:
    return dataclasses.replace(ATTENTION, **changes)


def experiment(**changes: Any) -> Experiment:
    return override(EXPERIMENT, changes)


@pytest.mark.parametrize(
    ("make", "message"),
    [
        (lambda: attention(num_heads=6, num_kv_heads=4), "num_heads=6 is not divisible by num_kv_heads=4"),
        (lambda: attention(block_size=0), "block_size=0; it must be >= 1"),
        (lambda: attention(block_size=1.5), "block_size=1.5; it must be a whole number"),
        (lambda: attention(d_model="256"), "d_model='256'; it must be a whole number"),
        (lambda: attention(num_heads=True), "num_heads=True; it must be a whole number"),
        (lambda: attention(rope_theta="1e4"), "rope_theta='1e4'; it must be a number"),
        (lambda: OptimConfig(b2="0.9"), "b2='0.9'; it must be a number"),
        (lambda: attention(num_blocks=0), "num_blocks=0; it must be >= 1"),
        (lambda: attention(local_blocks=3, init_blocks=1), "local_blocks=3 .* init_blocks=1 .* num_blocks=3"),
        (lambda: attention(local_blocks=-1), "local_blocks=-1"),
        (lambda: attention(rotary_dim=3), "rotary_dim=3 must be even"),
        (lambda: attention(rotary_dim=10), "rotary_dim=10 .* at most .*=8"),
        (lambda: attention(rope_theta=0.0), "rope_theta=0.0; it must be > 0"),
        (lambda: attention(norm_eps=float("nan")), "norm_eps=nan; it must be > 0"),
        (lambda: attention(implementation="cuda"), "implementation='cuda'; choose one of auto"),
        (lambda: VisionConfig(width=0), "width=0; it must be >= 1"),
        (lambda: VisionConfig(width=63), "width=63 is not divisible by num_heads=2"),
        (lambda: VisionConfig(width=8), "head width 4 is below 6"),
        (lambda: VisionConfig(sequence_length=65), "sequence_length=65 is not divisible by merge"),
        (lambda: VisionConfig(temporal_pool=3), "temporal_pool=3 must divide frames_per_segment=4"),
        (lambda: VisionConfig(rope_theta=-1.0), "rope_theta=-1.0"),
        (lambda: ModelConfig(ATTENTION, vocab_size=0), "vocab_size=0"),
        (lambda: ModelConfig(ATTENTION, pattern=""), "pattern=''; use the letters"),
        (lambda: ModelConfig(ATTENTION, pattern="MX"), "pattern='MX'; use the letters"),
        (lambda: ModelConfig(ATTENTION, pattern="DMMM", num_layers=3), "names 4 layers but num_layers=3"),
        (lambda: ModelConfig(ATTENTION, dtype="float16"), "dtype='float16'; choose float32 or bfloat16"),
        (lambda: StreamConfig("x", kind="audio"), "kind='audio'; choose text or captions"),
        (lambda: StreamConfig("x", rows=()), r"rows=\(\); give"),
        (lambda: StreamConfig("x", rows=((5, 1),)), "rising steps from 0"),
        (lambda: StreamConfig("x", rows=((0, 1), (9, 2), (4, 1))), "rising steps from 0"),
        (lambda: StreamConfig("x", rows=((0, -1),)), "rows >= 0"),
        (lambda: StreamConfig("x", skip_rows=-1), "skip_rows=-1"),
        (lambda: DataConfig(sequence_length=0), "sequence_length=0"),
        (lambda: DataConfig(sequence_length=7), "sequence_length=7; .* so >= 8"),
        (lambda: DataConfig(prefetch=-1), "prefetch=-1"),
        (lambda: DataConfig(streams=()), r"streams=\[\]; name at least one"),
        (lambda: DataConfig(streams=(StreamConfig("a"), StreamConfig("a"))), "each once"),
        (lambda: DataConfig(streams=(StreamConfig("a", rows=((0, 0), (9, 1))),)), "no stream has rows at step 0"),
        (lambda: DataConfig(streams=(StreamConfig("a", rows=((0, 1), (9, 0))),)), "no stream has rows at step 9"),
        (lambda: GroupConfig(learning_rate_scale=-1.0), "learning_rate_scale=-1.0; it must be >= 0"),
        (lambda: GroupConfig(weight_decay=float("nan")), "weight_decay=nan"),
        (lambda: GroupConfig(clip_norm=float("inf")), "clip_norm=inf; .* finite"),
        (lambda: GroupConfig(warmup_steps=-1), "warmup_steps=-1"),
        (lambda: GroupConfig(start_step=-1), "start_step=-1"),
        (lambda: RewarmConfig(0), "start_step=0; it must be >= 1"),
        (lambda: RewarmConfig(5, warmup_steps=-1), "RewarmConfig.warmup_steps=-1"),
        (lambda: RewarmConfig(5, peak_fraction=0.0), "peak_fraction=0.0; it must be > 0"),
        (lambda: OptimConfig(rewarms=(RewarmConfig(9), RewarmConfig(5))), r"rewarms start at \[9, 5\]; give them in rising order"),
        (lambda: OptimConfig(learning_rate=0.0), "learning_rate=0.0; it must be > 0"),
        (lambda: OptimConfig(learning_rate=float("inf")), "learning_rate=inf"),
        (lambda: OptimConfig(eps=0.0), "eps=0.0"),
        (lambda: OptimConfig(b2=1.0), r"b2=1.0; it must be in \[0, 1\)"),
        (lambda: OptimConfig(warmup_steps=-1), "warmup_steps=-1"),
        (lambda: OptimConfig(decay_fraction=1.5), "decay_fraction=1.5"),
        (lambda: OptimConfig(final_fraction=-0.1), "final_fraction=-0.1"),
        (lambda: TrainConfig(steps=0), "steps=0"),
        (lambda: TrainConfig(keep_checkpoints=0), "keep_checkpoints=0"),
        (lambda: TrainConfig(steps=10, index_warmup_steps=11), r"index_warmup_steps=11 must lie in \[0, steps=10\]"),
        (lambda: TrainConfig(kl_weight=-1.0), "kl_weight=-1.0"),
        (lambda: TrainConfig(evaluate_every=-1), "evaluate_every=-1"),
        (lambda: TrainConfig(loss_rows=0), "loss_rows=0"),
        (lambda: EvalConfig(candidates=1), "candidates=1; retrieval needs >= 2"),
        (lambda: experiment(name="a/b"), "name='a/b'; it names a folder"),
        (lambda: experiment(name=""), "name=''"),
        (lambda: experiment(seed=-1), "seed=-1"),
        (lambda: experiment(**{"model.vision": None}), r"streams \['captions'\] hold pictures but model.vision is None"),
        (lambda: experiment(**{"train.microbatches": 4}), "6 rows at step 0 are not divisible by train.microbatches=4"),
        (lambda: experiment(**{"optim.warmup_steps": 321}), "the trunk group warms up for 321 steps but decay starts at step 320"),
        (lambda: experiment(**{"optim.vision.warmup_steps": 321}), "the vision group warms up for 321"),
        (lambda: experiment(**{"optim.vision.start_step": 394}), "the vision group starts at step 394 and warms up for 7 steps"),
        (lambda: experiment(**{"optim.rewarms": (RewarmConfig(60),)}), "warms up for 50 steps but decay starts at step 48"),
        (lambda: experiment(**{"optim.rewarms": (RewarmConfig(390, 11),)}), "the rewarm at step 390 takes 11 steps, beyond step 400"),
        (lambda: experiment(**{"optim.rewarms": (RewarmConfig(300, 9), RewarmConfig(305, 9))}), "takes 9 steps, beyond step 305"),
    ],
)
def test_a_value_that_cannot_work_is_refused_by_name(make: Any, message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        make()


def test_rows_follow_their_schedule() -> None:
    captions = EXPERIMENT.data.streams[1]
    assert [captions.rows_at(step) for step in (0, 99, 100, 5000)] == [0, 0, 2, 2]
    assert [EXPERIMENT.data.rows_at(step) for step in (99, 100)] == [6, 8]


def test_layer_kinds_tile_the_pattern_over_depth() -> None:
    assert ModelConfig(ATTENTION, num_layers=5, pattern="DM").layer_kinds == "DMDMD"


def test_half_the_head_is_turned_by_default() -> None:
    assert ATTENTION.rotary_channels == 4
    assert attention(head_dim=10, index_dim=10).rotary_channels == 4, "rounded down to an even number"
    assert attention(rotary_dim=0).rotary_channels == 0


def test_groups_carry_the_names_that_parameters_are_sorted_by() -> None:
    assert EXPERIMENT.optim.groups == {
        "trunk": EXPERIMENT.optim.trunk,
        "index": EXPERIMENT.optim.index,
        "vision": EXPERIMENT.optim.vision,
    }


@pytest.mark.parametrize(
    ("path", "text", "value"),
    [
        ("optim.learning_rate", "1e-3", 1e-3),
        ("optim.learning_rate", "1", 1.0),
        ("train.steps", "500", 500),
        ("seed", 3, 3),
        ("model.remat", "true", True),
        ("model.remat", "False", False),
        ("model.vision", "none", None),
        ("optim.index.warmup_steps", "12", 12),
        ("optim.vision.warmup_steps", "none", None),
        ("model.attention.rotary_dim", "2", 2),
        ("data.pack", "data/full", "data/full"),
        ("data.streams.1.rows", "[[0, 2]]", ((0, 2),)),
        ("data.streams.0.sources", '["plays", "code"]', ("plays", "code")),
        ("data.streams", '[{"name": "text", "rows": [[0, 4]]}]', (StreamConfig("text", rows=((0, 4),)),)),
        ("data.streams", (StreamConfig("only"),), (StreamConfig("only"),)),
        ("optim.trunk", GroupConfig(weight_decay=0.5), GroupConfig(weight_decay=0.5)),
    ],
)
def test_override_parses_text_by_the_type_of_the_field(path: str, text: Any, value: Any) -> None:
    text_only = {"data.streams": (StreamConfig("text"),)} if path == "model.vision" else {}
    changed = override(EXPERIMENT, {**text_only, path: text})
    found: Any = changed
    for name in path.split("."):
        found = found[int(name)] if name.isdigit() else getattr(found, name)
    assert found == value
    assert type(found) is type(value)
    untouched = {other: leaf for other, leaf in flatten(changed).items() if not other.startswith((path, "data.streams"))}
    assert untouched.items() <= flatten(EXPERIMENT).items()


def test_changes_apply_together() -> None:
    with pytest.raises(ConfigError, match="not divisible"):
        experiment(**{"model.attention.num_kv_heads": 3})
    changed = experiment(**{"model.attention.num_kv_heads": 3, "model.attention.num_heads": 9})
    assert changed.model.attention.num_heads == 9
    fresh = experiment(**{"model.vision": VisionConfig(width=32), "model.vision.num_layers": 1})
    assert (fresh.model.vision.width, fresh.model.vision.num_layers) == (32, 1)


@pytest.mark.parametrize(
    ("path", "value", "message"),
    [
        ("optim.learning_rat", 1, "unknown config key 'optim.learning_rat'; nearest: optim.learning_rate"),
        ("learning_rate", 1, "nearest: .*optim.learning_rate"),
        ("model.attention.block_sise", 1, "nearest: model.attention.block_size"),
        ("optim.lr", 1, "unknown config key 'optim.lr'; nearest: optim.learning_rate"),
        ("bs", 1, "unknown config key 'bs'; nearest: model.attention.block_size"),
        ("model.vocab_size.x", 1, "unknown config key 'model.vocab_size.x'"),
        ("data.streams.2.rows", "[[0, 1]]", "unknown config key 'data.streams.2.rows'; nearest: data.streams.[01].rows"),
        ("zzz", 1, "unknown config key 'zzz'"),
        ("optim.learning_rate", "fast", "optim.learning_rate='fast' is not of type float"),
        ("optim.learning_rate", None, "optim.learning_rate=None is not of type float"),
        ("train.steps", "1.5", "train.steps='1.5' is not of type int"),
        ("train.steps", 1.5, "train.steps=1.5 is not of type int"),
        ("train.steps", True, "train.steps=True is not of type int"),
        ("model.remat", "maybe", "model.remat='maybe' is not of type bool"),
        ("model.remat", 1, "model.remat=1 is not of type bool"),
        ("name", 3, "name=3 is not of type str"),
        ("model.vision", "big", "model.vision='big' is not a VisionConfig; set its fields one by one"),
        ("data.streams.0.rows", "8", "data.streams.0.rows=8 is not a list"),
        ("data.streams.0.rows", "[[0, 1", "is not a JSON list"),
        ("data.streams.0.rows", "[[0]]", r"data.streams.0.rows.0=\[0\] needs 2 entries"),
        ("data.streams.0.rows", '[[0, "x"]]', "data.streams.0.rows.0.1='x' is not of type int"),
        ("data.streams", '[{"rows": [[0, 1]]}]', "config key data.streams.0.name is missing"),
        ("data.streams", '[{"name": "a", "weight": 2}]', "unknown config key 'data.streams.0.weight'"),
    ],
)
def test_override_refuses_unknown_paths_and_wrong_types(path: str, value: Any, message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        override(EXPERIMENT, {path: value})


def test_the_tree_survives_json() -> None:
    assert from_dict(Experiment, json.loads(json.dumps(to_dict(EXPERIMENT)))) == EXPERIMENT


def test_the_hash_names_every_leaf() -> None:
    assert config_hash(EXPERIMENT) == config_hash(from_dict(Experiment, to_dict(EXPERIMENT)))
    others = [experiment(seed=1), experiment(**{"data.streams.1.rows": ((0, 2),)}), experiment(**{"optim.index.clip_norm": 0.5})]
    assert len({config_hash(other) for other in (EXPERIMENT, *others)}) == 4
    assert len(config_hash(EXPERIMENT)) == 12


def test_difference_lists_leaves_of_both_sides() -> None:
    stored = json.loads(json.dumps(to_dict(experiment(**{"train.steps": 800, "data.streams.1.rows": ((0, 2),)}))))
    del stored["seed"]
    stored["optim"]["momentum"] = 0.9
    assert difference(EXPERIMENT, stored) == {
        "data.streams.1.rows": ([[0, 0], [100, 2]], [[0, 2]]),
        "optim.momentum": (None, 0.9),
        "seed": (0, None),
        "train.steps": (400, 800),
    }
    assert difference(EXPERIMENT, to_dict(EXPERIMENT)) == {}


def test_changes_from_the_command_line() -> None:
    assert parse_changes(["optim.learning_rate=1e-3", "data.pack=a=b"]) == {"optim.learning_rate": "1e-3", "data.pack": "a=b"}
    with pytest.raises(ConfigError, match=r"'optim.learning_rate' changes nothing: give path=value"):
        parse_changes(["train.steps=3", "optim.learning_rate"])


CONFIG_FILE = """
from msa_jax.config import Experiment, ModelConfig, MsaConfig, DataConfig, StreamConfig

def config():
    attention = MsaConfig(d_model=32, num_heads=4, num_kv_heads=2, head_dim=8, index_dim=8)
    return Experiment("file", ModelConfig(attention), data=DataConfig(streams=(StreamConfig("text"),)))

def variants():
    return {"fast": {"optim.learning_rate": 0.01, "train.steps": 300}, "wrong": {"optim.rate": 1}}
"""


def test_load_reads_a_config_file_its_variants_and_changes(tmp_path: Path) -> None:
    path = tmp_path / "base.py"
    path.write_text(CONFIG_FILE)
    assert load(path).name == "file"
    fast = load(path, "fast", {"train.steps": "200"})
    assert (fast.name, fast.optim.learning_rate, fast.train.steps) == ("file-fast", 0.01, 200)
    (tmp_path / "ablations").mkdir()
    child = tmp_path / "ablations" / "child.py"
    child.write_text("from msa_jax.config import load\ndef config():\n    return load('../base.py', 'fast', beside=__file__)\n")
    assert load(child).name == "file-fast"


@pytest.mark.parametrize(
    ("name", "variant", "message"),
    [
        ("bas.py", None, "no config file .*bas.py'; nearest: .*base.py"),
        ("base.py", "slow", "no variant 'slow'; choose from: fast, wrong"),
        ("base.py", "wrong", "unknown config key 'optim.rate'"),
        ("empty.py", None, "has no function config()"),
        ("only.py", "fast", "no variant 'fast'; choose from: none"),
        ("notes.md", None, "config file .*notes.md' is no Python file; its name must end in .py"),
    ],
)
def test_load_refuses_with_the_nearest_names(tmp_path: Path, name: str, variant: str | None, message: str) -> None:
    (tmp_path / "base.py").write_text(CONFIG_FILE)
    for name_of_no_config in ("empty.py", "notes.md"):
        (tmp_path / name_of_no_config).write_text("")
    (tmp_path / "only.py").write_text(CONFIG_FILE.split("def variants")[0])
    with pytest.raises(ConfigError, match=message):
        load(tmp_path / name, variant)


def test_smoke_keeps_kinds_streams_phases_and_groups() -> None:
    large = experiment(**{
        "model.pattern": "DDDMM", "model.num_layers": 60, "model.dtype": "bfloat16", "model.attention.d_model": 4096,
        "train.microbatches": 2, "train.steps": 10_000, "train.index_warmup_steps": 130, "train.kl_weight": 0.3,
        "data.streams.0.rows": ((0, 62),), "data.streams.1.rows": ((0, 0), (5000, 2), (8000, 10)), "data.streams.0.sources": ("plays",),
        "optim.vision.learning_rate_scale": 0.5, "optim.vision.warmup_steps": 500, "optim.vision.start_step": 5000,
        "optim.rewarms": (RewarmConfig(7500, 600, 0.3),), "train.loss_rows": 62, "train.init_from": "runs/x", "data.streams.0.skip_rows": 9,
    })  # fmt: skip
    small = smoke(large)
    assert small.model.layer_kinds == "DM"
    assert (small.model.dtype, small.train.kl_weight, small.train.microbatches) == ("bfloat16", 0.3, 2)
    assert [stream.name for stream in small.data.streams] == ["text", "captions"]
    assert small.data.streams[0].rows == ((0, 4),)
    assert small.data.streams[1].rows == ((0, 0), (20, 2), (32, 4))
    assert small.data.streams[0].sources == ()
    assert small.data.pack == "synthetic"
    assert (small.train.steps, small.train.index_warmup_steps) == (40, 1)
    assert (small.optim.vision.learning_rate_scale, small.optim.vision.warmup_steps, small.optim.vision.start_step) == (0.5, 2, 20)
    assert small.optim.rewarms == (RewarmConfig(30, 2, 0.3),)
    assert (small.train.loss_rows, small.train.init_from, small.data.streams[0].skip_rows) == (4, None, 0)
    assert small.model.attention.d_model == 64


@pytest.mark.parametrize("microbatches", [1, 2, 3, 4, 5])
def test_smoke_rows_stay_divisible(microbatches: int) -> None:
    """9 text rows and 3 caption rows, say, are divisible by 4 together but not each."""
    uneven = ((0, 5 * microbatches - 1),), ((0, 1), (200, microbatches + 1))
    small = smoke(experiment(**{"data.streams.0.rows": uneven[0], "data.streams.1.rows": uneven[1], "train.microbatches": microbatches}))
    assert [small.data.rows_at(step) % microbatches for step in (0, 20)] == [0, 0]
    assert small.data.rows_at(0) == 3 * microbatches
    assert small.data.rows_at(20) == 4 * microbatches


def test_smoke_of_every_warm_up_and_decay_is_valid() -> None:
    for steps in (37, 40, 41, 1001):
        for decay in (0.0, 0.2, 1.0):
            longest = steps - -(-steps * int(decay * 10) // 10)
            changes = {"train.steps": steps, "train.index_warmup_steps": steps, "optim.decay_fraction": decay}
            warmups = {"optim.warmup_steps": longest, "optim.vision.warmup_steps": longest}
            assert smoke(experiment(**changes, **warmups)).train.steps == 40
