"""Every config file and variant: it builds, it traces at its full size, and its smoke form is a valid experiment."""

import ast
import importlib.util
from pathlib import Path

import jax
import jax.numpy as jnp
import pytest

from msa_jax.config import Experiment, difference, load, smoke
from msa_jax.data.batch import Batch, VisionBatch
from msa_jax.train.state import build, init_state
from msa_jax.train.step import make_train_step

ROOT = Path(__file__).resolve().parents[1]
FILES = sorted((ROOT / "configs").rglob("*.py"))


def variants(path: Path) -> list[str | None]:
    spec = importlib.util.spec_from_file_location(path.stem, path)
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return [None, *(module.variants() if hasattr(module, "variants") else ())]


SEVERAL_CHANGES = {"when_to_add_vision": "has tests of its own, in test_when_to_add_vision.py"}  # what enters late also warms up late
CASES = [(path, variant) for path in FILES for variant in variants(path)]
IDS = [f"{path.relative_to(ROOT / 'configs')}{f':{variant}' if variant else ''}" for path, variant in CASES]


def abstract_batch(experiment: Experiment) -> Batch:
    shape = experiment.data.rows_at(0), experiment.data.sequence_length
    integers, vision = jax.ShapeDtypeStruct(shape, jnp.int32), experiment.model.vision
    pictures = None
    if vision:
        patches = 2 * experiment.train.microbatches, vision.sequence_length
        pictures = VisionBatch(
            jax.ShapeDtypeStruct((*patches, vision.patch_dim), jnp.float32), jax.ShapeDtypeStruct(patches, jnp.int32),
            jax.ShapeDtypeStruct((*patches, 3), jnp.int32),
        )  # fmt: skip
    return Batch(integers, integers, integers, jax.ShapeDtypeStruct(shape, jnp.float32), integers, integers, pictures)


@pytest.mark.parametrize(("path", "variant"), CASES, ids=IDS)
def test_a_config_traces_at_its_full_size(path: Path, variant: str | None) -> None:
    """Shapes of the whole train step, loss included, without computing anything; both phases of what a file builds by itself."""
    experiment = load(path, variant)
    graphdef, tx = build(experiment)
    state, batch = jax.eval_shape(lambda: init_state(experiment, tx)), abstract_batch(experiment)
    for phase in ("sparse",) if variant else ("sparse", "warmup"):
        after, metrics = jax.eval_shape(make_train_step(experiment, graphdef, tx, phase, ("plays",)), state, batch)
        assert jax.tree.map(lambda leaf: (leaf.shape, leaf.dtype), after) == jax.tree.map(lambda leaf: (leaf.shape, leaf.dtype), state)
        assert metrics.scalars["loss"].shape == ()


@pytest.mark.parametrize(("path", "variant"), CASES, ids=IDS)
def test_a_smoke_run_keeps_what_the_config_is_about(path: Path, variant: str | None) -> None:
    small, full = smoke(load(path, variant)), load(path, variant)
    assert small.name == full.name
    assert set(small.model.layer_kinds) == set(full.model.layer_kinds)
    assert (small.model.vision is None) == (full.model.vision is None)
    assert [stream.kind for stream in small.data.streams] == [stream.kind for stream in full.data.streams]
    assert {kind.experts for kind in small.model.layers} == {kind.experts for kind in full.model.layers}
    assert small.optim.optimizer == full.optim.optimizer
    assert (small.train.index_warmup_steps > 0) == (full.train.index_warmup_steps > 0)
    assert small.train.kl_weight == full.train.kl_weight
    assert small.model.attention.index_stop_gradient == full.model.attention.index_stop_gradient


@pytest.mark.parametrize("path", FILES, ids=lambda path: path.stem)
def test_a_config_file_says_what_it_is_and_how_to_run_it(path: Path) -> None:
    tree = ast.parse(path.read_text())
    relative = path.relative_to(ROOT)
    assert f"python train.py --config {relative}" in ast.get_docstring(tree)
    imports = [node for node in ast.walk(tree) if isinstance(node, ast.Import | ast.ImportFrom)]
    assert [node.module for node in imports] == ["msa_jax.config"]


def test_variants_are_differences_from_their_baseline() -> None:
    native = load(ROOT / "configs" / "native.py")
    for path, variant in CASES:
        if path.parent.name == "ablations" and variant and path.stem not in SEVERAL_CHANGES:
            changed = set(difference(load(path, variant), load(path))) - {"name"}
            assert len(changed) == 1, f"{path.stem}:{variant} changes {changed}; an ablation changes one thing"
    assert set(difference(load(ROOT / "configs" / "dense.py"), native)) == {"name", "model.pattern"}
    text_only = set(difference(load(ROOT / "configs" / "text_only.py"), native))
    assert all(path == "name" or path.startswith(("model.vision", "data.streams.1")) for path in text_only)
