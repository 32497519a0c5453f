"""Does the index find the blocks that dense attention would read? By MSA layer, on held-out text.

The dense attention is that of the layer's own q and k on the layer's own input, softmax over the whole prefix, averaged over
the G heads of a group. Only queries that see more than R blocks count: the others keep every block they see, and would score 1
whatever the index does. So rows should hold documents longer than R * C tokens.
"""

import functools
from collections.abc import Iterator

import jax
import jax.numpy as jnp
from flax import nnx
from jaxtyping import Array

from msa_jax.config import Experiment, MsaConfig
from msa_jax.data.batch import Batch
from msa_jax.data.pack import Pack
from msa_jax.data.text_evaluation import TextEvaluation
from msa_jax.eval.attention import attention_probabilities, block_mass, chosen_blocks, visible_blocks, visible_keys
from msa_jax.eval.forward import Forward
from msa_jax.eval.index_quality import index_quality, kept_unasked, random_choice
from msa_jax.model.block import KINDS
from msa_jax.train.state import TrainState


class IndexQuality:
    """For each MSA layer i; msa_jax/eval/index_quality.py defines the measures. Means over queries and KV heads.

    index/block_recall/layer_i      also captured_mass, relative_mass, and each of them `_without_local`
    index/block_recall_random/...   the same of random blocks beside the local one, exactly: the chance level
    index/kl_selected/layer_i       KL(teacher || index) on the selected support, nats a token, over all tokens
    index/kl_full_prefix/layer_i    the same on the whole prefix, as in warm-up
    index/queries                   queries with more than R visible blocks; with 0 of them only the KLs are given
    """

    name = "index"

    def __init__(self, experiment: Experiment, pack: Pack, forward: Forward, rows: int) -> None:
        """`rows` are evaluated at once. Raises ConfigError where data, model and pack do not fit together."""
        self._text = TextEvaluation(experiment.data, experiment.model, pack, experiment.eval.text_rows)
        self._forward, self._rows = forward, rows
        self._layers = [i for i, kind in enumerate(experiment.model.layer_kinds) if KINDS[kind].has_index]

    def run(self, state: TrainState) -> Iterator[tuple[str, float]]:
        blocks = {i: self._forward.block(state, i) for i in self._layers}
        parts = []
        for text in self._text.batches(self._rows):
            output = self._forward(state, text.batch)
            parts.append({i: layer_sums(*block, output.hidden_XBTD[i], output.ids_XBKTR[i], text.batch) for i, block in blocks.items()})
        totals = jax.tree.map(lambda *values: float(sum(values)), *jax.device_get(parts))
        for i, sums in totals.items():
            queries, tokens = sums.pop("queries"), sums.pop("tokens")
            for name in ("kl_selected", "kl_full_prefix"):
                yield f"index/{name}/layer_{i}", sums.pop(name) / tokens
            if queries:
                yield from ((f"index/{name}/layer_{i}", value / queries) for name, value in sums.items())
        yield "index/queries", queries


@functools.partial(jax.jit, static_argnums=0)
def layer_sums(graphdef: nnx.GraphDef, params: nnx.State, hidden_BTD: Array, ids_BKTR: Array, batch: Batch) -> dict[str, Array]:
    """Sums over a batch: of each measure over counted queries (mean over KV heads), of both KLs over tokens, and both counts."""
    block = nnx.merge(graphdef, params)
    attention, config = block.attention, block.attention.config
    x_BTD = block.attention_norm(hidden_BTD)
    segments_BT, positions_BT = jnp.asarray(batch.segments_BT), jnp.asarray(batch.positions_BT)
    q_BTNH, k_BTKH, _ = attention.main(x_BTD, positions_BT)
    by_row = jax.lax.map(lambda row: _row_sums(config, *row), (q_BTNH, k_BTKH, ids_BKTR, segments_BT, positions_BT))
    sums = jax.tree.map(lambda values_B: values_B.sum(0), by_row)
    for name, phase in (("kl_selected", "sparse"), ("kl_full_prefix", "warmup")):
        _, aux = attention(x_BTD, segments_BT, positions_BT, phase)
        sums |= {name: aux.kl * aux.tokens, "tokens": aux.tokens}
    return sums


def _row_sums(config: MsaConfig, q_TNH: Array, k_TKH: Array, ids_KTR: Array, segments_T: Array, positions_T: Array) -> dict[str, Array]:
    seen_TJ = visible_blocks(segments_T, positions_T, config.block_size)
    dense_NTS = attention_probabilities(q_TNH, k_TKH, visible_keys(segments_T, positions_T)[None])
    group_KTS = dense_NTS.reshape(config.num_kv_heads, -1, *dense_NTS.shape[1:]).mean(1)
    mass_KTJ = block_mass(group_KTS, positions_T, seen_TJ.shape[1], config.block_size)
    kept_TJ = kept_unasked(seen_TJ, config.local_blocks, config.init_blocks)
    counted_T = seen_TJ.sum(1) > config.num_blocks
    sums = {"queries": counted_T.sum(dtype=jnp.float32)}
    if seen_TJ.shape[1] <= config.num_blocks:  # rows too short for any query to count
        return sums
    chosen_KTJ = chosen_blocks(ids_KTR, seen_TJ).astype(jnp.float32)
    random_KTJ = jnp.broadcast_to(random_choice(seen_TJ, kept_TJ, config.num_blocks), chosen_KTJ.shape)
    for suffix, choice_KTJ in (("", chosen_KTJ), ("_random", random_KTJ)):
        values = index_quality(mass_KTJ, choice_KTJ, seen_TJ, kept_TJ, config.num_blocks, config.local_blocks + config.init_blocks)
        sums |= {name + suffix: (value_KT.mean(0) * counted_T).sum() for name, value_KT in values.items()}
    return sums
