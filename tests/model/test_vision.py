"""The vision tower: equal to its equations written out in numpy; images and segments never see one another."""

import dataclasses
import math
from collections.abc import Callable, Sequence

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx

from msa_jax.config import VisionConfig
from msa_jax.data.batch import VisionBatch
from msa_jax.model.vision import VisionTower, temporal_mean

CONFIG = VisionConfig(width=24, num_layers=2, num_heads=2, mlp_dim=40, patch_size=2, sequence_length=32)
D_MODEL = 20
Clip = np.ndarray  # [time steps, patch rows, patch columns, P]


def clip(seed: int, frames: int = 1, rows: int = 2, columns: int = 2) -> Clip:
    return np.random.default_rng(seed).normal(size=(frames, rows, columns, CONFIG.patch_dim)).astype(np.float32)


def pack_clips(sequences: Sequence[Sequence[Clip]], frames_per_segment: int = 4, length: int = 32) -> VisionBatch:
    """Clips one after the other, window by window; each run of `frames_per_segment` time steps is a segment."""
    patches = np.zeros((len(sequences), length, CONFIG.patch_dim), np.float32)
    segments, coords = np.zeros((len(sequences), length), np.int32), np.zeros((len(sequences), length, 3), np.int32)
    for v, clips in enumerate(sequences):
        at = segment = 0
        for pixels in clips:
            for t, frame in enumerate(pixels):
                segment += t % frames_per_segment == 0
                for window_h in range(0, frame.shape[0], 2):
                    for window_w in range(0, frame.shape[1], 2):
                        for h, w in [(0, 0), (0, 1), (1, 0), (1, 1)]:
                            patches[v, at] = frame[window_h + h, window_w + w]
                            segments[v, at] = segment
                            coords[v, at] = t % frames_per_segment, window_h + h, window_w + w
                            at += 1
    return VisionBatch(patches, segments, coords)


@pytest.fixture(scope="module")
def tower(filled: Callable) -> VisionTower:
    return filled(lambda: VisionTower(CONFIG, D_MODEL, nnx.Rngs(0)))


@nnx.jit
def run(tower: VisionTower, batch: VisionBatch) -> jax.Array:
    """Visual tokens [V, M, D]."""
    return tower(batch).reshape(batch.patches_VLP.shape[0], -1, D_MODEL)


def noise(seed: int, *shape: int) -> np.ndarray:
    return np.random.default_rng(seed).normal(size=shape).astype(np.float32)


# --- the definition ---------------------------------------------------------------------------------------------------


def weights(module: nnx.Module) -> tuple[np.ndarray, np.ndarray]:
    return tuple(np.asarray(leaf[...], np.float64) for leaf in (module.kernel, module.bias))


def layer_norm(module: nnx.LayerNorm, x: np.ndarray) -> np.ndarray:
    centred = x - x.mean(-1, keepdims=True)
    unit = centred / np.sqrt((centred**2).mean(-1, keepdims=True) + CONFIG.norm_eps)
    return unit * np.asarray(module.scale[...], np.float64) + np.asarray(module.bias[...], np.float64)


def mlp(module: nnx.Module, x: np.ndarray) -> np.ndarray:
    (up, up_bias), (down, down_bias) = weights(module.up), weights(module.down)
    hidden = x @ up + up_bias
    return hidden * (1 + np.vectorize(math.erf)(hidden / math.sqrt(2))) / 2 @ down + down_bias


def turn(x: np.ndarray, coords: np.ndarray) -> np.ndarray:
    """3D RoPE of [L, N, 12]: two angles an axis (rates 1 and 0.01), pair i with i + 6."""
    angles = np.concatenate([coords[:, [axis]] * np.array([1.0, 0.01]) for axis in range(3)], axis=-1)
    turned = (x[..., :6] + 1j * x[..., 6:]) * np.exp(1j * angles)[:, None]
    return np.concatenate([turned.real, turned.imag], axis=-1)


def tower_by_hand(tower: VisionTower, patches: np.ndarray, coords: np.ndarray) -> np.ndarray:
    """Visual tokens [L / 4, D] of one segment."""
    x = layer_norm(tower.input_norm, patches @ np.asarray(tower.patch_embedding.kernel[...], np.float64))
    for layer in range(CONFIG.num_layers):
        graphdef, state = nnx.split(tower.layers)
        block = nnx.merge(graphdef, jax.tree.map(lambda leaf, layer=layer: leaf[layer], state))
        normed = layer_norm(block.attention_norm, x)
        q, k, v = (np.einsum("lw,wnh->lnh", normed, kernel) + bias for kernel, bias in map(weights, (block.q, block.k, block.v)))
        logits = np.einsum("lnh,mnh->nlm", turn(q, coords), turn(k, coords)) / math.sqrt(12)
        shares = np.exp(logits) / np.exp(logits).sum(-1, keepdims=True)
        out, out_bias = weights(block.out)
        x = x + np.einsum("nlm,mnh,nhw->lw", shares, v, out) + out_bias
        x = x + mlp(block.mlp, layer_norm(block.mlp_norm, x))
    return mlp(tower.merge_projector, mlp(tower.patch_projector, x).reshape(-1, 4 * D_MODEL))


