"""Held-out text and pictures: exact bytes, right and wrong pictures, candidates, n-gram yardsticks."""

import dataclasses
import math

import numpy as np
import pytest

from msa_jax.config import ConfigError, DataConfig, ModelConfig, StreamConfig
from msa_jax.data.baselines import ByteCounts, Passage, bigram_bits_per_byte, unigram_bits_per_byte
from msa_jax.data.pack import Pack
from msa_jax.data.picture_evaluation import PictureEvaluation
from msa_jax.data.records import PICTURE_SPLITS
from msa_jax.data.text_evaluation import TextEvaluation
from msa_jax.data.tokenizer import Tokenizer
from msa_jax.data.vision import patchify

ALL = 10**6


def test_every_held_out_byte_is_predicted_once(data: DataConfig, model: ModelConfig, pack: Pack, tokenizer: Tokenizer) -> None:
    evaluation = TextEvaluation(data, model, pack, rows=ALL)
    assert evaluation.sources == pack.text_sources
    scored = dict.fromkeys(evaluation.sources, b"")
    counted = dict.fromkeys(evaluation.sources, 0)
    shapes = set()
    for batch, target_bytes_BT in evaluation.batches(rows=4):
        shapes.add((batch.tokens_BT.shape, batch.vision.segments_VL.shape))
        assert (target_bytes_BT[batch.loss_weights_BT == 0] == 0).all()
        for row in range(4):
            predicted = np.flatnonzero(batch.loss_weights_BT[row])
            if len(predicted):
                source = pack.sources[batch.sources_BT[row, 0]]
                scored[source] += tokenizer.text_bytes(batch.tokens_BT[row, predicted + 1])
                counted[source] += int(target_bytes_BT[row].sum())
                assert tokenizer.eos not in batch.tokens_BT[row]
    for source in evaluation.sources:
        assert scored[source] == b"".join(pack.document(i).encode() for i in pack.documents("heldout", [source]))
        assert counted[source] == len(scored[source])
    assert shapes == {((4, 96), (1, 64))}


def test_rows_are_spread_over_the_held_out_text(data: DataConfig, model: ModelConfig, pack: Pack) -> None:
    every, some = (TextEvaluation(data, model, pack, rows) for rows in (ALL, 2))
    for source in some.sources:
        assert len(some.pieces[source]) == 2
        np.testing.assert_array_equal(some.pieces[source][0], every.pieces[source][0])
        np.testing.assert_array_equal(some.pieces[source][1], every.pieces[source][-1])
    one = dataclasses.replace(data, streams=(StreamConfig("text", sources=("sums",)),))
    assert TextEvaluation(one, model, pack, 2).sources == ("sums",)
    pictures_only = dataclasses.replace(data, streams=data.streams[1:])
    assert list(TextEvaluation(pictures_only, model, pack, 2).batches(2)) == []


def test_text_evaluation_of_a_blind_model(data: DataConfig, model: ModelConfig, pack: Pack) -> None:
    blind = dataclasses.replace(model, vision=None)
    text = dataclasses.replace(data, streams=data.streams[:1])
    assert next(TextEvaluation(text, blind, pack, 2).batches(2)).batch.vision is None


def test_unigram_is_the_entropy_of_the_counts() -> None:
    counts = ByteCounts.of([b"aab", b""])
    bits = unigram_bits_per_byte(counts, [Passage(b"", b"ab"), Passage(b"zz", b"c")])
    p = {"a": 3 / 259, "b": 2 / 259, "c": 1 / 259}
    assert bits == pytest.approx(-sum(map(math.log2, p.values())) / 3)


def test_bigram_uses_the_byte_before_and_the_start() -> None:
    counts = ByteCounts.of([b"abab", b"b"])
    bits = bigram_bits_per_byte(counts, [Passage(b"", b"ab"), Passage(b"xa", b"b"), Passage(b"", b"")])
    p = [(1 + 1) / (2 + 256), (2 + 1) / (2 + 256), (2 + 1) / (2 + 256)]  # start -> a, a -> b, a -> b
    assert bits == pytest.approx(-sum(map(math.log2, p)) / 3)
    assert np.flatnonzero(counts.pairs[256]).tolist() == [97, 98], "both documents' first bytes follow START"


def test_bits_of_nothing_are_refused() -> None:
    with pytest.raises(ValueError, match="bits per byte of no text"):
        unigram_bits_per_byte(ByteCounts.of([b"a"]), [Passage(b"a", b"")])


