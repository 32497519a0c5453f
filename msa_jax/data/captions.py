"""A captioned picture as a document of its own: attention cannot reach another picture, so a wrong picture is a clean control.

tokens   <vision_start> <image> ... <image> <vision_end> red   fox   <eos>
weights        0           0    ...    0         1        1     1      0      of predicting the next token
"""

from collections.abc import Sequence

import numpy as np

from msa_jax.config import ConfigError, DataConfig, VisionConfig
from msa_jax.data.batch import BatchError
from msa_jax.data.pack import Pack
from msa_jax.data.packing import Rows, aligned
from msa_jax.data.tokenizer import Tokenizer
from msa_jax.data.vision import VisionPacker, patchify, sequences_needed, visual_tokens


class CaptionDocuments:
    """Writes pictures of a pack with captions into rows; picture and caption may belong to different entries."""

    def __init__(self, pack: Pack, tokenizer: Tokenizer, data: DataConfig, vision: VisionConfig) -> None:
        """Raises ConfigError where the longest document exceeds data.sequence_length."""
        self.pack, self.tokenizer, self.vision = pack, tokenizer, vision
        self._captions = tokenizer.encode_batch(pack.captions)
        clip = patchify(pack.pictures[0], vision)
        self.patches = len(clip.patches_nP)
        self.visual_tokens = len(visual_tokens(clip, vision))
        self.lengths = np.array([self.visual_tokens + len(caption) + 3 for caption in self._captions])
        longest = int(self.lengths.argmax())
        if self.lengths[longest] > data.sequence_length:
            raise ConfigError(
                f"the captioned picture {pack.captions[longest]!r} has {self.lengths[longest]} tokens, more than "
                f"data.sequence_length={data.sequence_length}; pictures are never cut, raise it"
            )
        # Bounds the vision part of a batch: a row of average captions holds this many pictures.
        self.most_a_row = max(1, data.sequence_length // aligned(round(float(self.lengths.mean())), data.align_documents))

    def sequences(self, rows: int) -> int:
        """Packed sequences (V) that `rows` rows of pictures need at most; at least one, so that shapes never vanish."""
        return max(1, sequences_needed(rows * self.most_a_row, self.patches, self.vision))

    def write(self, rows: Rows, row: int, packer: VisionPacker, caption: int, picture: int | None = None) -> slice:
        """Appends the document of entry `caption`, shown with the picture of another entry if one is named."""
        tok, words = self.tokenizer, self._captions[caption]
        clip = patchify(self.pack.pictures[caption if picture is None else picture], self.vision)
        placed = packer.add(clip)
        tokens = np.concatenate([[tok.vision_start], np.full(len(placed), tok.image), [tok.vision_end], words, [tok.eos]])
        weights = np.zeros(len(tokens), np.float32)
        weights[len(placed) + 1 : -1] = 1
        index = fill_placeholders(tokens, [placed], tok, self.pack.captions[caption])
        return rows.add(row, tokens, weights, int(self.pack.picture_sources[caption]), index)


def fill_placeholders(tokens: np.ndarray, pictures: Sequence[np.ndarray], tokenizer: Tokenizer, example: str) -> np.ndarray:
    """int32 [tokens]: the visual token that stands at each <image>, -1 elsewhere; run i of placeholders belongs to picture i.

    Raises BatchError naming the example, the picture and both counts unless they match; nothing is padded or truncated.
    """
    if (tokens == tokenizer.video).any():
        raise BatchError(f"example {example!r}: {(tokens == tokenizer.video).sum()} <video> placeholders but no clips")
    holders = np.flatnonzero(tokens == tokenizer.image)
    runs = np.split(holders, np.flatnonzero(np.diff(holders) > 1) + 1) if len(holders) else []
    if len(runs) != len(pictures):
        raise BatchError(f"example {example!r}: expected runs of placeholders for {len(pictures)} pictures, found {len(runs)}")
    index = np.full(len(tokens), -1, np.int32)
    for number, (run, picture) in enumerate(zip(runs, pictures, strict=True), 1):
        if len(run) != len(picture):
            raise BatchError(f"example {example!r}, picture {number}: expected {len(picture)} placeholders, found {len(run)}")
        index[run] = picture
    return index
