"""A model of a few thousand parameters with every parameter group, and batches made without a data pack."""

import functools
from collections.abc import Callable
from typing import Any

import jax
import numpy as np
import pytest

from msa_jax.config import (
    DataConfig,
    Experiment,
    ModelConfig,
    MsaConfig,
    OptimConfig,
    StreamConfig,
    TrainConfig,
    VisionConfig,
    override,
)
from msa_jax.data.batch import Batch, VisionBatch, check_batch

SOURCES = ("plays", "code", "drawings")
EXPERIMENT = Experiment(
    "tiny",
    ModelConfig(
        MsaConfig(d_model=32, num_heads=4, num_kv_heads=2, head_dim=8, index_dim=8, block_size=4, num_blocks=2),
        vocab_size=48,
        num_layers=2,
        mlp_dim=48,
        vision=VisionConfig(width=16, num_layers=1, mlp_dim=16, patch_size=2, sequence_length=16),
    ),
    data=DataConfig(
        pack="synthetic",
        sequence_length=24,
        streams=(StreamConfig("text", rows=((0, 2),)), StreamConfig("captions", kind="captions", rows=((0, 2),))),
    ),
    optim=OptimConfig(learning_rate=1e-2, warmup_steps=2, decay_fraction=0.25),
    train=TrainConfig(steps=8, index_warmup_steps=3, checkpoint_every=4),
)


class Batches:
    """Batch n is a function of n: text rows of two documents, caption rows whose pictures fill one patch sequence each."""

    def __init__(self, experiment: Experiment, poison_at: int | None = None) -> None:
        self._experiment, self._next, self._poison_at = experiment, 0, poison_at

    def __next__(self) -> Batch:
        self._next += 1
        batch = make_batch(self._experiment, self._next - 1)
        if self._next == self._poison_at:
            batch.vision.patches_VLP[:] = np.nan
        return batch

    def get_state(self) -> dict[str, Any]:
        return {"next": self._next}

    def set_state(self, state: dict[str, Any]) -> None:
        self._next = state["next"]


def make_batch(experiment: Experiment, number: int) -> Batch:
    random = np.random.default_rng(number)
    text, captions = (stream.rows_at(number) for stream in experiment.data.streams)
    rows, length, vision = text + captions, experiment.data.sequence_length, experiment.model.vision
    tokens_BT = random.integers(7, experiment.model.vocab_size, (rows, length), dtype=np.int32)
    tokens_BT[:, 1::2] = tokens_BT[:, ::2]  # every other token can be learned
    segments_BT, positions_BT, sources_BT = (np.zeros((rows, length), np.int32) for _ in range(3))
    visual_index_BT = np.full((rows, length), -1, np.int32)
    for row in range(rows):
        cut, end = random.integers(8, 14), random.integers(16, length + 1)
        segments_BT[row, :cut], segments_BT[row, cut:end] = 1, 2
        positions_BT[row] = np.where(np.arange(length) < cut, np.arange(length), np.arange(length) - cut)
        positions_BT[row, end:] -= end - cut
        sources_BT[row] = row % 2 if row < text else 2
    tokens_a_sequence = vision.sequence_length // vision.merge**2
    for row in range(captions):
        visual_index_BT[text + row, 1 : 1 + tokens_a_sequence] = row * tokens_a_sequence + np.arange(tokens_a_sequence)
    sources_BT[segments_BT == 0] = -1
    followed_BT = np.diff(segments_BT, axis=1, append=0) == 0
    weights_BT = followed_BT & (segments_BT > 0) & (visual_index_BT < 0) & (np.roll(visual_index_BT, -1, axis=1) < 0)
    batch = Batch(
        tokens_BT, segments_BT, positions_BT, weights_BT.astype(np.float32), sources_BT, visual_index_BT,
        VisionBatch(
            random.uniform(-1, 1, (captions, vision.sequence_length, vision.patch_dim)).astype(np.float32),
            np.ones((captions, vision.sequence_length), np.int32),
            np.tile(np.stack([np.zeros(16, np.int32), *np.divmod(np.arange(16, dtype=np.int32), 4)], -1), (captions, 1, 1)),
        ),
    )  # fmt: skip
    check_batch(batch, vision)
    return batch


@pytest.fixture(scope="session")
def experiment() -> Experiment:
    return EXPERIMENT


@pytest.fixture
def changed(experiment: Experiment) -> Callable[..., Experiment]:
    return functools.partial(_changed, experiment)


def _changed(experiment: Experiment, **changes: Any) -> Experiment:
    return override(experiment, {path.replace("__", "."): value for path, value in changes.items()})


@pytest.fixture(scope="session")
def batch() -> Batch:
    return jax.device_put(make_batch(EXPERIMENT, 0))
