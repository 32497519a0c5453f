"""The only type that crosses from data to model: one training or evaluation batch with static shapes.

Text rows and picture rows share one compiled step. Pictures are cut into patches and packed into V sequences of L
patches; patches of one merge window (merge x merge neighbours) lie next to each other, so that visual token m of a packed
sequence is made of patches m * merge^2 .. (m + 1) * merge^2 - 1. `visual_index_BT` says which visual token stands at a
text position:

    tokens_BT        the  fox  <start> <image> <image> <end>  red  fox  <eos>
    visual_index_BT   -1   -1     -1      0       1      -1    -1   -1    -1      flat index into [V * M], -1 = text
    loss_weights_BT    1    0      0      0       0       1     1    1     0      weight of predicting tokens[t + 1] from t
"""

from typing import NamedTuple

import numpy as np
from jax.typing import ArrayLike


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


def check_batch(batch: Batch) -> None:
    """Raises BatchError unless shapes agree, segments are uninterrupted and placeholders match the visual tokens.

    Runs on the host where batches are made (inside jit values cannot be checked).
    """
    tokens = np.asarray(batch.tokens_BT)
    for name, value in batch._asdict().items():
        if name != "vision" and np.shape(value) != tokens.shape:
            raise BatchError(f"{name} has shape {np.shape(value)}, tokens_BT has {tokens.shape}; all [B, T] arrays must agree")
    _check_segments(np.asarray(batch.segments_BT), np.asarray(batch.positions_BT))
    _check_visual_index(batch)


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


def _check_visual_index(batch: Batch) -> None:
    index = np.asarray(batch.visual_index_BT)
    used = index[index >= 0]
    if batch.vision is None:
        if len(used):
            raise BatchError(f"{len(used)} placeholders but the batch has no pictures")
        return
    segments_VL = np.asarray(batch.vision.segments_VL)
    limit = segments_VL.size
    if len(np.unique(used)) != len(used):
        raise BatchError("two placeholders share one visual token; each visual token is placed once")
    if len(used) and used.max() >= limit:
        raise BatchError(f"placeholder points at visual token {used.max()} but there are at most {limit}")
