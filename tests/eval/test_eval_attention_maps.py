"""Attention between text and pictures in real layers, against loops in numpy."""

from pathlib import Path

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx

from msa_jax.config import Experiment
from msa_jax.data.batch import Batch
from msa_jax.data.mixture import load_tokenizer
from msa_jax.data.pack import Pack
from msa_jax.eval.attention_maps import AttentionMaps, layer_sums
from msa_jax.eval.forward import Forward
from msa_jax.eval.lift import TEXT, VISUAL
from msa_jax.eval.long_documents import long_documents
from msa_jax.train.state import TrainState


@pytest.fixture(scope="module")
def long(experiment: Experiment, pack: Pack) -> Batch:
    return long_documents(experiment, pack, 4)


def heads_of(forward: Forward, state: TrainState, long: Batch, layer: int) -> tuple[np.ndarray, ...]:
    """q, k and, for MSA layers, iq, ik."""
    graphdef, params = forward.block(state, layer)

    @jax.jit
    def project(params: nnx.State, hidden_BTD: jax.Array) -> tuple[jax.Array, ...]:
        block = nnx.merge(graphdef, params)
        x_BTD, positions = block.attention_norm(hidden_BTD), jnp.asarray(long.positions_BT)
        index = block.attention.index(x_BTD, positions) if block.attention.has_index else ()
        return *block.attention.main(x_BTD, positions)[:2], *index

    return tuple(np.asarray(x) for x in project(params, forward(state, long).hidden_XBTD[layer]))


def softmax(scores: np.ndarray) -> np.ndarray:
    weights = np.exp(scores - scores.max())
    return weights / weights.sum()


def test_shares_of_pictures_by_loops(experiment: Experiment, forward: Forward, state: TrainState, long: Batch) -> None:
    config, special = experiment.model.attention, load_tokenizer(experiment.data, experiment.model).special_ids
    q, k, iq, ik = heads_of(forward, state, long, 1)
    ids = np.asarray(forward(state, long).ids_XBKTR[1])
    totals, queries = dict.fromkeys(("visible", "index", "selected", "attention"), 0.0), 0
    visual_BT = long.visual_index_BT >= 0
    for row, length in enumerate((long.segments_BT > 0).sum(1)):
        for t in range(config.num_blocks * config.block_size, length):
            if visual_BT[row, t] or long.tokens_BT[row, t] in special:
                continue
            queries += 1
            visual = visual_BT[row, : t + 1]
            totals["visible"] += visual.mean()
            for head in range(config.num_kv_heads):
                kept = np.isin(np.arange(t + 1) // config.block_size, ids[row, head, t])
                scores = ik[row, : t + 1] @ iq[row, t, head] / np.sqrt(config.index_dim)
                totals["index"] += softmax(scores)[visual].sum() / config.num_kv_heads
                totals["selected"] += visual[kept].mean() / config.num_kv_heads
                for member in range(2):
                    scores = k[row, : t + 1, head] @ q[row, t, 2 * head + member] / np.sqrt(config.head_dim)
                    totals["attention"] += softmax(np.where(kept, scores, -np.inf))[visual].sum() / config.num_heads
    output = forward(state, long)
    sums = layer_sums(*forward.block(state, 1), special, output.hidden_XBTD[1], output.ids_XBKTR[1], long)
    assert float(sums["queries"]) == queries > 20
    for name, total in totals.items():
        assert float(sums[f"visual_{name}"]) == pytest.approx(total, rel=1e-4), name


def test_mass_of_a_dense_layer_by_loops(experiment: Experiment, forward: Forward, state: TrainState, long: Batch) -> None:
    """Text queries on visual keys, one head: sinks are <bos>, picture marks and the one most attended key of the row."""
    config, special = experiment.model.attention, load_tokenizer(experiment.data, experiment.model).special_ids
    q, k = heads_of(forward, state, long, 0)
    output = forward(state, long)
    sums = layer_sums(*forward.block(state, 0), special, output.hidden_XBTD[0], output.ids_XBKTR[0], long)
    head, mass, keys = 3, 0.0, 0.0
    for row, length in enumerate((long.segments_BT > 0).sum(1)):
        p = np.zeros((length, length))
        for t in range(length):
            p[t, : t + 1] = softmax(k[row, : t + 1, head // 2] @ q[row, t, head] / np.sqrt(config.head_dim))
        visual = long.visual_index_BT[row, :length] >= 0
        mark = np.isin(long.tokens_BT[row, :length], special) & ~visual
        removed = mark.copy()
        removed[[0, p.sum(0).argmax()]] = True
        for t in np.flatnonzero(~visual & ~mark):
            on = visual[: t + 1] & ~removed[: t + 1]
            off = ~visual[: t + 1] & ~removed[: t + 1]
            if on.any() and off.any():
                mass += p[t, : t + 1][on].sum() / p[t, : t + 1][on | off].sum()
                keys += on.sum() / (on | off).sum()
    assert float(sums["mass_22N"][TEXT, VISUAL, head]) == pytest.approx(mass, rel=1e-4)
    assert float(sums["keys_22N"][TEXT, VISUAL, head]) == pytest.approx(keys, rel=1e-4)


def test_arrays_for_the_figure(
    experiment: Experiment, pack: Pack, forward: Forward, state: TrainState, long: Batch, tmp_path: Path
) -> None:
    values = dict(AttentionMaps(experiment, pack, forward, long, tmp_path).run(state))
    with np.load(tmp_path / "arrays" / "lift.npz", allow_pickle=False) as arrays:
        assert arrays["lift_XN"].shape == arrays["lift_long_XN"].shape == (2, 4)
        assert arrays["layers_X"].tolist() == [0, 1]
        np.testing.assert_array_equal(arrays["lift_long_X22N"][:, TEXT, VISUAL], arrays["lift_long_XN"])
        for i in (0, 1):
            assert values[f"attention/lift/layer_{i}"] == pytest.approx(np.exp(np.log(arrays["lift_XN"][i]).mean()), rel=1e-5)
    assert "attention/visual_index/layer_0" not in values, "a dense layer has no index"
