"""One update of the real model: what may and may not change it."""

import functools
from collections.abc import Callable
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from tiny_experiment import EXPERIMENT, SOURCES, TEXT_EXPERIMENT, changed, make_batch

from msa_jax.config import Experiment
from msa_jax.data.batch import Batch
from msa_jax.model.groups import parameter_group
from msa_jax.train.checkpoint import Checkpoints
from msa_jax.train.loss import batch_totals, loss_fn
from msa_jax.train.state import TrainState, build, init_state
from msa_jax.train.step import Metrics, accumulate_gradients, make_train_step, parameter_names, phase_at, split_batch, token_counts

Result = tuple[TrainState, Metrics]
QUICK = {"xla_backend_optimization_level": 0}  # compiles in half the time; what is compared here does not depend on it


@functools.cache
def initial(experiment: Experiment) -> TrainState:
    return jax.jit(lambda: init_state(experiment, build(experiment)[1]), compiler_options=QUICK)()


@functools.cache
def compiled_step(experiment: Experiment, phase: str, quick: bool = True) -> Callable[[TrainState, Batch], Result]:
    graphdef, tx = build(experiment)
    return jax.jit(make_train_step(experiment, graphdef, tx, phase, SOURCES), compiler_options=QUICK if quick else None)


@functools.cache
def first_update(experiment: Experiment, start: Experiment, phase: str, quick: bool = True) -> Result:
    """The state after one step of `experiment` from the initial state of `start`, on the host."""
    return jax.device_get(compiled_step(experiment, phase, quick)(initial(start), make_batch(start, 0)))


def by_group(tree: Any) -> dict[str, list[np.ndarray]]:
    groups: dict[str, list[np.ndarray]] = {"trunk": [], "index": [], "vision": []}
    for path, leaf in jax.tree_util.tree_flatten_with_path(tree)[0]:
        groups[parameter_group(path)].append(np.asarray(leaf))
    return groups


@pytest.mark.parametrize(
    ("phase", "start"),
    [("sparse", EXPERIMENT), pytest.param("warmup", TEXT_EXPERIMENT, marks=pytest.mark.slow)],
    ids=["sparse", "warmup"],
)
def test_the_weight_of_the_index_loss_does_not_touch_the_other_groups(phase: str, start: Experiment) -> None:
    """Bit for bit, from one state, compiled as in a run: the KL has no gradient there and no part in their clipping."""
    without, _ = first_update(changed(start, train__kl_weight=0.0), start, phase, quick=False)
    with_kl, metrics = first_update(start, start, phase, quick=False)
    assert metrics.scalars["loss/kl"] > 0
    ours, theirs, before = by_group(without.params), by_group(with_kl.params), by_group(initial(start).params)
    for group in ("trunk", "vision"):
        for a, b in zip(ours[group], theirs[group], strict=True):
            np.testing.assert_array_equal(a, b)
        assert all((a != b).any() for a, b in zip(ours[group], before[group], strict=True)), f"{group} moved"
    assert all((a != b).any() for a, b in zip(ours["index"], theirs["index"], strict=True))


def test_weight_zero_keeps_the_tree_and_gives_exact_zeros(experiment: Experiment) -> None:
    state, metrics = first_update(changed(experiment, train__kl_weight=0.0), experiment, "sparse", quick=False)
    assert jax.tree.structure(state) == jax.tree.structure(initial(experiment))
    assert metrics.scalars["gradient_norm/index"] == metrics.scalars["loss/kl"] == metrics.scalars["loss/kl/layer_1"] == 0.0
    assert metrics.scalars["loss"] == metrics.scalars["loss/lm"]


def test_metrics_say_what_happened(experiment: Experiment) -> None:
    state, metrics = first_update(experiment, experiment, "sparse", quick=False)
    scalars, batch = metrics.scalars, make_batch(experiment, 0)
    assert state.step == 1
    assert scalars["loss"] == pytest.approx(scalars["loss/lm"] + scalars["loss/kl"], rel=1e-6)
    assert scalars["loss/kl"] == pytest.approx((scalars["loss/kl/layer_0"] + scalars["loss/kl/layer_1"]) / 2, rel=1e-6)
    assert scalars["tokens"] == (batch.segments_BT > 0).sum()
    assert scalars["tokens/visual"] == (batch.visual_index_BT >= 0).sum() == 8
    assert scalars["tokens/text"] + scalars["tokens/visual"] == scalars["tokens"]
    weight = {name: scalars[f"tokens/source/{name}"] for name in SOURCES}
    assert [weight[name] for name in SOURCES] == [batch.loss_weights_BT[batch.sources_BT == i].sum() for i in range(3)]
    mean = sum(scalars[f"loss/source/{name}"] * weight[name] for name in SOURCES) / sum(weight.values())
    assert mean == pytest.approx(scalars["loss/lm"], rel=1e-5)
    assert scalars["lr/trunk"] == pytest.approx(1e-2 / 3)
    assert scalars["parameter_norm/index"] == pytest.approx(
        np.sqrt(sum((leaf**2).sum() for leaf in by_group(state.params)["index"])), rel=1e-5
    )
    assert metrics.finite.all()
    assert len(metrics.finite) == len(parameter_names(state.params)) == len(set(parameter_names(state.params)))


