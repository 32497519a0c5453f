"""The rule that makes experts' loads equal: by hand, on the stacked layers of a model, and in the training step."""

import functools
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx
from tiny_experiment import SOURCES, TEXT_EXPERIMENT, changed, make_batch

from msa_jax.config import ModelConfig, MoeConfig, MsaConfig
from msa_jax.data.batch import Batch
from msa_jax.train.balance import balance_experts, imbalance
from msa_jax.train.loss import batch_totals, loss_fn
from msa_jax.train.state import TrainState, abstract_model, build, init_state
from msa_jax.train.step import Metrics, accumulate_gradients, make_train_step, parameter_names

QUICK = {"xla_backend_optimization_level": 0}
MOE = MoeConfig(num_experts=4, experts_per_token=2, expert_dim=16, shared_dim=8, dense_layers=1, bias_rate=0.02)
EXPERIMENT = changed(TEXT_EXPERIMENT, model__moe=MOE, model__pattern="D", train__microbatches=2, optim__learning_rate=1e-4)


def test_every_layer_moves_by_its_own_load() -> None:
    """Layers M D M D M of which the first keeps its MLP."""
    attention = MsaConfig(d_model=16, num_heads=2, num_kv_heads=2, head_dim=8, index_dim=8)
    config = ModelConfig(attention, vocab_size=8, num_layers=5, pattern="MD", mlp_dim=8, moe=MOE)
    graphdef, shapes = abstract_model(config)
    params = jax.tree.map(lambda leaf: jnp.full(leaf.shape, 0.5), shapes)
    load_XO = jnp.array([[0, 0, 0, 0], [4, 0, 2, 2], [8, 8, 8, 8], [0, 0, 0, 9], [1, 2, 3, 4]])
    moved = balance_experts(params, load_XO, config)
    model = nnx.merge(graphdef, moved)
    for depth, signs in {1: [-1, 1, 0, 0], 2: [0, 0, 0, 0], 3: [1, 1, 1, -1], 4: [1, 1, -1, -1]}.items():
        np.testing.assert_allclose(model.block(depth).mlp.router.bias[...], 0.5 + 0.02 * np.array(signs), rtol=1e-6)
    for name, before, after in zip(parameter_names(params), jax.tree.leaves(params), jax.tree.leaves(moved), strict=True):
        assert name.endswith("router.bias") or (before == after).all()


def test_imbalance_names_the_layers_with_experts() -> None:
    load_XO = jnp.array([[0, 0, 0, 0], [4, 0, 2, 2]])
    assert {name: float(value) for name, value in imbalance(load_XO, EXPERIMENT.model).items()} == {"experts/imbalance/layer_1": 1.0}


@functools.cache
def compiled_step() -> Callable[[TrainState, Batch], tuple[TrainState, Metrics]]:
    graphdef, tx = build(EXPERIMENT)
    return jax.jit(make_train_step(EXPERIMENT, graphdef, tx, "sparse", SOURCES), compiler_options=QUICK)


@functools.cache
def initial() -> TrainState:
    return jax.jit(lambda: init_state(EXPERIMENT, build(EXPERIMENT)[1]), compiler_options=QUICK)()


def router_bias(params: Any) -> np.ndarray:
    (found,) = (leaf for name, leaf in zip(parameter_names(params), jax.tree.leaves(params), strict=True) if name.endswith("router.bias"))
    return np.asarray(found)


@functools.cache
def gradients(microbatches: int) -> Any:
    batch = make_batch(EXPERIMENT, 0)
    loss = functools.partial(loss_fn, graphdef=build(EXPERIMENT)[0], phase="sparse", kl_weight=1.0, num_sources=3)

    def of(params: Any) -> Any:
        return accumulate_gradients(loss, params, batch, batch_totals(batch), microbatches, merge=1)

    return jax.device_get(jax.jit(of, compiler_options=QUICK)(initial().params))


def test_microbatches_count_the_same_loads_as_one_big_batch() -> None:
    """And every gradient agrees, that of the selection bias being exactly zero."""
    (whole, whole_losses), (split, split_losses) = gradients(1), gradients(2)
    np.testing.assert_array_equal(whole_losses.load_XO, split_losses.load_XO)
    real_tokens = (make_batch(EXPERIMENT, 0).segments_BT > 0).sum()
    np.testing.assert_array_equal(whole_losses.load_XO.sum(1), [0, 2 * real_tokens])
    for name, a, b in zip(parameter_names(whole), jax.tree.leaves(whole), jax.tree.leaves(split), strict=True):
        if name.endswith("router.bias"):
            assert not a.any()
            assert not b.any()
        else:
            error = np.sqrt(np.mean((a - b) ** 2) / np.mean(a**2))
            assert error < 1e-5, f"{name}: error ratio {error:.2e}"


def test_the_step_moves_the_bias_by_the_rule_and_the_optimiser_does_not() -> None:
    state, metrics = compiled_step()(initial(), make_batch(EXPERIMENT, 0))
    load_O = gradients(1)[1].load_XO[1]
    np.testing.assert_allclose(router_bias(state.params)[0], 0.02 * np.sign(load_O.mean() - load_O), rtol=1e-6)
    assert metrics.scalars["experts/imbalance/layer_1"] == pytest.approx(load_O.max() / load_O.mean() - 1, rel=1e-6)


def test_loads_become_equal() -> None:
    """All tokens start with expert 0."""
    params = initial().params
    skewed = [
        jnp.array([[1.0, 0, 0, 0]]) if name.endswith("router.bias") else leaf
        for name, leaf in zip(parameter_names(params), jax.tree.leaves(params), strict=True)
    ]
    state = TrainState(initial().step, jax.tree.unflatten(jax.tree.structure(params), skewed), initial().opt_state, initial().key)
    imbalances = []
    for _ in range(80):
        state, metrics = compiled_step()(state, make_batch(EXPERIMENT, 0))
        imbalances.append(float(metrics.scalars["experts/imbalance/layer_1"]))
    assert imbalances[0] == pytest.approx(1.0), "half of all choices are expert 0's, twice the mean"
    assert np.mean(imbalances[-8:]) < 0.3
