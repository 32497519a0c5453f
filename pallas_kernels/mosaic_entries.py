"""The entries of a work item inside a kernel: how they reach shared memory, what they say, and which keys their queries see."""

from typing import Any

import jax
import jax.numpy as jnp
from jax import lax
from jax.experimental import pallas as pl
from jax.experimental.pallas import mosaic_gpu as plgpu

from pallas_kernels.inverse_index import BLOCK, COUNT, ENTRY, LIST, ROWS, START, slot_bits
from pallas_kernels.mosaic import int32, row_values

_BOX = 256  # a TMA box has at most 256 elements an axis


def load_arrivals(per: int) -> int:
    """Arrivals on its barrier that `load_entries` makes for pieces of `per` entries."""
    return -(-per // _BOX)


def load_entries(entry_P: Any, first: jax.Array, ids_sm: Any, barrier: Any) -> None:
    """Starts the loads of a work item's entries, whatever their number: the list has room for a whole piece from any start."""
    per = ids_sm.shape[0]
    for begin in range(0, per, _BOX):
        size = min(_BOX, per - begin)
        plgpu.copy_gmem_to_smem(entry_P.at[pl.ds(first + begin, size)], ids_sm.at[pl.ds(begin, size)], barrier)


class Entries:
    """The entries of a work item in shared memory, in tiles of `per_tile`."""

    def __init__(self, ids_sm: Any, slots: int, per_tile: int):
        self._ids, self._bits, self._per_tile = ids_sm, slot_bits(slots), per_tile

    def of_tile(self, tile: jax.Array) -> list[tuple[jax.Array, jax.Array, jax.Array]]:
        """[(query, slot, whether there is an entry)]; padding reads as query 0."""
        packed = [self._ids[tile * self._per_tile + j] for j in range(self._per_tile)]
        safe = [jnp.maximum(e, 0) for e in packed]
        return [(lax.shift_right_logical(s, self._bits), s & ((1 << self._bits) - 1), e >= 0) for s, e in zip(safe, packed, strict=True)]


class WorkItem:
    """What a thread block works at: `tiles` tiles of entries of list `l` (batch row `b`, KV head `h`) that chose one kernel block.

    `w` is its number, `wg` the warpgroup that asks.
    """

    def __init__(self, item_ref: Any, ids_sm: Any, *, num_kv_heads: int, slots: int, per_tile: int):
        self._item, self.w, self.wg = item_ref, lax.axis_index("w"), lax.axis_index("wg")
        self.tiles = lax.div(item_ref[self.w, COUNT] + (per_tile - 1), int32(per_tile))
        self.l, self.first_entry = item_ref[self.w, LIST], item_ref[self.w, ENTRY]
        self.b, self.h = lax.div(self.l, int32(num_kv_heads)), lax.rem(self.l, int32(num_kv_heads))
        self.entries = Entries(ids_sm, slots, per_tile)

    def slot_rows(self, slots_BZKH: Any, block_size: int) -> Any:
        """The block's rows of keys or values in slots."""
        block = lax.rem(self._item[self.w, BLOCK], int32(slots_BZKH.shape[1] // block_size))
        return pl.ds(block * block_size, block_size)

    def extent(self) -> tuple[jax.Array, jax.Array]:
        """First key row of the block, and its rows."""
        return self._item[self.w, START], self._item[self.w, ROWS]


def visible(queries: list[jax.Array], first_T: Any, item: tuple, block_size: int, shape: tuple[int, int], *, query_axis: int, key0=0):
    """Which keys of a block the rows of a tile see: (whether any is hidden, a function that makes the mask of `shape`).

    Queries ascend, so only a tile whose first query is in the block, or any tile of a window, has hidden keys.

    Args:
      queries: the tile's, each of them owning an equal part of `query_axis`.
      first_T: row of BlockTable.first_BT, read only where the block is a window.
      item: (key row of query 0, first key row of the block, rows of the block).
      key0: the block's key that stands first on the key axis.
    """
    key_row, start, rows = item
    window = rows < block_size
    hidden = window | (queries[0] + key_row < start + block_size)

    def mask() -> jax.Array:
        key = plgpu.broadcasted_iota(jnp.int32, shape, 1 - query_axis, layout=plgpu.Layout.WGMMA)
        last = row_values([t + key_row - start - key0 for t in queries], shape, query_axis)
        first = row_values([jnp.where(window, first_T[t] - start, 0) - key0 for t in queries], shape, query_axis)
        return (key <= last) & (key >= first)

    return hidden, mask
