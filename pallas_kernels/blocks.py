"""Where queries and keys stand, which keys a query may see, and which of them its block ids cover: one rule for all ops.

Two documents packed into one row after a padding token, C = 2. Blocks are counted from the start of each document,
wherever that lies, so a block never holds keys of two documents:

    key index    0    1   2   3   4   5    6   7   8
    segment      0    1   1   1   1   1    2   2   2
    position     -    0   1   2   3   4    0   1   2
    block        -   [0   0] [1   1] [2]  [0   0] [1]

Query 5 sees keys 1..5 and may keep its blocks 0, 1 and 2; query 7 sees keys 6 and 7 and may keep block 0.
"""

from typing import NamedTuple

import jax
import jax.numpy as jnp


class Reach(NamedTuple):
    """What each query may see, as bounds on key indices. int32 [B, T]; a query of zeros sees nothing.

    The query stands at key `index` and sees the `count` keys that end there. Its document's block b is the keys
    origin + b * C .. origin + (b + 1) * C - 1. Holds where documents are uninterrupted and positions count up by one in each.
    """

    index_BT: jax.Array
    count_BT: jax.Array  # 0 for a padding query
    origin_BT: jax.Array


class Layout(NamedTuple):
    """Documents along the keys, and what follows from them for each query. All int32."""

    segments_BS: jax.Array  # 0 = padding, documents 1..
    positions_BS: jax.Array  # position inside the document
    reach: Reach
    aligned: tuple[()] | None = None  # () where one document fills every row: known while tracing, so kernels may skip what packing needs


def make_layout(
    num_queries: int,
    num_keys: int,
    batch: int,
    segments_BS: jax.Array | None,
    positions_BS: jax.Array | None,
    q_offset: jax.Array | int | None,
) -> Layout:
    """One document where `segments_BS` is None; positions counted from each segment's start where `positions_BS` is None.

    Query i stands at key q_offset + i; one that stands outside the keys is padding.
    """
    key_index_BS = jnp.broadcast_to(jnp.arange(num_keys, dtype=jnp.int32), (batch, num_keys))
    aligned = () if segments_BS is None else None
    if segments_BS is None:
        segments_BS, positions_BS, first_BS = jnp.ones_like(key_index_BS), key_index_BS, jnp.zeros_like(key_index_BS)
    else:
        segments_BS = jnp.asarray(segments_BS, jnp.int32)
        first_BS = first_keys(segments_BS)
        positions_BS = key_index_BS - first_BS if positions_BS is None else jnp.asarray(positions_BS, jnp.int32)
    count_BS = jnp.where(segments_BS > 0, key_index_BS - first_BS + 1, 0)
    offset_B1 = jnp.broadcast_to(jnp.asarray(num_keys - num_queries if q_offset is None else q_offset, jnp.int32), (batch,))[:, None]
    index_BT = offset_B1 + jnp.arange(num_queries, dtype=jnp.int32)
    reach = Reach(index_BT, at_queries(count_BS, index_BT), at_queries(key_index_BS - positions_BS, index_BT))
    return Layout(segments_BS, positions_BS, reach, aligned)


def first_keys(segments_BS: jax.Array) -> jax.Array:
    """Key index at which the run of equal segment ids around each key starts."""
    key_index_S = jnp.arange(segments_BS.shape[1], dtype=jnp.int32)
    starts_BS = jnp.pad(segments_BS[:, 1:] != segments_BS[:, :-1], ((0, 0), (1, 0)))
    return jax.lax.cummax(jnp.where(starts_BS, key_index_S, 0), axis=1)


def at_queries(values_BS: jax.Array, index_BT: jax.Array) -> jax.Array:
    """The keys' values at the queries' places; 0 (padding) for a query that stands outside the keys."""
    inside_BT = (index_BT >= 0) & (index_BT < values_BS.shape[1])
    return jnp.where(inside_BT, jnp.take_along_axis(values_BS, index_BT, axis=1, mode="clip"), 0)


def visible(layout: Layout) -> jax.Array:
    """[B, T, S] bool: the key is of the query's document, which is not padding, and not after the query."""
    index_BT = layout.reach.index_BT
    segments_BT = at_queries(layout.segments_BS, index_BT)
    same_BTS = (segments_BT[:, :, None] == layout.segments_BS[:, None, :]) & (segments_BT > 0)[:, :, None]
    key_index_S = jnp.arange(layout.segments_BS.shape[1], dtype=jnp.int32)
    return same_BTS & (key_index_S <= index_BT[:, :, None])


def in_reach(key_index: jax.Array, index: jax.Array, count: jax.Array) -> jax.Array:
    """Whether a query of this index and count sees the key; the three broadcast."""
    return (key_index <= index) & (key_index > index - count)


def support(ids_BKTR: jax.Array | None, layout: Layout, block_size: int, num_kv_heads: int) -> jax.Array:
    """[B, K, T, S] bool: the visible keys of the blocks in `ids_BKTR`, or all visible keys where that is None.

    An id that is negative or past the query's own block covers no visible key, and a repeated id covers the same keys again:
    neither needs a rule of its own.
    """
    visible_B1TS = visible(layout)[:, None]
    if ids_BKTR is None:
        batch, _, num_queries, num_keys = visible_B1TS.shape
        return jnp.broadcast_to(visible_B1TS, (batch, num_kv_heads, num_queries, num_keys))
    block_BS = layout.positions_BS // block_size
    covered_BKTS = (ids_BKTR[..., None] == block_BS[:, None, None, None, :]).any(axis=3)
    return visible_B1TS & covered_BKTS
