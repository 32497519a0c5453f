"""The mixture: batch n depends on the seed and n only; every training token and picture once an epoch; exact counts."""

import dataclasses
from collections import Counter
from collections.abc import Callable

import numpy as np
import pytest

from msa_jax.config import ConfigError, DataConfig, ModelConfig, StreamConfig, VisionConfig
from msa_jax.data.batch import Batch, BatchError
from msa_jax.data.captions import CaptionDocuments, fill_placeholders
from msa_jax.data.mixture import Mixture, rows_before, stream_seed
from msa_jax.data.pack import Pack
from msa_jax.data.text import tokenize
from msa_jax.data.tokenizer import Tokenizer
from msa_jax.data.vision import patchify

TEXT, CAPTIONS = StreamConfig("text", rows=((0, 2),)), StreamConfig("captions", kind="captions", rows=((0, 2),))


def documents_of(batch: Batch, row: int) -> list[dict[str, np.ndarray]]:
    """The documents of a row, each with its slice of the [B, T] arrays."""
    found = []
    for segment in range(1, batch.segments_BT[row].max() + 1):
        place = batch.segments_BT[row] == segment
        found.append({name: value[row, place] for name, value in batch._asdict().items() if name != "vision"})
    return found


@pytest.fixture(scope="module")
def mixture(data: DataConfig, model: ModelConfig, pack: Pack) -> Mixture:
    return Mixture(data, model, pack, seed=0)


def test_same_seed_same_batches_whatever_was_asked_before(
    data: DataConfig, model: ModelConfig, pack: Pack, mixture: Mixture, assert_same: Callable
) -> None:
    other = Mixture(data, model, pack, seed=0)
    for step in (7, 0, 300, 7):
        assert_same(mixture.batch(step)[0], other.batch(step)[0])
        assert mixture.batch(step)[1] == other.batch(step)[1]
    assert (mixture.batch(0)[0].tokens_BT != mixture.batch(1)[0].tokens_BT).any()


def test_seeds_change_text_and_pictures(data: DataConfig, model: ModelConfig, pack: Pack, mixture: Mixture) -> None:
    tokens = Mixture(data, model, pack, seed=1).batch(0)[0].tokens_BT
    for row in range(4):
        assert (tokens[row] != mixture.batch(0)[0].tokens_BT[row]).any()
    assert stream_seed(0, "a") != stream_seed(0, "b") != stream_seed(1, "b")


@pytest.mark.parametrize("align", [1, 8])
def test_every_training_token_once_an_epoch_in_another_order(
    align: int, data: DataConfig, model: ModelConfig, pack: Pack, tokenizer: Tokenizer
) -> None:
    one = dataclasses.replace(data, streams=(dataclasses.replace(TEXT, rows=((0, 1),)),), align_documents=align)
    mixture = Mixture(one, model, pack, seed=3)
    epoch = len(mixture._rows["text"])
    text = tokenize(pack, tokenizer)
    expected = Counter()
    for index in pack.documents("train"):
        expected.update([tokenizer.bos, *text.document(index).tolist(), tokenizer.eos])
    orders = []
    for start in (0, epoch):
        rows = [mixture.batch(step)[0] for step in range(start, start + epoch)]
        found = Counter(np.concatenate([b.tokens_BT[b.segments_BT > 0] for b in rows]).tolist())
        assert found == expected
        orders.append([b.tokens_BT.tobytes() for b in rows])
        if align == 8:
            starts = np.concatenate([np.flatnonzero((b.positions_BT[0] == 0) & (b.segments_BT[0] > 0)) for b in rows])
            assert not (starts % 8).any()
    assert orders[0] != orders[1]
    assert sorted(orders[0]) == sorted(orders[1])