def test_baselines_are_of_the_training_text_on_the_scored_bytes(data: DataConfig, model: ModelConfig, pack: Pack) -> None:
    evaluation = TextEvaluation(data, model, pack, rows=ALL)
    found = evaluation.baselines()
    counts = ByteCounts.of(pack.document(i).encode() for i in pack.documents("train"))
    for source in pack.text_sources:
        whole = [Passage(b"", pack.document(i).encode()) for i in pack.documents("heldout", [source])]
        assert found[source]["byte_unigram"] == pytest.approx(unigram_bits_per_byte(counts, whole))
        assert found[source]["byte_bigram"] == pytest.approx(bigram_bits_per_byte(counts, whole)), "pieces know the byte before them"
        assert 1 < found[source]["byte_bigram"] < found[source]["byte_unigram"] < 6


@pytest.fixture(scope="module")
def pictures(data: DataConfig, model: ModelConfig, pack: Pack) -> PictureEvaluation:
    return PictureEvaluation(data, model, pack)


@pytest.mark.parametrize("split", PICTURE_SPLITS)
def test_wrong_pictures_are_of_the_same_group_and_differ(pictures: PictureEvaluation, pack: Pack, split: str) -> None:
    right_n, wrong_n = pictures.pairs(split, 12)
    assert len(set(right_n.tolist())) == len(right_n) == 12
    for right, wrong in zip(right_n, wrong_n, strict=True):
        assert pack.picture_splits[right] == pack.picture_splits[wrong] == PICTURE_SPLITS.index(split)
        assert pack.picture_groups[right] == pack.picture_groups[wrong]
        assert pack.captions[right] != pack.captions[wrong]
        assert (pack.pictures[right] != pack.pictures[wrong]).any()
    assert len(set(wrong_n.tolist())) > 6, "one wrong picture for all would be a shortcut"
    np.testing.assert_array_equal(pictures.pairs(split, 12).wrong_n, wrong_n)


@pytest.mark.parametrize("split", PICTURE_SPLITS)
def test_candidates_are_different_pictures_with_the_right_one_anywhere(pictures: PictureEvaluation, pack: Pack, split: str) -> None:
    captions_n, candidates_nc, answers_n = pictures.retrieval(split, 12, 4)
    assert candidates_nc.shape == (12, 4)
    np.testing.assert_array_equal(candidates_nc[np.arange(12), answers_n], captions_n)
    assert len(set(answers_n.tolist())) > 1
    for row in candidates_nc:
        assert len({pack.captions[i] for i in row}) == len({pack.pictures[i].tobytes() for i in row}) == 4
        assert set(pack.picture_splits[row].tolist()) == {PICTURE_SPLITS.index(split)}


def twins(pack: Pack) -> Pack:
    """The pack with one and the same picture everywhere."""
    return dataclasses.replace(pack, pictures=np.broadcast_to(pack.pictures[:1], pack.pictures.shape))


def test_too_few_different_pictures_are_refused(pictures: PictureEvaluation, data: DataConfig, model: ModelConfig, pack: Pack) -> None:
    size = len(pack.picture_ids("concept"))
    with pytest.raises(ConfigError, match=rf"eval.candidates={size + 1} but split 'concept' .* has only {size} different"):
        pictures.retrieval("concept", 3, size + 1)
    same = PictureEvaluation(data, model, twins(pack))
    with pytest.raises(ConfigError, match="has only 1 different pictures"):
        same.retrieval("comp", 3, 2)
    with pytest.raises(ConfigError, match="no second picture"):
        same.pairs("comp", 3)


def test_a_group_of_one_borrows_from_the_split(data: DataConfig, model: ModelConfig, pack: Pack) -> None:
    lonely = dataclasses.replace(pack, picture_groups=np.arange(len(pack.captions), dtype=np.int32), groups=pack.captions)
    right_n, wrong_n = PictureEvaluation(data, model, lonely).pairs("comp", 5)
    assert all(pack.captions[a] != pack.captions[b] for a, b in zip(right_n, wrong_n, strict=True))


def test_examples_show_the_asked_picture_with_the_asked_caption(
    pictures: PictureEvaluation, model: ModelConfig, pack: Pack, tokenizer: Tokenizer
) -> None:
    right_n, wrong_n = pictures.pairs("comp", 11)
    seen, shapes = [], set()
    for batch, examples_BT in pictures.batches(right_n, wrong_n, rows=2):
        shapes.add((batch.tokens_BT.shape, batch.vision.patches_VLP.shape))
        assert ((examples_BT >= 0) == (batch.segments_BT > 0)).all()
        patches = batch.vision.patches_VLP.reshape(-1, 4, model.vision.patch_dim)
        for example in range(11):
            place = examples_BT == example
            if place.any():
                seen.append(example)
                assert tokenizer.decode(batch.tokens_BT[place][18:-1]) == pack.captions[right_n[example]]
                shown = patches[batch.visual_index_BT[place][1:17]].reshape(64, -1)
                np.testing.assert_array_equal(shown, patchify(pack.pictures[wrong_n[example]], model.vision).patches_nP)
                assert batch.loss_weights_BT[place].sum() == place.sum() - 18
    assert seen == list(range(11))
    assert len(shapes) == 1
