"""The vision tower: patches -> 3D-attention ViT -> projector -> visual tokens of the model's width.

Several images and clips are packed into one sequence of L patches. A patch attends to every patch of its own segment (an
image, or up to `frames_per_segment` time steps of one clip) and to nothing else. Segments 1 1 1 1 2 2 2 2 0 0, rows are
queries:

        1 1 1 1 2 2 2 2 0 0
    1   x x x x . . . . . .      image, or frames that see each other ("3D attention")
    1   x x x x . . . . . .
    1   x x x x . . . . . .
    1   x x x x . . . . . .
    2   . . . . x x x x . .
    2   . . . . x x x x . .
    2   . . . . x x x x . .
    2   . . . . x x x x . .
    0   . . . . . . . . x x      padding sees padding, so that no row is empty; nobody else sees it
    0   . . . . . . . . x x

The encoder is MiniMax-M3's: linear patch embedding, LayerNorm, pre-LN layers with biases and erf-GELU, no final norm, no
learned positions but 3D RoPE. The projector is an MLP on each patch, then the merge^2 patches of a window side by side
through a second MLP.
"""

import functools

import jax
import jax.numpy as jnp
from flax import nnx
from jax.typing import DTypeLike
from jaxtyping import Array, Float, Int

from msa_jax.config import VisionConfig
from msa_jax.data.batch import VisionBatch
from msa_jax.model.init import fan_in_normal, residual_scale, rngs_by_name
from msa_jax.model.rope import rope_angles_3d, rotate
from msa_jax.model.stack import scan_modules, stack_modules


class GeluMLP(nnx.Module):
    """Linear, erf-GELU, linear, with biases."""

    def __init__(self, widths: tuple[int, int, int], *, rngs: nnx.Rngs, dtype: DTypeLike, output_scale: float = 1.0) -> None:
        child = rngs_by_name(rngs)
        width_in, hidden, width_out = widths
        self.up = nnx.Linear(width_in, hidden, dtype=dtype, kernel_init=fan_in_normal(), rngs=child("up"))
        self.down = nnx.Linear(hidden, width_out, dtype=dtype, kernel_init=fan_in_normal(output_scale), rngs=child("down"))

    def __call__(self, x: Float[Array, "*rows width_in"]) -> Float[Array, "*rows width_out"]:
        return self.down(jax.nn.gelu(self.up(x), approximate=False))


def layer_norm(config: VisionConfig, rngs: nnx.Rngs, dtype: DTypeLike) -> nnx.LayerNorm:
    return nnx.LayerNorm(config.width, epsilon=config.norm_eps, dtype=dtype, use_fast_variance=False, rngs=rngs)


