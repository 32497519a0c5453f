"""The whole model: scanned equals unrolled, losses train their own groups, pictures land where they belong, nothing leaks."""

import dataclasses
import functools
import itertools
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx

from msa_jax.config import KINDS as DESCRIBED_KINDS
from msa_jax.config import LayerKind, ModelConfig, MsaConfig, VisionConfig
from msa_jax.data.batch import Batch, VisionBatch
from msa_jax.model.block import KINDS, Block
from msa_jax.model.groups import parameter_group
from msa_jax.model.hybrid import HybridTransformer, ModelOutput

ATTENTION = MsaConfig(d_model=32, num_heads=4, num_kv_heads=2, head_dim=8, index_dim=8, block_size=4, num_blocks=2)
VISION = VisionConfig(width=24, num_layers=1, num_heads=2, mlp_dim=32, patch_size=2, sequence_length=16)
CONFIG = ModelConfig(attention=ATTENTION, vocab_size=64, num_layers=2, mlp_dim=48, vision=VISION)
T = 24
RNG = np.random.default_rng(0)


def described(**changes: Any) -> Callable[[], HybridTransformer]:
    return lambda: HybridTransformer(dataclasses.replace(CONFIG, **changes), rngs=nnx.Rngs(0))


@pytest.fixture(scope="module")
def model(filled: Callable) -> HybridTransformer:
    return filled(described())


@pytest.fixture(scope="module")
def initialised() -> HybridTransformer:
    """A model as it really starts."""
    return described(pattern="M", num_layers=1, tie_embeddings=False)()


@pytest.fixture(scope="module")
def blind(model: HybridTransformer) -> HybridTransformer:
    """The same trunk without a vision tower."""
    blind = nnx.eval_shape(described(vision=None))
    nnx.update(blind, nnx.filter_state(nnx.state(model), lambda path, _: path[0] != "vision"))
    return blind


@nnx.jit(static_argnames=("phase", "kl"))
def compiled(model, batch, kl_denominator, phase, kl) -> ModelOutput:
    return model(batch, phase, kl=kl, kl_denominator=kl_denominator, trace=True)


def run(model: HybridTransformer, batch: Batch, phase: str = "sparse", *, kl: bool = True, kl_denominator=None) -> ModelOutput:
    """The model's results as numpy arrays. Batches of one structure share a program, so the default denominator is written out."""
    if kl_denominator is None:
        kl_denominator = np.float32((batch.segments_BT > 0).sum())
    return jax.tree.map(np.asarray, compiled(model, batch, kl_denominator, phase, kl))


DOCUMENTS = [[RNG.integers(1, 64, n) for n in lengths] for lengths in ([11, 11], [5, 11])]


def no_pictures() -> VisionBatch:
    return VisionBatch(np.zeros((2, 16, 12), np.float32), np.zeros((2, 16), np.int32), np.zeros((2, 16, 3), np.int32))


def pictures(seed: int) -> VisionBatch:
    """Sequence 0 holds two pictures of 2 x 4 patches, sequence 1 one of them and padding."""
    h, w = np.array([0, 0, 1, 1] * 2), np.array([0, 1, 0, 1, 2, 3, 2, 3])
    coords = np.stack([np.zeros(8, int), h, w], axis=-1)
    empty = no_pictures()
    patches = np.random.default_rng(seed).normal(size=(2, 16, 12)).astype(np.float32)
    segments, coords_VLA = empty.segments_VL.copy(), empty.coords_VLA.copy()
    for v, place in [(0, 0), (0, 1), (1, 0)]:
        segments[v, 8 * place : 8 * place + 8], coords_VLA[v, 8 * place : 8 * place + 8] = place + 1, coords
    return VisionBatch(np.where(segments[..., None] > 0, patches, 0).astype(np.float32), segments, coords_VLA)


PLACES = {(0, 3): 0, (0, 4): 1, (0, 15): 4, (0, 16): 5, (1, 6): 3, (1, 7): 2}  # (row, t): flat index of the visual token [V * M]


@pytest.fixture(scope="module")
def text(pack: Callable) -> Batch:
    """Four documents in two rows."""
    return pack(DOCUMENTS, T)


