"""Packs on disk and in memory: splits, digests, damage, kept token ids."""

import errno
import json
import os
from pathlib import Path

import numpy as np
import pytest

from msa_jax.data import text as texts
from msa_jax.data.pack import ARRAYS, MANIFEST, Pack, PackError, save, write_atomically
from msa_jax.data.records import (
    PICTURE_SPLITS,
    Document,
    Picture,
    check_held_out,
    fraction,
    picture_split,
    split_pictures,
    text_split,
)
from msa_jax.data.tokenizer import Tokenizer


def test_synthetic_pack_is_a_function_of_its_seed(pack: Pack) -> None:
    assert pack.digest == Pack.synthetic(0).digest != Pack.synthetic(1).digest
    assert pack.digest == Pack.open("synthetic").digest
    assert pack.document_splits.tolist() == Pack.synthetic(1).document_splits.tolist()


def test_synthetic_pack_has_the_structure_of_a_real_one(pack: Pack) -> None:
    assert pack.sources == ("animals", "counting", "sums", "shapes")
    assert pack.text_sources == pack.sources[:3]
    assert pack.picture_source_names == ("shapes",)
    for source in pack.text_sources:
        assert len(pack.documents("train", [source])) > 10 * len(pack.documents("heldout", [source])) > 0
    for split in PICTURE_SPLITS:
        assert len(pack.picture_ids(split)) >= 10
    assert pack.pictures.shape[1:] == (32, 32, 3)


def test_no_held_out_document_concept_or_combination_is_trained_on(pack: Pack) -> None:
    names = [{f"{pack.document_sources[i]}/{pack.document_names[i]}" for i in pack.documents(split)} for split in ("train", "heldout")]
    assert not names[0] & names[1]
    shapes = {split: {pack.captions[i].split()[2] for i in pack.picture_ids(split)} for split in PICTURE_SPLITS}
    captions = {split: {pack.captions[i] for i in pack.picture_ids(split)} for split in PICTURE_SPLITS}
    pixels = {split: {pack.pictures[i].tobytes() for i in pack.picture_ids(split)} for split in PICTURE_SPLITS}
    assert not shapes["concept"] & (shapes["train"] | shapes["comp"])
    assert shapes["comp"] <= shapes["train"]
    assert not captions["comp"] & captions["train"]
    assert not pixels["train"] & (pixels["comp"] | pixels["concept"])


def picture(caption: str, concept: str, varied: bool, value: int = 0) -> Picture:
    return Picture("p", caption, concept, "g", varied, np.full((2, 2, 3), value, np.uint8))


def test_splits_follow_names_and_not_order() -> None:
    documents = [Document("a", str(i), "x") for i in range(2000)]
    held = [d for d in documents if text_split(d) == "heldout"]
    assert 0.03 < len(held) / len(documents) < 0.07
    assert held == [d for d in documents[::-1] if text_split(d) == "heldout"][::-1]
    pictures = [picture(f"{i} {j}", str(i), j > 0) for i in range(400) for j in range(5)]
    splits = {p.caption: picture_split(p) for p in pictures}
    for i in range(400):
        assert len({splits[f"{i} {j}"] == "concept" for j in range(5)}) == 1
        assert splits[f"{i} 0"] != "comp"
    shares = [sum(split == name for split in splits.values()) / len(splits) for name in ("concept", "comp")]
    assert 0.03 < shares[0] < 0.07
    assert 0.06 < shares[1] < 0.10  # 10% of the four varied fifths that are not held out as concepts
    assert fraction("a") == fraction("a") != fraction("b")
    assert 0 <= fraction("a") < 1


def test_held_out_copies_of_training_pictures_are_dropped() -> None:
    concepts = {
        split: next(c for c in map(str, range(999)) if picture_split(picture(c, c, False)) == split) for split in ("train", "concept")
    }
    trained, copy, fresh = (
        picture("t", concepts["train"], False),
        picture("c", concepts["concept"], False),
        picture("f", concepts["concept"], False, 1),
    )
    assert [(p.caption, split) for p, split in split_pictures([copy, trained, fresh])] == [("t", "train"), ("f", "concept")]


def test_a_source_with_too_little_held_out_is_refused() -> None:
    names = [str(i) for i in range(3000)]
    documents = [Document("a", name, "x" * 1000) for name in names]
    check_held_out(documents)
    training = [d for d in documents if text_split(d) == "train"]
    with pytest.raises(ValueError, match=r"source 'a': 0 of \d+ bytes are held out; at least 1% and 50000"):
        check_held_out(training)
    with pytest.raises(ValueError, match="at least 1%"):
        check_held_out([d._replace(text=d.text * (70 if d in training[:300] else 1)) for d in documents])