def test_token_counts_do_not_depend_on_weights(experiment: Experiment) -> None:
    batch = make_batch(experiment, 0)
    heavy = batch._replace(loss_weights_BT=4 * batch.loss_weights_BT)
    assert jax.tree.map(int, token_counts(heavy, SOURCES)) == jax.tree.map(int, token_counts(batch, SOURCES))


def test_microbatches_equal_one_big_batch(experiment: Experiment) -> None:
    """Four rows of different lengths and weights, two of them with pictures, cut into two parts."""
    batch = make_batch(experiment, 0)
    tokens = (batch.segments_BT > 0).sum(1)
    parts = [batch.loss_weights_BT[:2].sum(), batch.loss_weights_BT[2:].sum()]
    assert len(set(tokens.tolist())) > 1
    assert parts[0] != parts[1], "else plain averaging would pass too"
    graphdef, _ = build(experiment)
    loss = functools.partial(loss_fn, graphdef=graphdef, phase="sparse", kl_weight=1.0, num_sources=3)

    @functools.partial(jax.jit, static_argnums=1, compiler_options=QUICK)
    def gradients(params: Any, microbatches: int) -> Any:
        return accumulate_gradients(loss, params, batch, batch_totals(batch), microbatches, experiment.model.vision.merge)

    whole, split = (jax.device_get(gradients(initial(experiment).params, parts)) for parts in (1, 2))
    for a, b in zip(jax.tree.leaves(whole[1]), jax.tree.leaves(split[1]), strict=True):
        np.testing.assert_allclose(a, b, rtol=1e-5, atol=1e-7)
    for name, a, b in zip(parameter_names(whole[0]), jax.tree.leaves(whole[0]), jax.tree.leaves(split[0]), strict=True):
        error = np.sqrt(np.mean((a - b) ** 2) / np.mean(a**2))
        assert error < 1e-5, f"{name}: error ratio {error:.2e}"


def test_splitting_keeps_rows_pictures_and_order(experiment: Experiment) -> None:
    batch = make_batch(experiment, 0)
    parts = split_batch(batch, 2, merge=2)
    np.testing.assert_array_equal(parts.tokens_BT.reshape(batch.tokens_BT.shape), batch.tokens_BT)
    np.testing.assert_array_equal(parts.vision.patches_VLP[1, 0], batch.vision.patches_VLP[1])
    np.testing.assert_array_equal(parts.visual_index_BT[:, 1, 1:5], [[0, 1, 2, 3]] * 2)
    index = np.array([[-1, 0, 3, -1], [7, 4, -1, -1]], np.int32)  # part 0 owns visual tokens 0..3, part 1 owns 4..7
    parts = split_batch(batch._replace(tokens_BT=index * 0, visual_index_BT=index), 2, merge=2)
    np.testing.assert_array_equal(parts.visual_index_BT, [[[-1, 0, 3, -1]], [[3, 0, -1, -1]]])
    empty = batch._replace(vision=type(batch.vision)(*(leaf[:0] for leaf in batch.vision)))
    assert split_batch(empty, 2, merge=2).vision.patches_VLP.shape == (2, 0, *batch.vision.patches_VLP.shape[1:])


@pytest.mark.parametrize(
    ("parts", "message"), [(3, "batch of 4 rows is not divisible by train.microbatches=3"), (4, "2 packed patch sequences")]
)
def test_what_does_not_divide_is_named(experiment: Experiment, parts: int, message: str) -> None:
    with pytest.raises(ValueError, match=message):
        split_batch(make_batch(experiment, 0), parts, merge=2)


def test_bfloat16_computes_on_float32_masters(text_experiment: Experiment) -> None:
    """Weights around 0.1 move by 1e-6, a hundredth of the spacing of bfloat16 there: nothing of it may be rounded away."""
    small = changed(text_experiment, model__dtype="bfloat16", optim__learning_rate=1e-6, optim__warmup_steps=0)
    state, metrics = first_update(small, text_experiment, "warmup")
    assert {leaf.dtype for leaf in jax.tree.leaves((state.params, state.opt_state.inner_states["trunk"].inner_state[1].mu))} == {
        np.dtype("float32")
    }
    moved = np.abs(by_group(state.params)["trunk"][0] - by_group(initial(text_experiment).params)["trunk"][0])
    assert 0 < moved.max() < 2e-6
    exact = first_update(text_experiment, text_experiment, "warmup")[1].scalars["loss/lm"]
    assert metrics.scalars["loss/lm"].dtype == np.float32
    assert 0 < abs(metrics.scalars["loss/lm"] - exact) < 0.03 * exact, "bfloat16 has eight bits"