@pytest.fixture(scope="module")
def illustrated(text: Batch) -> Batch:
    index = np.full((2, T), -1, np.int32)
    for place, token in PLACES.items():
        index[place] = token
    return text._replace(visual_index_BT=index, vision=pictures(0))


# --- layers -----------------------------------------------------------------------------------------------------------


def test_every_described_kind_exists() -> None:
    assert set(KINDS) == set(DESCRIBED_KINDS)


@nnx.jit
def through(block: Block, x, segments, positions) -> tuple:
    return block(x, segments, positions, return_selection=True)


@pytest.mark.parametrize(("pattern", "depth"), [("D", 2), ("M", 2), ("DDM", 4)])
def test_scan_equals_the_layers_one_by_one(filled: Callable, text: Batch, assert_close: Callable, pattern: str, depth: int) -> None:
    model = filled(described(pattern=pattern, num_layers=depth, vision=None))
    output = run(model, text)
    x, kl = np.asarray(model.embed(text)), []
    for i, kind in enumerate((pattern * depth)[:depth]):
        block = model.block(i)
        assert type(block.attention) is KINDS[kind]
        assert_close(output.trace.hidden_XBTD[i], x)
        x, aux, _ = through(block, x, text.segments_BT, text.positions_BT)
        if kind == "M":
            kl.append(float(aux.kl))
            np.testing.assert_array_equal(output.trace.ids_XBKTR[i], aux.ids)
        else:
            assert (output.trace.ids_XBKTR[i] == -1).all()
    assert_close(output.logits_BTE, model.logits(x))
    assert output.logits_BTE.dtype == output.kl.dtype == jnp.float32
    assert output.kl_X.shape == (len(kl),)
    np.testing.assert_allclose(output.kl_X, kl, rtol=1e-5)
    np.testing.assert_allclose(output.kl, np.mean(kl) if kl else 0, rtol=1e-5)
    assert output.trace.ids_XBKTR.shape == (depth, 2, 2, T, 2)
    with pytest.raises(IndexError, match=rf"block\({depth}\): the model has layers 0 .. {depth - 1}"):
        model.block(depth)


def test_a_block_is_two_residual_steps(filled: Callable, text: Batch, assert_close: Callable) -> None:
    @nnx.jit
    def both(block: Block, x: jax.Array, segments: jax.Array) -> tuple[jax.Array, jax.Array]:
        hidden = x + block.attention(block.attention_norm(x), segments)[0]
        return block(x, segments)[0], hidden + block.mlp(block.mlp_norm(hidden))

    block = filled(lambda: Block(CONFIG, LayerKind("D", experts=False), nnx.Rngs(0)))
    assert_close(*both(block, np.random.default_rng(0).normal(size=(2, T, 32)).astype(np.float32), text.segments_BT))


def test_the_phase_reaches_the_layers(blind: HybridTransformer, text: Batch) -> None:
    """Documents of 11 tokens, 8 keys selected: the first 8 see the same in both phases."""
    sparse, dense = run(blind, text), run(blind, text, "warmup")
    np.testing.assert_allclose(sparse.logits_BTE[0, :8], dense.logits_BTE[0, :8], atol=1e-4)
    assert np.abs(sparse.logits_BTE[0, 8:11] - dense.logits_BTE[0, 8:11]).max() > 1e-3
    np.testing.assert_array_equal(sparse.trace.ids_XBKTR[0], dense.trace.ids_XBKTR[0])


def test_weights_depend_on_their_name_alone(initialised: HybridTransformer) -> None:
    """Arms of a study are paired: the pattern, the index branch, other layers and the trunk's width change nobody else's start."""
    one, other = (described(pattern=pattern, num_layers=4, vision=None)() for pattern in ("DDM", "MMDD"))
    for i in range(4):
        ours, theirs = (dict(nnx.to_flat_state(nnx.state(model.block(i)))) for model in (one, other))
        shared = set(ours) & set(theirs)
        assert len(shared) > 8
        for path in shared:
            np.testing.assert_array_equal(ours[path][...], theirs[path][...])
    np.testing.assert_array_equal(one.embedding[...], other.embedding[...])
    gates = [one.block(i).mlp.gate.kernel[...] for i in range(4)]
    for first, second in [*itertools.combinations(gates, 2), (gates[0], one.block(0).mlp.up.kernel[...])]:
        assert (first != second).any()
    tower = described(pattern="D", num_layers=1)().vision
    for ours, theirs in zip(*(jax.tree.leaves(nnx.state(vision)) for vision in (initialised.vision, tower)), strict=True):
        np.testing.assert_array_equal(ours, theirs)
    reseeded = HybridTransformer(one.config, rngs=nnx.Rngs(1))
    assert (reseeded.embedding[...] != one.embedding[...]).any()


