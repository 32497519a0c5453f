import jax
import jax.numpy as jnp
import numpy as np
import pytest

from msa_jax.model.rope import rope_angles, rope_angles_3d, rotate

RNG = np.random.default_rng(0)


def test_halves_turn_like_complex_numbers() -> None:
    """Channels (i, i + r) are one complex number times e^(i angle); the rest passes through untouched."""
    x = RNG.normal(size=(2, 5, 3, 16)).astype(np.float32)
    positions = RNG.integers(0, 1000, (2, 5))
    rotary, theta = 8, 100.0
    angles = positions[..., None] * theta ** (-np.arange(4) / 4)
    turned = (x[..., :4] + 1j * x[..., 4:8]) * np.exp(1j * angles)[:, :, None]
    y = rotate(jnp.asarray(x), rope_angles(jnp.asarray(positions), rotary, theta))
    np.testing.assert_allclose(y[..., :4], turned.real, atol=2e-4)
    np.testing.assert_allclose(y[..., 4:8], turned.imag, atol=2e-4)
    np.testing.assert_array_equal(y[..., 8:], x[..., 8:])


def test_no_rotary_channels_is_the_identity() -> None:
    x = jnp.asarray(RNG.normal(size=(1, 3, 2, 8)))
    np.testing.assert_array_equal(rotate(x, rope_angles(jnp.arange(3)[None], 0, 1e4)), x)


def scores(coords_q: np.ndarray, coords_k: np.ndarray, head_dim: int) -> np.ndarray:
    q, k = (np.random.default_rng(seed).normal(size=(1, 1, head_dim)).astype(np.float32) for seed in (1, 2))
    turned = [rotate(jnp.asarray(x), rope_angles_3d(jnp.asarray(c)[None], head_dim, 1e4)) for x, c in ((q, coords_q), (k, coords_k))]
    return np.asarray((turned[0] * turned[1]).sum())


@pytest.mark.parametrize("axis", [0, 1, 2])
def test_each_axis_moves_its_own_channels(axis: int) -> None:
    """26 + 26 + 26 of 80 channels in MiniMax-M3: 13 angles an axis, in the order t, h, w; the last two channels never turn."""
    head_dim = 80
    origin = jnp.asarray([[2, 3, 5]])
    moved = origin.at[0, axis].add(1)
    before, after = rope_angles_3d(origin, head_dim, 1e4), rope_angles_3d(moved, head_dim, 1e4)
    assert before.shape == (1, 39)
    changed = np.asarray(before != after)[0].reshape(3, 13)
    assert changed[axis].all()
    assert not np.delete(changed, axis, axis=0).any()
    x = jnp.asarray(RNG.normal(size=(1, 2, head_dim)), jnp.float32)
    for trigonometric in (jnp.cos, jnp.sin):
        assert (trigonometric(before) != trigonometric(after)).any(), "moving along one axis must change cos and sin"
    touched = np.asarray(rotate(x, before) != rotate(x, after)).any((0, 1))
    half = np.repeat(np.arange(3) == axis, 13)
    np.testing.assert_array_equal(touched, np.concatenate([half, half, [False, False]]))


@pytest.mark.parametrize("head_dim", [6, 16, 80])
def test_only_differences_of_coordinates_matter(head_dim: int) -> None:
    q, k, shift = np.array([1, 4, 2]), np.array([0, 7, 3]), np.array([5, 2, 9])
    base = scores(q, k, head_dim)
    np.testing.assert_allclose(scores(q + shift, k + shift, head_dim), base, rtol=1e-4, atol=1e-5)
    for axis in range(3):
        assert abs(scores(q + np.eye(3, dtype=int)[axis], k, head_dim) - base) > 1e-3, f"axis {axis} has no effect"


def test_the_rotation_is_float32_and_keeps_the_dtype() -> None:
    x = jnp.asarray(RNG.normal(size=(1, 64, 2, 8)), jnp.bfloat16)
    angles = rope_angles(jnp.arange(64)[None] * 1000, 8, 1e4)
    assert angles.dtype == jnp.float32
    y = jax.jit(rotate)(x, angles)
    assert y.dtype == jnp.bfloat16
    exact = rotate(x.astype(jnp.float32), angles)
    np.testing.assert_allclose(y.astype(jnp.float32), exact, rtol=2**-8, atol=1e-6)
