"""Inverse of a selection: for every KV head and kernel block the queries that chose it, and the work items that walk these lists.

A *list* belongs to one (batch row, KV head): l = b * K + k. It holds entries (query t, slot r), packed as `t << slot_bits | r`, grouped by
kernel block, ascending in t, every block's run padded with -1 to a multiple of `pad`. Work items cut each run into pieces of at most
`per` entries, so a hot block that every query chose is shared by many thread blocks. One sort, everything else is gathers and scatters;
all shapes are static, counts are data.

    block            0                 1        2
    entry_LP  (t0,r) (t3,r) -1 -1  (t1,r) ...  ...        pad = 4
    items     [---- 0 ----]        [- 1 -][2]             per = 8 entries
"""

from typing import NamedTuple

import jax
import jax.numpy as jnp
from jax import lax

from pallas_kernels.block_table import BlockTable

# Columns of InverseIndex.item_WX.
LIST, BLOCK, START, ROWS, ENTRY, COUNT = range(6)


class InverseIndex(NamedTuple):
    """See the module's docstring; W = L * (static bound of items a list), and items that are not needed have COUNT 0."""

    entry_LP: jax.Array  # int32, -1 = padding
    item_WX: jax.Array  # int32 (list, block b * J + j, its first key row in the batch row, its rows, first entry, entries)
    place_BKTR: jax.Array  # int32, where (t, r) stands in its list; P for an unused slot
    first_item_LJ: jax.Array  # int32, the block's first item, numbered over all lists
    num_items_LJ: jax.Array  # int32


def slot_bits(slots: int) -> int:
    """Bits that hold a slot number in a packed entry."""
    return max(1, (slots - 1).bit_length())