def test_the_start_is_at_unit_scale(initialised: HybridTransformer, text: Batch) -> None:
    """Embeddings and logits of standard deviation 1, residual outputs damped by 1 / sqrt(2 L): the loss starts near ln E.

    Only untied: tied, the input itself has logit sqrt(D) at the start.
    """
    block, damped = initialised.block(0), 1 / np.sqrt(2)
    for linear, scale in [(block.mlp.up, 1), (block.mlp.down, damped), (block.attention.main.q.linear, 1)]:
        kernel = linear.kernel[...]
        np.testing.assert_allclose(np.std(kernel) * np.sqrt(kernel.shape[0]), scale, rtol=0.08)
    np.testing.assert_allclose(np.std(block.attention.index.q.linear.kernel[...]) * np.sqrt(32), 1, rtol=0.08)
    np.testing.assert_allclose(np.std(block.attention.main.out.kernel[...]) * np.sqrt(32), damped, rtol=0.08)
    x = initialised.embed(text)
    np.testing.assert_allclose(np.std(x), 1, rtol=0.08)
    np.testing.assert_allclose(np.std(initialised.logits(x)), 1, rtol=0.08)


def test_tied_and_untied_embeddings(blind: HybridTransformer, filled: Callable, text: Batch) -> None:
    x = np.random.default_rng(0).normal(size=(2, T, 32)).astype(np.float32)
    np.testing.assert_allclose(blind.logits(x), blind.norm(x) @ blind.embedding[...].T, atol=1e-5)
    untied = filled(described(tie_embeddings=False, vision=None))
    np.testing.assert_allclose(untied.logits(x), untied.norm(x) @ untied.unembedding[...].T, atol=1e-5)
    assert (untied.unembedding[...] != untied.embedding[...]).any()
    np.testing.assert_allclose(blind.embed(text), blind.embedding[...][text.tokens_BT] * np.sqrt(32), rtol=1e-6)


# --- who learns from what ---------------------------------------------------------------------------------------------


@nnx.jit(static_argnames="phase")
def pullback(model, batch, lm_bar, kl_bar, phase) -> nnx.State:
    """The gradient of lm_bar * language-model loss + kl_bar * kl."""

    def loss(model: HybridTransformer) -> jax.Array:
        output = model(batch, phase)
        nll = -jnp.take_along_axis(jax.nn.log_softmax(output.logits_BTE[:, :-1]), batch.tokens_BT[:, 1:, None], -1)[..., 0]
        return lm_bar * (nll * batch.loss_weights_BT[:, :-1]).mean() + kl_bar * output.kl

    return nnx.grad(loss)(model)


def by_group(state: nnx.State) -> dict[str, list[np.ndarray]]:
    groups: dict[str, list[np.ndarray]] = {}
    for path, leaf in nnx.to_flat_state(state):
        groups.setdefault(parameter_group(path), []).append(np.asarray(leaf[...]))
    return groups


@pytest.fixture(scope="module")
def trained(model: HybridTransformer, blind: HybridTransformer, rebuilt: Callable, illustrated: Batch, text: Batch) -> dict[str, Callable]:
    """Gradients by case, each a function of (lm_bar, kl_bar)."""
    rematerialised = rebuilt(blind, described(vision=None, remat=True))
    cases = {
        "pictures": (model, illustrated, "sparse"),
        "text": (model, text._replace(vision=no_pictures()), "sparse"),
        "remat": (rematerialised, text, "sparse"),
        "warmup": (rematerialised, text, "warmup"),
    }

    def gradient(case: str, lm_bar: float, kl_bar: float) -> nnx.State:
        model, batch, phase = cases[case]
        return pullback(model, batch, np.float32(lm_bar), np.float32(kl_bar), phase)

    return {case: functools.partial(gradient, case) for case in cases}


