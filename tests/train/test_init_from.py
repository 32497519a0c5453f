"""Starting from another run's checkpoint: what is inherited and what is not. Parameters are few, named as the model's are."""

from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from tiny_experiment import TEXT_EXPERIMENT, Batches, changed

from msa_jax.config import GroupConfig, OptimConfig, RewarmConfig
from msa_jax.train import loop
from msa_jax.train.checkpoint import CHECKPOINTS, CheckpointError, Checkpoints
from msa_jax.train.init_from import init_from
from msa_jax.train.optim import make_optimizer
from msa_jax.train.state import TrainState

TEXT = {"embedding": jnp.full((3, 2), 0.5), "layers": {"index": {"kernel": jnp.ones((2, 2))}, "mlp": {"kernel": jnp.full((2, 2), 2.0)}}}
BOTH = TEXT | {"vision": {"up": {"kernel": jnp.full((2, 2), 3.0)}}}
CONFIG = OptimConfig(learning_rate=0.1, warmup_steps=0, decay_fraction=0.4, final_fraction=0.1)


def start(config: OptimConfig, steps: int, params: Any) -> tuple[TrainState, optax.GradientTransformation]:
    tx = make_optimizer(config, steps, params)
    return TrainState(jnp.zeros((), jnp.int32), params, tx.init(params), jax.random.key(len(jax.tree.leaves(params)))), tx


def train(state: TrainState, tx: optax.GradientTransformation, gradients: list[float]) -> TrainState:
    @jax.jit
    def step(state: TrainState, gradient: Any) -> TrainState:
        gradients = jax.tree.map(lambda leaf: leaf * 0 + gradient, state.params)
        updates, opt_state = tx.update(gradients, state.opt_state, state.params)
        return TrainState(state.step + 1, optax.apply_updates(state.params, updates), opt_state, state.key)

    for gradient in gradients:
        state = step(state, gradient)
    return state


def save(state: TrainState, folder: Path) -> TrainState:
    with Checkpoints(folder / CHECKPOINTS) as checkpoints:
        checkpoints.save(state, b"7")
    return state


def named(tree: Any) -> dict[str, np.ndarray]:
    return {jax.tree_util.keystr(path): np.asarray(leaf) for path, leaf in jax.tree_util.tree_flatten_with_path(tree)[0]}


def test_two_runs_equal_one_that_warms_up_again(tmp_path: Path) -> None:
    """Five decayed steps, then three at 0.3 peak: moments and Adam's own count go on, the schedule starts anew."""
    gradients = [0.5, -0.2, 0.3, 0.1, 0.4, -0.3, 0.2, 0.6]
    again = OptimConfig(
        learning_rate=0.1, warmup_steps=0, decay_fraction=0.4, final_fraction=0.1, rewarms=(RewarmConfig(5, peak_fraction=0.3),)
    )
    expected = train(*start(again, 8, TEXT), gradients)
    save(train(*start(CONFIG, 5, TEXT), gradients[:5]), tmp_path)
    fresh, tx = start(OptimConfig(learning_rate=0.03, warmup_steps=0, decay_fraction=1.0, final_fraction=1 / 3), 3, TEXT)
    found = train(init_from(tmp_path, fresh), tx, gradients[5:])
    assert (int(found.step), int(expected.step)) == (3, 8)
    for ours, theirs in zip(jax.tree.leaves(found.params), jax.tree.leaves(expected.params), strict=True):
        np.testing.assert_allclose(ours, theirs, rtol=1e-6)


def test_what_is_inherited(tmp_path: Path) -> None:
    fresh, tx = start(CONFIG, 10, BOTH)
    saved = save(train(fresh, tx, [0.5, 0.25]), tmp_path)
    state = init_from(tmp_path, fresh)
    assert int(state.step) == 0
    np.testing.assert_array_equal(jax.random.key_data(state.key), jax.random.key_data(fresh.key))
    theirs, counts = named((saved.params, saved.opt_state)), []
    for name, leaf in named((state.params, state.opt_state)).items():
        if leaf.ndim:
            np.testing.assert_array_equal(leaf, theirs[name], err_msg=name)
        else:
            counts.append(int(leaf))
    assert sorted(counts) == [0, 0, 0, 2, 2, 2], "Adam's count of each group is kept, the schedules' are not"


