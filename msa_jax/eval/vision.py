"""Does the model use the picture? Caption loss with the right and with a wrong picture, and retrieval of 1 among n."""

from collections.abc import Iterator

import jax
import numpy as np

from msa_jax.config import Experiment
from msa_jax.data.pack import Pack
from msa_jax.data.picture_evaluation import PictureEvaluation
from msa_jax.data.records import PICTURE_SPLITS
from msa_jax.eval.forward import Forward
from msa_jax.train.state import TrainState


def retrieval_credit(nats_nc: np.ndarray, answers_n: np.ndarray) -> np.ndarray:
    """1 where the right candidate alone has the lowest loss, 1 / k in a tie of k, else 0. A blind model gets 1 / c on average."""
    best_nc = nats_nc == nats_nc.min(axis=1, keepdims=True)
    return best_nc[np.arange(len(answers_n)), answers_n] / best_nc.sum(axis=1)


class CaptionLoss:
    """For each split of the pictures; `train` pictures were seen in training, `comp` and `concept` are held out:

    caption/right/comp            nats a token of the caption, <eos> included, after its own picture
    caption/wrong/comp            after another picture of the same group (wrong-image control)
    caption/image_gain/comp       wrong - right
    retrieval/accuracy/comp       given a caption, its picture gives it the lowest loss among n: 1-of-n retrieval of the picture
    retrieval/chance/comp         1 / n
    retrieval/captions/comp       number of captions
    """

    name = "captions"

    def __init__(self, experiment: Experiment, pack: Pack, forward: Forward, rows: int) -> None:
        """`rows` are evaluated at once. Raises ConfigError where a split holds too few pictures."""
        self._forward, self._rows, config = forward, rows, experiment.eval
        self._evaluation = PictureEvaluation(experiment.data, experiment.model, pack)
        splits = [split for split in PICTURE_SPLITS if len(self._evaluation.pictures(split))]
        self._pairs = {split: self._evaluation.pairs(split, config.pictures) for split in splits}
        self._retrieval = {split: self._evaluation.retrieval(split, config.pictures, config.candidates) for split in splits}

    def run(self, state: TrainState) -> Iterator[tuple[str, float]]:
        for split, pairs in self._pairs.items():
            right_n, tokens_n = self._caption_nats(state, pairs.right_n, pairs.right_n)
            wrong_n, _ = self._caption_nats(state, pairs.right_n, pairs.wrong_n)
            right, wrong = float(right_n.sum() / tokens_n.sum()), float(wrong_n.sum() / tokens_n.sum())
            yield f"caption/right/{split}", right
            yield f"caption/wrong/{split}", wrong
            yield f"caption/image_gain/{split}", wrong - right
        for split, (captions_n, candidates_nc, answers_n) in self._retrieval.items():
            asked_nc = np.broadcast_to(captions_n[:, None], candidates_nc.shape)
            nats, _ = self._caption_nats(state, asked_nc.ravel(), candidates_nc.ravel())
            yield f"retrieval/accuracy/{split}", float(retrieval_credit(nats.reshape(candidates_nc.shape), answers_n).mean())
            yield f"retrieval/chance/{split}", 1 / candidates_nc.shape[1]
            yield f"retrieval/captions/{split}", len(captions_n)

    def _caption_nats(self, state: TrainState, captions: np.ndarray, pictures: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
        """(nats, predicted tokens) of each example: caption captions[i] after picture pictures[i]."""
        parts = []
        for pictured in self._evaluation.batches(captions, pictures, self._rows):
            output = self._forward(state, pictured.batch)
            parts.append((pictured.examples_BT, (output.nats_BT, output.weights_BT)))
        totals_2n = np.zeros((2, len(captions)))
        for examples_BT, values in parts:
            shown = examples_BT >= 0
            for total_n, value_BT in zip(totals_2n, jax.device_get(values), strict=True):
                total_n += np.bincount(examples_BT[shown], value_BT[shown], len(total_n))
        return tuple(totals_2n)