@pytest.mark.parametrize("case", ["pictures", "remat", "warmup"])
def test_each_loss_trains_its_own_groups_exactly(trained: dict[str, Callable], case: str) -> None:
    """Through the scan over layers, with and without remat, in both phases."""
    lm, kl = by_group(trained[case](1, 0)), by_group(trained[case](0, 1))
    assert set(lm) == set(kl) == ({"trunk", "index", "vision"} if case == "pictures" else {"trunk", "index"})
    for leaf in (*lm["index"], *kl["trunk"], *kl.get("vision", [])):
        assert not leaf.any()
    for leaf in (*lm["trunk"], *lm.get("vision", []), *kl["index"]):
        layers = leaf if len(leaf) <= 2 else leaf[None]
        assert (np.abs(layers).reshape(len(layers), -1).max(1) > 0).all(), "every layer learns"


def test_remat_and_empty_slots_change_no_gradient(trained: dict[str, Callable], assert_close: Callable) -> None:
    with_slots = trained["text"](1, 1)
    assert not any(leaf.any() for leaf in by_group(with_slots)["vision"]), "text alone trains no vision"
    assert_close(nnx.filter_state(with_slots, lambda path, _: path[0] != "vision"), trained["remat"](1, 1))


def test_without_kl_the_tree_stays_and_nothing_else_changes(blind: HybridTransformer, text: Batch) -> None:
    graphdef, params = nnx.split(blind)
    gradient = jax.eval_shape(jax.grad(lambda params: nnx.merge(graphdef, params)(text, kl=False).kl), params)
    assert jax.tree.structure(gradient) == jax.tree.structure(params)
    output = run(blind, text, kl=False)
    assert output.kl == 0
    assert not output.kl_X.any()
    np.testing.assert_array_equal(output.logits_BTE, run(blind, text).logits_BTE)


def test_microbatches_share_one_denominator(blind: HybridTransformer, text: Batch) -> None:
    whole = run(blind, text)
    tokens = np.float32((text.segments_BT > 0).sum())
    parts = [text._replace(segments_BT=np.where(np.arange(2)[:, None] == row, text.segments_BT, 0)) for row in range(2)]
    np.testing.assert_allclose(sum(run(blind, part, kl_denominator=tokens).kl for part in parts), whole.kl, rtol=1e-5)


# --- documents, padding, causality ------------------------------------------------------------------------------------


def test_packed_and_padded_equal_separate(blind: HybridTransformer, text: Batch, pack: Callable, assert_close: Callable) -> None:
    packed = run(blind, text)
    for row, start, number in [(0, 0, 0), (0, 11, 1), (1, 5, 1)]:
        for left in (0, T - 11):
            alone = run(blind, pack([[DOCUMENTS[row][number]], []], T, left=left))
            ours, theirs = slice(start, start + 11), slice(left, left + 11)
            assert_close(packed.logits_BTE[row, ours], alone.logits_BTE[0, theirs])
            np.testing.assert_array_equal(packed.trace.ids_XBKTR[:, row, :, ours], alone.trace.ids_XBKTR[:, 0, :, theirs])


def test_the_future_changes_no_bit(model: HybridTransformer, illustrated: Batch) -> None:
    before = run(model, illustrated).logits_BTE
    for t in (1, 5, 12, 20):
        tokens = illustrated.tokens_BT.copy()
        tokens[:, t:] = (tokens[:, t:] + 7) % 64
        after = run(model, illustrated._replace(tokens_BT=tokens)).logits_BTE
        np.testing.assert_array_equal(after[:, :t], before[:, :t])
        assert (after[0, t] != before[0, t]).any()


# --- pictures ---------------------------------------------------------------------------------------------------------


def test_visual_tokens_land_on_their_places(model: HybridTransformer, illustrated: Batch) -> None:
    embed = nnx.jit(lambda model, batch: (model.embed(batch), model.vision(batch.vision)))
    x, visual = (np.asarray(array) for array in embed(model, illustrated))
    text, _ = (np.asarray(array) for array in embed(model, illustrated._replace(visual_index_BT=np.full((2, T), -1, np.int32))))
    assert visual.shape == (2 * 4, 32)
    for row, t in np.ndindex(2, T):
        if (row, t) in PLACES:
            np.testing.assert_allclose(x[row, t], visual[PLACES[row, t]], rtol=1e-5, atol=1e-6)
            assert np.abs(x[row, t] - text[row, t]).max() > 0.1
        else:
            np.testing.assert_array_equal(x[row, t], text[row, t])