class VisionBlock(nnx.Module):
    """Pre-LN encoder layer: attention inside segments with 3D RoPE, then an erf-GELU MLP."""

    def __init__(self, config: VisionConfig, rngs: nnx.Rngs, dtype: DTypeLike) -> None:
        self.config = config
        child, scale = rngs_by_name(rngs), residual_scale(config.num_layers)
        heads = (config.num_heads, config.width // config.num_heads)
        self.attention_norm = layer_norm(config, child("attention_norm"), dtype)
        self.q, self.k, self.v = (
            nnx.LinearGeneral(config.width, heads, dtype=dtype, kernel_init=fan_in_normal(), rngs=child(name)) for name in "qkv"
        )
        self.out = nnx.LinearGeneral(heads, config.width, axis=(-2, -1), dtype=dtype, kernel_init=fan_in_normal(scale), rngs=child("out"))
        self.mlp_norm = layer_norm(config, child("mlp_norm"), dtype)
        self.mlp = GeluMLP((config.width, config.mlp_dim, config.width), rngs=child("mlp"), dtype=dtype, output_scale=scale)

    def __call__(
        self, x_VLW: Float[Array, "V L W"], segments_VL: Int[Array, "V L"], coords_VLA: Int[Array, "V L A"]
    ) -> Float[Array, "V L W"]:
        normed_VLW = self.attention_norm(x_VLW)
        q_VLNH, k_VLNH, v_VLNH = self.q(normed_VLW), self.k(normed_VLW), self.v(normed_VLW)
        angles = rope_angles_3d(coords_VLA, q_VLNH.shape[-1], self.config.rope_theta)
        same_VLL = segments_VL[:, :, None] == segments_VL[:, None, :]
        out_VLNH = jax.nn.dot_product_attention(rotate(q_VLNH, angles), rotate(k_VLNH, angles), v_VLNH, mask=same_VLL[:, None])
        x_VLW = x_VLW + self.out(out_VLNH)
        return x_VLW + self.mlp(self.mlp_norm(x_VLW))


def temporal_mean(
    x_VLW: Float[Array, "V L W"], segments_VL: Int[Array, "V L"], coords_VLA: Int[Array, "V L A"], pool: int
) -> Float[Array, "V L W"]:
    """Every patch becomes the mean of the patches at its own (h, w) in its run of `pool` time steps, inside its segment.

    A shorter last run is the mean of what it has. The copies of a run are equal: the batch places the first one.
    """
    group_VLA = coords_VLA.at[..., 0].set(coords_VLA[..., 0] // pool)
    same_VLL = (segments_VL[:, :, None] == segments_VL[:, None, :]) & (group_VLA[:, :, None] == group_VLA[:, None, :]).all(-1)
    share_VLL = same_VLL / same_VLL.sum(-1, keepdims=True, dtype=jnp.float32)
    return jnp.einsum("vlm,vmw->vlw", share_VLL, x_VLW, preferred_element_type=jnp.float32).astype(x_VLW.dtype)


class VisionTower(nnx.Module):
    """VisionBatch -> visual tokens [V * M, D]; token v * M + m is made of patches m * merge^2 .. of packed sequence v.

    Padded patches (segment 0) reach no other token, whatever they hold. Parameters are float32, compute is in `dtype`.
    """

    def __init__(self, config: VisionConfig, d_model: int, rngs: nnx.Rngs, *, dtype: DTypeLike = jnp.float32, remat: bool = False) -> None:
        child = rngs_by_name(rngs)
        self.config, self.dtype, self.remat = config, dtype, remat
        self.patch_embedding = nnx.Linear(
            config.patch_dim, config.width, use_bias=False, dtype=dtype, kernel_init=fan_in_normal(), rngs=child("patch_embedding")
        )
        self.input_norm = layer_norm(config, child("input_norm"), dtype)
        self.layers = stack_modules(lambda rngs: VisionBlock(config, rngs, dtype), child("layers").params(), jnp.arange(config.num_layers))
        self.patch_projector = GeluMLP((config.width, d_model, d_model), rngs=child("patch_projector"), dtype=dtype)
        self.merge_projector = GeluMLP((config.merge**2 * d_model, d_model, d_model), rngs=child("merge_projector"), dtype=dtype)

    def __call__(self, batch: VisionBatch) -> Float[Array, "visual D"]:
        """Raises ValueError where the patches do not fit the tower's patch size or merge window."""
        patches_VLP, segments_VL, coords_VLA = (jnp.asarray(array) for array in batch)
        _, length, patch_dim = patches_VLP.shape
        if patch_dim != self.config.patch_dim or length % self.config.merge**2:
            raise ValueError(
                f"VisionTower: patches_VLP has shape {patches_VLP.shape}; expected patches of {self.config.patch_dim} numbers "
                f"and a length divisible by merge^2={self.config.merge**2}"
            )
        # zeroed and not only masked: a masked softmax weight is 0, but 0 * NaN would still poison its row
        real_VL1 = (segments_VL > 0)[..., None]
        x_VLW = self.input_norm(self.patch_embedding(jnp.where(real_VL1, patches_VLP, 0).astype(self.dtype)))
        run = functools.partial(_run_block, segments_VL=segments_VL, coords_VLA=coords_VLA)
        x_VLW, _ = scan_modules(run, self.layers, x_VLW, remat=self.remat)
        if self.config.temporal_pool > 1:
            x_VLW = temporal_mean(x_VLW, segments_VL, coords_VLA, self.config.temporal_pool)
        patches_VLD = self.patch_projector(x_VLW)
        return self.merge_projector(patches_VLD.reshape(-1, self.config.merge**2 * patches_VLD.shape[-1]))


def _run_block(block: VisionBlock, x_VLW: Array, segments_VL: Array, coords_VLA: Array) -> tuple[Array, None]:
    return block(x_VLW, segments_VL, coords_VLA), None
