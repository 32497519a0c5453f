"""The committed tokenizer and any other: special tokens, literal text, bytes, training."""

import json
from collections.abc import Callable
from pathlib import Path

import pytest
import tokenizers as library
from tokenizers import normalizers, pre_tokenizers

from msa_jax.data import tokenizer as tokenizers
from msa_jax.data.pack import Pack
from msa_jax.data.tokenizer import SPECIAL_TOKENS, Tokenizer, TokenizerError

TEXTS = (
    "",
    " ",
    "plain words",
    "na\u00efve \U0001f98a\u2019s\r\n\t\x00\x7f",
    "def f(x):\n        return x\n",
    "\u00a0\u2028\ud7ff",
    "<image>",
)


def test_special_tokens_come_first(tokenizer: Tokenizer) -> None:
    assert tokenizer.special_ids == tuple(range(7))
    assert (tokenizer.pad, tokenizer.bos, tokenizer.eos, tokenizer.image) == (0, 1, 2, 3)
    assert (tokenizer.video, tokenizer.vision_start, tokenizer.vision_end) == (4, 5, 6)
    assert tokenizer.vocab_size == 4096
    assert tokenizer.decode([1, 3, 2]) == "<bos><image><eos>"


@pytest.mark.parametrize("text", TEXTS)
def test_every_text_survives_and_its_bytes_are_counted(tokenizer: Tokenizer, text: str) -> None:
    ids = tokenizer.encode(text)
    assert tokenizer.decode(ids) == text
    assert tokenizer.text_bytes(ids) == text.encode()
    assert tokenizer.byte_lengths[ids].sum() == len(text.encode())


def test_every_byte_has_a_token(tokenizer: Tokenizer) -> None:
    assert {tokenizer.text_bytes([i]) for i in range(tokenizer.vocab_size)} >= {bytes([b]) for b in range(256)}


@pytest.mark.parametrize("text", [*SPECIAL_TOKENS, "an <image> of <eos>", "<<image>>", "<ima" + "ge>" * 3])
def test_literal_placeholders_are_ordinary_text(tokenizer: Tokenizer, text: str) -> None:
    ids = tokenizer.encode(text)
    assert not set(ids.tolist()) & set(tokenizer.special_ids)
    assert tokenizer.decode(ids) == text


def test_special_tokens_stand_for_no_bytes(tokenizer: Tokenizer) -> None:
    assert not tokenizer.byte_lengths[list(tokenizer.special_ids)].any()
    assert (tokenizer.byte_lengths[7:] > 0).all()
    assert tokenizer.text_bytes([1, *tokenizer.encode("ab"), 3, 2]) == b"ab"


def test_batches_encode_like_single_texts(tokenizer: Tokenizer) -> None:
    assert [ids.tolist() for ids in tokenizer.encode_batch(TEXTS)] == [tokenizer.encode(text).tolist() for text in TEXTS]


def edited(change: Callable[[library.Tokenizer], None]) -> bytes:
    made = library.Tokenizer.from_buffer((tokenizers.COMMITTED / "bpe4096.json").read_bytes())
    change(made)
    return made.to_str().encode()


@pytest.mark.parametrize(("change", "message"), [
    (lambda t: setattr(t, "normalizer", normalizers.Lowercase()), "does not reproduce its input"),
    (lambda t: setattr(t, "pre_tokenizer", pre_tokenizers.ByteLevel(add_prefix_space=True)), "does not reproduce its input"),
])  # fmt: skip
def test_a_tokenizer_that_changes_text_is_refused(change: Callable, message: str) -> None:
    with pytest.raises(TokenizerError, match=message):
        Tokenizer(edited(change), "mine")


def definition() -> dict:
    return json.loads((tokenizers.COMMITTED / "bpe4096.json").read_bytes())


def test_missing_special_tokens_are_named() -> None:
    values = definition()
    values["added_tokens"] = [token for token in values["added_tokens"] if token["content"] not in ("<image>", "<video>")]
    del values["model"]["vocab"]["<image>"], values["model"]["vocab"]["<video>"]
    with pytest.raises(TokenizerError, match="mine lacks the special tokens <image>, <video>"):
        Tokenizer(json.dumps(values).encode(), "mine")


def test_special_tokens_that_would_match_text_are_refused() -> None:
    values = definition()
    for token in values["added_tokens"]:
        token["special"] = False
    with pytest.raises(TokenizerError, match='marked "special": true'):
        Tokenizer(json.dumps(values).encode(), "mine")


def test_a_tokenizer_without_all_bytes_is_refused() -> None:
    words = library.Tokenizer(library.models.WordLevel({token: i for i, token in enumerate([*SPECIAL_TOKENS, "a"])}, unk_token="a"))
    words.add_special_tokens(list(SPECIAL_TOKENS))
    with pytest.raises(TokenizerError, match="not byte-level: 255 of 256"):
        Tokenizer(words.to_str().encode(), "words")


def test_another_tokenizer_loads_by_path(tmp_path: Path) -> None:
    def extend(made: library.Tokenizer) -> None:
        made.add_tokens(["a whole phrase"])
        made.enable_truncation(4)
        made.enable_padding(length=9)

    path = tmp_path / "tokenizer.json"
    path.write_bytes(edited(extend))
    loaded = tokenizers.load(str(path))
    assert loaded.vocab_size == 4097
    ids = loaded.encode("it is a whole phrase of text, longer than four")
    assert 4096 in ids
    assert loaded.byte_lengths[4096] == 14
    assert loaded.text_bytes(ids) == b"it is a whole phrase of text, longer than four"
    assert len(loaded.encode("a")) == 1
    assert loaded.digest != tokenizers.load("bpe4096").digest


@pytest.mark.parametrize(("content", "message"), [(None, r"no tokenizer .*bpe4096"), (b"{}", "not a tokenizer.json")])
def test_unusable_files_are_named(tmp_path: Path, content: bytes | None, message: str) -> None:
    path = tmp_path / "tokenizer.json"
    if content is not None:
        path.write_bytes(content)
    with pytest.raises(TokenizerError, match=message):
        tokenizers.load(str(path))


def test_training_is_deterministic_and_sees_the_training_split_only(pack: Pack) -> None:
    made = tokenizers.train(pack, 320)
    assert made == tokenizers.train(pack, 320)
    hidden = pack.documents("heldout")
    blanked = pack.text.copy()
    for index in hidden:
        blanked[pack.document_ends[index - 1] if index else 0 : pack.document_ends[index]] = ord("q")
    captions = tuple("q" if pack.picture_splits[i] else caption for i, caption in enumerate(pack.captions))
    other = Pack(**{**{k: v for k, v in vars(pack).items() if k != "digest"}, "text": blanked, "captions": captions})
    assert tokenizers.train(other, 320) == made
    learned = Tokenizer(made, "learned")
    assert learned.vocab_size == 320
    assert learned.special_ids == tuple(range(7))
    assert len(learned.encode("red and blue")) < len("red and blue")


def test_a_vocabulary_too_small_for_bytes_is_refused(pack: Pack) -> None:
    with pytest.raises(TokenizerError, match=r"vocab_size=262; .* need >= 263"):
        tokenizers.train(pack, 262)


def test_command(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    out = tmp_path / "t.json"
    assert tokenizers.main(["train", "--pack", "synthetic", "--vocab-size", "300", "--out", str(out)]) == 0
    assert json.loads(capsys.readouterr().out)["sha256"] == tokenizers.load(str(out)).digest
    assert tokenizers.main(["train", "--pack", str(tmp_path / "none"), "--out", str(out)]) == 1
    assert "python -m msa_jax.data.build small" in capsys.readouterr().out