def test_order_of_records_does_not_matter(pack: Pack) -> None:
    records = [Document("a", str(i), f"text {i}") for i in range(9)]
    drawings = [picture(f"c{i}", f"c{i}", False, i) for i in range(9)]
    assert Pack.from_records("p", records, drawings).digest == Pack.from_records("p", records[::-1], drawings[::-1]).digest


@pytest.fixture
def folder(tmp_path: Path, pack: Pack) -> Path:
    save(pack, tmp_path / "built", extra={"note": "x"})
    return tmp_path / "built"


def test_saved_pack_is_the_same_pack(folder: Path, pack: Pack) -> None:
    loaded = Pack.load(folder)
    assert loaded.digest == pack.digest
    assert loaded.captions == pack.captions
    assert loaded.counts() == pack.counts() == json.loads((folder / MANIFEST).read_text())["counts"]
    np.testing.assert_array_equal(loaded.pictures, pack.pictures)
    assert [loaded.document(i) for i in range(3)] == [pack.document(i) for i in range(3)]
    before = (folder / ARRAYS).read_bytes(), (folder / MANIFEST).read_bytes()
    save(loaded, folder, extra={"note": "x"})
    assert before == ((folder / ARRAYS).read_bytes(), (folder / MANIFEST).read_bytes())
    assert sorted(p.name for p in folder.iterdir()) == [MANIFEST, ARRAYS]


def test_a_missing_pack_names_its_command(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    with pytest.raises(PackError, match=r"data/small/manifest.json does not exist. Run `make data`"):
        Pack.open("data/small")
    with pytest.raises(PackError, match=r"python -m msa_jax\.data\.build small --out elsewhere"):
        Pack.load("elsewhere")


def damage(folder: Path, file: str, change: bytes | None) -> None:
    path = folder / file
    data = bytearray(path.read_bytes())
    if change is None:
        data[len(data) // 2] ^= 1
    path.write_bytes(data if change is None else change)


@pytest.mark.parametrize(("file", "change", "message"), [
    (ARRAYS, None, r"pack.safetensors is damaged: sha256 .*Delete the folder and run"),
    (ARRAYS, b"", "pack.safetensors is damaged"),
    (MANIFEST, b"{", "manifest.json is damaged"),
    (MANIFEST, b"[]", "manifest.json is damaged"),
    (MANIFEST, b"{}", "manifest.json is damaged"),
    (MANIFEST, b'{"format": 99, "sha256": "x"}', "has format 99, this version reads format 1"),
])  # fmt: skip
def test_damage_is_named(folder: Path, file: str, change: bytes | None, message: str) -> None:
    damage(folder, file, change)
    with pytest.raises(PackError, match=message):
        Pack.load(folder)


def test_a_failed_write_leaves_the_old_file_and_no_other(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    path = tmp_path / "file"
    write_atomically(path, b"old")

    def full(descriptor: int) -> None:
        raise OSError(errno.ENOSPC, "No space left on device")

    monkeypatch.setattr(os, "fsync", full)
    with pytest.raises(OSError, match="No space left"):
        write_atomically(path, b"new")
    assert path.read_bytes() == b"old"
    assert list(tmp_path.iterdir()) == [path]


def test_token_ids_are_kept_beside_the_pack(folder: Path, tokenizer: Tokenizer, monkeypatch: pytest.MonkeyPatch) -> None:
    loaded = Pack.load(folder)
    made = texts.tokenize(loaded, tokenizer)
    for index in (0, 1, len(loaded.document_ends) - 1):
        np.testing.assert_array_equal(made.document(index), tokenizer.encode(loaded.document(index)))
    (path,) = folder.glob("tokens-*")
    with monkeypatch.context() as patch:
        patch.setattr(Tokenizer, "encode_batch", lambda *_: pytest.fail("kept ids were not used"))
        kept = texts.tokenize(loaded, tokenizer)
    np.testing.assert_array_equal(kept.tokens, made.tokens)
    np.testing.assert_array_equal(kept.ends, made.ends)
    for change in (None, b"", path.read_bytes()[:-3]):
        damage(folder, path.name, change)
        np.testing.assert_array_equal(texts.tokenize(loaded, tokenizer).tokens, made.tokens)


def test_ids_that_cannot_be_kept_are_a_warning(folder: Path, tokenizer: Tokenizer, monkeypatch: pytest.MonkeyPatch) -> None:
    def full(path: Path, data: bytes) -> None:
        raise OSError(errno.ENOSPC, "No space left on device")

    monkeypatch.setattr(texts, "write_atomically", full)
    with pytest.warns(UserWarning, match="tokens are not kept for the next run: .*No space left"):
        made = texts.tokenize(Pack.load(folder), tokenizer)
    assert len(made.ends) == len(Pack.load(folder).document_ends)