def test_text_pieces_are_pieces_of_one_document_with_right_weights(mixture: Mixture, pack: Pack, tokenizer: Tokenizer) -> None:
    text = tokenize(pack, tokenizer)
    whole = {source: [] for source in range(3)}
    for index in pack.documents("train"):
        framed = [tokenizer.bos, *text.document(index).tolist(), tokenizer.eos]
        whole[int(pack.document_sources[index])].append(np.array(framed, np.int32).tobytes())
    for step in range(40):
        batch, _ = mixture.batch(step)
        for row in range(2):
            for piece in documents_of(batch, row):
                (source,) = set(piece["sources_BT"].tolist())
                assert any(piece["tokens_BT"].tobytes() in document for document in whole[source])
                assert piece["loss_weights_BT"].tolist() == [1] * (len(piece["tokens_BT"]) - 1) + [0]
                assert (piece["visual_index_BT"] == -1).all()


def test_every_training_picture_once_an_epoch_with_its_own_caption(
    data: DataConfig, model: ModelConfig, pack: Pack, tokenizer: Tokenizer
) -> None:
    one = dataclasses.replace(data, streams=(dataclasses.replace(CAPTIONS, rows=((0, 1),)),))
    mixture = Mixture(one, model, pack, seed=0)
    patches = {caption: patchify(pixels, model.vision).patches_nP for caption, pixels in zip(pack.captions, pack.pictures, strict=True)}
    tok, seen = tokenizer, Counter()
    for step in range(len(mixture._rows["captions"])):
        batch, _ = mixture.batch(step)
        visual = batch.vision.patches_VLP.reshape(-1, 4, model.vision.patch_dim)
        for document in documents_of(batch, 0):
            tokens, index = document["tokens_BT"], document["visual_index_BT"]
            assert tokens[:18].tolist() == [tok.vision_start, *[tok.image] * 16, tok.vision_end]
            assert tokens[-1] == tok.eos
            caption = tok.decode(tokens[18:-1])
            np.testing.assert_array_equal(visual[index[1:17]].reshape(64, -1), patches[caption])
            assert (index[[0, *range(17, len(index))]] == -1).all()
            assert document["loss_weights_BT"].tolist() == [0] * 17 + [1] * (len(tokens) - 18) + [0]
            assert set(document["sources_BT"].tolist()) == {pack.sources.index("shapes")}
            seen[caption] += 1
    assert seen == Counter(pack.captions[i] for i in pack.picture_ids("train"))


def test_pictures_never_move_the_text_rows(data: DataConfig, model: ModelConfig, pack: Pack, mixture: Mixture) -> None:
    alone = Mixture(dataclasses.replace(data, streams=(TEXT,)), model, pack, seed=0)
    later = dataclasses.replace(CAPTIONS, rows=((0, 0), (2, 4)))
    late = Mixture(dataclasses.replace(data, streams=(later, TEXT)), model, pack, seed=0)
    for step in range(5):
        for other in (alone, late):
            np.testing.assert_array_equal(other.batch(step)[0].tokens_BT[:2], mixture.batch(step)[0].tokens_BT[:2])
    assert late.batch(1)[0].tokens_BT.shape == (2, 96)
    assert late.batch(2)[0].tokens_BT.shape == (6, 96)
    assert late.batch(1)[0].vision.segments_VL.shape == (1, 64), "an empty picture part keeps one compiled step"
    np.testing.assert_array_equal(late.batch(2)[0].tokens_BT[2:4], mixture.batch(0)[0].tokens_BT[2:4])


def test_a_streams_loss_weight_scales_its_rows_only(data: DataConfig, model: ModelConfig, pack: Pack, mixture: Mixture) -> None:
    streams = tuple(dataclasses.replace(s, loss_weight=4.0) if s.kind == "captions" else s for s in data.streams)
    plain, _ = mixture.batch(3)
    weighted, _ = Mixture(dataclasses.replace(data, streams=streams), model, pack, seed=0).batch(3)
    captions_B = (plain.visual_index_BT >= 0).any(axis=1)
    assert 0 < captions_B.sum() < len(captions_B)
    factor_B1 = np.where(captions_B, 4.0, 1.0)[:, None]
    np.testing.assert_array_equal(weighted.loss_weights_BT, plain.loss_weights_BT * factor_B1)


