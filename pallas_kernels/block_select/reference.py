"""The definition of block_select: every score of the whole sequence, one sort."""

import functools

import jax
import jax.numpy as jnp

from pallas_kernels.blocks import Layout, at_queries, support, visible
from pallas_kernels.numerics import accumulator, einsum, masked_softmax


@functools.partial(jax.jit, static_argnames=("block_size", "num_blocks", "local_blocks", "init_blocks", "scale"))
def block_select(
    iq_BTKI: jax.Array,
    ik_BSI: jax.Array,
    layout: Layout,
    *,
    block_size: int,
    num_blocks: int,
    local_blocks: int,
    init_blocks: int,
    scale: float,
) -> tuple[jax.Array, jax.Array]:
    """ids [B, K, T, R] and lse [B, K, T]; see api.py."""
    dtype = accumulator(iq_BTKI, ik_BSI)
    s_BKTS = einsum("btki,bsi->bkts", iq_BTKI.astype(dtype), ik_BSI.astype(dtype)) * scale
    num_kv_heads, num_keys = s_BKTS.shape[1], s_BKTS.shape[3]

    # Block score: the largest visible token score, NaN counted as -inf.
    block_J = jnp.arange(-(-num_keys // block_size), dtype=jnp.int32)
    member_BTSJ = visible(layout)[..., None] & ((layout.positions_BS // block_size)[:, None, :, None] == block_J)
    token_BKTS1 = jnp.where(jnp.isnan(s_BKTS), -jnp.inf, s_BKTS)[..., None]
    score_BKTJ = jnp.where(member_BTSJ[:, None], token_BKTS1, -jnp.inf).max(axis=3)

    # Rank: always kept, then by higher score, then by lower id (the sort holds -0.0 and +0.0 equal); unseen blocks last.
    own_BT1 = (at_queries(layout.positions_BS, layout.reach.index_BT) // block_size)[..., None]
    seen_BTJ = member_BTSJ.any(axis=2)
    always_BTJ = (block_J > own_BT1 - local_blocks) | (block_J < init_blocks)
    order_BTJ = jnp.where(seen_BTJ, jnp.where(always_BTJ, 0, 1), 2)
    shape = score_BKTJ.shape
    keys = (jnp.broadcast_to(order_BTJ[:, None], shape), -score_BKTJ, jnp.broadcast_to(block_J, shape))
    order_BKTJ, _, id_BKTJ = jax.lax.sort(keys, num_keys=3)
    kept_BKTR = jnp.where(order_BKTJ < 2, id_BKTJ, num_keys)[..., :num_blocks]
    kept_BKTR = jnp.pad(kept_BKTR, ((0, 0),) * 3 + ((0, num_blocks - kept_BKTR.shape[-1]),), constant_values=num_keys)

    # Ascending ids put the local block, the greatest a query sees, into the last valid slot.
    kept_BKTR = jnp.sort(kept_BKTR, axis=-1)
    ids_BKTR = jnp.where(kept_BKTR < num_keys, kept_BKTR, -1)
    _, _, lse_BKT1 = masked_softmax(s_BKTS, support(ids_BKTR, layout, block_size, num_kv_heads))
    return ids_BKTR, lse_BKT1[..., 0].astype(jnp.float32)
