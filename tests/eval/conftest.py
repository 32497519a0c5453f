"""A tiny untrained model over the synthetic pack, shared by the tests of the evaluators."""

import dataclasses

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx

from msa_jax.config import EvalConfig, Experiment, ModelConfig, MsaConfig, VisionConfig, smoke
from msa_jax.data.pack import Pack
from msa_jax.eval.forward import Forward
from msa_jax.train.state import TrainState, abstract_model

ATTENTION = MsaConfig(d_model=64, num_heads=4, num_kv_heads=2, head_dim=16, index_dim=16, block_size=8, num_blocks=4)


@pytest.fixture(scope="session")
def experiment() -> Experiment:
    """One dense and one MSA layer, T = 128, C = 8, R = 4; up to 32 captions a split with 8 candidates each."""
    small = smoke(Experiment("tiny", ModelConfig(attention=ATTENTION, vision=VisionConfig(), pattern="DM", num_layers=2)))
    return dataclasses.replace(small, eval=EvalConfig(text_rows=4, pictures=32, candidates=8))


@pytest.fixture(scope="session")
def pack() -> Pack:
    return Pack.synthetic(0)


@pytest.fixture(scope="session")
def model(experiment: Experiment) -> tuple[nnx.GraphDef, TrainState]:
    """Random weights from numpy: compiling the model's own initialisation would take longer than all evaluators."""
    graphdef, shapes = abstract_model(experiment.model)
    rng = np.random.default_rng(0)
    params = jax.tree.map(lambda leaf: jnp.asarray(0.1 * rng.standard_normal(leaf.shape), leaf.dtype), shapes)
    return graphdef, TrainState(jnp.zeros((), jnp.int32), params, (), jax.random.key(0))


@pytest.fixture(scope="session")
def state(model: tuple[nnx.GraphDef, TrainState]) -> TrainState:
    return model[1]


@pytest.fixture(scope="session")
def forward(model: tuple[nnx.GraphDef, TrainState]) -> Forward:
    return Forward(model[0])
