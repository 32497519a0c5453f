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
from msa_jax.model.attention import AttentionAux, document_positions, kl_tokens
from msa_jax.model.dense import DenseAttention
from msa_jax.model.msa import MsaAttention

CONFIG = MsaConfig(d_model=24, num_heads=4, num_kv_heads=2, head_dim=8, index_dim=12, block_size=4, num_blocks=2, rotary_dim=4)
T = 26  # not a multiple of the block size
SEGMENTS = np.array([[0, 0, 0] + [1] * 13 + [2] * 9 + [0], [1] * 5 + [2] * 18 + [3] * 3], np.int32)
WHOLE = np.ones((2, T), np.int32)
DOCUMENTS = [(row, np.flatnonzero(SEGMENTS[row] == document)) for row, document in [(0, 1), (0, 2), (1, 1), (1, 2), (1, 3)]]
PHASES = ["sparse", "warmup"]


@pytest.fixture(scope="module")
def layer(filled: Callable) -> MsaAttention:
    return filled(described())


@pytest.fixture(scope="module")
def x() -> np.ndarray:
    return np.random.default_rng(1).normal(size=(2, T, 24)).astype(np.float32)


def noise(seed: int, *shape: int) -> np.ndarray:
    return np.random.default_rng(seed).normal(size=shape).astype(np.float32)


def described(**changes) -> Callable[[], MsaAttention]:
    return lambda: MsaAttention(dataclasses.replace(CONFIG, **changes), rngs=nnx.Rngs(0))


@nnx.jit(static_argnames=("phase", "kl"))
def compiled(layer, x, segments, positions, kl_denominator, phase, kl):
    return layer(x, segments, positions, phase, kl=kl, kl_denominator=kl_denominator, return_selection=True)


def run(layer, x, segments=WHOLE, positions=None, phase="sparse", *, kl=True, kl_denominator=None) -> tuple[np.ndarray, AttentionAux]:
    """The layer's results as numpy arrays. Calls of one shape share a program, so the defaults of the layer are written out."""
    positions = np.asarray(document_positions(segments.shape[1], segments)) if positions is None else positions
    kl_denominator = np.float32((segments > 0).sum()) if kl_denominator is None else kl_denominator
    return jax.tree.map(np.asarray, compiled(layer, x, segments, positions, kl_denominator, phase, kl))


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
def test_the_definition(layer: MsaAttention, x: np.ndarray, assert_close: Callable, phase: str) -> None:
    y, aux = run(layer, x, SEGMENTS, phase=phase)
    expected, total = np.zeros(x.shape), 0.0
    for row, at in DOCUMENTS:
        expected[row, at], loss, chosen = document_by_hand(layer, x[row, at].astype(np.float64), phase)
        total += loss
        for place, t in enumerate(at):
            assert [set(ids[ids >= 0].tolist()) for ids in aux.ids[row, :, t]] == chosen[place], f"row {row}, token {t}"
    assert_close(y, expected)
    assert_close(aux.kl, total / (SEGMENTS > 0).sum())
    assert aux.tokens == (SEGMENTS > 0).sum()
    assert aux.ids.shape == (2, 2, T, 2)
    assert aux.lse.shape == (2, 2, T)


def test_defaults_are_one_document_and_its_tokens(layer: MsaAttention, x: np.ndarray, assert_close: Callable) -> None:
    y, aux = compiled(layer, x, None, None, None, "sparse", True)
    assert_close((y, aux), run(layer, x), limit=1e-6)
    packed = jax.eval_shape(lambda x: layer(x, SEGMENTS)[1].tokens, x)
    assert (packed.shape, packed.dtype) == ((), jnp.float32)
    np.testing.assert_array_equal(kl_tokens(x, jnp.asarray(SEGMENTS), None), (SEGMENTS > 0).sum())
    assert kl_tokens(x, None, None) == 2 * T


