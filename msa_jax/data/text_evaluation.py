"""Held-out text for bits per byte, exact to the byte.

A document is read as <bos> text, in pieces of T tokens that overlap by one: each token of the text is predicted once, never from
padding, and <eos> is not scored. A source's bits per byte are therefore its nats / ln 2 / (bytes of the scored tokens), and a
byte-level baseline can be measured on exactly the same bytes.
"""

from collections.abc import Iterator
from typing import NamedTuple

import numpy as np

from msa_jax.config import DataConfig, ModelConfig
from msa_jax.data.baselines import ByteCounts, Passage, bigram_bits_per_byte, unigram_bits_per_byte
from msa_jax.data.batch import Batch, check_batch
from msa_jax.data.mixture import load_tokenizer, stream_sources, to_batch
from msa_jax.data.pack import Pack
from msa_jax.data.packing import Rows
from msa_jax.data.text import tokenize
from msa_jax.data.vision import VisionPacker


class TextBatch(NamedTuple):
    """A batch without pictures. `target_bytes_BT` int32: bytes of the token predicted at t, 0 where nothing is."""

    batch: Batch
    target_bytes_BT: np.ndarray


class TextEvaluation:
    """Held-out pieces of every source that the text streams train on: at most `rows` a source, evenly spread over its text."""

    def __init__(self, data: DataConfig, model: ModelConfig, pack: Pack, rows: int) -> None:
        self._data, self._vision, self._pack = data, model.vision, pack
        self.tokenizer = load_tokenizer(data, model)
        streams = [stream for stream in data.streams if stream.kind == "text"]
        trained = {source for stream in streams for source in stream_sources(pack, stream)}
        self.sources = tuple(source for source in pack.text_sources if source in trained)
        text = tokenize(pack, self.tokenizer) if trained else None
        self.pieces: dict[str, list[np.ndarray]] = {}
        for source in self.sources:
            pieces = []
            for index in pack.documents("heldout", [source]):
                tokens = np.concatenate([[self.tokenizer.bos], text.document(index)])
                pieces += [tokens[start : start + data.sequence_length] for start in range(0, len(tokens) - 1, data.sequence_length - 1)]
            chosen = np.unique(np.linspace(0, len(pieces) - 1, min(rows, len(pieces))).round().astype(int))
            self.pieces[source] = [pieces[i] for i in chosen]

    def batches(self, rows: int) -> Iterator[TextBatch]:
        """All pieces, one a row, in batches of `rows`; the last one ends in empty rows. Pictures: one empty sequence."""
        todo = [(self._pack.sources.index(source), piece) for source in self.sources for piece in self.pieces[source]]
        for first in range(0, len(todo), rows):
            filled = Rows(rows, self._data.sequence_length, pad=self.tokenizer.pad)
            target_bytes_BT = np.zeros(filled.tokens_BT.shape, np.int32)
            for row, (source, piece) in enumerate(todo[first : first + rows]):
                weights = np.ones(len(piece), np.float32)
                weights[-1] = 0
                filled.add(row, piece, weights, source)
                target_bytes_BT[row, : len(piece) - 1] = self.tokenizer.byte_lengths[piece[1:]]
            batch = to_batch(filled, VisionPacker(1, self._vision) if self._vision else None)
            check_batch(batch, self._vision)
            yield TextBatch(batch, target_bytes_BT)

    def baselines(self) -> dict[str, dict[str, float]]:
        """{source: {"byte_unigram": bits, "byte_bigram": bits}} per byte, on the pieces; learned from the training text of all sources."""
        documents = (self._pack.document(index).encode() for index in self._pack.documents("train", self.sources))
        counts = ByteCounts.of(documents)
        found = {}
        for source in self.sources:
            passages = [
                Passage(self.tokenizer.text_bytes(piece[:1]), self.tokenizer.text_bytes(piece[1:])) for piece in self.pieces[source]
            ]
            found[source] = {
                "byte_unigram": unigram_bits_per_byte(counts, passages),
                "byte_bigram": bigram_bits_per_byte(counts, passages),
            }
        return found
