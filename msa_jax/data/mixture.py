"""The joint mixture: batch n is a function of the configuration, the pack, the seed and n, and of nothing else.

Each stream has its own endless order of rows, shuffled anew every epoch, which the other streams do not touch: adding pictures
leaves the text rows as they were, row for row.
"""

import hashlib
from typing import Any

import grain
import numpy as np

from msa_jax.config import ConfigError, DataConfig, ModelConfig, StreamConfig
from msa_jax.data import tokenizer as tokenizers
from msa_jax.data.batch import Batch, check_batch
from msa_jax.data.captions import CaptionDocuments
from msa_jax.data.pack import Pack
from msa_jax.data.packing import Rows, plan_cut, plan_whole
from msa_jax.data.text import TokenizedText, tokenize
from msa_jax.data.tokenizer import Tokenizer
from msa_jax.data.vision import VisionPacker

Counts = dict[str, int]


class TextRows:
    """Training documents of some sources, cut into rows: <bos> text <eos>, the last token of a piece predicts nothing."""

    def __init__(self, pack: Pack, text: TokenizedText, tokenizer: Tokenizer, data: DataConfig, sources: list[str], seed: int) -> None:
        chosen = pack.documents("train", sources)
        self._documents = [np.concatenate([[tokenizer.bos], text.document(i), [tokenizer.eos]]).astype(np.int32) for i in chosen]
        self._sources = pack.document_sources[chosen]
        lengths = [len(document) for document in self._documents]
        self._rows = plan_cut(lengths, data.sequence_length, np.random.default_rng(seed), align=data.align_documents)

    def __len__(self) -> int:
        return len(self._rows)

    def write(self, rows: Rows, row: int, index: int) -> None:
        for document, start, length in self._rows[index]:
            weights = np.ones(length, np.float32)
            weights[-1] = 0
            rows.add(row, self._documents[document][start : start + length], weights, int(self._sources[document]))


class PictureRows:
    """Training pictures of some sources with their captions, several to a row."""

    def __init__(self, documents: CaptionDocuments, data: DataConfig, sources: list[str], seed: int) -> None:
        self._documents = documents
        self._pictures = np.random.default_rng(seed).permutation(documents.pack.picture_ids("train", sources))
        lengths = documents.lengths[self._pictures]
        self._rows = plan_whole(lengths, data.sequence_length, documents.most_a_row, align=data.align_documents)

    def __len__(self) -> int:
        return len(self._rows)

    def write(self, rows: Rows, row: int, index: int, packer: VisionPacker) -> None:
        for document in self._rows[index]:
            self._documents.write(rows, row, packer, int(self._pictures[document]))


