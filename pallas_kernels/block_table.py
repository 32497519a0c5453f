"""Where the key blocks of packed documents lie: from (segments, positions) to kernel blocks of at most C consecutive key rows.

Block ids are local to a document, and documents start at any row, so a block may start at any row. Kernels see none of that: they see
numbered *kernel blocks*, each with a first row and a number of rows, and the keys copied into slots of C rows, one a kernel block
(a tiled TMA read must start at a multiple of 8 rows). Without segments slots and keys are the same rows and nothing is copied.

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

from pallas_kernels.blocks import Layout, at_queries


class BlockTable(NamedTuple):
    """Kernel blocks of each batch row, and the view that each query has of them."""

    start_BJ: jax.Array  # first key row; 0 for unused numbers
    rows_BJ: jax.Array  # C for a full block, 1..C-1 for a window, 0 for unused numbers
    base_BT: jax.Array  # number of block 0 of the query's document
    local_BT: jax.Array  # id of the query's own block, -1 for padding; the valid ids are 0..local
    first_BT: jax.Array  # key rows first..last are what the query sees of its own block
    last_BT: jax.Array
    slot_BS: jax.Array | None  # where each key stands in the slots, J * C for padding; None: slots and keys are the same rows

    def number(self, ids_BKTR: jax.Array) -> jax.Array:
        """Kernel block number of every id, -1 for ids that are not valid."""
        valid = (ids_BKTR >= 0) & (ids_BKTR <= self.local_BT[:, None, :, None])
        return jnp.where(valid, self.base_BT[:, None, :, None] + ids_BKTR, -1)

    def whole(self, num_keys: int, block_size: int) -> bool:
        """Whether, as known while tracing, every kernel block is full; then slots and keys are the same rows."""
        return self.slot_BS is None and self.last_BT.shape[1] == num_keys == self.start_BJ.shape[1] * block_size

    def to_slots(self, x_BSKH: jax.Array, block_size: int) -> jax.Array:
        """Keys or values in slots, [B, J * C, K, H]; rows that hold no key of the slot's documents are 0, so that they cannot be NaN."""
        (B, J), S = self.start_BJ.shape, x_BSKH.shape[1]
        if self.whole(S, block_size):
            return x_BSKH
        row_BJC = self.start_BJ[..., None] + jnp.arange(block_size, dtype=jnp.int32)
        real_BJC = jnp.arange(block_size, dtype=jnp.int32) < self.rows_BJ[..., None]
        if self.slot_BS is None:
            x_BSKH = jnp.pad(x_BSKH, ((0, 0), (0, J * block_size - S), (0, 0), (0, 0)))
        else:
            row_B1 = jnp.arange(B)[:, None]
            row_BJC = jnp.minimum(row_BJC, S - 1).reshape(B, -1)
            real_BJC = real_BJC.reshape(B, -1) & (self.slot_BS[row_B1, row_BJC] < J * block_size)
            x_BSKH = x_BSKH[row_B1, row_BJC]
        return jnp.where(real_BJC.reshape(B, J * block_size, 1, 1), x_BSKH, 0)

    def from_slots(self, x_BZKH: jax.Array, num_keys: int) -> jax.Array:
        """Transpose of `to_slots`: every key's row, 0 for padding."""
        if self.slot_BS is None:
            return x_BZKH[:, :num_keys]
        return x_BZKH.at[jnp.arange(x_BZKH.shape[0])[:, None], self.slot_BS].get(mode="fill", fill_value=0)


def block_table(layout: Layout, block_size: int) -> BlockTable:
    """The table of a call; without segments, keys after the last query do not count."""
    last_BT, S = layout.reach.index_BT, layout.segments_BS.shape[1]
    if layout.aligned is not None:
        start_J = jnp.arange(-(-S // block_size), dtype=jnp.int32) * block_size
        rows_BJ = jnp.clip(jnp.minimum(last_BT[:, -1:] + 1, S) - start_J, 0, block_size)
        local_BT = jnp.where((last_BT >= 0) & (last_BT < S), last_BT // block_size, -1)
        start_BJ = jnp.broadcast_to(start_J, rows_BJ.shape)
        return BlockTable(start_BJ, rows_BJ, jnp.zeros_like(local_BT), local_BT, local_BT * block_size, last_BT, None)
    start_BJ, rows_BJ, number_BS = _windows(layout.segments_BS, layout.positions_BS, block_size)
    # A key's block is the one that holds the first row of its document-local block.
    own_BS = jnp.arange(S, dtype=jnp.int32) - layout.positions_BS % block_size
    number_own_BS = jnp.take_along_axis(number_BS, own_BS, axis=1)
    place_BS = jnp.arange(S, dtype=jnp.int32) - jnp.take_along_axis(start_BJ, jnp.maximum(number_own_BS, 0), axis=1)
    slot_BS = jnp.where(layout.segments_BS > 0, number_own_BS * block_size + place_BS, start_BJ.shape[1] * block_size)
    local_BT = jnp.where(at_queries(layout.segments_BS, last_BT) > 0, at_queries(layout.positions_BS, last_BT) // block_size, -1)
    base_BT = jnp.where(local_BT >= 0, at_queries(number_own_BS, last_BT) - local_BT, 0)
    first_BT = last_BT - at_queries(layout.positions_BS, last_BT) % block_size
    return BlockTable(start_BJ, rows_BJ, base_BT, local_BT, first_BT, last_BT, slot_BS)


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
