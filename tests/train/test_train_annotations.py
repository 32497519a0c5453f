"""The jaxtyping annotations of loss, optimiser and step hold: fresh copies of them are traced under a run-time type checker."""

import importlib
import sys
from collections.abc import Iterator
from types import SimpleNamespace

import jax
import jax.numpy as jnp
import pytest
from jaxtyping import TypeCheckError, install_import_hook
from tiny_experiment import SOURCES, make_batch

import msa_jax.train
from msa_jax.config import Experiment, MoeConfig, override

CHECKED = ("balance", "loss", "optim", "schedule", "step")


@pytest.fixture(scope="module")
def checked() -> Iterator[SimpleNamespace]:
    """The modules, imported anew under the checker; the ordinary ones return after these tests."""
    names = [f"msa_jax.train.{name}" for name in CHECKED]
    with pytest.MonkeyPatch.context() as patch:
        for name, module in zip(CHECKED, [importlib.import_module(name) for name in names], strict=True):
            patch.setattr(msa_jax.train, name, module)
            patch.delitem(sys.modules, f"msa_jax.train.{name}")
        with install_import_hook(names, "beartype.beartype"):
            yield SimpleNamespace(**{name: importlib.import_module(f"msa_jax.train.{name}") for name in CHECKED})


@pytest.mark.filterwarnings("ignore::beartype.roar.BeartypeDecorHintPep585DeprecationWarning")  # flax's own annotations
def test_annotations_hold(checked: SimpleNamespace, experiment: Experiment) -> None:
    moe = MoeConfig(num_experts=5, experts_per_token=2, expert_dim=7)
    halves = override(experiment, {
        "train.microbatches": 2, "train.z_loss_weight": 0.1, "model.moe": moe, "optim.optimizer": "muon", "optim.ema_decay": 0.9,
    })  # fmt: skip
    state_module = importlib.import_module("msa_jax.train.state")
    graphdef, params = state_module.abstract_model(halves.model)
    tx = checked.optim.make_optimizer(halves.optim, halves.train.steps, params)
    state = jax.eval_shape(lambda: state_module.init_state(halves, tx))
    step = checked.step.make_train_step(halves, graphdef, tx, "sparse", SOURCES)
    after, metrics = jax.eval_shape(step, state, make_batch(halves, 0))
    assert after.step.dtype == jnp.int32
    assert metrics.scalars["loss"].shape == ()


def test_a_wrong_shape_is_caught(checked: SimpleNamespace) -> None:
    """The checker is really on."""
    with pytest.raises(TypeCheckError):
        checked.loss.next_token_nats(jnp.zeros((2, 3, 4)), jnp.zeros((3, 2), jnp.int32))
