"""The definition of sparse_attention: for each query, one softmax over all keys of which its support is kept."""

import functools

import jax
import jax.numpy as jnp

from pallas_kernels.blocks import Layout, support
from pallas_kernels.numerics import accumulator, einsum, masked_softmax


@functools.partial(jax.jit, static_argnames=("block_size", "scale"))
def sparse_attention(
    q_BTNH: jax.Array, k_BSKH: jax.Array, v_BSKH: jax.Array, ids_BKTR: jax.Array, layout: Layout, *, block_size: int, scale: float
) -> tuple[jax.Array, jax.Array]:
    """out [B, T, N, H] and lse [B, T, N]; see api.py. Its gradients are those of autodiff."""
    batch, _, num_heads, _ = q_BTNH.shape
    num_kv_heads = k_BSKH.shape[2]
    dtype = accumulator(q_BTNH, k_BSKH, v_BSKH)
    support_BKTS = support(ids_BKTR, layout, block_size, num_kv_heads)

    # One query at a time, so that keys outside its support are replaced by zero: multiplied by zero, a NaN would stay.
    @jax.checkpoint
    def attend(query: tuple[jax.Array, jax.Array]) -> tuple[jax.Array, jax.Array]:
        q_BNH, support_BKS = query
        q_BKGH = q_BNH.reshape(batch, num_kv_heads, num_heads // num_kv_heads, -1).astype(dtype)
        kept_BSK1 = support_BKS.swapaxes(1, 2)[..., None]
        k_kept_BSKH = jnp.where(kept_BSK1, k_BSKH.astype(dtype), 0)
        v_kept_BSKH = jnp.where(kept_BSK1, v_BSKH.astype(dtype), 0)
        logits_BKGS = einsum("bkgh,bskh->bkgs", q_BKGH, k_kept_BSKH) * scale
        weights_BKGS, total_BKG1, lse_BKG1 = masked_softmax(logits_BKGS, support_BKS[:, :, None])
        out_BKGH = einsum("bkgs,bskh->bkgh", weights_BKGS / total_BKG1, v_kept_BSKH)
        return out_BKGH.reshape(batch, num_heads, -1), lse_BKG1.reshape(batch, num_heads)

    out_TBNH, lse_TBN = jax.lax.map(attend, (q_BTNH.swapaxes(0, 1), jnp.moveaxis(support_BKTS, 2, 0)))
    return out_TBNH.swapaxes(0, 1).astype(q_BTNH.dtype), lse_TBN.swapaxes(0, 1)