def test_a_group_that_is_new_starts_anew(tmp_path: Path) -> None:
    saved = save(train(*start(CONFIG, 10, TEXT), [0.5, 0.25]), tmp_path)
    fresh, tx = start(CONFIG, 10, BOTH)
    state = init_from(tmp_path, fresh)
    assert jax.tree.structure(state) == jax.tree.structure(fresh)
    np.testing.assert_array_equal(state.params["vision"]["up"]["kernel"], BOTH["vision"]["up"]["kernel"])
    np.testing.assert_array_equal(state.params["embedding"], saved.params["embedding"])
    ours, theirs = state.opt_state.inner_states, saved.opt_state.inner_states
    assert not any(leaf.any() for leaf in jax.tree.leaves(ours["vision"]))
    for name in ("trunk", "index"):
        for a, b in zip(jax.tree.leaves(ours[name]), jax.tree.leaves(theirs[name]), strict=True):
            assert a.ndim == 0 or (a == b).all()
    assert (train(state, tx, [0.1]).params["vision"]["up"]["kernel"] != 3.0).all()


def test_a_late_start_is_counted_in_the_new_runs_steps(tmp_path: Path) -> None:
    late = OptimConfig(learning_rate=0.1, warmup_steps=0, vision=GroupConfig(start_step=1, warmup_steps=0))
    fresh, tx = start(late, 10, BOTH)
    saved = save(train(fresh, tx, [0.5, 0.5, 0.5]), tmp_path)
    state = init_from(tmp_path, fresh)
    once, twice = train(state, tx, [0.1]), train(state, tx, [0.1, 0.1])
    before, first, second = (one.params["vision"]["up"]["kernel"] for one in (saved, once, twice))
    np.testing.assert_array_equal(before, first)
    assert (first != second).all()


def test_a_checkpoint_that_is_missing_or_of_another_model(tmp_path: Path) -> None:
    fresh, _ = start(CONFIG, 10, TEXT)
    with pytest.raises(CheckpointError, match=r"no checkpoint in .*none/checkpoints; complete ones: none"):
        init_from(tmp_path / "none", fresh)
    save(start(CONFIG, 10, BOTH)[0], tmp_path)
    with pytest.raises(CheckpointError, match=r"params vision\..*only in the checkpoint"):
        init_from(tmp_path, fresh)
    other = TEXT | {"embedding": jnp.zeros((4, 2))}
    save(fresh, tmp_path / "text")
    with pytest.raises(CheckpointError, match=r"params embedding: float32\[3, 2\] in the checkpoint, float32\[4, 2\] expected"):
        init_from(tmp_path / "text", start(CONFIG, 10, other)[0])


def test_a_run_starts_from_the_folder_of_its_seed_and_resumes_from_its_own(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    fresh, tx = start(CONFIG, 10, TEXT)
    monkeypatch.setattr(loop, "init_state", lambda experiment, tx, seed: fresh)
    runs = []
    for seed in (2, 5):
        save(train(fresh, tx, [0.1 * seed]), tmp_path / f"first_{seed}")
        experiment = changed(TEXT_EXPERIMENT, seed=seed, train__init_from=str(tmp_path / "first_{seed}"))
        runs.append(loop.Run(experiment, Batches(experiment), tmp_path / f"second_{seed}"))
    checkpoints = [Checkpoints(run.folder / CHECKPOINTS) for run in runs]
    states = loop.start(runs, tx, checkpoints)
    for seed, state in zip((2, 5), states, strict=True):
        expected = train(fresh, tx, [0.1 * seed])
        np.testing.assert_array_equal(state.opt_state.inner_states["trunk"].inner_state[1].mu["embedding"],
                                      expected.opt_state.inner_states["trunk"].inner_state[1].mu["embedding"])  # fmt: skip
        save(train(state, tx, [1.0] * 4), tmp_path / f"second_{seed}")
    resumed = loop.start(runs, tx, checkpoints)
    assert [int(state.step) for state in resumed] == [4, 4]
    assert runs[0].batches.get_state() == b"7"