def test_a_frozen_index_branch_can_be_saved_resumed_and_unfrozen(text_experiment: Experiment, tmp_path: Path) -> None:
    """While frozen it stands still and its moments go on; afterwards the same state trains it."""
    frozen = changed(text_experiment, optim__index__learning_rate_scale=0.0)
    before = by_group(initial(text_experiment).params)
    state, metrics = first_update(frozen, text_experiment, "warmup")
    with Checkpoints(tmp_path) as checkpoints:
        checkpoints.save(jax.device_put(state), b"1")
    abstract = jax.eval_shape(lambda: init_state(text_experiment, build(text_experiment)[1]))
    restored, _ = Checkpoints(tmp_path).restore(abstract)
    after, _ = compiled_step(text_experiment, "warmup")(restored, make_batch(text_experiment, 1))
    assert metrics.scalars["lr/index"] == 0.0
    for start, still, moved in zip(before["index"], by_group(state.params)["index"], by_group(after.params)["index"], strict=True):
        np.testing.assert_array_equal(start, still)
        assert (still != moved).any()
    assert all((start != moved).any() for start, moved in zip(before["trunk"], by_group(state.params)["trunk"], strict=True))
    free = first_update(text_experiment, text_experiment, "warmup")[0]
    for a, b in zip(jax.tree.leaves(state.opt_state), jax.tree.leaves(free.opt_state), strict=True):
        np.testing.assert_array_equal(a, b)


def test_a_donated_state_with_tied_embeddings_gives_the_same_step(text_experiment: Experiment) -> None:
    graphdef, tx = build(text_experiment)
    assert text_experiment.model.tie_embeddings
    state = jax.tree.map(jnp.copy, initial(text_experiment))
    step = jax.jit(make_train_step(text_experiment, graphdef, tx, "warmup", SOURCES), donate_argnums=0, compiler_options=QUICK)
    after, metrics = step(state, make_batch(text_experiment, 0))
    assert all(leaf.is_deleted() for leaf in jax.tree.leaves(state.params))
    expected, expected_metrics = first_update(text_experiment, text_experiment, "warmup")
    assert float(metrics.scalars["loss"]) == expected_metrics.scalars["loss"]
    for a, b in zip(jax.tree.leaves(after.params), jax.tree.leaves(expected.params), strict=True):
        np.testing.assert_array_equal(a, b)


def test_the_guards_flags_point_at_the_gradients_that_are_lost(text_experiment: Experiment) -> None:
    """NaN in one index weight of layer 1: in the warm-up phase nothing else may be lost."""
    poisoned = jax.tree.map(jnp.copy, initial(text_experiment))
    kernel = poisoned.params["layers"][0][0]["attention"]["index"]["q"]["linear"]["kernel"]
    kernel[...] = kernel[...].at[1].set(jnp.nan)
    metrics = jax.device_get(compiled_step(text_experiment, "warmup")(poisoned, make_batch(text_experiment, 0))[1])
    lost = {name for name, fine in zip(parameter_names(poisoned.params), metrics.finite, strict=True) if not fine}
    assert lost
    assert all(".attention.index." in name for name in lost)
    assert np.isfinite(metrics.scalars["loss/lm"])
    assert np.isfinite(metrics.scalars["loss/kl/layer_0"])
    assert np.isnan(metrics.scalars["loss/kl/layer_1"])


def test_phases_follow_the_configuration(experiment: Experiment) -> None:
    assert [phase_at(experiment, step) for step in (0, 2, 3, 7)] == ["warmup", "warmup", "sparse", "sparse"]


def test_totals_count_the_whole_batch(experiment: Experiment) -> None:
    batch: Batch = make_batch(experiment, 3)
    totals = batch_totals(batch)
    assert float(totals.tokens) == (batch.segments_BT > 0).sum()
    assert float(totals.loss_weight) == batch.loss_weights_BT.sum()


def test_initial_states_follow_the_seed(text_experiment: Experiment) -> None:
    tx = build(text_experiment)[1]
    make = jax.jit(lambda seed: init_state(changed(text_experiment, seed=seed), tx), static_argnums=0, compiler_options=QUICK)
    first, other = make(0), make(1)
    for a, b in zip(jax.tree.leaves(first.params), jax.tree.leaves(initial(text_experiment).params), strict=True):
        np.testing.assert_array_equal(a, b)
    assert (first.params["embedding"][...] != other.params["embedding"][...]).any()
    assert (jax.random.key_data(first.key) != jax.random.key_data(other.key)).any()
    assert int(first.step) == 0