def padded_entries(queries: int, slots: int, blocks: int, pad: int, per: int) -> int:
    """Static length P of a list: the worst padding, and room to read a whole piece from any start."""
    return -(-(queries * slots + blocks * (pad - 1) + per) // 256) * 256


def _sorted_entries(number_LN: jax.Array, blocks: int) -> tuple[jax.Array, jax.Array]:
    """Block numbers of each list in ascending order (unused slots last, as number `blocks`), and the places they come from.

    All lists are sorted as one: a sort of rows takes twice the time. The list number in the key keeps them apart.
    """
    (L, N), bits = number_LN.shape, max(1, (number_LN.shape[1] - 1).bit_length())
    first_L1 = jnp.arange(L, dtype=jnp.int32)[:, None] * (blocks + 1)
    number_LN = first_L1 + jnp.where(number_LN < 0, blocks, number_LN)
    if L * (blocks + 1) <= 1 << (32 - bits):  # number and place fit one word: the faster sort
        place_N = jnp.arange(N, dtype=jnp.uint32)
        key_LN = lax.sort((number_LN.astype(jnp.uint32) << bits | place_N).reshape(-1), is_stable=False).reshape(L, N)
        return (key_LN >> bits).astype(jnp.int32) - first_L1, (key_LN & ((1 << bits) - 1)).astype(jnp.int32)
    place_LN = jnp.broadcast_to(jnp.arange(N, dtype=jnp.int32), (L, N))
    sorted_X, place_X = lax.sort((number_LN.reshape(-1), place_LN.reshape(-1)), is_stable=True, num_keys=1)
    return sorted_X.reshape(L, N) - first_L1, place_X.reshape(L, N)


def _count_below(sorted_LN: jax.Array, bound_Y: jax.Array) -> jax.Array:
    """How many of each ascending row are below each bound: in steps of 256, then one by one.

    jnp.searchsorted becomes a chain of small kernels that takes a quarter of the time of the whole index.
    """
    L, N = sorted_LN.shape
    step_LMX = jnp.pad(sorted_LN, ((0, 0), (0, -N % 256)), constant_values=jnp.iinfo(jnp.int32).max).reshape(L, -1, 256)
    step_LY = jnp.maximum((step_LMX[:, None, :, 0] < bound_Y[:, None]).sum(axis=-1, dtype=jnp.int32) - 1, 0)
    inside_LYX = jnp.take_along_axis(step_LMX, step_LY[..., None], axis=1)
    return step_LY * 256 + (inside_LYX < bound_Y[:, None]).sum(axis=-1, dtype=jnp.int32)


def invert(number_BKTR: jax.Array, table: BlockTable, *, pad: int, per: int) -> InverseIndex:
    """Lists and work items of a selection given as kernel block numbers (-1 = unused slot, no number twice in a query).

    `pad` and `per` count entries; per % pad == 0 keeps every item's first entry at a multiple of pad.
    """
    B, K, T, R = number_BKTR.shape
    L, N, J = B * K, T * R, table.start_BJ.shape[1]
    P = padded_entries(T, R, J, pad, per)
    sorted_LN, place_LN = _sorted_entries(number_BKTR.reshape(L, N), J)
    edges = _count_below(sorted_LN, jnp.arange(J + 1, dtype=jnp.int32))
    count_LJ = edges[:, 1:] - edges[:, :-1]
    run_LJ = -(-count_LJ // pad) * pad
    run_start_LJ = jnp.cumsum(run_LJ, axis=1) - run_LJ
    shift = jnp.concatenate([run_start_LJ - edges[:, :-1], jnp.full((L, 1), P, jnp.int32)], axis=1)
    target_LN = jnp.minimum(jnp.arange(N, dtype=jnp.int32) + jnp.take_along_axis(shift, sorted_LN, axis=1), P)
    l_L1 = jnp.arange(L, dtype=jnp.int32)[:, None]
    packed_LN = (place_LN // R) << slot_bits(R) | place_LN % R
    entry_LP = jnp.full((L, P), -1, jnp.int32).at[l_L1, target_LN].set(packed_LN, mode="drop")
    place_BKTR = jnp.zeros((L, N), jnp.int32).at[l_L1, place_LN].set(target_LN, unique_indices=True).reshape(B, K, T, R)
    item_WX, first_item_LJ, num_items_LJ = _items(count_LJ, run_start_LJ, table, N // per + J, per, K)
    return InverseIndex(entry_LP, item_WX, place_BKTR, first_item_LJ, num_items_LJ)


def _items(count_LJ, run_start_LJ, table: BlockTable, items: int, per: int, K: int):
    """Cut every run into pieces of `per` entries; `items` bounds their number in a list."""
    L, J = count_LJ.shape
    pieces_LJ = -(-count_LJ // per)
    end_LJ = jnp.cumsum(pieces_LJ, axis=1)
    w = jnp.arange(items, dtype=jnp.int32)
    block_LW = (w[:, None] >= end_LJ[:, None, :]).sum(axis=-1, dtype=jnp.int32)
    live = block_LW < J
    block_LW = jnp.minimum(block_LW, J - 1)

    def of_block(x_LJ):
        return jnp.take_along_axis(x_LJ, block_LW, axis=1)

    done_LW = (w - of_block(end_LJ - pieces_LJ)) * per
    entries_LW = jnp.where(live, jnp.minimum(of_block(count_LJ) - done_LW, per), 0)
    first_LW = jnp.where(live, of_block(run_start_LJ) + done_LW, 0)
    b_L1 = (jnp.arange(L, dtype=jnp.int32) // K)[:, None]
    list_LW = jnp.broadcast_to(jnp.arange(L, dtype=jnp.int32)[:, None], block_LW.shape)
    block = (b_L1 * J + block_LW, table.start_BJ[b_L1, block_LW], table.rows_BJ[b_L1, block_LW])
    item = jnp.stack([list_LW, *block, first_LW, entries_LW], axis=-1).reshape(L * items, -1)
    return item, end_LJ - pieces_LJ + jnp.arange(L, dtype=jnp.int32)[:, None] * items, pieces_LJ