class Mixture:
    """All streams of a configuration. `batch(n)` is batch n, with its exact token counts."""

    def __init__(self, data: DataConfig, model: ModelConfig, pack: Pack, seed: int, microbatches: int = 1) -> None:
        """Raises ConfigError for a vocabulary that is too small, unknown sources or documents that do not fit."""
        self.data, self.vision, self.microbatches = data, model.vision, microbatches
        self.tokenizer = load_tokenizer(data, model)
        self._text_sources = len(pack.text_sources)
        kinds = {stream.kind for stream in data.streams}
        text = tokenize(pack, self.tokenizer) if "text" in kinds else None
        self._captions = CaptionDocuments(pack, self.tokenizer, data, model.vision) if "captions" in kinds else None
        self._rows: dict[str, Any] = {}
        self._orders: dict[str, grain.MapDataset] = {}
        for stream in data.streams:
            own_seed = stream_seed(seed, stream.name)
            sources = stream_sources(pack, stream)
            if stream.kind == "text":
                rows = TextRows(pack, text, self.tokenizer, data, sources, own_seed)
            else:
                rows = PictureRows(self._captions, data, sources, own_seed)
            if not len(rows):
                raise ConfigError(f"StreamConfig {stream.name!r}: the training split of {sources} is empty")
            self._rows[stream.name] = rows
            self._orders[stream.name] = grain.MapDataset.range(len(rows)).seed(own_seed).shuffle().repeat()

    def batch(self, step: int) -> tuple[Batch, Counts]:
        """Batch of step n. Microbatch i owns rows i*B/m .. and vision sequences i*V/m ..; streams are spread evenly over them."""
        m = self.microbatches
        streams = sorted(self.data.streams, key=lambda stream: stream.kind == "captions")  # pictures together, to be dealt out evenly
        wanted = [(stream, stream.skip_rows + rows_before(stream, step) + i) for stream in streams for i in range(stream.rows_at(step))]
        assert len(wanted) % m == 0, f"{len(wanted)} rows cannot be dealt out to {m} microbatches"
        rows = Rows(len(wanted), self.data.sequence_length, pad=self.tokenizer.pad, align=self.data.align_documents)
        packer, share = self._packer(step)
        for microbatch in range(m):
            if packer:
                packer.restrict(microbatch * share, (microbatch + 1) * share)
            for place, (stream, number) in enumerate(wanted[microbatch::m], microbatch * len(wanted) // m):
                index = self._orders[stream.name][number]
                if stream.kind == "text":
                    self._rows[stream.name].write(rows, place, index)
                else:
                    self._rows[stream.name].write(rows, place, index, packer)
                rows.loss_weights_BT[place] *= stream.loss_weight
        batch = to_batch(rows, packer)
        check_batch(batch, self.vision)
        return batch, count_tokens(batch, self._text_sources)

    def _packer(self, step: int) -> tuple[VisionPacker | None, int]:
        """Empty vision sequences for a step and how many of them each microbatch owns."""
        if self.vision is None:
            return None, 0
        rows = sum(stream.rows_at(step) for stream in self.data.streams if stream.kind == "captions")
        share = self._captions.sequences(-(-rows // self.microbatches)) if self._captions else 1
        return VisionPacker(share * self.microbatches, self.vision), share


def load_tokenizer(data: DataConfig, model: ModelConfig) -> Tokenizer:
    """The configured tokenizer. Raises ConfigError where the model has fewer embeddings than it has tokens."""
    tokenizer = tokenizers.load(data.tokenizer)
    if model.vocab_size < tokenizer.vocab_size:
        raise ConfigError(
            f"model.vocab_size={model.vocab_size} is smaller than the {tokenizer.vocab_size} entries of tokenizer {data.tokenizer!r}"
        )
    return tokenizer


def stream_sources(pack: Pack, stream: StreamConfig) -> list[str]:
    """The sources of a stream; all of its kind by default. Raises ConfigError for one that the pack does not have."""
    known = pack.text_sources if stream.kind == "text" else pack.picture_source_names
    unknown = [source for source in stream.sources if source not in known]
    if unknown:
        raise ConfigError(f"StreamConfig {stream.name!r}: sources {unknown} are not in pack {pack.name!r}; of this kind are {list(known)}")
    return list(stream.sources or known)


def stream_seed(seed: int, name: str) -> int:
    """A stream's own seed: it depends on the stream's name and not on which others there are."""
    return int.from_bytes(hashlib.sha256(f"{seed}/{name}".encode()).digest()[:4], "big")


def rows_before(stream: StreamConfig, step: int) -> int:
    """Rows that the stream's schedule has used before this step."""
    ends = [*(start for start, _ in stream.rows[1:]), step]
    return sum(max(0, min(end, step) - start) * rows for (start, rows), end in zip(stream.rows, ends, strict=True))


def to_batch(rows: Rows, packer: VisionPacker | None) -> Batch:
    return Batch(
        tokens_BT=rows.tokens_BT,
        segments_BT=rows.segments_BT,
        positions_BT=rows.positions_BT,
        loss_weights_BT=rows.loss_weights_BT,
        sources_BT=rows.sources_BT,
        visual_index_BT=rows.visual_index_BT,
        vision=packer.batch if packer else None,
    )


def count_tokens(batch: Batch, text_sources: int) -> Counts:
    """Exact slots of a batch by what stands in them. `text_sources` of the pack's sources are text, the others pictures.

    text + caption + visual + padding = B * T; patches + patch_padding = V * L. `predicted` counts tokens with a loss.
    """
    real_BT, visual_BT = batch.segments_BT > 0, batch.visual_index_BT >= 0
    captioned_BT = batch.sources_BT >= text_sources
    patches = 0 if batch.vision is None else int((batch.vision.segments_VL > 0).sum())
    return {
        "text": int((real_BT & ~captioned_BT).sum()),
        "caption": int((captioned_BT & ~visual_BT).sum()),
        "visual": int(visual_BT.sum()),
        "padding": int((~real_BT).sum()),
        "predicted": int((batch.loss_weights_BT > 0).sum()),
        "patches": patches,
        "patch_padding": 0 if batch.vision is None else batch.vision.segments_VL.size - patches,
    }
