"""check_batch: a right batch passes, each contradiction is named."""

import numpy as np
import pytest

from msa_jax.config import VisionConfig
from msa_jax.data.batch import Batch, BatchError, VisionBatch, check_batch

VISION = VisionConfig(patch_size=2, merge=1, sequence_length=4, frames_per_segment=2, width=12)


def right() -> Batch:
    """One row: a text of 3 tokens, a picture of 2 visual tokens with a caption of 2, padding."""
    segments = np.array([[1, 1, 1, 2, 2, 2, 2, 0]], np.int32)
    return Batch(
        tokens_BT=np.zeros((1, 8), np.int32),
        segments_BT=segments,
        positions_BT=np.array([[0, 1, 2, 0, 1, 2, 3, 0]], np.int32),
        loss_weights_BT=np.array([[1, 1, 0, 0, 1, 1, 0, 0]], np.float32),
        sources_BT=np.zeros((1, 8), np.int32),
        visual_index_BT=np.array([[-1, -1, -1, 0, 1, -1, -1, -1]], np.int32),
        vision=VisionBatch(
            np.zeros((1, 4, VISION.patch_dim), np.float32),
            np.array([[1, 1, 0, 0]], np.int32),
            np.zeros((1, 4, 3), np.int32),
        ),
    )


def changed(name: str, row: list[int]) -> Batch:
    value = getattr(right(), name)
    return right()._replace(**{name: np.array([row], value.dtype)})


def test_a_right_batch_passes() -> None:
    check_batch(right(), VISION)
    text = right()._replace(vision=None, visual_index_BT=np.full((1, 8), -1, np.int32))
    check_batch(text, None)


@pytest.mark.parametrize(("name", "row", "message"), [
    ("sources_BT", [0] * 7, r"sources_BT has shape \(1, 7\)"),
    ("segments_BT", [-1, 1, 1, 2, 2, 2, 2, 0], "negative"),
    ("segments_BT", [1, 1, 2, 1, 1, 1, 1, 0], r"row 0: a segment id returns .*\[1, 2, 1\]"),
    ("positions_BT", [0, 1, 2, 3, 4, 5, 6, 0], "row 0, token 3: position 3, expected 0"),
    ("loss_weights_BT", [1, 1, 1, 0, 1, 1, 0, 0], "row 0, token 2: loss weight 1.0"),
    ("loss_weights_BT", [1, 1, 0, 1, 1, 1, 0, 0], "row 0, token 3: loss weight 1.0"),
    ("loss_weights_BT", [1, 1, 0, 0, 1, 1, 1, 0], "row 0, token 6: loss weight 1.0"),
    ("loss_weights_BT", [1, 1, 0, 0, 1, 1, 0, 1], "row 0, token 7: loss weight 1.0"),
    ("loss_weights_BT", [-1, 1, 0, 0, 1, 1, 0, 0], "row 0, token 0: loss weight -1.0"),
    ("loss_weights_BT", [float("nan"), 1, 0, 0, 1, 1, 0, 0], "row 0, token 0: loss weight nan"),
    ("visual_index_BT", [-1, -1, -1, 0, 0, -1, -1, -1], "share one visual token"),
    ("visual_index_BT", [-1, -1, -1, 0, -1, -1, -1, -1], "expected 2 placeholders, .* found 1"),
    ("visual_index_BT", [-1, -1, -1, 0, 2, -1, -1, -1], "row 0: .* visual token 2, which is padding"),
    ("visual_index_BT", [-1, -1, -1, 0, 9, -1, -1, -1], "row 0: .* visual token 9"),
])  # fmt: skip
def test_contradictions_are_named(name: str, row: list[int], message: str) -> None:
    with pytest.raises(BatchError, match=message):
        check_batch(changed(name, row), VISION)


def test_vision_part_fits_the_model() -> None:
    vision = right().vision
    for bad, message in (
        (vision._replace(coords_VLA=np.zeros((1, 4, 2), np.int32)), "coords_VLA has shape"),
        (vision._replace(patches_VLP=np.zeros((1, 4, 3), np.float32)), "patches_VLP has shape"),
        (VisionBatch(*(np.concatenate([leaf, leaf], 1) for leaf in vision)), "L=8, VisionConfig.sequence_length=4"),
    ):
        with pytest.raises(BatchError, match=message):
            check_batch(right()._replace(vision=bad), VISION)
    with pytest.raises(BatchError, match="no vision part but VisionConfig"):
        check_batch(right()._replace(vision=None), VISION)
    with pytest.raises(BatchError, match="2 placeholders but the batch has no pictures"):
        check_batch(right()._replace(vision=None), None)
    with pytest.raises(BatchError, match="a vision part but VisionConfig is None"):
        check_batch(right(), None)


def test_a_merge_window_belongs_to_one_segment() -> None:
    vision = VisionConfig(patch_size=1, merge=2, sequence_length=4, width=12)
    batch = right()._replace(visual_index_BT=np.full((1, 8), -1, np.int32), vision=right().vision._replace(patches_VLP=np.zeros((1, 4, 3))))
    with pytest.raises(BatchError, match="inside a merge window"):
        check_batch(batch, vision)