@pytest.mark.parametrize(("rows", "step", "expected"), [
    (((0, 8),), 5, 40),
    (((0, 0), (3, 2), (5, 4)), 3, 0),
    (((0, 0), (3, 2), (5, 4)), 4, 2),
    (((0, 1), (3, 2), (5, 4)), 7, 3 + 4 + 8),
])  # fmt: skip
def test_rows_before_a_step(rows: tuple[tuple[int, int], ...], step: int, expected: int) -> None:
    stream = StreamConfig("s", rows=rows)
    assert rows_before(stream, step) == expected == sum(stream.rows_at(s) for s in range(step))


def test_skipped_rows_are_those_of_an_earlier_run(data: DataConfig, model: ModelConfig, pack: Pack, mixture: Mixture) -> None:
    streams = (dataclasses.replace(TEXT, skip_rows=6), dataclasses.replace(CAPTIONS, skip_rows=2))
    later = Mixture(dataclasses.replace(data, streams=streams), model, pack, seed=0)
    for step in range(3):
        np.testing.assert_array_equal(later.batch(step)[0].tokens_BT[:2], mixture.batch(step + 3)[0].tokens_BT[:2])
        np.testing.assert_array_equal(later.batch(step)[0].tokens_BT[2:], mixture.batch(step + 1)[0].tokens_BT[2:])


