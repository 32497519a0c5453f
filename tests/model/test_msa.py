"""The MSA layer: equal to its definition written out in numpy, to dense attention where it must be, and to itself under every
transformation; nothing leaks through masks, selections or losses."""

import dataclasses
from collections.abc import Callable

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx

from msa_jax.config import MsaConfig
from msa_jax.model.dense import DenseAttention
from msa_jax.model.msa import MsaAttention

CONFIG = MsaConfig(d_model=24, num_heads=4, num_kv_heads=2, head_dim=8, index_dim=12, block_size=4, num_blocks=2, rotary_dim=4)
T = 26  # not a multiple of the block size
SEGMENTS = np.array([[0, 0, 0] + [1] * 13 + [2] * 9 + [0], [1] * 5 + [2] * 18 + [3] * 3], np.int32)
PHASES = ["sparse", "warmup"]


@pytest.fixture(scope="module")
def layer() -> MsaAttention:
    layer = nnx.jit(lambda: MsaAttention(CONFIG, rngs=nnx.Rngs(0)))()
    rng = np.random.default_rng(7)  # norms away from their start, so that a forgotten one shows
    for norm in (layer.main.q.norm, layer.main.k.norm, layer.index.q.norm, layer.index.k.norm):
        norm.w[...] = jnp.asarray(rng.uniform(-0.3, 0.5, norm.w.shape), jnp.float32)
    return layer


@pytest.fixture(scope="module")
def x() -> jax.Array:
    return jax.random.normal(jax.random.key(1), (2, T, 24))


def with_config(layer: MsaAttention, **changes) -> MsaAttention:
    """The same weights under a changed config."""
    config = dataclasses.replace(CONFIG, **changes)
    other = nnx.eval_shape(lambda: MsaAttention(config, rngs=nnx.Rngs(0)))
    nnx.update(other, nnx.state(layer))
    return other


@nnx.jit(static_argnames=("phase", "kl", "return_selection"))
def run(layer, x, segments=None, positions=None, phase="sparse", kl=True, kl_denominator=None, return_selection=True):
    return layer(x, segments, positions, phase, kl=kl, kl_denominator=kl_denominator, return_selection=return_selection)


# --- the definition ---------------------------------------------------------------------------------------------------


def heads_by_hand(heads, x: np.ndarray, position: int, theta: float, rotary: int) -> np.ndarray:
    """Projection, RMSNorm with 1 + w, RoPE of the first channels in halves, of one token: [heads, width]."""
    y = np.einsum("d,dnh->nh", x, np.asarray(heads.linear.kernel[...], np.float64))
    if heads.norm is None:
        return y
    y = y / np.sqrt((y**2).mean(-1, keepdims=True) + 1e-6) * (1 + np.asarray(heads.norm.w[...], np.float64))
    half = rotary // 2
    turned = (y[:, :half] + 1j * y[:, half:rotary]) * np.exp(1j * position * theta ** (-np.arange(half) / half))
    return np.concatenate([turned.real, turned.imag, y[:, rotary:]], axis=-1)


def softmax(logits: np.ndarray) -> np.ndarray:
    weights = np.exp(logits - logits.max(-1, keepdims=True))
    return weights / weights.sum(-1, keepdims=True)


