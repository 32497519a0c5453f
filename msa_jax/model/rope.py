"""Rotary position embedding (Su et al., arXiv 2104.09864): partial, over one axis for text and over three for patches.

The first 2r of H channels turn, in NeoX halves: channel i pairs with channel i + r, the rest pass through.

    text     angles_i = position * theta^(-i / r),                i < r = rotary_dim / 2
    patches  angles   = [t angles | h angles | w angles],         H // 6 each, so r = 3 * (H // 6)
"""

import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, Float, Int


def rope_angles(positions: Int[Array, "*rows"], rotary_dim: int, theta: float) -> Float[Array, "*rows half"]:
    """Angles in radians, float32, [..., rotary_dim / 2]."""
    frequencies = theta ** -(np.arange(0, rotary_dim, 2) / max(rotary_dim, 1))
    return jnp.asarray(positions, jnp.float32)[..., None] * frequencies.astype(np.float32)


def rope_angles_3d(coords: Int[Array, "*rows A"], head_dim: int, theta: float) -> Float[Array, "*rows half"]:
    """Angles of (t, h, w) side by side, float32, [..., 3 * (head_dim // 6)]; each axis has its own full frequency range."""
    axis_width = 2 * (head_dim // 6)
    angles = rope_angles(coords, axis_width, theta)
    return angles.reshape(*angles.shape[:-2], -1)


def rotate(x: Float[Array, "*rows N H"], angles: Float[Array, "*rows half"]) -> Float[Array, "*rows N H"]:
    """Turns the first 2 * half channels of every head by `angles`, in float32; returns the dtype of x."""
    half = angles.shape[-1]
    cos, sin = jnp.cos(angles)[..., None, :], jnp.sin(angles)[..., None, :]
    first, second = x[..., :half], x[..., half : 2 * half]
    turned = (first * cos - second * sin, second * cos + first * sin)
    return jnp.concatenate([*(part.astype(x.dtype) for part in turned), x[..., 2 * half :]], axis=-1)
