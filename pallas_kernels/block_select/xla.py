"""block_select in plain JAX: scores of a chunk of queries against a chunk of keys at a time, kept as block maxima.

Memory beside inputs and outputs: the scores of one chunk of queries against one of keys, and one maximum for each block
(1 / C of a row of scores) of the queries in the chunk. Keys that no query of the chunk sees are not visited.
"""

import functools
import math

import jax
import jax.numpy as jnp

from pallas_kernels.blocks import Layout, Reach, in_reach
from pallas_kernels.chunks import by_group, finite, for_heads, key_view, logits, row_elements, scan_queries
from pallas_kernels.numerics import accumulator, einsum, masked_softmax

KEY_CHUNK = 1024  # keys scored at a time, rounded to whole blocks


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
    batch, num_keys, _ = ik_BSI.shape
    block_size = min(block_size, num_keys)
    num_frames = -(-num_keys // block_size)
    num_chunks = -(-num_keys // max(KEY_CHUNK, block_size))
    chunk_frames = -(-num_frames // num_chunks)
    num_padded = num_chunks * chunk_frames * block_size
    ik_BSI_padded = jnp.pad(ik_BSI, ((0, 0), (0, num_padded - num_keys), (0, 0)))

    def select(carry: None, queries: tuple[jax.Array, Reach]) -> tuple[None, jax.Array]:
        iq_BZKI, chunk_reach = queries
        scores_BKZY = _frame_scores(iq_BZKI, ik_BSI_padded, chunk_reach, block_size, chunk_frames, scale)
        ids_BKZR = _keep_best(scores_BKZY, chunk_reach, block_size, num_blocks, local_blocks, init_blocks)
        return carry, ids_BKZR.swapaxes(1, 2)

    elements = batch * iq_BTKI.shape[2] * max(chunk_frames * block_size, num_frames)
    _, ids_BTKR = scan_queries(select, None, elements, (iq_BTKI, layout.reach))
    ids_BKTR = ids_BTKR.swapaxes(1, 2)
    return ids_BKTR, _support_lse(iq_BTKI, ik_BSI, ids_BKTR, layout, block_size, scale).astype(jnp.float32)


def _frame_scores(iq_BZKI: jax.Array, ik_BSI: jax.Array, chunk_reach: Reach, block_size: int, chunk_frames: int, scale: float) -> jax.Array:
    """[B, K, Z, Y]: score of the block that starts in each frame of C keys, frames -1..J-1; -inf without a visible number.

    A block of a document that starts `shift` keys after a multiple of C ends in the next frame: its score is the larger of
    the maximum over the keys from `shift` on in its own frame and over the keys before `shift` in the next.
    """
    index_B1Z1, count_B1Z1, origin_B1Z1 = (x_BZ[:, None, :, None] for x_BZ in chunk_reach)
    after_B1Z1C = jnp.arange(block_size) >= (origin_B1Z1 % block_size)[..., None]
    size = chunk_frames * block_size
    # A positive factor keeps the order and waits for the maxima; the sign cannot wait.
    signed_BZKI = iq_BZKI * math.copysign(1, scale)

    def visit(i: jax.Array | int, maxima: tuple[jax.Array, jax.Array]) -> tuple[jax.Array, ...]:
        ik_BUI = jax.lax.dynamic_slice_in_dim(ik_BSI, i * size, size, axis=1)
        s_BKZU = einsum("bzki,bui->bkzu", signed_BZKI, ik_BUI)
        seen_B1ZU = in_reach(i * size + jnp.arange(size), index_B1Z1, count_B1Z1)
        s_BKZU = jnp.where(seen_B1ZU & ~jnp.isnan(s_BKZU), s_BKZU, -jnp.inf)
        s_BKZJC = s_BKZU.reshape(*s_BKZU.shape[:3], chunk_frames, block_size)
        parts = (jnp.where(after_B1Z1C, s_BKZJC, -jnp.inf), jnp.where(after_B1Z1C, -jnp.inf, s_BKZJC))
        return tuple(
            jax.lax.dynamic_update_slice_in_dim(maximum, part.max(axis=-1), i * chunk_frames, axis=3)
            for maximum, part in zip(maxima, parts, strict=True)
        )

    batch, num_queries, num_kv_heads, _ = iq_BZKI.shape
    shape = (batch, num_kv_heads, num_queries, ik_BSI.shape[1] // block_size)
    lowest_BKZJ = jnp.full_like(iq_BZKI, -jnp.inf, dtype=accumulator(iq_BZKI, ik_BSI), shape=shape)
    edge_BKZ1 = lowest_BKZJ[..., :1]
    if ik_BSI.shape[1] == size:
        after_BKZJ, before_BKZJ = visit(0, (lowest_BKZJ, lowest_BKZJ))
    else:
        first, last = _seen_keys(chunk_reach, ik_BSI.shape[1])
        after_BKZJ, before_BKZJ = jax.lax.fori_loop(first // size, last // size + 1, visit, (lowest_BKZJ, lowest_BKZJ))
    before_BKZY = jnp.concatenate([before_BKZJ, edge_BKZ1], axis=-1)
    best_BKZY = jnp.maximum(jnp.concatenate([edge_BKZ1, after_BKZJ], axis=-1), before_BKZY)
    return jnp.where(jnp.isneginf(best_BKZY), best_BKZY, best_BKZY * abs(scale))


def _seen_keys(chunk_reach: Reach, num_keys: int) -> tuple[jax.Array, jax.Array]:
    """The first and the last key that any query of the chunk sees; (num_keys, -1) where none sees any."""
    seen_BZ = chunk_reach.count_BT > 0
    first_BZ = jnp.where(seen_BZ, chunk_reach.index_BT - chunk_reach.count_BT + 1, num_keys)
    return first_BZ.min(), jnp.where(seen_BZ, chunk_reach.index_BT, -1).max()


def _keep_best(
    scores_BKZY: jax.Array, chunk_reach: Reach, block_size: int, num_blocks: int, local_blocks: int, init_blocks: int
) -> jax.Array:
    """ids [B, K, Z, R], ascending (the query's own block is the greatest it sees), then -1."""
    index_B1Z1, count_B1Z1, origin_B1Z1 = (x_BZ[:, None, :, None] for x_BZ in chunk_reach)
    num_frames = scores_BKZY.shape[-1]
    first_frame_B1Z1 = origin_B1Z1 // block_size
    own_B1Z1 = (index_B1Z1 - origin_B1Z1) // block_size
    id_B1ZY = jnp.arange(-1, num_frames - 1) - first_frame_B1Z1
    past_end_B1ZY = origin_B1Z1 + (id_B1ZY + 1) * block_size
    seen_B1ZY = (id_B1ZY >= 0) & (id_B1ZY <= own_B1Z1) & (past_end_B1ZY > index_B1Z1 - count_B1Z1 + 1) & (count_B1Z1 > 0)
    always_B1ZY = (id_B1ZY > own_B1Z1 - local_blocks) | (id_B1ZY < init_blocks)

    # Ranks leave the infinities to "always kept" and "not seen". top_k takes the lower index among equals, once -0.0 is 0.0.
    largest = jnp.finfo(scores_BKZY.dtype).max
    rank_BKZY = jnp.where(scores_BKZY == 0, 0, jnp.clip(scores_BKZY, -largest, largest))
    rank_BKZY = jnp.where(seen_B1ZY, jnp.where(always_B1ZY, jnp.inf, rank_BKZY), -jnp.inf)
    rank_BKZR, frame_BKZR = jax.lax.top_k(rank_BKZY, min(num_blocks, num_frames))
    ids_BKZR = jnp.where(rank_BKZR > -jnp.inf, frame_BKZR - 1 - first_frame_B1Z1, num_frames)
    ids_BKZR = jnp.sort(ids_BKZR, axis=-1)
    ids_BKZR = jnp.where(ids_BKZR < num_frames, ids_BKZR, -1)
    return jnp.pad(ids_BKZR, ((0, 0),) * 3 + ((0, num_blocks - ids_BKZR.shape[-1]),), constant_values=-1)


def _support_lse(iq_BTKI: jax.Array, ik_BSI: jax.Array, ids_BKTR: jax.Array, layout: Layout, block_size: int, scale: float) -> jax.Array:
    """[B, K, T]. A pass of its own over the kept blocks, so that a caller under jit who does not use it does not pay for it."""
    num_keys, num_kv_heads = ik_BSI.shape[1], iq_BTKI.shape[2]
    ik_BKSI = for_heads(ik_BSI, num_kv_heads)

    def lse(carry: None, queries: tuple) -> tuple[None, jax.Array]:
        iq_BZKI, ids_BZKR, chunk_reach = queries
        view = key_view(ids_BZKR.swapaxes(1, 2), chunk_reach, num_keys, block_size)
        s_BKZ1U = logits(view, finite(by_group(iq_BZKI, num_kv_heads)), ik_BKSI, scale)
        lse_BKZ11 = masked_softmax(s_BKZ1U, view.keep_BKZ1U)[2]
        return carry, lse_BKZ11[..., 0, 0].swapaxes(1, 2)

    elements = row_elements(ids_BKTR, ik_BKSI, num_kv_heads, ik_BSI.shape[-1], block_size)
    return scan_queries(lse, None, elements, (iq_BTKI, ids_BKTR.swapaxes(1, 2), layout.reach))[1].swapaxes(1, 2)