def test_microbatches_own_their_rows_and_pictures(data: DataConfig, model: ModelConfig, pack: Pack, mixture: Mixture) -> None:
    streams = (dataclasses.replace(CAPTIONS, rows=((0, 3),)), dataclasses.replace(TEXT, rows=((0, 3),)))
    halves = Mixture(dataclasses.replace(data, streams=streams), model, pack, seed=0, microbatches=2)
    whole = Mixture(dataclasses.replace(data, streams=streams), model, pack, seed=0)
    for step in range(4):
        batch, counts = halves.batch(step)
        assert sorted(r.tobytes() for r in batch.tokens_BT) == sorted(r.tobytes() for r in whole.batch(step)[0].tokens_BT)
        owned = batch.vision.segments_VL.size // 4 // 2
        kinds = []
        for half in range(2):
            index = batch.visual_index_BT[half * 3 : half * 3 + 3]
            used = index[index >= 0]
            assert (used // owned == half).all()
            kinds.append(sum(bool((row >= 0).any()) for row in index))
        assert sorted(kinds) == [1, 2]
        assert counts["visual"] == whole.batch(step)[1]["visual"]


def test_counts_are_exact(mixture: Mixture, tokenizer: Tokenizer) -> None:
    batch, counts = mixture.batch(3)
    by_hand = Counter()
    for row in range(4):
        for t in range(96):
            token, kind = batch.tokens_BT[row, t], "caption" if row >= 2 else "text"
            by_hand["padding" if batch.segments_BT[row, t] == 0 else "visual" if token == tokenizer.image else kind] += 1
            by_hand["predicted"] += int(batch.loss_weights_BT[row, t])
    by_hand["patches"] = 4 * by_hand["visual"]
    by_hand["patch_padding"] = batch.vision.segments_VL.size - by_hand["patches"]
    assert counts == dict(by_hand)
    assert sum(counts[k] for k in ("text", "caption", "visual", "padding")) == batch.tokens_BT.size
    assert counts["text"] > 0
    assert counts["visual"] > 0


def test_a_model_without_vision_gets_text_only(data: DataConfig, model: ModelConfig, pack: Pack) -> None:
    blind = dataclasses.replace(model, vision=None)
    batch, counts = Mixture(dataclasses.replace(data, streams=(TEXT,)), blind, pack, seed=0).batch(0)
    assert batch.vision is None
    assert (counts["visual"], counts["patches"], counts["patch_padding"]) == (0, 0, 0)


@pytest.mark.parametrize(("change", "message"), [
    ({"sequence_length": 16}, r"'\w+ \w+ \w+' has \d+ tokens, more than data.sequence_length=16"),
    ({"streams": (StreamConfig("text", sources=("counting", "plays")),)}, r"sources \['plays'\] are not in pack 'synthetic'.*'animals'"),
    ({"streams": (StreamConfig("p", kind="captions", sources=("counting",)),)}, r"sources \['counting'\] .*'shapes'"),
    ({"tokenizer": "none"}, "no tokenizer 'none'"),
])  # fmt: skip
def test_configurations_that_do_not_fit(data: DataConfig, model: ModelConfig, pack: Pack, change: dict, message: str) -> None:
    with pytest.raises(ValueError, match=message):
        Mixture(dataclasses.replace(data, **change), model, pack, seed=0)


def test_a_vocabulary_smaller_than_the_tokenizer_is_refused(data: DataConfig, model: ModelConfig, pack: Pack) -> None:
    with pytest.raises(ConfigError, match=r"model.vocab_size=4000 is smaller than the 4096 entries of tokenizer 'bpe4096'"):
        Mixture(data, dataclasses.replace(model, vocab_size=4000), pack, seed=0)


def test_named_sources_only(data: DataConfig, model: ModelConfig, pack: Pack) -> None:
    chosen = StreamConfig("text", rows=((0, 4),), sources=("sums",))
    mixture = Mixture(dataclasses.replace(data, streams=(chosen,)), model, pack, seed=0)
    sources = np.concatenate([mixture.batch(step)[0].sources_BT for step in range(5)])
    assert set(sources[sources >= 0].tolist()) == {pack.sources.index("sums")}


def test_several_pictures_share_a_longer_sequence(data: DataConfig, model: ModelConfig, pack: Pack) -> None:
    wide = dataclasses.replace(model, vision=dataclasses.replace(VisionConfig(), sequence_length=192))
    mixture = Mixture(data, wide, pack, seed=0)
    batch, counts = mixture.batch(0)
    assert batch.vision.segments_VL.shape == (-(-2 * mixture._captions.most_a_row // 3), 192)
    assert set(np.unique(batch.vision.segments_VL[0])) == {1, 2, 3}
    assert counts["patches"] == 4 * counts["visual"]


@pytest.mark.parametrize(("found", "pictures", "message"), [
    ([5, 3, 3, 6, 9, 2], [3], "example 'fox', picture 1: expected 3 placeholders, found 2"),
    ([5, 3, 3, 3, 3, 6], [3], "picture 1: expected 3 placeholders, found 4"),
    ([5, 3, 3, 6, 5, 3, 6], [2, 2], "picture 2: expected 2 placeholders, found 1"),
    ([5, 6, 9, 2], [2], "runs of placeholders for 1 pictures, found 0"),
    ([5, 3, 3, 6], [], "runs of placeholders for 0 pictures, found 1"),
    ([5, 4, 4, 6], [2], "2 <video> placeholders but no clips"),
])  # fmt: skip
def test_placeholders_must_match_pictures(tokenizer: Tokenizer, found: list[int], pictures: list[int], message: str) -> None:
    with pytest.raises(BatchError, match=message):
        fill_placeholders(np.array(found), [np.arange(n) for n in pictures], tokenizer, "fox")


def test_placeholders_take_pictures_in_order(tokenizer: Tokenizer) -> None:
    index = fill_placeholders(np.array([5, 3, 3, 6, 5, 3, 6]), [np.array([4, 5]), np.array([9])], tokenizer, "two")
    assert index.tolist() == [-1, 4, 5, -1, -1, 9, -1]
    assert fill_placeholders(np.array([9, 8, 2]), [], tokenizer, "none").tolist() == [-1, -1, -1]


def test_rows_of_pictures_are_well_filled(mixture: Mixture, data: DataConfig, pack: Pack, tokenizer: Tokenizer, model: ModelConfig) -> None:
    long = dataclasses.replace(data, sequence_length=512)
    documents = CaptionDocuments(pack, tokenizer, long, model.vision)
    assert documents.most_a_row == 512 // round(float(documents.lengths.mean()))
    assert documents.sequences(0) == 1
    assert documents.sequences(3) == 3 * documents.most_a_row
