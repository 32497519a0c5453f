"""Text to token ids and back, byte by byte: nothing is unencodable and every token has an exact number of bytes.

    python -m msa_jax.data.tokenizer train --pack data/small --vocab-size 4096 --out msa_jax/data/tokenizers/bpe4096.json

Special tokens are placed by the pipeline only: a text that spells "<image>" is ordinary bytes.
"""

import argparse
import functools
import hashlib
import importlib.resources
import json
from collections.abc import Iterator, Sequence
from pathlib import Path

import numpy as np
import tokenizers
from tokenizers import decoders, models, pre_tokenizers, trainers

from msa_jax.data.pack import Pack, write_atomically

SPECIAL_TOKENS = ("<pad>", "<bos>", "<eos>", "<image>", "<video>", "<vision_start>", "<vision_end>")
COMMITTED = importlib.resources.files("msa_jax.data") / "tokenizers"
PROBE = "Hi,\n\t  <image> <eos>the 3 na\u00efve \U0001f98a\u2019s "


class TokenizerError(ValueError):
    """A tokenizer that is missing or lacks something; the message names what."""


def _byte_of_character() -> dict[str, int]:
    """The alphabet of byte-level BPE: printable Latin-1 characters stand for themselves, other bytes for U+0100, U+0101, ..."""
    printable = {*range(0x21, 0x7F), *range(0xA1, 0xAD), *range(0xAE, 0x100)}
    others = [byte for byte in range(256) if byte not in printable]
    return {chr(byte): byte for byte in printable} | {chr(256 + i): byte for i, byte in enumerate(others)}


BYTE_OF_CHARACTER = _byte_of_character()


class Tokenizer:
    """A Hugging Face tokenizer.json with the seven SPECIAL_TOKENS. `pad`, `bos`, ..., `vision_end` are their ids."""

    def __init__(self, definition: bytes, name: str) -> None:
        """Raises TokenizerError unless the definition is byte-level, reproduces its input and has all special tokens."""
        self.name = name
        self.digest = hashlib.sha256(definition).hexdigest()
        try:
            self._tokenizer = tokenizers.Tokenizer.from_buffer(definition)
        except ValueError as error:  # the library's own word for a definition that it cannot read
            raise TokenizerError(f"tokenizer {name}: not a tokenizer.json: {error}") from error
        self._tokenizer.no_padding()
        self._tokenizer.no_truncation()
        self._tokenizer.encode_special_tokens = True  # text that spells a special token stays text
        vocabulary = self._tokenizer.get_vocab(with_added_tokens=True)
        missing = [token for token in SPECIAL_TOKENS if token not in vocabulary]
        if missing:
            raise TokenizerError(f"tokenizer {name} lacks the special tokens {', '.join(missing)}; add them to its added_tokens")
        lost = sorted(byte for character, byte in BYTE_OF_CHARACTER.items() if character not in vocabulary)
        if lost:
            raise TokenizerError(f"tokenizer {name} is not byte-level: {len(lost)} of 256 bytes have no token (the first: {lost[0]:#04x})")
        self.vocab_size = max(vocabulary.values()) + 1
        self.special_ids = tuple(vocabulary[token] for token in SPECIAL_TOKENS)
        self.pad, self.bos, self.eos, self.image, self.video, self.vision_start, self.vision_end = self.special_ids
        self._check_round_trip()

    def _check_round_trip(self) -> None:
        ids = self.encode(PROBE)
        if self.text_bytes(ids) != PROBE.encode() or set(ids.tolist()) & set(self.special_ids):
            raise TokenizerError(
                f"tokenizer {self.name} does not reproduce its input: {PROBE!r} became {self.text_bytes(ids)!r}. It must not "
                'change the text (no prefix space, no lower-casing), and its special tokens must be marked "special": true'
            )

    def encode(self, text: str) -> np.ndarray:
        """int32 ids of ordinary text, without <bos> and <eos>."""
        return self.encode_batch([text])[0]

    def encode_batch(self, texts: Sequence[str]) -> list[np.ndarray]:
        return [np.array(e.ids, np.int32) for e in self._tokenizer.encode_batch_fast(list(texts), add_special_tokens=False)]

    def decode(self, ids: Sequence[int] | np.ndarray) -> str:
        """Text of the ids; special tokens are spelled out, incomplete UTF-8 becomes U+FFFD."""
        return b"".join(self._spelling[int(i)] for i in ids).decode(errors="replace")

    def text_bytes(self, ids: Sequence[int] | np.ndarray) -> bytes:
        """The bytes that the ids stand for; special tokens stand for none."""
        return b"".join(self._spelling[int(i)] for i in ids if int(i) not in self.special_ids)

    @functools.cached_property
    def byte_lengths(self) -> np.ndarray:
        """int32 [vocab_size]: bytes of text a token stands for; 0 for special tokens."""
        lengths = np.array([len(spelling) for spelling in self._spelling], np.int32)
        lengths[list(self.special_ids)] = 0
        return lengths

    @functools.cached_property
    def _spelling(self) -> list[bytes]:
        added = {token_id: token.content for token_id, token in self._tokenizer.get_added_tokens_decoder().items()}
        spelling = [b""] * self.vocab_size
        for token, token_id in self._tokenizer.get_vocab(with_added_tokens=True).items():
            spelling[token_id] = added[token_id].encode() if token_id in added else bytes(BYTE_OF_CHARACTER[c] for c in token)
        return spelling


