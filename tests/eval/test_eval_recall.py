"""Index quality of a real layer: KL as the model reports it, one at the oracle's ids, and chance at random ids."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx

from msa_jax.config import Experiment
from msa_jax.data.batch import Batch
from msa_jax.data.pack import Pack
from msa_jax.data.text_evaluation import TextEvaluation
from msa_jax.eval.forward import Forward
from msa_jax.eval.recall import layer_sums
from msa_jax.train.state import TrainState
from pallas_kernels.index_kl.api import index_kl

MSA = 1  # the model's MSA layer
ROWS = 4


@pytest.fixture(scope="module")
def batch(experiment: Experiment, pack: Pack) -> Batch:
    return next(TextEvaluation(experiment.data, experiment.model, pack, experiment.eval.text_rows).batches(ROWS)).batch


@pytest.fixture(scope="module")
def heads(forward: Forward, state: TrainState, batch: Batch) -> tuple[np.ndarray, ...]:
    """The MSA layer's q, k, iq, ik."""
    graphdef, params = forward.block(state, MSA)

    @jax.jit
    def project(params: nnx.State, hidden_BTD: jax.Array) -> tuple[jax.Array, ...]:
        block = nnx.merge(graphdef, params)
        x_BTD, positions = block.attention_norm(hidden_BTD), jnp.asarray(batch.positions_BT)
        return *block.attention.main(x_BTD, positions)[:2], *block.attention.index(x_BTD, positions)

    return tuple(np.asarray(value) for value in project(params, forward(state, batch).hidden_XBTD[MSA]))


