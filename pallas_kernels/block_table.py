"""Where the key blocks of packed documents lie: from (segments, positions) to kernel blocks of at most C consecutive key rows.

Block ids are local to a document, and documents start at any row, so a block may start at any row. Kernels see none of that: they see
numbered *kernel blocks*, each with a first row and a number of rows.

    row        0         5         10        15             C = 5
    document   1 1 1 1 1 1 1 2 3 3 4 4 4 4 4 4 4 4 4
    kernel     [- full 0 -][win 1][full 2 -][full..           window 1 holds the tail of 1 and the whole of 2; 3 ends 5 rows after its start

Every full block (C rows of one document) is a kernel block of its own. A document's last block has fewer rows, and only its own tokens
see it, as their local block; such short blocks share windows. Of the short blocks that start in one cell (rows jC..jC+C-1), those that
end less than C rows after the start of the first one share its window; at most one does not, and gets its own. That bounds the kernel
blocks by 2 ceil(S / C), however many documents there are (ceil(S / C) without segments). Numbers ascend with the rows, and block `id`
of a document has the number `base + id`.
"""

from typing import NamedTuple

import jax
import jax.numpy as jnp
from jax import lax


class BlockTable(NamedTuple):
    """Kernel blocks of each batch row, and the view that each query has of them."""

    start_BJ: jax.Array  # first key row; 0 for unused numbers
    rows_BJ: jax.Array  # C for a full block, 1..C-1 for a window, 0 for unused numbers
    base_BT: jax.Array  # number of block 0 of the query's document
    local_BT: jax.Array  # id of the query's own block, -1 for padding; the valid ids are 0..local
    first_BT: jax.Array  # key rows first..last are what the query sees of its own block
    last_BT: jax.Array

    def number(self, ids_BKTR: jax.Array) -> jax.Array:
        """Kernel block number of every id, -1 for ids that are not valid."""
        valid = (ids_BKTR >= 0) & (ids_BKTR <= self.local_BT[:, None, :, None])
        return jnp.where(valid, self.base_BT[:, None, :, None] + ids_BKTR, -1)


def positions_in_segments(segments_BS: jax.Array) -> jax.Array:
    """Positions counted from the first row of each segment: [1, 1, 2, 2, 2] -> [0, 1, 0, 1, 2]."""
    row_S = jnp.arange(segments_BS.shape[1], dtype=jnp.int32)
    changes = segments_BS != jnp.roll(segments_BS, 1, axis=1)
    return row_S - lax.cummax(jnp.where(changes.at[:, 0].set(True), row_S, 0), axis=1)


def block_table(
    num_queries: int,
    num_keys: int,
    *,
    block_size: int,
    segments_BS: jax.Array | None = None,
    positions_BS: jax.Array | None = None,
    q_offset_B: jax.Array | None = None,
    batch: int = 1,
) -> BlockTable:
    """Table for queries at key rows `q_offset[b] + t` (default S - T); without segments, keys from q_offset + T on do not count."""
    offset_B = jnp.full((batch,), num_keys - num_queries, jnp.int32) if q_offset_B is None else q_offset_B.astype(jnp.int32)
    last_BT = offset_B[:, None] + jnp.arange(num_queries, dtype=jnp.int32)
    if segments_BS is None:
        start_J = jnp.arange(-(-num_keys // block_size), dtype=jnp.int32) * block_size
        end_B = jnp.minimum(offset_B + num_queries, num_keys)
        rows_BJ = jnp.clip(end_B[:, None] - start_J, 0, block_size)
        local_BT = last_BT // block_size
        start_BJ = jnp.broadcast_to(start_J, rows_BJ.shape)
        return BlockTable(start_BJ, rows_BJ, jnp.zeros_like(local_BT), local_BT, local_BT * block_size, last_BT)
    positions_BS = positions_in_segments(segments_BS) if positions_BS is None else positions_BS.astype(jnp.int32)
    start_BJ, rows_BJ, number_BS = _windows(segments_BS, positions_BS, block_size)
    position_BT = jnp.take_along_axis(positions_BS, last_BT, axis=1)
    real_BT = jnp.take_along_axis(segments_BS, last_BT, axis=1) > 0
    base_BT = jnp.where(real_BT, jnp.take_along_axis(number_BS, jnp.where(real_BT, last_BT - position_BT, 0), axis=1), 0)
    local_BT = jnp.where(real_BT, position_BT // block_size, -1)
    return BlockTable(start_BJ, rows_BJ, base_BT, local_BT, last_BT - position_BT % block_size, last_BT)


def _windows(segments_BS: jax.Array, positions_BS: jax.Array, block_size: int) -> tuple[jax.Array, jax.Array, jax.Array]:
    """Kernel blocks of packed rows; number_BS is the number of the last kernel block that starts at or before each row."""
    B, S = segments_BS.shape
    cells = -(-S // block_size)
    row_S = jnp.arange(S, dtype=jnp.int32)
    last_of_segment = (segments_BS != jnp.roll(segments_BS, -1, axis=1)).at[:, -1].set(True)
    end_BS = lax.cummin(jnp.where(last_of_segment, row_S + 1, S), axis=1, reverse=True)
    rows_BS = jnp.minimum(end_BS - row_S, block_size)
    starts = (segments_BS > 0) & (positions_BS % block_size == 0)
    short = starts & (rows_BS < block_size)
    pad = ((0, 0), (0, cells * block_size - S))
    first_of_cell = jnp.pad(jnp.where(short, row_S, S), pad, constant_values=S).reshape(B, cells, block_size).min(axis=2)
    window_BS = jnp.repeat(first_of_cell, block_size, axis=1)[:, :S]
    outside = row_S + rows_BS >= window_BS + block_size
    opens = starts & (~short | (row_S == window_BS) | outside)
    number_BS = jnp.cumsum(opens, axis=1, dtype=jnp.int32) - 1
    b_B1 = jnp.arange(B)[:, None]
    blocks = min(2 * cells, S)
    start_BJ = jnp.zeros((B, blocks), jnp.int32).at[b_B1, jnp.where(opens, number_BS, blocks)].set(row_S, mode="drop")
    used = jnp.where(starts, row_S + rows_BS - jnp.take_along_axis(start_BJ, jnp.maximum(number_BS, 0), axis=1), 0)
    rows_BJ = jnp.zeros((B, blocks), jnp.int32).at[b_B1, jnp.where(starts, number_BS, blocks)].max(used, mode="drop")
    return start_BJ, rows_BJ, number_BS