def document_by_hand(layer: MsaAttention, x: np.ndarray, phase: str) -> tuple[np.ndarray, float, list]:
    """Output, summed KL and chosen blocks [t][k] of one document, query by query, as the paper's equations read."""
    c = layer.config
    project = [
        np.stack([heads_by_hand(heads, row, t, c.rope_theta, c.rotary_channels) for t, row in enumerate(x)])
        for heads in (layer.main.q, layer.main.k, layer.main.v, layer.index.q, layer.index.k)
    ]
    q, k, v, iq, ik = project
    group, total, chosen = c.num_heads // c.num_kv_heads, 0.0, []
    out = np.zeros((len(x), c.num_heads, c.head_dim))
    for t in range(len(x)):
        chosen.append([])
        for g in range(c.num_kv_heads):
            s = ik[: t + 1, 0] @ iq[t, g] / np.sqrt(c.index_dim)
            own = t // c.block_size
            ranked = sorted(range(own), key=lambda b: -s[b * c.block_size : (b + 1) * c.block_size].max())
            blocks = {own, *ranked[: c.num_blocks - 1]}
            chosen[t].append(blocks)
            keys = [j for j in range(t + 1) if phase == "warmup" or j // c.block_size in blocks]
            teacher = softmax(q[t, g * group : (g + 1) * group] @ k[keys, g].T / np.sqrt(c.head_dim))
            out[t, g * group : (g + 1) * group] = teacher @ v[keys, g]
            mean, student = teacher.mean(0), softmax(s[keys])
            total += (mean * np.log(mean / student)).sum() / c.num_kv_heads
    return np.einsum("tnh,nhd->td", out, np.asarray(layer.main.out.kernel[...], np.float64)), total, chosen


@pytest.mark.parametrize("phase", PHASES)
def test_the_definition(layer: MsaAttention, x: jax.Array, assert_close: Callable, phase: str) -> None:
    y, aux = run(layer, x, jnp.asarray(SEGMENTS), phase=phase)
    expected, total = np.zeros(x.shape), 0.0
    for row, document in [(0, 1), (0, 2), (1, 1), (1, 2), (1, 3)]:
        at = np.flatnonzero(SEGMENTS[row] == document)
        expected[row, at], loss, chosen = document_by_hand(layer, np.asarray(x[row, at], np.float64), phase)
        total += loss
        for place, t in enumerate(at):
            ids = np.asarray(aux.ids[row, :, t])
            assert [set(heads[heads >= 0].tolist()) for heads in ids] == chosen[place], f"row {row}, token {t}"
    assert_close(y, expected)
    assert_close(aux.kl, total / (SEGMENTS > 0).sum())
    assert aux.tokens == (SEGMENTS > 0).sum()
    assert aux.ids.shape == (2, 2, T, 2)
    assert aux.lse.shape == (2, 2, T)


# --- dense where it must be -------------------------------------------------------------------------------------------


def outputs_and_gradients(layer, x, segments) -> tuple:
    graphdef, params = nnx.split(layer)
    mix = jax.random.normal(jax.random.key(5), x.shape)

    def loss(params: nnx.State, x: jax.Array) -> tuple:
        y, aux = nnx.merge(graphdef, params)(x, segments)
        return (y * mix).sum() + aux.kl, y

    (_, y), (params_bar, x_bar) = jax.jit(jax.value_and_grad(loss, (0, 1), has_aux=True))(params, x)
    return y, params_bar["main"], x_bar


@pytest.mark.parametrize(
    ("length", "changes", "segments"),
    [
        (T, {"num_blocks": 7}, None),
        (T, {"num_blocks": 9}, SEGMENTS),
        (7, {}, None),
        (8, {}, None),
    ],
    ids=["all_blocks", "all_blocks_packed", "RC-1", "RC"],
)
def test_equals_dense(layer: MsaAttention, x: jax.Array, assert_close: Callable, length: int, changes: dict, segments) -> None:
    sparse = with_config(layer, **changes)
    dense = nnx.eval_shape(lambda: DenseAttention(sparse.config, rngs=nnx.Rngs(0)))
    nnx.update(dense.main, nnx.state(layer.main))
    segments = None if segments is None else jnp.asarray(segments)
    assert_close(outputs_and_gradients(sparse, x[:, :length], segments), outputs_and_gradients(dense, x[:, :length], segments))


def test_beyond_its_budget_it_is_not_dense(layer: MsaAttention, x: jax.Array) -> None:
    dense, _ = run(layer, x[:, :9], phase="warmup")
    sparse, _ = run(layer, x[:, :9])
    np.testing.assert_allclose(sparse[:, :8], dense[:, :8], atol=1e-6)
    assert jnp.abs(sparse[:, 8] - dense[:, 8]).max() > 1e-3


def test_dense_and_sparse_of_one_seed_share_their_main_weights(layer: MsaAttention) -> None:
    dense = DenseAttention(CONFIG, rngs=nnx.Rngs(0))
    for name in ("q", "k", "v"):
        np.testing.assert_array_equal(getattr(dense.main, name).linear.kernel[...], getattr(layer.main, name).linear.kernel[...])


# --- who learns from what ---------------------------------------------------------------------------------------------


@nnx.jit(static_argnames=("phase", "remat"))
def gradients(layer, x, phase="sparse", remat=False) -> tuple:
    """Gradients of the output and of the KL, each with respect to (parameters, x)."""
    graphdef, params = nnx.split(layer)

    def forward(params: nnx.State, x: jax.Array) -> tuple:
        y, aux = nnx.merge(graphdef, params)(x, phase=phase)
        return jnp.square(y).sum(), aux.kl

    forward = jax.checkpoint(forward) if remat else forward
    return tuple(jax.grad(lambda *inputs, i=i: forward(*inputs)[i], (0, 1))(params, x) for i in range(2))


@pytest.mark.parametrize("phase", PHASES)
@pytest.mark.parametrize("remat", [False, True])
def test_each_loss_trains_its_own_branch_exactly(layer: MsaAttention, x: jax.Array, phase: str, remat: bool) -> None:
    (output_bar, x_output_bar), (kl_bar, x_kl_bar) = gradients(layer, x, phase, remat)
    for leaf in jax.tree.leaves((output_bar["index"], kl_bar["main"], x_kl_bar)):
        assert not leaf.any()
    for leaf in jax.tree.leaves((output_bar["main"], kl_bar["index"], x_output_bar)):
        assert jnp.abs(leaf).max() > 1e-6


def test_without_stop_gradient_the_kl_reaches_the_trunk(layer: MsaAttention, x: jax.Array) -> None:
    (_, _), (kl_bar, x_kl_bar) = gradients(with_config(layer, index_stop_gradient=False), x)
    assert jnp.abs(x_kl_bar).max() > 1e-6
    assert not any(leaf.any() for leaf in jax.tree.leaves(kl_bar["main"])), "the teacher stays a constant"


@pytest.mark.parametrize("phase", PHASES)
def test_without_kl_nothing_is_computed_and_nothing_changes(layer: MsaAttention, x: jax.Array, phase: str) -> None:
    y, aux = run(layer, x, phase=phase)
    y_off, aux_off = run(layer, x, phase=phase, kl=False)
    assert aux.kl > 0
    assert aux_off.kl == 0
    np.testing.assert_array_equal(y_off, y)
    traced = {kl: str(jax.make_jaxpr(lambda x, kl=kl: layer(x, phase=phase, kl=kl)[0])(x)) for kl in (True, False)}
    assert "index_kl" in traced[True]
    assert "index_kl" not in traced[False]

    def loss(layer, x):
        y, aux = layer(x, phase=phase, kl=False)
        return jnp.square(y).sum() + aux.kl

    index_bar = nnx.jit(nnx.grad(loss))(layer, x)["index"]
    assert jax.tree.structure(index_bar) == jax.tree.structure(nnx.state(layer.index)), "the same tree, for the optimiser"
    assert not any(leaf.any() for leaf in jax.tree.leaves(index_bar))


def test_the_denominator_is_the_callers(layer: MsaAttention, x: jax.Array) -> None:
    segments = jnp.asarray(SEGMENTS)
    _, aux = run(layer, x, segments)
    _, halved = run(layer, x, segments, kl_denominator=2 * aux.tokens)
    assert halved.tokens == 2 * aux.tokens
    np.testing.assert_allclose(halved.kl, aux.kl / 2, rtol=1e-6)
    _, empty = run(layer, x, jnp.zeros_like(segments))
    assert empty.kl == empty.tokens == 0


# --- documents, padding, leaks ----------------------------------------------------------------------------------------


@pytest.mark.parametrize("phase", PHASES)
def test_packed_equals_separate(layer: MsaAttention, x: jax.Array, assert_close: Callable, phase: str) -> None:
    y, aux = run(layer, x, jnp.asarray(SEGMENTS), phase=phase)
    total = 0.0
    for row, document in [(0, 1), (0, 2), (1, 2)]:
        at = np.flatnonzero(SEGMENTS[row] == document)
        alone, aux_alone = run(layer, x[row : row + 1, at], phase=phase)
        assert_close(y[row, at], alone[0])
        np.testing.assert_array_equal(aux.ids[row][:, at], aux_alone.ids[0])
        total += aux_alone.kl * aux_alone.tokens
    one_document = np.where((SEGMENTS == [[1], [2]]) | (SEGMENTS == [[2], [2]]), SEGMENTS, 0)
    _, rest = run(layer, x, jnp.asarray(one_document), phase=phase)
    assert_close(rest.kl * rest.tokens, total)


@pytest.mark.parametrize("phase", PHASES)
def test_padding_on_either_side_changes_nothing(layer: MsaAttention, x: jax.Array, assert_close: Callable, phase: str) -> None:
    length = 17
    alone = run(layer, x[:, :length], phase=phase)
    junk = 100 * jax.random.normal(jax.random.key(9), (2, T - length, 24))
    for left in (0, 3, T - length):
        padded = jnp.concatenate([junk[:, :left], x[:, :length], junk[:, left:]], axis=1)
        segments = np.zeros((2, T), np.int32)
        segments[:, left : left + length] = 1
        positions = np.where(segments > 0, np.arange(T) - left, 0)
        for given in (None, jnp.asarray(positions)):
            y, aux = run(layer, padded, jnp.asarray(segments), given, phase=phase)
            inside = (y[:, left : left + length], aux.kl, aux.tokens)
            assert_close(inside, (alone[0], alone[1].kl, alone[1].tokens))
            np.testing.assert_array_equal(aux.ids[:, :, left : left + length], alone[1].ids)
            assert not y[segments == 0].any()


@pytest.mark.parametrize("phase", PHASES)
def test_the_future_changes_no_bit(layer: MsaAttention, x: jax.Array, phase: str) -> None:
    y, aux = run(layer, x, phase=phase)
    for t in (1, 4, 11, T - 1):
        changed, aux_changed = run(layer, x.at[:, t:].add(jax.random.normal(jax.random.key(t), (2, T - t, 24))), phase=phase)
        np.testing.assert_array_equal(changed[:, :t], y[:, :t])
        np.testing.assert_array_equal(aux_changed.ids[:, :, :t], aux.ids[:, :, :t])
        assert (changed[:, t] != y[:, t]).any()


def test_an_unselected_block_changes_no_bit(layer: MsaAttention, x: jax.Array) -> None:
    """Queries whose heads both leave out a block, and keep the same blocks when it changes, do not see the change."""
    y, aux = run(layer, x)
    dense, _ = run(layer, x, phase="warmup")
    witnesses = 0
    for block in range(T // 4):
        nudged = x.at[:, 4 * block + 1].add(1e-2)
        y_nudged, aux_nudged = run(layer, nudged)
        blind = (aux.ids != block).all((1, 3)) & (aux.ids == aux_nudged.ids).all((1, 3)) & (jnp.arange(T) // 4 > block)
        np.testing.assert_array_equal(y_nudged[blind], y[blind])
        seen = run(layer, nudged, phase="warmup")[0][blind] != dense[blind]
        assert seen.any(-1).all(), "full attention would have seen it"
        witnesses += int(blind.sum())
    assert witnesses > 50


# --- precision and transformations ------------------------------------------------------------------------------------


def test_bfloat16_compute_is_close(layer: MsaAttention, x: jax.Array, assert_close: Callable) -> None:
    """With every block selected, so that no rounded score can choose another block."""
    half = nnx.eval_shape(lambda: MsaAttention(dataclasses.replace(CONFIG, num_blocks=7), rngs=nnx.Rngs(0), dtype=jnp.bfloat16))
    nnx.update(half, nnx.state(layer))
    y, aux = run(with_config(layer, num_blocks=7), x)
    y_half, aux_half = run(half, x)
    assert y_half.dtype == jnp.bfloat16
    assert aux_half.kl.dtype == aux_half.lse.dtype == jnp.float32
    assert {leaf.dtype for leaf in jax.tree.leaves(nnx.state(half))} == {jnp.dtype("float32")}
    assert_close(y_half, y, limit=0.02)
    assert_close(aux_half.kl, aux.kl, limit=0.05)


def test_alone_in_every_transformation(layer: MsaAttention, x: jax.Array, assert_close: Callable) -> None:
    graphdef, params = nnx.split(layer)

    def apply(params: nnx.State, x: jax.Array) -> tuple[jax.Array, jax.Array]:
        y, aux = nnx.merge(graphdef, params)(x)
        return y, aux.kl

    expected = run(layer, x)[0], run(layer, x)[1].kl
    assert_close(nnx.jit(lambda layer, x: (layer(x)[0], layer(x)[1].kl))(layer, x), expected)
    assert_close(jax.jit(apply)(params, x), expected)
    assert_close(jax.jit(jax.checkpoint(apply))(params, x), expected)

    y_V, kl_V = jax.jit(jax.vmap(apply, (None, 0)))(params, x[:, None])
    assert_close((y_V[:, 0], kl_V.mean()), expected)
    seeds = jax.tree.map(lambda leaf: jnp.stack([leaf, 2 * leaf]), params)
    y_seeds, _ = jax.jit(jax.vmap(apply, (0, None)))(seeds, x)
    assert_close(y_seeds[0], expected[0])

    scanned, kl_scanned = jax.jit(lambda stacked, x: jax.lax.scan(lambda x, entry: apply(entry, x), x, stacked))(seeds, x)
    first = jax.jit(apply)(params, x)
    second = jax.jit(apply)(jax.tree.map(lambda leaf: 2 * leaf, params), first[0])
    assert_close((scanned, kl_scanned), (second[0], jnp.stack([first[1], second[1]])))


def test_gradients_under_vmap(layer: MsaAttention, x: jax.Array, assert_close: Callable) -> None:
    graphdef, params = nnx.split(layer)

    def loss(params: nnx.State, x: jax.Array) -> jax.Array:
        y, aux = nnx.merge(graphdef, params)(x)
        return jnp.square(y).mean() + aux.kl

    each = jax.jit(jax.vmap(jax.grad(loss), (None, 0)))(params, x[:, None])
    assert_close(jax.tree.map(lambda leaf: leaf.mean(0), each), jax.jit(jax.grad(loss))(params, x))


def test_an_implementation_can_be_named(layer: MsaAttention, x: jax.Array, assert_close: Callable) -> None:
    assert_close(run(with_config(layer, implementation="reference"), x)[0], run(layer, x)[0])
    with pytest.raises(NotImplementedError, match="mosaic_gpu"):
        run(with_config(layer, implementation="mosaic_gpu"), x)
