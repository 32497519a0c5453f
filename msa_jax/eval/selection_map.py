"""Which blocks a few queries of one long document of text and pictures selected, for the figure."""

from collections.abc import Iterator
from pathlib import Path

import numpy as np

from msa_jax.config import Experiment
from msa_jax.data.batch import Batch
from msa_jax.data.mixture import load_tokenizer
from msa_jax.eval.arrays import write_arrays
from msa_jax.eval.forward import Forward
from msa_jax.model.block import KINDS
from msa_jax.train.state import TrainState

QUERIES = 6


def shown_queries(visual_T: np.ndarray, text_T: np.ndarray, earliest: int) -> np.ndarray:
    """Positions to show, from `earliest` on: the first words of up to QUERIES / 2 captions, and other text evenly between them.

    visual_T, text_T: visual tokens and ordinary text; a caption's first word is the first text behind a picture.
    """
    text = np.flatnonzero(text_T)
    text = text[text >= earliest]
    pictures_before = np.cumsum(visual_T)[text]
    captions = text[np.flatnonzero(np.diff(pictures_before, prepend=pictures_before[:1]))]
    captions = _evenly(captions, QUERIES // 2)
    others = _evenly(np.setdiff1d(text, captions), QUERIES - len(captions))
    return np.sort(np.concatenate([captions, others]))


def _evenly(values: np.ndarray, count: int) -> np.ndarray:
    return values[np.unique(np.linspace(0, len(values) - 1, min(count, len(values))).round().astype(int))]


class SelectionMap:
    """Writes arrays/selection_map.npz; it has no values of its own.

    ids_XKTR     selected blocks of MSA layers, -1 = unused slot        layers_X     their places in the model
    tokens_T     the document, word by word                             visual_T     which tokens are pictures
    queries_Q    positions worth showing: those must choose             block_size   keys a block
    """

    name = "selection"

    def __init__(self, experiment: Experiment, forward: Forward, long: Batch, workdir: Path) -> None:
        """`long`: documents of `long_documents`, of which the first is shown."""
        attention = experiment.model.attention
        tokenizer = load_tokenizer(experiment.data, experiment.model)
        self._layers_X = np.array([i for i, kind in enumerate(experiment.model.layer_kinds) if KINDS[kind].has_index])
        real_T = long.segments_BT[0] > 0
        tokens_T, visual_T = long.tokens_BT[0][real_T], long.visual_index_BT[0][real_T] >= 0
        text_T = ~np.isin(tokens_T, tokenizer.special_ids)
        self._forward, self._long, self._real_T, self._workdir = forward, long, real_T, workdir
        self._document = {
            "layers_X": self._layers_X,
            "tokens_T": np.array([tokenizer.decode([token]) for token in tokens_T]),
            "visual_T": visual_T,
            "queries_Q": shown_queries(visual_T, text_T, attention.num_blocks * attention.block_size),
            "block_size": np.array(attention.block_size),
        }

    def run(self, state: TrainState) -> Iterator[tuple[str, float]]:
        ids_XKTR = np.asarray(self._forward(state, self._long).ids_XBKTR)[self._layers_X, 0][:, :, self._real_T]
        write_arrays(self._workdir, "selection_map", ids_XKTR=ids_XKTR, step=state.step, **self._document)
        return iter(())
