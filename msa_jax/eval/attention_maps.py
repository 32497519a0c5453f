"""Do text tokens attend to pictures, and does the index find them? Lift by layer and head, and a map of the selection.

Two kinds of rows: captioned pictures as in training, one a document, which are shorter than R blocks; and long documents of
text and pictures, in which MSA layers must select. The attention is what the layer really uses: dense layers the whole prefix,
MSA layers the selected blocks.
"""

import functools
from collections.abc import Iterator
from pathlib import Path

import jax
import jax.numpy as jnp
import numpy as np
from flax import nnx
from jaxtyping import Array

from msa_jax.config import Experiment
from msa_jax.data.batch import Batch
from msa_jax.data.mixture import load_tokenizer
from msa_jax.data.pack import Pack
from msa_jax.data.picture_evaluation import PictureEvaluation
from msa_jax.eval.arrays import write_arrays
from msa_jax.eval.attention import attention_probabilities, chosen_blocks, keys_of_blocks, visible_blocks, visible_keys
from msa_jax.eval.forward import Forward
from msa_jax.eval.lift import TEXT, VISUAL, block_shares, lift, separation, sinks
from msa_jax.eval.long_documents import held_out_pictures
from msa_jax.model.block import Block
from msa_jax.train.state import TrainState

_LEAST_LIFT = 1e-3  # keeps the geometric mean over heads finite where a head never looks at a picture


class AttentionMaps:
    """For each layer i; msa_jax/eval/lift.py defines lift and separation. Writes arrays/lift.npz.

    attention/lift/layer_i               text queries on visual keys, geometric mean over heads; one picture a document
    attention/lift_long/layer_i          the same in long documents
    attention/separation/layer_i         in long documents, mean over heads

    and in long documents, for text queries of MSA layers that see more than R blocks, the share of pictures in

    attention/visual_visible/layer_i     the keys that the query sees
    attention/visual_index/layer_i       the index's probability mass over them, before selection
    attention/visual_selected/layer_i    the keys of the selected blocks
    attention/visual_attention/layer_i   the attention mass after selection
    """

    name = "attention"

    def __init__(self, experiment: Experiment, pack: Pack, forward: Forward, long: Batch, workdir: Path) -> None:
        """`long`: documents of `long_documents`; as many rows of captioned pictures are looked at."""
        ids = held_out_pictures(experiment, pack)
        pictures = PictureEvaluation(experiment.data, experiment.model, pack)
        self._short = next(iter(pictures.batches(ids, ids, len(long.tokens_BT)))).batch
        self._long, self._forward, self._workdir = long, forward, workdir
        self._num_layers = experiment.model.num_layers
        self._special = load_tokenizer(experiment.data, experiment.model).special_ids

    def run(self, state: TrainState) -> Iterator[tuple[str, float]]:
        short, long = self._sums(state, self._short), self._sums(state, self._long)
        lift_X22N, long_X22N = _lifts(short), _lifts(long)
        maps = {"lift": lift_X22N[:, TEXT, VISUAL], "lift_long": long_X22N[:, TEXT, VISUAL]}
        write_arrays(
            self._workdir, "lift", lift_XN=maps["lift"], lift_long_XN=maps["lift_long"], lift_long_X22N=long_X22N,
            layers_X=np.arange(len(long)), step=state.step,
        )  # fmt: skip
        for i, sums in enumerate(long):
            for name, lift_XN in maps.items():
                yield f"attention/{name}/layer_{i}", float(np.exp(np.log(np.maximum(lift_XN[i], _LEAST_LIFT)).mean()))
            yield f"attention/separation/layer_{i}", float(separation(long_X22N[i]).mean())
            if sums.get("queries"):
                for name in ("visible", "index", "selected", "attention"):
                    yield f"attention/visual_{name}/layer_{i}", float(sums[f"visual_{name}"] / sums["queries"])

    def _sums(self, state: TrainState, batch: Batch) -> list[dict[str, np.ndarray]]:
        output = self._forward(state, batch)
        sums = [
            layer_sums(*self._forward.block(state, i), self._special, output.hidden_XBTD[i], output.ids_XBKTR[i], batch)
            for i in range(self._num_layers)
        ]
        return jax.device_get(sums)


def _lifts(layers: list[dict[str, np.ndarray]]) -> np.ndarray:
    """[layer, query kind, key kind, head]"""
    return np.stack([lift(sums["mass_22N"], sums["keys_22N"]) for sums in layers])


@functools.partial(jax.jit, static_argnums=(0, 2))
def layer_sums(
    graphdef: nnx.GraphDef, params: nnx.State, special: tuple[int, ...], hidden_BTD: Array, ids_BKTR: Array, batch: Batch
) -> dict[str, Array]:
    """Sums over the rows of a batch of what `AttentionMaps` divides. `special`: ids of special tokens."""
    block = nnx.merge(graphdef, params)
    tokens_BT, segments_BT, positions_BT = (jnp.asarray(x) for x in (batch.tokens_BT, batch.segments_BT, batch.positions_BT))
    x_BTD = block.attention_norm(hidden_BTD)
    special_BT = jnp.isin(tokens_BT, jnp.array(special))
    visual_BT = jnp.asarray(batch.visual_index_BT) >= 0
    heads = block.attention.main(x_BTD, positions_BT)[:2]
    index = block.attention.index(x_BTD, positions_BT) if block.attention.has_index else ()
    by_row = jax.lax.map(
        lambda row: _row_sums(block, *row), (heads, index, ids_BKTR, segments_BT, positions_BT, visual_BT, special_BT & ~visual_BT)
    )
    return jax.tree.map(lambda values_B: values_B.sum(0), by_row)


def _row_sums(
    block: Block,
    heads: tuple[Array, Array],
    index: tuple[Array, ...],
    ids_KTR: Array,
    segments_T: Array,
    positions_T: Array,
    visual_T: Array,
    special_T: Array,
) -> dict[str, Array]:
    config = block.attention.config
    visible_TS = visible_keys(segments_T, positions_T)
    seen_TJ = visible_blocks(segments_T, positions_T, config.block_size)
    support = visible_TS[None]
    if block.attention.has_index:
        support = keys_of_blocks(chosen_blocks(ids_KTR, seen_TJ), visible_TS, positions_T, config.block_size)
    used_NTS = attention_probabilities(*heads, support)
    kinds_2T = jnp.stack([(segments_T > 0) & ~visual_T & ~special_T, visual_T])
    mass_22N, keys_22N, _ = block_shares(used_NTS, visible_TS, kinds_2T, sinks(used_NTS, segments_T, special_T))
    sums = {"mass_22N": mass_22N, "keys_22N": keys_22N}
    if block.attention.has_index:
        iq_TKI, ik_TI = index
        counted_T = kinds_2T[TEXT] & (seen_TJ.sum(1) > config.num_blocks)
        spreads = {
            "visible": _even(visible_TS[None]),
            "index": attention_probabilities(iq_TKI, ik_TI[:, None], visible_TS[None]),
            "selected": _even(support),
            "attention": used_NTS,
        }
        sums |= {f"visual_{name}": (jnp.where(visual_T, spread, 0.0).sum(-1).mean(0) * counted_T).sum() for name, spread in spreads.items()}
        sums["queries"] = counted_T.sum(dtype=jnp.float32)
    return sums


def _even(keys: Array) -> Array:
    """The same probability for each of a query's keys."""
    return keys / jnp.maximum(keys.sum(-1, keepdims=True), 1)
