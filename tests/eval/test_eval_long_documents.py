"""Long documents of text and pictures, and what the selection map shows of one."""

import dataclasses
from pathlib import Path

import numpy as np
import pytest

from msa_jax.config import Experiment
from msa_jax.data.mixture import load_tokenizer
from msa_jax.data.pack import Pack
from msa_jax.data.picture_evaluation import PictureEvaluation
from msa_jax.data.vision import patchify
from msa_jax.eval.arrays import write_arrays
from msa_jax.eval.forward import Forward
from msa_jax.eval.long_documents import long_documents
from msa_jax.eval.selection_map import SelectionMap, shown_queries
from msa_jax.train.state import TrainState


def longer(experiment: Experiment, streams: str = "text captions", length: int = 512) -> Experiment:
    kept = tuple(stream for stream in experiment.data.streams if stream.name in streams.split())
    return dataclasses.replace(experiment, data=dataclasses.replace(experiment.data, sequence_length=length, streams=kept))


def test_every_picture_stands_before_its_caption(experiment: Experiment, pack: Pack) -> None:
    tokenizer = load_tokenizer(experiment.data, experiment.model)
    by_pixels = {patchify(p, experiment.model.vision).patches_nP.tobytes(): c for p, c in zip(pack.pictures, pack.captions, strict=True)}
    held_out = [pack.captions[i] for i in pack.picture_ids("concept")]
    batch = long_documents(longer(experiment), pack, 3)
    patches = batch.vision.patches_VLP.reshape(-1, batch.vision.patches_VLP.shape[-1])
    for row in range(3):
        tokens, visual = batch.tokens_BT[row], batch.visual_index_BT[row]
        assert tokens[0] == tokenizer.bos
        ends = np.flatnonzero(tokens == tokenizer.vision_end)
        assert len(ends) >= 5
        for end in ends:
            first = visual[end - 16] * 4
            caption = by_pixels[patches[first : first + 64].tobytes()]
            words = tokenizer.encode(caption)
            assert caption in held_out
            assert tokens[end + 1 : end + 1 + len(words)].tolist() == words.tolist()
            assert tokens[end - 17] == tokenizer.vision_start
        assert ((tokens == tokenizer.image) == (visual >= 0)).all()


def test_one_held_out_document_a_row_longer_than_the_blocks_that_are_kept(experiment: Experiment, pack: Pack) -> None:
    batch = long_documents(experiment, pack, 2)
    real = batch.segments_BT > 0
    assert set(np.unique(batch.segments_BT)) <= {0, 1}
    assert (real.sum(1) > 32).all(), "R * C = 32"
    assert (batch.positions_BT[real] == np.broadcast_to(np.arange(128), real.shape)[real]).all()
    tokenizer = load_tokenizer(experiment.data, experiment.model)
    passage = tokenizer.decode(batch.tokens_BT[0, 1 : 1 + 128 // 8])
    assert any(passage in pack.document(i) for i in pack.documents("heldout"))


def test_text_only_and_pictures_only(experiment: Experiment, pack: Pack) -> None:
    tokenizer = load_tokenizer(experiment.data, experiment.model)
    text = long_documents(longer(experiment, "text"), pack, 2)
    assert (text.visual_index_BT < 0).all()
    assert (text.segments_BT > 0).all()
    pictures = long_documents(longer(experiment, "captions"), pack, 2)
    share = (pictures.visual_index_BT >= 0).sum() / (pictures.segments_BT > 0).sum()
    assert share > 0.6
    blind = dataclasses.replace(longer(experiment, "text"), model=dataclasses.replace(experiment.model, vision=None))
    assert long_documents(blind, pack, 2).vision is None
    assert not np.isin(text.tokens_BT, tokenizer.special_ids)[:, 1:].any()


def test_shapes_are_those_of_captioned_rows(experiment: Experiment, pack: Pack) -> None:
    ids = np.arange(8)
    pictures = next(PictureEvaluation(experiment.data, experiment.model, pack).batches(ids, ids, 3)).batch
    long = long_documents(experiment, pack, 3)
    assert [leaf.shape for leaf in long.vision] == [leaf.shape for leaf in pictures.vision]
    assert long.tokens_BT.shape == pictures.tokens_BT.shape


def test_shown_queries_by_hand() -> None:
    """Two pictures with a mark behind each; the captions' first words stand at 27 and 45."""
    visual = np.zeros(60, bool)
    visual[[*range(20, 26), *range(38, 44)]] = True
    text = ~visual
    text[[26, 44]] = False
    shown = shown_queries(visual, text, 20)
    assert {27, 45} <= set(shown.tolist())
    assert len(shown) == len(set(shown.tolist())) == 6
    assert (np.diff(shown) > 0).all()
    assert text[shown].all()
    assert shown.min() >= 20
    assert shown_queries(visual, text, 44).min() >= 45
    assert len(shown_queries(np.zeros(9, bool), np.ones(9, bool), 6)) == 3


def test_the_map_holds_the_models_selection(
    experiment: Experiment, pack: Pack, forward: Forward, state: TrainState, tmp_path: Path
) -> None:
    long = long_documents(experiment, pack, 4)
    assert list(SelectionMap(experiment, forward, long, tmp_path).run(state)) == []
    with np.load(tmp_path / "arrays" / "selection_map.npz", allow_pickle=False) as data:
        arrays = dict(data)
    real = int((long.segments_BT[0] > 0).sum())
    assert arrays["layers_X"].tolist() == [1]
    np.testing.assert_array_equal(arrays["ids_XKTR"], np.asarray(forward(state, long).ids_XBKTR)[[1], 0][:, :, :real])
    assert len(arrays["tokens_T"]) == len(arrays["visual_T"]) == real
    assert arrays["tokens_T"][0] == "<bos>"
    assert set(arrays["tokens_T"][arrays["visual_T"]]) == {"<image>"}
    assert (arrays["queries_Q"] >= 32).all()
    for query in arrays["queries_Q"]:
        assert (arrays["ids_XKTR"][0, :, query] >= 0).all(), "a query beyond R blocks fills every slot"


def test_arrays_are_plain(tmp_path: Path) -> None:
    file = write_arrays(tmp_path, "some", numbers=np.arange(3), words=np.array(["a", "bc"]))
    with np.load(file, allow_pickle=False) as data:
        assert data["words"].tolist() == ["a", "bc"]
    with pytest.raises(TypeError, match=r"some\.bad"):
        write_arrays(tmp_path, "some", bad=np.array([{}], dtype=object))
    assert [path.name for path in (tmp_path / "arrays").iterdir()] == ["some.npz"], "no partial file is left"