# --- dense where it must be -------------------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def output_and_gradients() -> Callable:
    """(module, x, segments) -> output, gradients of the main weights and of x, and those of the index weights, all without KL."""

    @nnx.jit
    def compute(module, x, segments):
        graphdef, params = nnx.split(module)
        mix = noise(5, *x.shape)

        def loss(params: nnx.State, x: jax.Array) -> tuple:
            y, _ = nnx.merge(graphdef, params)(x, segments, kl=False)
            return (y * mix).sum(), y

        (_, y), (params_bar, x_bar) = jax.value_and_grad(loss, (0, 1), has_aux=True)(params, x)
        return (y, params_bar["main"], x_bar), {name: params_bar[name] for name in params_bar if name != "main"}

    return compute


@pytest.mark.parametrize("segments", [WHOLE, SEGMENTS], ids=["one_document", "packed"])
def test_with_every_block_it_equals_dense(
    layer: MsaAttention, x: np.ndarray, rebuilt: Callable, assert_close: Callable, output_and_gradients: Callable, segments: np.ndarray
) -> None:
    sparse = rebuilt(layer, described(num_blocks=7))
    dense = nnx.eval_shape(lambda: DenseAttention(CONFIG, rngs=nnx.Rngs(0)))
    nnx.update(dense.main, nnx.state(layer.main))
    (ours, index_bar), (theirs, nothing) = (output_and_gradients(module, x, segments) for module in (sparse, dense))
    assert_close(ours, theirs)
    assert not nothing
    assert jax.tree.structure(index_bar["index"]) == jax.tree.structure(nnx.state(layer.index)), "the same tree, for the optimiser"
    assert not any(np.asarray(leaf).any() for leaf in jax.tree.leaves(index_bar))


def test_a_short_context_equals_dense_and_a_longer_one_does_not(layer: MsaAttention, x: np.ndarray, assert_close: Callable) -> None:
    """R = 2 blocks of C = 4 hold 8 keys: documents of 7 and 8 tokens are dense, the ninth token of one of 9 is not."""
    segments = np.array([[1] * 7 + [2] * 8 + [3] * 9 + [0] * 2] * 2, np.int32)
    (sparse, _), (dense, _) = run(layer, x, segments), run(layer, x, segments, phase="warmup")
    assert_close(sparse[:, :23], dense[:, :23])
    assert np.abs(sparse[:, 23] - dense[:, 23]).max() > 1e-3


# --- who learns from what ---------------------------------------------------------------------------------------------


@nnx.jit(static_argnames=("phase", "remat"))
def pullback(layer, x, y_bar, kl_bar, phase, remat=False) -> tuple:
    """Gradients of y_bar * y + kl_bar * kl with respect to (parameters, x)."""
    graphdef, params = nnx.split(layer)

    def forward(params: nnx.State, x: jax.Array) -> tuple[jax.Array, jax.Array]:
        y, aux = nnx.merge(graphdef, params)(x, phase=phase)
        return y, aux.kl

    return jax.vjp(jax.checkpoint(forward) if remat else forward, params, x)[1]((y_bar, kl_bar))


@pytest.mark.parametrize(("phase", "remat"), [("sparse", True), ("warmup", False)])
def test_each_loss_trains_its_own_branch_exactly(layer: MsaAttention, x: np.ndarray, phase: str, remat: bool) -> None:
    zero, one = np.float32(0), np.float32(1)
    output_bar, x_output_bar = pullback(layer, x, noise(3, *x.shape), zero, phase, remat=remat)
    kl_bar, x_kl_bar = pullback(layer, x, np.zeros_like(x), one, phase, remat=remat)
    for leaf in jax.tree.leaves((output_bar["index"], kl_bar["main"], x_kl_bar)):
        assert not np.asarray(leaf).any()
    for leaf in jax.tree.leaves((output_bar["main"], kl_bar["index"], x_output_bar)):
        assert np.abs(leaf).max() > 1e-6


def test_without_stop_gradient_the_kl_reaches_the_trunk(layer: MsaAttention, x: np.ndarray, rebuilt: Callable) -> None:
    kl_bar, x_kl_bar = pullback(rebuilt(layer, described(index_stop_gradient=False)), x, np.zeros_like(x), np.float32(1), "warmup")
    assert np.abs(x_kl_bar).max() > 1e-6
    assert not any(np.asarray(leaf).any() for leaf in jax.tree.leaves(kl_bar["main"])), "the teacher stays a constant"


