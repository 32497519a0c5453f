"""Does the model use the picture? The right one against a wrong one of the same group, and retrieval of 1 among n.

Retrieval asks for the picture, given the caption: the n candidates are ranked by the probability of one and the same caption, so
that neither its length nor its frequency helps, and a model that ignores pictures ties on all n (count a tie of k as 1 / k).
"""

from collections.abc import Iterator, Sequence
from typing import NamedTuple

import numpy as np

from msa_jax.config import ConfigError, DataConfig, ModelConfig
from msa_jax.data.batch import Batch, check_batch
from msa_jax.data.captions import CaptionDocuments
from msa_jax.data.mixture import load_tokenizer, stream_sources, to_batch
from msa_jax.data.pack import Pack
from msa_jax.data.packing import Rows, plan_whole
from msa_jax.data.records import fraction
from msa_jax.data.vision import VisionPacker


class Pairs(NamedTuple):
    """n examples, as indices into the pack's pictures: caption i belongs to picture right[i] and not to wrong[i]."""

    right_n: np.ndarray
    wrong_n: np.ndarray


class Retrieval(NamedTuple):
    """n captions with c candidate pictures each; the right one stands at place answer[i]."""

    captions_n: np.ndarray
    candidates_nc: np.ndarray
    answers_n: np.ndarray


class PictureBatch(NamedTuple):
    """A batch of captioned pictures. `examples_BT` int32: which of the asked examples stands here, -1 = none."""

    batch: Batch
    examples_BT: np.ndarray


class PictureEvaluation:
    """Pictures of the sources that the caption streams train on, from any split ("train", "concept", "comp")."""

    def __init__(self, data: DataConfig, model: ModelConfig, pack: Pack) -> None:
        self._data, self._vision, self._pack = data, model.vision, pack
        self._documents = CaptionDocuments(pack, load_tokenizer(data, model), data, model.vision)
        streams = [stream for stream in data.streams if stream.kind == "captions"]
        self._sources = sorted({source for stream in streams for source in stream_sources(pack, stream)})

    def pictures(self, split: str) -> np.ndarray:
        """Indices of the split's pictures, in an order that depends on their captions only."""
        ids = self._pack.picture_ids(split, self._sources)
        return np.array(sorted(ids, key=lambda i: fraction(f"evaluation:{self._pack.captions[i]}")), np.int64)

    def pairs(self, split: str, count: int) -> Pairs:
        """At most `count` pictures, each with the next one of its group that has another caption and other pixels.

        Where its group has no other, the next of the split is taken. Raises ConfigError where the split has none at all.
        """
        ids = self.pictures(split)
        groups = self._pack.picture_groups[ids]
        wrong = []
        for place, picture in enumerate(ids[:count]):
            following = np.roll(np.arange(len(ids)), -place - 1)
            nearest = [*following[groups[following] == groups[place]], *following]
            other = next((ids[i] for i in nearest if self._differ(picture, ids[i])), None)
            if other is None:
                raise ConfigError(f"split {split!r} of pack {self._pack.name!r} has no second picture to show instead of the right one")
            wrong.append(other)
        return Pairs(ids[:count], np.array(wrong, np.int64))

    def retrieval(self, split: str, count: int, candidates: int) -> Retrieval:
        """At most `count` captions with the right picture among others of the split. Raises ConfigError where these are too few."""
        ids = self.pictures(split)
        random = np.random.default_rng(len(ids))
        sets, answers = [], random.integers(0, candidates, min(count, len(ids)))
        for picture, answer in zip(ids, answers, strict=False):
            chosen: list[int] = []
            for other in random.permutation(ids):
                if len(chosen) == candidates - 1:
                    break
                if all(self._differ(int(other), seen) for seen in [int(picture), *chosen]):
                    chosen.append(int(other))
            if len(chosen) < candidates - 1:
                raise ConfigError(
                    f"eval.candidates={candidates} but split {split!r} of pack {self._pack.name!r} has only {len(chosen) + 1} "
                    "different pictures"
                )
            sets.append([*chosen[:answer], int(picture), *chosen[answer:]])
        return Retrieval(ids[:count], np.array(sets, np.int64).reshape(-1, candidates), answers)

    def _differ(self, a: int, b: int) -> bool:
        return self._pack.captions[a] != self._pack.captions[b] and not np.array_equal(self._pack.pictures[a], self._pack.pictures[b])

    def batches(self, captions: Sequence[int] | np.ndarray, pictures: Sequence[int] | np.ndarray, rows: int) -> Iterator[PictureBatch]:
        """Example i shows picture pictures[i] with the caption of captions[i], weighted as in training; `rows` rows a batch.

        Every batch has the same shapes: T = data.sequence_length, V = what `rows` rows need at most; the last ends in empty rows.
        """
        lengths = self._documents.lengths[np.asarray(captions)]
        plan = plan_whole(lengths, self._data.sequence_length, self._documents.most_a_row, align=self._data.align_documents)
        tokenizer = self._documents.tokenizer
        for first in range(0, len(plan), rows):
            filled = Rows(rows, self._data.sequence_length, pad=tokenizer.pad, align=self._data.align_documents)
            packer = VisionPacker(self._documents.sequences(rows), self._vision)
            examples_BT = np.full(filled.tokens_BT.shape, -1, np.int32)
            for row, examples in enumerate(plan[first : first + rows]):
                for example in examples:
                    place = self._documents.write(filled, row, packer, int(captions[example]), int(pictures[example]))
                    examples_BT[row, place] = example
            batch = to_batch(filled, packer)
            check_batch(batch, self._vision)
            yield PictureBatch(batch, examples_BT)
