"""Held-out text: nats a token and exact bits a byte by source, beside what byte n-gram models reach on the same bytes."""

import math
from collections.abc import Iterator

import jax
import numpy as np

from msa_jax.config import Experiment
from msa_jax.data.pack import Pack
from msa_jax.data.text_evaluation import TextEvaluation
from msa_jax.eval.forward import Forward
from msa_jax.train.state import TrainState


class TextPerplexity:
    """For each source of the text streams:

    text/nats_per_token/plays           mean over scored tokens
    text/bits_per_byte/plays            nats / ln 2 / bytes of the scored tokens
    text/unigram_bits_per_byte/plays    of a byte-unigram model of the training text; also bigram
    text/bytes/plays                    bytes that were scored
    """

    name = "text"

    def __init__(self, experiment: Experiment, pack: Pack, forward: Forward, rows: int) -> None:
        """`rows` are evaluated at once. Raises ConfigError where data, model and pack do not fit together."""
        self._text = TextEvaluation(experiment.data, experiment.model, pack, experiment.eval.text_rows)
        self._all_sources, self._forward, self._rows = pack.sources, forward, rows
        self._baselines = self._text.baselines()

    def run(self, state: TrainState) -> Iterator[tuple[str, float]]:
        parts = []
        for text in self._text.batches(self._rows):
            output = self._forward(state, text.batch)
            parts.append((text.batch.sources_BT, (output.nats_BT, output.weights_BT, text.target_bytes_BT)))
        totals_3S = np.zeros((3, len(self._all_sources)))  # nats, tokens, bytes
        for sources_BT, values in parts:
            scored = sources_BT >= 0
            for total_S, value_BT in zip(totals_3S, jax.device_get(values), strict=True):
                total_S += np.bincount(sources_BT[scored], value_BT[scored], len(total_S))
        for source in self._text.sources:
            nats, tokens, size = totals_3S[:, self._all_sources.index(source)].tolist()
            yield f"text/nats_per_token/{source}", nats / tokens
            yield f"text/bits_per_byte/{source}", nats / math.log(2) / size
            yield f"text/unigram_bits_per_byte/{source}", self._baselines[source]["byte_unigram"]
            yield f"text/bigram_bits_per_byte/{source}", self._baselines[source]["byte_bigram"]
            yield f"text/bytes/{source}", size
