"""Pictures and clips as patches in merge-window order, cut into attention segments and packed into sequences of L patches.

Order of the patches of a clip: time step, then merge windows by row and column, then the patches inside a window:

    merge = 2, one time step of 4 x 4 patches      0  1 | 4  5
    (numbers are places in the sequence)           2  3 | 6  7
                                                   -----------
                                                   8  9 |12 13
                                                  10 11 |14 15

so that visual token m of a sequence is made of its patches m * merge^2 .. (m + 1) * merge^2 - 1. The numbers of a patch are
ordered (frame of the temporal patch, row, column, channel).
"""

from typing import NamedTuple

import numpy as np

from msa_jax.config import VisionConfig
from msa_jax.data.batch import BatchError, VisionBatch


class Clip(NamedTuple):
    """One picture or clip of n patches."""

    patches_nP: np.ndarray  # float32 in [-1, 1]
    coords_nA: np.ndarray  # int32 (t, h, w); t restarts at 0 in every segment
    lengths: tuple[int, ...]  # patches of each attention segment, in order


def patchify(frames: np.ndarray, vision: VisionConfig) -> Clip:
    """uint8 [H, W, channels] (a picture) or [frames, H, W, channels] (a clip) as patches.

    An incomplete temporal patch is filled by repeating the last frame. Raises BatchError for another size or type.
    """
    frames = frames[None] if frames.ndim == 3 else frames
    steps, rows, columns = grid(frames.shape, vision)
    if frames.dtype != np.uint8:
        raise BatchError(f"pictures are uint8, got {frames.dtype}; scale to 0..255 first")
    p, tp, merge = vision.patch_size, vision.temporal_patch_size, vision.merge
    filled = np.concatenate([frames, np.repeat(frames[-1:], steps * tp - len(frames), axis=0)])
    windows = (rows // merge, merge, columns // merge, merge)
    blocks = filled.reshape(steps, tp, windows[0], merge, p, windows[2], merge, p, vision.channels)
    patches = blocks.transpose(0, 2, 5, 3, 6, 1, 4, 7, 8).reshape(-1, vision.patch_dim).astype(np.float32) / 127.5 - 1
    f = vision.frames_per_segment
    t, h, w = np.meshgrid(np.arange(steps) % f, np.arange(rows), np.arange(columns), indexing="ij")
    coords = np.stack([t, h, w], -1).astype(np.int32).reshape(steps, *windows, 3).transpose(0, 1, 3, 2, 4, 5).reshape(-1, 3)
    lengths = tuple(rows * columns * min(f, steps - start) for start in range(0, steps, f))
    if max(lengths) > vision.sequence_length:
        raise BatchError(
            f"a segment of {max(lengths)} patches of a clip {frames.shape} does not fit into VisionConfig.sequence_length="
            f"{vision.sequence_length}; raise it, lower frames_per_segment={f} or resize"
        )
    return Clip(patches, coords, lengths)


def grid(shape: tuple[int, ...], vision: VisionConfig) -> tuple[int, int, int]:
    """Time steps, rows and columns of patches of a clip [frames, H, W, channels]. Raises BatchError where it does not divide."""
    frames, height, width, channels = shape
    window = vision.patch_size * vision.merge
    if frames < 1 or min(height, width) < 1 or height % window or width % window or channels != vision.channels:
        raise BatchError(
            f"a clip of shape {shape} has no patches of {vision.patch_size} merged {vision.merge} x {vision.merge}: height and width "
            f"must be multiples of {window}, channels must be {vision.channels}"
        )
    return -(-frames // vision.temporal_patch_size), height // vision.patch_size, width // vision.patch_size


def visual_tokens(clip: Clip, vision: VisionConfig) -> np.ndarray:
    """int64 [tokens]: which of the clip's merge windows stand in the text, in order.

    With temporal_pool = 1 these are all; otherwise a pooled token stands at the window of the first of the steps it averages.
    """
    windows = np.arange(len(clip.patches_nP) // vision.merge**2)
    return windows[clip.coords_nA[:: vision.merge**2, 0] % vision.temporal_pool == 0]


class VisionPacker:
    """Fills V sequences of L patches in order. Segments lie whole in one sequence; no two clips share one."""

    def __init__(self, sequences: int, vision: VisionConfig) -> None:
        self.vision = vision
        length = vision.sequence_length
        self.batch = VisionBatch(
            patches_VLP=np.zeros((sequences, length, vision.patch_dim), np.float32),
            segments_VL=np.zeros((sequences, length), np.int32),
            coords_VLA=np.zeros((sequences, length, 3), np.int32),
        )
        self.restrict(0, sequences)

    def restrict(self, first: int, end: int) -> None:
        """The next clips go to sequences first .. end - 1, which must be empty."""
        self._sequence, self._used, self._end = first, 0, end

    def add(self, clip: Clip) -> np.ndarray:
        """Places a clip; int64 [tokens]: the flat index in [V * M] of each of its visual tokens. Raises BatchError when full."""
        merge2, length = self.vision.merge**2, self.vision.sequence_length
        index, start = [], 0
        for size in clip.lengths:
            if self._used + size > length:
                self._sequence, self._used = self._sequence + 1, 0
            if self._sequence >= self._end:
                raise BatchError(f"pictures need more than the {self._end} sequences of {length} patches that the batch has for them")
            place = np.s_[self._sequence, self._used : self._used + size]
            self.batch.patches_VLP[place] = clip.patches_nP[start : start + size]
            self.batch.coords_VLA[place] = clip.coords_nA[start : start + size]
            self.batch.segments_VL[place] = self.batch.segments_VL[self._sequence, self._used - 1] + 1 if self._used else 1
            index.append(np.arange(size // merge2) + (self._sequence * length + self._used) // merge2)
            start, self._used = start + size, self._used + size
        return np.concatenate(index)[visual_tokens(clip, self.vision)]


def sequences_needed(pictures: int, patches: int, vision: VisionConfig) -> int:
    """Sequences of L patches that hold so many pictures of so many patches each."""
    return -(-pictures // (vision.sequence_length // patches))