def test_without_kl_nothing_is_computed_and_nothing_changes(layer: MsaAttention, x: np.ndarray) -> None:
    for phase in PHASES:
        traced = {kl: str(jax.make_jaxpr(lambda x, kl=kl, phase=phase: layer(x, phase=phase, kl=kl)[0])(x)) for kl in (True, False)}
        assert "index_kl" in traced[True]
        assert "index_kl" not in traced[False]
    (y, aux), (y_off, aux_off) = run(layer, x), run(layer, x, kl=False)
    assert aux.kl > 0
    assert aux_off.kl == 0
    np.testing.assert_array_equal(y_off, y)


def test_the_denominator_is_the_callers(layer: MsaAttention, x: np.ndarray) -> None:
    _, aux = run(layer, x, SEGMENTS)
    _, halved = run(layer, x, SEGMENTS, kl_denominator=2 * aux.tokens)
    assert halved.tokens == 2 * aux.tokens
    np.testing.assert_allclose(halved.kl, aux.kl / 2, rtol=1e-6)
    _, empty = run(layer, x, np.zeros_like(SEGMENTS))
    assert empty.kl == empty.tokens == 0


# --- documents, padding, leaks ----------------------------------------------------------------------------------------


@pytest.mark.parametrize("phase", PHASES)
def test_packed_equals_separate(layer: MsaAttention, x: np.ndarray, assert_close: Callable, phase: str) -> None:
    """Each document alone, at the start of a row of its own."""
    y, aux = run(layer, x, SEGMENTS, phase=phase)
    total = 0.0
    for row, at in DOCUMENTS:
        alone, aux_alone = run(layer, np.resize(x[row, at], x.shape), WHOLE * (np.arange(T) < len(at)), phase=phase)
        assert_close(y[row, at], alone[0, : len(at)])
        np.testing.assert_array_equal(aux.ids[row][:, at], aux_alone.ids[0, :, : len(at)])
        total += run(layer, np.resize(x[row, at], x.shape), WHOLE * [[1], [0]] * (np.arange(T) < len(at)), phase=phase)[1].kl * len(at)
    assert_close(aux.kl * aux.tokens, total)


@pytest.mark.parametrize("phase", PHASES)
def test_padding_on_either_side_changes_nothing(layer: MsaAttention, x: np.ndarray, assert_close: Callable, phase: str) -> None:
    length = 17
    alone, aux_alone = run(layer, x[:, :length], WHOLE[:, :length], phase=phase)
    junk = 100 * noise(9, 2, T, 24)
    for left in (0, 3, T - length):
        inside = slice(left, left + length)
        padded, segments, positions = junk.copy(), np.zeros_like(WHOLE), np.full_like(WHOLE, 10**6)
        padded[:, inside], segments[:, inside], positions[:, inside] = x[:, :length], 1, np.arange(length)
        y, aux = run(layer, padded, segments, positions, phase=phase)
        assert_close((y[:, inside], aux.kl, aux.tokens), (alone, aux_alone.kl, aux_alone.tokens))
        np.testing.assert_array_equal(aux.ids[:, :, inside], aux_alone.ids)
        assert not y[segments == 0].any()


@pytest.mark.parametrize("phase", PHASES)
def test_the_future_changes_no_bit(layer: MsaAttention, x: np.ndarray, phase: str) -> None:
    y, aux = run(layer, x, phase=phase)
    for t in (1, 4, 11, T - 1):
        later = np.arange(T)[:, None] >= t
        y_later, aux_later = run(layer, x + later * noise(t, 2, T, 24), phase=phase)
        np.testing.assert_array_equal(y_later[:, :t], y[:, :t])
        np.testing.assert_array_equal(aux_later.ids[:, :, :t], aux.ids[:, :, :t])
        assert (y_later[:, t] != y[:, t]).any()