def load(name_or_path: str) -> Tokenizer:
    """A committed tokenizer by name ("bpe4096") or any tokenizer.json by path. Raises TokenizerError naming what is missing."""
    committed = COMMITTED / f"{name_or_path}.json"
    source = committed if committed.is_file() else Path(name_or_path)
    if not source.is_file():
        names = sorted(entry.name.removesuffix(".json") for entry in COMMITTED.iterdir() if entry.name.endswith(".json"))
        raise TokenizerError(f"no tokenizer {name_or_path!r}: neither a file nor one of the committed ones ({', '.join(names)})")
    return Tokenizer(source.read_bytes(), name_or_path)


def train(pack: Pack, vocab_size: int) -> bytes:
    """A byte-level BPE learned from the documents and captions of the training split only; the same pack gives the same bytes."""
    smallest = len(SPECIAL_TOKENS) + 256
    if vocab_size < smallest:
        raise TokenizerError(f"vocab_size={vocab_size}; {len(SPECIAL_TOKENS)} special tokens and 256 bytes need >= {smallest}")
    tokenizer = tokenizers.Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=vocab_size,
        special_tokens=list(SPECIAL_TOKENS),
        initial_alphabet=sorted(BYTE_OF_CHARACTER),
        show_progress=False,
    )
    tokenizer.train_from_iterator(_training_texts(pack), trainer)
    return (tokenizer.to_str(pretty=False) + "\n").encode()


def _training_texts(pack: Pack) -> Iterator[str]:
    for index in pack.documents("train"):
        yield pack.document(index)
    for index in pack.picture_ids("train"):
        yield pack.captions[index] + "\n"


def main(arguments: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(prog="python -m msa_jax.data.tokenizer", description="Train a byte-level BPE on a data pack.")
    command = parser.add_subparsers(dest="command", required=True).add_parser("train", help="learn merges from the training split")
    command.add_argument("--pack", default="data/small", help="folder of a built pack, or 'synthetic' (default: %(default)s)")
    command.add_argument("--vocab-size", type=int, default=4096, help="entries, special tokens included (default: %(default)s)")
    command.add_argument("--out", type=Path, required=True, help="tokenizer.json to write")
    options = parser.parse_args(arguments)
    try:
        pack = Pack.open(options.pack)
        definition = train(pack, options.vocab_size)
        tokenizer = Tokenizer(definition, str(options.out))
    except ValueError as error:
        print(f"error: {error}")
        return 1
    write_atomically(options.out, definition)
    print(json.dumps({"tokenizer": str(options.out), "vocab_size": tokenizer.vocab_size, "sha256": tokenizer.digest, "pack": pack.digest}))
    return 0


if __name__ == "__main__":
    raise SystemExit(main())