@pytest.fixture(scope="module")
def dense_mass(heads: tuple[np.ndarray, ...], batch: Batch, experiment: Experiment) -> np.ndarray:
    """[B, K, T, J] by loops over queries: the layer's own q and k, softmax over the prefix, mean over the group."""
    (q, k, *_), config = heads, experiment.model.attention
    length, size, group = batch.tokens_BT.shape[1], config.block_size, config.num_heads // config.num_kv_heads
    mass = np.zeros((ROWS, config.num_kv_heads, length, length // size))
    for row in range(ROWS):
        for head in range(config.num_heads):
            scores = q[row, :, head] @ k[row, :, head // group].T / np.sqrt(config.head_dim)
            for t in np.flatnonzero(batch.segments_BT[row]):
                p = np.exp(scores[t, : t + 1] - scores[t, : t + 1].max())
                np.add.at(mass[row, head // group, t], np.arange(t + 1) // size, p / p.sum() / group)
    return mass


def with_ids(forward: Forward, state: TrainState, batch: Batch, ids_BKTR: np.ndarray) -> dict[str, float]:
    """Means of a batch when the layer had selected `ids_BKTR`."""
    sums = jax.device_get(layer_sums(*forward.block(state, MSA), forward(state, batch).hidden_XBTD[MSA], ids_BKTR, batch))
    queries = sums.pop("queries")
    return {name: float(value / queries) for name, value in sums.items()} | {"queries": float(queries)}


def counted(batch: Batch, experiment: Experiment) -> np.ndarray:
    config = experiment.model.attention
    return (batch.positions_BT // config.block_size + 1 > config.num_blocks) & (batch.segments_BT > 0)


def test_the_oracles_ids_score_one(
    forward: Forward, state: TrainState, batch: Batch, experiment: Experiment, dense_mass: np.ndarray
) -> None:
    count = experiment.model.attention.num_blocks
    best = np.argsort(-dense_mass, axis=-1, kind="stable")[..., :count].astype(np.int32)
    values = with_ids(forward, state, batch, best)
    assert values["queries"] == counted(batch, experiment).sum() > 100
    assert values["block_recall"] == pytest.approx(1, abs=1e-3)
    assert values["relative_mass"] == pytest.approx(1, abs=1e-5)
    at = counted(batch, experiment)
    captured = np.sort(dense_mass, axis=-1)[..., -count:].sum(-1).mean(1)[at].mean()
    assert values["captured_mass"] == pytest.approx(captured, rel=1e-4)


def test_random_ids_score_chance(forward: Forward, state: TrainState, batch: Batch, experiment: Experiment) -> None:
    config, rng = experiment.model.attention, np.random.default_rng(0)
    ids = np.full((ROWS, config.num_kv_heads, batch.tokens_BT.shape[1], config.num_blocks), -1, np.int32)
    for row, head, t in np.ndindex(ids.shape[:3]):
        local = batch.positions_BT[row, t] // config.block_size
        earlier = rng.permutation(local)[: config.num_blocks - 1]
        ids[row, head, t, : len(earlier) + 1] = [*earlier, local]
    values = with_ids(forward, state, batch, ids)
    for name in ("block_recall", "captured_mass", "relative_mass"):
        for suffix in ("", "_without_local"):
            assert values[name + suffix] == pytest.approx(values[name + suffix + "_random"], abs=0.02)


def test_the_models_own_ids_by_loops(
    forward: Forward, state: TrainState, batch: Batch, experiment: Experiment, dense_mass: np.ndarray
) -> None:
    ids = np.asarray(forward(state, batch).ids_XBKTR[MSA])
    values, count = with_ids(forward, state, batch, ids), experiment.model.attention.num_blocks
    recall, captured, relative = [], [], []
    for row, t in np.argwhere(counted(batch, experiment)):
        for head in range(ids.shape[1]):
            mass, chosen = dense_mass[row, head, t], set(ids[row, head, t].tolist()) - {-1}
            oracle = set(np.argsort(-mass, kind="stable")[:count].tolist())
            common = sorted(oracle & chosen)
            recall.append(len(common) / count)
            captured.append(mass[sorted(chosen)].sum())
            relative.append(mass[common].sum() / mass[sorted(oracle)].sum())
    found = [values[name] for name in ("block_recall", "captured_mass", "relative_mass")]
    np.testing.assert_allclose(found, [np.mean(recall), np.mean(captured), np.mean(relative)], rtol=2e-3)


def test_rows_in_which_every_query_keeps_all_it_sees_give_the_kl_only(forward: Forward, state: TrainState, batch: Batch) -> None:
    output = forward(state, batch)
    short = jax.tree.map(lambda leaf: leaf[:, :32], batch._replace(vision=None))  # R * C = 32
    sums = layer_sums(*forward.block(state, MSA), output.hidden_XBTD[MSA, :, :32], output.ids_XBKTR[MSA, :, :, :32], short)
    assert set(sums) == {"queries", "tokens", "kl_selected", "kl_full_prefix"}
    assert float(sums["queries"]) == 0
    assert float(sums["kl_selected"]) == pytest.approx(float(sums["kl_full_prefix"]), rel=1e-5)


def test_kl_is_the_definitions(
    heads: tuple[np.ndarray, ...], forward: Forward, state: TrainState, batch: Batch, experiment: Experiment
) -> None:
    output = forward(state, batch)
    sums = layer_sums(*forward.block(state, MSA), output.hidden_XBTD[MSA], output.ids_XBKTR[MSA], batch)
    assert float(sums["tokens"]) == (batch.segments_BT > 0).sum()
    q, k, iq, ik = heads
    documents = {"segments": batch.segments_BT, "positions": batch.positions_BT, "weights_BT": (batch.segments_BT > 0).astype(np.float32)}
    definition = jax.jit(
        lambda ids: index_kl(iq, ik, q, k, ids, block_size=experiment.model.attention.block_size, implementation="reference", **documents)
    )
    for name, ids in (("kl_selected", output.ids_XBKTR[MSA]), ("kl_full_prefix", None)):
        assert float(sums[name] / sums["tokens"]) == pytest.approx(float(definition(ids)), rel=1e-4)
    assert sums["kl_selected"] != sums["kl_full_prefix"]