def test_text_is_the_same_bits_whatever_the_pictures_hold(model: HybridTransformer, illustrated: Batch) -> None:
    """Row 0 has pictures from t = 3 and in its second document, row 1 none here."""
    index = np.where(np.arange(2)[:, None] == 0, illustrated.visual_index_BT, -1)
    batch = illustrated._replace(visual_index_BT=index)
    first, other = (run(model, batch._replace(vision=pictures(seed))).logits_BTE for seed in (1, 2))
    for row, before in [(0, slice(0, 3)), (0, slice(11, 15)), (1, slice(0, T))]:
        np.testing.assert_array_equal(first[row, before], other[row, before])
    assert (first[0, 3:11] != other[0, 3:11]).any(-1).all(), "what follows a picture sees it"
    poisoned = pictures(1)
    poisoned = poisoned._replace(patches_VLP=np.where(poisoned.segments_VL[..., None] == 0, np.float32(np.nan), poisoned.patches_VLP))
    np.testing.assert_array_equal(run(model, batch._replace(vision=poisoned)).logits_BTE, first)
    np.testing.assert_array_equal(run(model, batch._replace(vision=no_pictures())).logits_BTE[1], first[1])


def test_a_vision_tower_leaves_text_alone(
    model: HybridTransformer, blind: HybridTransformer, text: Batch, illustrated: Batch, assert_close: Callable
) -> None:
    """Against the same trunk without a tower, and with no picture slots at all."""
    assert_close(run(model, text._replace(vision=no_pictures())), run(blind, text), limit=1e-6)
    embedded = blind.embed(text)
    for vision in (None, VisionBatch(*(array[:0] for array in no_pictures()))):
        np.testing.assert_array_equal(model.embed(text._replace(vision=vision)), embedded)
    with pytest.raises(ValueError, match=r"the batch has pictures but ModelConfig\.vision is None"):
        blind(illustrated)


# --- precision and size -----------------------------------------------------------------------------------------------


def test_bfloat16_compute_is_close(filled: Callable, rebuilt: Callable, text: Batch, assert_close: Callable) -> None:
    """Dense layers, where no rounded score can choose another block (tests/model/test_msa.py has the sparse layer)."""
    dense = filled(described(pattern="D", vision=None))
    half = rebuilt(dense, described(pattern="D", vision=None, dtype="bfloat16"))
    output, expected = run(half, text), run(dense, text)
    assert output.trace.hidden_XBTD.dtype == jnp.bfloat16
    assert output.logits_BTE.dtype == output.kl.dtype == jnp.float32
    assert {leaf.dtype for leaf in jax.tree.leaves(nnx.state(half))} == {jnp.dtype("float32")}
    real = text.segments_BT > 0
    assert_close(output.logits_BTE[real], expected.logits_BTE[real], limit=0.03)


def test_a_large_model_traces_without_memory() -> None:
    """MiniMax-M3's attention at a context of 8,192: forward and backward, scanned and rematerialised."""
    attention = MsaConfig(d_model=6144, num_heads=64, num_kv_heads=4, head_dim=128, rotary_dim=64)
    config = ModelConfig(
        attention=attention, vocab_size=200_064, num_layers=7, pattern="DDDMMMM", mlp_dim=12288, tie_embeddings=False,
        dtype="bfloat16", remat=True,
    )  # fmt: skip
    graphdef, params = nnx.split(nnx.eval_shape(lambda: HybridTransformer(config, rngs=nnx.Rngs(0))))
    row = jax.ShapeDtypeStruct((1, 8192), jnp.int32)

    def loss(params: nnx.State, batch: Batch) -> jax.Array:
        output = nnx.merge(graphdef, params)(batch)
        return output.logits_BTE.mean() + output.kl

    gradient = jax.eval_shape(jax.grad(loss), params, Batch(row, row, row, row, row, row, None))
    assert jax.tree.map(lambda leaf: leaf.shape, gradient) == jax.tree.map(lambda leaf: leaf.shape, params)
    assert gradient["layers"][1][0]["attention"]["index"]["q"]["linear"]["kernel"].shape == (4, 6144, 4, 128)
