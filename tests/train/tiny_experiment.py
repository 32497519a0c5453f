"""A model of a few thousand parameters with every parameter group, and batches made without a data pack."""

from typing import Any

import numpy as np

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


TEXT_EXPERIMENT = override(EXPERIMENT, {"model.vision": None, "data.streams": EXPERIMENT.data.streams[:1]})  # compiles in half the time


class Batches:
    """Batch n is a function of n: text rows of two documents, caption rows whose pictures fill one patch sequence each."""

    def __init__(self, experiment: Experiment) -> None:
        self._experiment, self._next = experiment, 0

    def __next__(self) -> Batch:
        self._next += 1
        return make_batch(self._experiment, self._next - 1)

    def get_state(self) -> bytes:
        return str(self._next).encode()

    def set_state(self, state: bytes) -> None:
        self._next = int(state)


def make_batch(experiment: Experiment, number: int) -> Batch:
    random = np.random.default_rng(number)
    text, captions = (*(stream.rows_at(number) for stream in experiment.data.streams), 0)[:2]
    rows, length, vision = text + captions, experiment.data.sequence_length, experiment.model.vision
    tokens_BT = random.integers(7, experiment.model.vocab_size, (rows, length), dtype=np.int32)
    tokens_BT[:, 1::2] = tokens_BT[:, ::2]  # every other token can be learned
    segments_BT, positions_BT, sources_BT = (np.zeros((rows, length), np.int32) for _ in range(3))
    visual_index_BT = np.full((rows, length), -1, np.int32)
    # spread over the rows, so that each half of the batch owns half of the pictures
    caption_rows = np.flatnonzero(np.arange(rows) % 2) if captions == text else np.arange(text, rows)
    for row in range(rows):
        cut, end = random.integers(8, 14), random.integers(16, length + 1)
        segments_BT[row, :cut], segments_BT[row, cut:end] = 1, 2
        positions_BT[row] = np.where(np.arange(length) < cut, np.arange(length), np.arange(length) - cut)
        positions_BT[row, end:] -= end - cut
        sources_BT[row] = 2 if row in caption_rows else row // 2 % 2
    tokens_a_sequence = vision.sequence_length // vision.merge**2 if vision else 0
    for picture, row in enumerate(caption_rows):
        visual_index_BT[row, 1 : 1 + tokens_a_sequence] = picture * tokens_a_sequence + np.arange(tokens_a_sequence)
    sources_BT[segments_BT == 0] = -1
    followed_BT = np.diff(segments_BT, axis=1, append=0) == 0
    weights_BT = followed_BT & (segments_BT > 0) & (visual_index_BT < 0) & (np.roll(visual_index_BT, -1, axis=1) < 0)
    batch = Batch(
        tokens_BT, segments_BT, positions_BT, weights_BT.astype(np.float32), sources_BT, visual_index_BT,
        make_pictures(vision, captions, random) if vision else None,
    )  # fmt: skip
    check_batch(batch, vision)
    return batch


def make_pictures(vision: VisionConfig, count: int, random: np.random.Generator) -> VisionBatch:
    """Square pictures of 4 x 4 patches, one a sequence."""
    coords_LA = np.stack([np.zeros(16, np.int32), *np.divmod(np.arange(16, dtype=np.int32), 4)], axis=-1)
    patches_VLP = random.uniform(-1, 1, (count, 16, vision.patch_dim)).astype(np.float32)
    return VisionBatch(patches_VLP, np.ones((count, 16), np.int32), np.tile(coords_LA, (count, 1, 1)))


def changed(experiment: Experiment, **changes: Any) -> Experiment:
    """`changed(experiment, optim__learning_rate=0.1)`"""
    return override(experiment, {path.replace("__", "."): value for path, value in changes.items()})