def test_an_unselected_block_changes_no_bit(layer: MsaAttention, x: np.ndarray) -> None:
    """Queries whose heads both leave out a block, and keep the same blocks when it changes, do not see the change."""
    y, aux = run(layer, x)
    dense, _ = run(layer, x, phase="warmup")
    witnesses = 0
    for block in range(T // 4):
        nudged = x.copy()
        nudged[:, 4 * block + 1] += 1e-2
        y_nudged, aux_nudged = run(layer, nudged)
        blind = (aux.ids != block).all((1, 3)) & (aux.ids == aux_nudged.ids).all((1, 3)) & (np.arange(T) // 4 > block)
        np.testing.assert_array_equal(y_nudged[blind], y[blind])
        seen = run(layer, nudged, phase="warmup")[0][blind] != dense[blind]
        assert seen.any(-1).all(), "full attention would have seen it"
        witnesses += int(blind.sum())
    assert witnesses > 50


# --- precision and transformations ------------------------------------------------------------------------------------


def test_bfloat16_compute_is_close(layer: MsaAttention, x: np.ndarray, rebuilt: Callable, assert_close: Callable) -> None:
    """With every block selected, so that no rounded score can choose another block: the full prefix is then the support."""
    every_block = dataclasses.replace(CONFIG, num_blocks=7)
    half = rebuilt(layer, lambda: MsaAttention(every_block, rngs=nnx.Rngs(0), dtype=jnp.bfloat16))
    (y, aux), (y_half, aux_half) = run(layer, x, phase="warmup"), run(half, x)
    assert y_half.dtype == jnp.bfloat16
    assert aux_half.kl.dtype == aux_half.lse.dtype == jnp.float32
    assert {leaf.dtype for leaf in jax.tree.leaves(nnx.state(half))} == {jnp.dtype("float32")}
    assert_close(y_half, y, limit=0.02)
    assert_close(aux_half.kl, aux.kl, limit=0.05)


def test_a_layer_alone_in_every_transformation(layer: MsaAttention, x: np.ndarray, assert_close: Callable) -> None:
    """vmap over seeds of the gradient of a scan over rematerialised layers, against each seed's two layers by the chain rule."""
    graphdef, params = nnx.split(layer)
    mix, one = noise(3, *x.shape), np.float32(1)

    def apply(x: jax.Array, params: nnx.State) -> tuple[jax.Array, jax.Array]:
        y, aux = nnx.merge(graphdef, params)(x)
        return y, aux.kl

    def loss(layers: nnx.State, x: jax.Array) -> jax.Array:
        y, kl = jax.lax.scan(jax.checkpoint(apply), x, layers)
        return (y * mix).sum() + kl.sum()

    inputs = np.stack([x, x[::-1]])
    seeds = jax.tree.map(lambda leaf: jnp.stack([jnp.stack([leaf, 0.5 * leaf]), jnp.stack([-leaf, 2 * leaf])]), params)
    value, (layers_bar, x_bar) = jax.jit(jax.vmap(jax.value_and_grad(loss, (0, 1))))(seeds, inputs)
    for seed in range(2):
        first, second = (nnx.merge(graphdef, jax.tree.map(lambda leaf, at=(seed, i): leaf[at], seeds)) for i in range(2))
        hidden, aux_first = run(first, inputs[seed])
        y, aux_second = run(second, hidden)
        second_bar, hidden_bar = pullback(second, hidden, mix, one, "sparse", remat=True)
        first_bar, expected_x_bar = pullback(first, inputs[seed], hidden_bar, one, "sparse", remat=True)
        expected = jax.tree.map(lambda *leaves: jnp.stack(leaves), first_bar, second_bar)
        assert_close(jax.tree.map(lambda leaf, seed=seed: leaf[seed], (layers_bar, x_bar)), (expected, expected_x_bar))
        np.testing.assert_allclose(value[seed], (y * mix).sum() + aux_first.kl + aux_second.kl, rtol=1e-4)


def test_an_implementation_can_be_named(layer: MsaAttention, x: np.ndarray, rebuilt: Callable, assert_close: Callable) -> None:
    assert_close(run(rebuilt(layer, described(implementation="reference")), x, SEGMENTS)[0], run(layer, x, SEGMENTS)[0])
    with pytest.raises(NotImplementedError, match="mosaic_gpu"):
        run(rebuilt(layer, described(implementation="mosaic_gpu")), x)
