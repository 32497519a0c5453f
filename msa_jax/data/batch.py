"""The only type that crosses from data to model: one training or evaluation batch with static shapes.

Text rows and picture rows share one compiled step. Pictures are cut into patches and packed into V sequences of L
patches; patches of one merge window (merge x merge neighbours) lie next to each other, so that visual token m of a packed
sequence is made of patches m * merge^2 .. (m + 1) * merge^2 - 1. `visual_index_BT` says which visual token stands at a
text position:

    tokens_BT        <bos>  the  fox  <eos> | <start> <image> <image> <end>  red  fox  <eos>
    segments_BT        1     1    1     1   |    2       2       2      2     2    2     2
    visual_index_BT   -1    -1   -1    -1   |   -1       0       1     -1    -1   -1    -1      flat index into [V * M], -1 = text
    loss_weights_BT    1     1    1     0   |    0       0       0      1     1    1     0      of predicting tokens[t + 1] at t

With VisionConfig.temporal_pool > 1 the mean over a run of time steps stands at the visual token of the first of them, and the
others are not placed.
"""

from typing import NamedTuple

import numpy as np
from jax.typing import ArrayLike

from msa_jax.config import VisionConfig


class VisionBatch(NamedTuple):
    """Packed patches. `segments_VL` 0 = padding; patches attend to each other only inside one (sequence, segment)."""

    patches_VLP: ArrayLike  # float32 in [-1, 1]
    segments_VL: ArrayLike  # int32, 1.. for each attention segment of a sequence
    coords_VLA: ArrayLike  # int32 (t, h, w) of each patch; t restarts at 0 in every segment


class Batch(NamedTuple):
    """B rows of T tokens. All arrays are host or device arrays with exactly these shapes."""

    tokens_BT: ArrayLike  # int32
    segments_BT: ArrayLike  # int32, 0 = padding, documents 1..
    positions_BT: ArrayLike  # int32, position inside the document
    loss_weights_BT: ArrayLike  # float32, weight of predicting tokens_BT[:, t + 1] at t; 0 at placeholders, padding, document ends
    sources_BT: ArrayLike  # int32, index into the pack's list of sources, -1 = padding
    visual_index_BT: ArrayLike  # int32, flat index of the visual token placed here, -1 = none
    vision: VisionBatch | None  # None only for models without a vision tower


class BatchError(ValueError):
    """A batch that contradicts itself; the message names the row and both counts."""


def check_batch(batch: Batch, vision: VisionConfig | None) -> None:
    """Raises BatchError unless shapes agree, segments are uninterrupted and placeholders match the visual tokens.

    `vision` is the model's. Runs on the host where batches are made (inside jit values cannot be checked).
    """
    shape = np.shape(batch.tokens_BT)
    for name, value in batch._asdict().items():
        if name != "vision" and np.shape(value) != shape:
            raise BatchError(f"{name} has shape {np.shape(value)}, tokens_BT has {shape}; all [B, T] arrays must agree")
    segments_BT = np.asarray(batch.segments_BT)
    _check_segments(segments_BT, np.asarray(batch.positions_BT))
    _check_weights(segments_BT, np.asarray(batch.loss_weights_BT), np.asarray(batch.visual_index_BT))
    if (batch.vision is None) != (vision is None):
        raise BatchError(f"the batch has {'no' if batch.vision is None else 'a'} vision part but VisionConfig is {vision}")
    if vision is None:
        _require_no_placeholders(np.asarray(batch.visual_index_BT))
    else:
        _check_vision(batch.vision, vision)
        _check_visual_index(batch, vision)


def _check_segments(segments_BT: np.ndarray, positions_BT: np.ndarray) -> None:
    if (segments_BT < 0).any():
        raise BatchError("segments_BT holds negative ids; 0 is padding and documents count from 1")
    for row, segments in enumerate(segments_BT):
        starts = np.flatnonzero(np.diff(segments, prepend=-1))
        runs = segments[starts]
        runs = runs[runs > 0]
        if len(set(runs.tolist())) != len(runs):
            raise BatchError(f"row {row}: a segment id returns after another document ({runs.tolist()}); one document must be one run")
        expected = np.arange(len(segments)) - np.repeat(starts, np.diff(starts, append=len(segments)))
        wrong = np.flatnonzero((positions_BT[row] != expected) & (segments > 0))
        if len(wrong):
            at = int(wrong[0])
            raise BatchError(f"row {row}, token {at}: position {positions_BT[row, at]}, expected {expected[at]} inside its document")


def _check_weights(segments_BT: np.ndarray, weights_BT: np.ndarray, index_BT: np.ndarray) -> None:
    """A weight needs a next token, of the same document, that is no placeholder."""
    target_BT = np.pad((segments_BT[:, 1:] == segments_BT[:, :-1]) & (index_BT[:, 1:] < 0), ((0, 0), (0, 1)))
    wrong = np.argwhere((weights_BT != 0) & ~(target_BT & (segments_BT > 0)) | ~(weights_BT >= 0))
    if len(wrong):
        row, at = wrong[0]
        raise BatchError(
            f"row {row}, token {at}: loss weight {weights_BT[row, at]}; weights are >= 0, and 0 where the next token is a placeholder, "
            "padding or of another document"
        )


def _require_no_placeholders(index_BT: np.ndarray) -> None:
    if (index_BT >= 0).any():
        raise BatchError(f"{(index_BT >= 0).sum()} placeholders but the batch has no pictures")


def _check_vision(batch: VisionBatch, vision: VisionConfig) -> None:
    segments_VL = np.asarray(batch.segments_VL)
    sequences, length = segments_VL.shape
    expected = {"patches_VLP": (sequences, length, vision.patch_dim), "coords_VLA": (sequences, length, 3)}
    for name, shape in expected.items():
        if np.shape(getattr(batch, name)) != shape:
            raise BatchError(f"{name} has shape {np.shape(getattr(batch, name))}, expected {shape}")
    if length != vision.sequence_length:
        raise BatchError(f"segments_VL has L={length}, VisionConfig.sequence_length={vision.sequence_length}")
    windows = segments_VL.reshape(sequences, -1, vision.merge**2)
    if (windows != windows[..., :1]).any():
        raise BatchError("segments_VL changes inside a merge window; the patches of a visual token belong to one segment")


def _check_visual_index(batch: Batch, vision: VisionConfig) -> None:
    """Every placed visual token is real and placed once; every real one that pooling keeps is placed."""
    index_BT = np.asarray(batch.visual_index_BT)
    first = np.s_[:, :: vision.merge**2]
    real = (np.asarray(batch.vision.segments_VL)[first] > 0).reshape(-1)
    kept = real & (np.asarray(batch.vision.coords_VLA)[first][..., 0].reshape(-1) % vision.temporal_pool == 0)
    rows = np.broadcast_to(np.arange(len(index_BT))[:, None], index_BT.shape)[index_BT >= 0]
    used = index_BT[index_BT >= 0]
    outside = np.flatnonzero(~np.isin(used, np.flatnonzero(kept)))
    if len(outside):
        at = outside[0]
        raise BatchError(f"row {rows[at]}: a placeholder points at visual token {used[at]}, which is padding or does not exist")
    if len(np.unique(used)) != len(used):
        raise BatchError("two placeholders share one visual token; each visual token is placed once")
    if len(used) != kept.sum():
        raise BatchError(f"expected {kept.sum()} placeholders, one for each visual token of the pictures; found {len(used)}")
