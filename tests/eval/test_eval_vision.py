"""Right, wrong and retrieved pictures, with models whose answers are known."""

import numpy as np
import pytest

from msa_jax.config import Experiment
from msa_jax.data.batch import Batch
from msa_jax.data.mixture import load_tokenizer
from msa_jax.data.pack import Pack
from msa_jax.data.vision import patchify
from msa_jax.eval.forward import ForwardOutput
from msa_jax.eval.vision import CaptionLoss, retrieval_credit


class KnowsEveryPicture:
    """Reads the batch: behind its own picture a caption costs a nat a token and letter, behind any other 2.5 times as much."""

    def __init__(self, experiment: Experiment, pack: Pack) -> None:
        self.tokenizer, self.merge2 = load_tokenizer(experiment.data, experiment.model), experiment.model.vision.merge**2
        self.captions = {
            patchify(p, experiment.model.vision).patches_nP.tobytes(): c for p, c in zip(pack.pictures, pack.captions, strict=True)
        }

    def __call__(self, state: None, batch: Batch) -> ForwardOutput:
        patches = batch.vision.patches_VLP.reshape(-1, batch.vision.patches_VLP.shape[-1])
        nats_BT = np.zeros_like(batch.loss_weights_BT)
        for row, segments in enumerate(batch.segments_BT):
            for document in range(1, segments.max() + 1):
                places = np.flatnonzero(segments == document)
                tokens, visual = batch.tokens_BT[row, places], batch.visual_index_BT[row, places]
                start = visual[visual >= 0][0] * self.merge2
                shown = self.captions[patches[start : start + (visual >= 0).sum() * self.merge2].tobytes()]
                asked = self.tokenizer.decode([token for token in tokens if token not in self.tokenizer.special_ids])
                nats_BT[row, places] = len(asked) * (1.0 if shown == asked else 2.5)
        return ForwardOutput(nats_BT * batch.loss_weights_BT, batch.loss_weights_BT, None, None)


class Blind:
    """Every token costs 3 nats, whatever the picture."""

    def __call__(self, state: None, batch: Batch) -> ForwardOutput:
        return ForwardOutput(3.0 * batch.loss_weights_BT, batch.loss_weights_BT, None, None)


@pytest.fixture(scope="module")
def evaluated(experiment: Experiment, pack: Pack) -> dict[type, dict[str, float]]:
    models = (KnowsEveryPicture(experiment, pack), Blind())
    return {type(model): dict(CaptionLoss(experiment, pack, model, rows=4).run(None)) for model in models}


@pytest.mark.parametrize("split", ["train", "concept", "comp"])
def test_a_model_that_knows_every_picture(evaluated: dict, pack: Pack, split: str) -> None:
    values = evaluated[KnowsEveryPicture]
    right = values[f"caption/right/{split}"]
    assert 10 < right < 25, "letters of a caption"
    assert values[f"caption/wrong/{split}"] == pytest.approx(2.5 * right)
    assert values[f"caption/image_gain/{split}"] == pytest.approx(1.5 * right)
    assert values[f"retrieval/accuracy/{split}"] == 1.0
    assert values[f"retrieval/captions/{split}"] == min(32, len(pack.picture_ids(split)))


@pytest.mark.parametrize("split", ["train", "concept", "comp"])
def test_a_blind_model_gains_nothing_and_retrieves_at_exactly_chance(evaluated: dict, split: str) -> None:
    values = evaluated[Blind]
    assert values[f"caption/right/{split}"] == values[f"caption/wrong/{split}"] == pytest.approx(3.0)
    assert values[f"caption/image_gain/{split}"] == 0.0
    assert values[f"retrieval/accuracy/{split}"] == values[f"retrieval/chance/{split}"] == 1 / 8


def test_retrieval_credit_by_hand() -> None:
    nats = np.array([[1.0, 2.0, 3.0], [2.0, 1.0, 1.0], [1.0, 1.0, 1.0], [1.0, 2.0, 0.5]])
    assert retrieval_credit(nats, np.array([0, 2, 1, 0])).tolist() == pytest.approx([1, 1 / 2, 1 / 3, 0])