def test_the_definition(tower: VisionTower, assert_close: Callable) -> None:
    batch = pack_clips([[clip(0, frames=3, rows=2, columns=4), clip(1)], [clip(2, rows=4, columns=4)]])
    tokens = np.asarray(run(tower, batch))
    for v, segment in [(0, 1), (0, 2), (1, 1)]:
        at = np.flatnonzero(batch.segments_VL[v] == segment)
        expected = tower_by_hand(tower, batch.patches_VLP[v, at].astype(np.float64), batch.coords_VLA[v, at])
        assert_close(tokens[v, at[::4] // 4], expected)


# --- who sees whom ----------------------------------------------------------------------------------------------------


def test_images_segments_and_sequences_are_isolated_to_the_bit(tower: VisionTower) -> None:
    sequences = [[clip(0), clip(1, columns=4), clip(2)], [clip(3, frames=6)]]  # the clip is cut into segments of 4 and 2 steps
    batch = pack_clips(sequences)
    before = np.asarray(run(tower, batch))
    assert batch.segments_VL.max(axis=1).tolist() == [3, 2]
    for v, segment in [(0, 1), (0, 2), (0, 3), (1, 1), (1, 2)]:
        inside = (np.arange(2)[:, None] == v) & (batch.segments_VL == segment)
        after = np.asarray(run(tower, batch._replace(patches_VLP=np.where(inside[..., None], -batch.patches_VLP, batch.patches_VLP))))
        changed = inside[:, ::4]
        np.testing.assert_array_equal(after[~changed], before[~changed])
        assert (after[changed] != before[changed]).any(-1).all(), "every token of the segment sees it"


def test_a_visual_token_is_its_own_window(tower: VisionTower) -> None:
    """With every window a segment, token m depends on patches 4m .. 4m + 3 alone, and on their order."""
    batch = pack_clips([[clip(seed) for seed in range(4)]])
    before = np.asarray(run(tower, batch))[0]
    swapped = np.arange(32)
    swapped[[4, 7]] = 7, 4  # contents and coordinates of two patches of window 1
    after = np.asarray(run(tower, VisionBatch(*(array[:, swapped] for array in batch))))[0]
    np.testing.assert_array_equal(np.delete(after, 1, axis=0), np.delete(before, 1, axis=0))
    assert np.abs(after[1] - before[1]).max() > 1e-2


def test_swapped_images_swap_their_tokens(tower: VisionTower, assert_close: Callable) -> None:
    a, b, c = clip(0, columns=4), clip(1, columns=4), clip(2)
    first = run(tower, pack_clips([[a, b], [c]]))
    second = run(tower, pack_clips([[b, a], [c]]))
    assert_close(second[0, :2], first[0, 2:4])
    assert_close(second[0, 2:4], first[0, :2])
    third = run(tower, pack_clips([[c], [a, b]]))
    assert_close((third[1, :4], third[0, 0]), (first[0, :4], first[1, 0]))


def test_the_order_of_frames_matters_inside_a_segment_only(tower: VisionTower, assert_close: Callable) -> None:
    frames = clip(0, frames=4)
    order = [2, 0, 3, 1]
    joint, joint_permuted = (run(tower, pack_clips([[x]]))[0, :4] for x in (frames, frames[order]))
    assert jnp.abs(joint_permuted - joint[jnp.array(order)]).max() > 1e-3
    alone, alone_permuted = (run(tower, pack_clips([[x]], frames_per_segment=1))[0, :4] for x in (frames, frames[order]))
    assert_close(alone_permuted, alone[jnp.array(order)])
    assert jnp.abs(joint - alone).max() > 1e-3


def test_only_relative_coordinates_matter_on_every_axis(tower: VisionTower, assert_close: Callable) -> None:
    batch = pack_clips([[clip(0, frames=2, rows=4, columns=2)]])
    before = run(tower, batch)[0, :4]
    assert_close(run(tower, batch._replace(coords_VLA=batch.coords_VLA + np.array([3, 5, 7], np.int32)))[0, :4], before, limit=1e-4)
    for axis in range(3):
        stretched = batch.coords_VLA * (1 + np.eye(3, dtype=np.int32)[axis])
        assert jnp.abs(run(tower, batch._replace(coords_VLA=stretched))[0, :4] - before).max() > 1e-4, f"axis {axis} is dropped"


def test_padding_is_never_seen_not_even_as_nan(tower: VisionTower) -> None:
    batch = pack_clips([[clip(0), clip(1, columns=4)], []])
    padding = batch.segments_VL == 0
    poisoned = batch._replace(
        patches_VLP=np.where(padding[..., None], np.nan, batch.patches_VLP).astype(np.float32),
        coords_VLA=np.where(padding[..., None], 10**6, batch.coords_VLA).astype(np.int32),
    )
    real = ~padding[:, ::4]
    before, after = (np.asarray(run(tower, x)) for x in (batch, poisoned))
    np.testing.assert_array_equal(after[real], before[real])
    assert np.isfinite(after).all()

    mix = noise(7, *before.shape) * real[..., None]

    @nnx.jit
    def gradient(tower: VisionTower, batch: VisionBatch) -> nnx.State:
        return nnx.grad(lambda tower: (tower(batch).reshape(mix.shape) * mix).sum())(tower)

    for ours, theirs in zip(*(jax.tree.leaves(gradient(tower, x)) for x in (poisoned, batch)), strict=True):
        np.testing.assert_array_equal(ours, theirs)
        assert np.isfinite(ours).all()


# --- temporal pooling -------------------------------------------------------------------------------------------------


def test_temporal_mean_by_hand() -> None:
    """Runs of 2 time steps at one place and in one segment; a shorter last run is the mean of what it has."""
    batch = pack_clips([[clip(0, frames=3), clip(1, frames=2)]], frames_per_segment=4)
    x = np.random.default_rng(0).normal(size=(1, 32, 5)).astype(np.float32)
    pooled = np.asarray(temporal_mean(jnp.asarray(x), *(jnp.asarray(array) for array in batch[1:]), 2))
    expected = x.copy()
    for first, second in [(0, 4), (12, 16)]:  # time steps 0 and 1 of each clip, four places each; step 2 of clip 0 stays alone
        mean = (x[0, first : first + 4] + x[0, second : second + 4]) / 2
        expected[0, first : first + 4] = expected[0, second : second + 4] = mean
    np.testing.assert_allclose(pooled[0, :20], expected[0, :20], rtol=1e-5, atol=1e-6)


def test_pooling_averages_after_the_encoder(tower: VisionTower, rebuilt: Callable, assert_close: Callable) -> None:
    pooled = rebuilt(tower, lambda: VisionTower(dataclasses.replace(CONFIG, temporal_pool=2), D_MODEL, nnx.Rngs(0)))
    tokens = run(pooled, pack_clips([[clip(0, frames=4)]]))[0]
    assert_close(tokens[1], tokens[0])
    assert_close(tokens[3], tokens[2])
    assert jnp.abs(tokens[2] - tokens[0]).max() > 1e-2
    still = pack_clips([[clip(0)]])
    assert_close(run(pooled, still)[0, :1], run(tower, still)[0, :1])


# --- the rest ---------------------------------------------------------------------------------------------------------


def test_bfloat16_compute_is_close(tower: VisionTower, rebuilt: Callable, assert_close: Callable) -> None:
    batch = pack_clips([[clip(0, frames=4)], [clip(1, columns=4)]])
    real = batch.segments_VL[:, ::4] > 0
    half = run(rebuilt(tower, lambda: VisionTower(CONFIG, D_MODEL, nnx.Rngs(0), dtype=jnp.bfloat16)), batch)
    assert half.dtype == jnp.bfloat16
    assert_close(half[real], run(tower, batch)[real], limit=0.02)


@pytest.mark.parametrize("remat", [False, True])
def test_remat_is_the_callers_choice(tower: VisionTower, rebuilt: Callable, remat: bool) -> None:
    """That it changes no gradient is tested where it is applied (tests/model/test_stack.py)."""
    chosen = rebuilt(tower, lambda: VisionTower(CONFIG, D_MODEL, nnx.Rngs(0), remat=remat))
    assert ("remat" in str(jax.make_jaxpr(lambda batch: chosen(batch))(pack_clips([[clip(0)]])))) == remat


def test_wrong_patches_are_refused() -> None:
    tower = nnx.eval_shape(lambda: VisionTower(CONFIG, D_MODEL, nnx.Rngs(0)))
    with pytest.raises(ValueError, match=r"\(1, 32, 13\); expected patches of 12 numbers"):
        tower(VisionBatch(np.zeros((1, 32, 13)), np.zeros((1, 32), int), np.zeros((1, 32, 3), int)))
    with pytest.raises(ValueError, match=r"divisible by merge\^2=4"):
        tower(VisionBatch(np.zeros((1, 30, 12)), np.zeros((1, 30), int), np.zeros((1, 30, 3), int)))


def test_minimax_m3_sizes_trace_without_memory() -> None:
    config = VisionConfig(width=1280, num_layers=32, num_heads=16, mlp_dim=5120, patch_size=14, temporal_patch_size=2, sequence_length=4096)
    tower = nnx.eval_shape(lambda: VisionTower(config, 6144, nnx.Rngs(0), dtype=jnp.bfloat16, remat=True))
    assert tower.layers.q.kernel.shape == (32, 1280, 16, 80)
    batch = VisionBatch(
        *(jax.ShapeDtypeStruct((2, 4096, *tail), kind) for tail, kind in [((1176,), "float32"), ((), "int32"), ((3,), "int32")])
    )
    graphdef, params = nnx.split(tower)
    tokens = jax.eval_shape(lambda params, batch: nnx.merge(graphdef, params)(batch), params, batch)
    assert (tokens.shape, tokens.dtype) == ((2 * 1024, 6144), jnp.bfloat16)
