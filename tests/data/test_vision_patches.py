"""Patches against a loop that follows the docstring; segments, pooling and sizes that do not fit."""

import dataclasses

import numpy as np
import pytest

from msa_jax.config import VisionConfig
from msa_jax.data.batch import BatchError
from msa_jax.data.vision import VisionPacker, patchify, sequences_needed, visual_tokens

VISION = VisionConfig(patch_size=2, merge=2, frames_per_segment=2, sequence_length=48, width=16)


def frames(count: int, height: int, width: int) -> np.ndarray:
    return np.random.default_rng(0).integers(0, 256, (count, height, width, 3), np.uint8)


def patches_by_loop(clip: np.ndarray, vision: VisionConfig) -> tuple[np.ndarray, np.ndarray]:
    p, tp, merge, f = vision.patch_size, vision.temporal_patch_size, vision.merge, vision.frames_per_segment
    patches, coords = [], []
    for step in range(-(-len(clip) // tp)):
        for window_row in range(clip.shape[1] // (p * merge)):
            for window_column in range(clip.shape[2] // (p * merge)):
                for row in range(window_row * merge, (window_row + 1) * merge):
                    for column in range(window_column * merge, (window_column + 1) * merge):
                        chosen = [clip[min(step * tp + frame, len(clip) - 1)] for frame in range(tp)]
                        patch = np.stack([frame[row * p : (row + 1) * p, column * p : (column + 1) * p] for frame in chosen])
                        patches.append(patch.reshape(-1) / 127.5 - 1)
                        coords.append((step % f, row, column))
    return np.array(patches), np.array(coords)


@pytest.mark.parametrize("temporal_patch", [1, 2])
@pytest.mark.parametrize(("count", "height", "width"), [(1, 8, 8), (1, 4, 12), (3, 8, 4), (5, 4, 8)])
def test_patches_and_coordinates_follow_merge_windows(count: int, height: int, width: int, temporal_patch: int) -> None:
    vision = dataclasses.replace(VISION, temporal_patch_size=temporal_patch)
    clip = patchify(frames(count, height, width), vision)
    patches, coords = patches_by_loop(frames(count, height, width), vision)
    np.testing.assert_allclose(clip.patches_nP, patches, atol=1e-6)
    np.testing.assert_array_equal(clip.coords_nA, coords)
    assert clip.patches_nP.dtype == np.float32
    assert abs(clip.patches_nP).max() <= 1
    steps = -(-count // temporal_patch)
    assert [n // (height * width // 4) for n in clip.lengths] == [min(2, steps - s) for s in range(0, steps, 2)]


def test_a_picture_is_a_clip_of_one_frame() -> None:
    picture = frames(1, 8, 8)
    np.testing.assert_array_equal(patchify(picture[0], VISION).patches_nP, patchify(picture, VISION).patches_nP)


@pytest.mark.parametrize(("bad", "message"), [
    (frames(1, 6, 8), r"multiples of 4"),
    (frames(1, 8, 8)[..., :1], r"channels must be 3"),
    (frames(0, 8, 8), r"a clip of shape \(0, 8, 8, 3\)"),
    (frames(1, 8, 8).astype(np.float32), r"uint8, got float32"),
    (frames(2, 16, 16), r"a segment of 128 patches .*sequence_length=48"),
])  # fmt: skip
def test_what_does_not_fit_is_refused(bad: np.ndarray, message: str) -> None:
    with pytest.raises(BatchError, match=message):
        patchify(bad, VISION)


def test_packing_keeps_segments_whole_and_apart() -> None:
    packer = VisionPacker(3, VISION)
    clips = [patchify(frames(n, 8, 8), VISION) for n in (1, 3, 1)]  # segments of 16, 32 + 16 and 16 patches; L = 48
    index = [packer.add(clip) for clip in clips]
    segments_VL = packer.batch.segments_VL
    assert [np.unique(row, return_counts=True)[1].tolist() for row in segments_VL] == [[16, 32], [16, 16, 16], [48]]
    np.testing.assert_array_equal(np.concatenate(index), np.arange(20))  # windows in order, without a gap here
    for clip, places in zip(clips, index, strict=True):
        patches = packer.batch.patches_VLP.reshape(-1, 4, VISION.patch_dim)[places]
        np.testing.assert_array_equal(patches.reshape(-1, VISION.patch_dim), clip.patches_nP)
        np.testing.assert_array_equal(packer.batch.coords_VLA.reshape(-1, 4, 3)[places].reshape(-1, 3), clip.coords_nA)


def test_packer_stays_inside_its_microbatch_and_says_when_it_is_full() -> None:
    packer = VisionPacker(4, VISION)
    packer.restrict(2, 3)
    clip = patchify(frames(2, 8, 8), VISION)
    assert packer.add(clip).min() == 2 * 48 // 4
    with pytest.raises(BatchError, match="more than the 3 sequences of 48 patches"):
        packer.add(clip)


def test_pooled_tokens_stand_at_the_first_step_of_their_run() -> None:
    vision = dataclasses.replace(VISION, frames_per_segment=4, temporal_pool=2, sequence_length=64)
    clip = patchify(frames(5, 4, 8), vision)  # steps 0 1 | 2 3 and, in the next segment, 0; two windows each
    assert visual_tokens(clip, vision).tolist() == [0, 1, 4, 5, 8, 9]
    assert VisionPacker(1, vision).add(clip).tolist() == [0, 1, 4, 5, 8, 9]


@pytest.mark.parametrize(("pictures", "patches", "expected"), [(0, 16, 0), (3, 16, 1), (4, 16, 2), (3, 40, 3)])
def test_sequences_needed(pictures: int, patches: int, expected: int) -> None:
    assert sequences_needed(pictures, patches, VISION) == expected
