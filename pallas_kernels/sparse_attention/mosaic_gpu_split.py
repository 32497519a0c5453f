"""Forward of sparse_attention: parts a selection into what neighbouring queries share and what they do not.  Hopper (sm_90a).

A tile is X = 128 / G neighbouring queries. A full block that most of them chose, or that is the own block of one of them, is *common*: the
Q-tile kernel reads it once for all. What is left is *stray* and goes KV-outer. Blocks of several short documents (windows of the block
table) are always stray: there KV-outer masks both ends.
"""

from __future__ import annotations

import math
from typing import NamedTuple

import jax
import jax.numpy as jnp
from jax import lax
from jax.experimental import pallas as pl
from jax.experimental.pallas import mosaic_gpu as plgpu

from pallas_kernels.block_table import BlockTable
from pallas_kernels.mosaic import filled, int32, launch
from pallas_kernels.sparse_attention import tuning


class Split(NamedTuple):
    """A selection of L lists in n tiles of X queries, parted into common blocks and stray entries."""

    walk_LnYU: jax.Array  # int32; rows CHOICES and STARTS say of each place which block it is, row SIZES how many blocks and parts
    stray_LTR: jax.Array  # kernel block numbers, packed to the front, -1 after


CHOICES, STARTS, SIZES = range(3)  # number << NUMBER_BIT | one bit for each query that chose it; its first key row; (blocks, parts)
NUMBER_BIT = 16
_OWN, _WINDOW = 16, 21  # bits of the sums in `split` that count own blocks and windows, above one bit a query


def split(number_LTR: jax.Array, table: BlockTable, *, neighbours: int, threshold: int, block_size: int, interpret=None) -> Split:
    """Common are the full blocks that at least `threshold` of `neighbours` queries chose, and those that are one's own block.

    Compares a tile's entries with each other: X * R is small, and nothing is sorted or scattered.
    """
    (L, T, R), B = number_LTR.shape, table.start_BJ.shape[0]
    n, U = T // neighbours, neighbours * R
    b_L = jnp.arange(L, dtype=jnp.int32) // (L // B)
    own_BT = table.base_BT + jnp.maximum(table.local_BT, 0)
    window_BT = jnp.take_along_axis(table.rows_BJ, own_BT, axis=1) < block_size
    own_LTR = number_LTR == own_BT[b_L][..., None]
    bit_T1 = 1 << (jnp.arange(T, dtype=jnp.int32) % neighbours)[:, None]
    says_LTR = bit_T1 + jnp.where(own_LTR, (1 << _OWN) + jnp.where(window_BT[b_L][..., None], 1 << _WINDOW, 0), 0)
    number_LnU, says_LnU = number_LTR.reshape(L, n, U), says_LTR.reshape(L, n, U)

    sums_LnU = sum_of_equals(number_LnU, says_LnU, interpret=interpret)
    bits_LnU = sums_LnU & ((1 << _OWN) - 1)
    chosen_enough = (lax.population_count(bits_LnU) >= threshold) | ((sums_LnU >> _OWN) > 0)
    common = (number_LnU >= 0) & chosen_enough & ((sums_LnU >> _WINDOW) == 0)
    query_U = jnp.arange(U, dtype=jnp.int32) // R
    head = common & (bits_LnU & ((1 << query_U) - 1) == 0)

    # Neighbours stand in at most two full blocks of their own. 32 places are 128 bytes, what a TMA copy wants to start at a multiple of.
    places = math.ceil(min(U, U // threshold + 2) / 32) * 32
    before_UU = (jnp.arange(U)[:, None] < jnp.arange(U)).astype(jnp.bfloat16)
    rank_LnU = jnp.einsum("lnu,uv->lnv", head.astype(jnp.bfloat16), before_UU, preferred_element_type=jnp.float32)
    rank_LnU = jnp.where(head, rank_LnU.astype(jnp.int32), -1)
    choice_LnU = number_LnU.astype(jnp.uint32) << NUMBER_BIT | bits_LnU.astype(jnp.uint32)
    at_place = rank_LnU[..., None, :] == jnp.arange(places, dtype=jnp.int32)[:, None]
    listed_LnV = jnp.where(at_place, choice_LnU[..., None, :], 0).sum(axis=-1, dtype=jnp.uint32)
    number_LX = (listed_LnV >> NUMBER_BIT).astype(jnp.int32).reshape(L, -1)
    start_LnV = jnp.take_along_axis(table.start_BJ[b_L], number_LX, axis=1).reshape(listed_LnV.shape)

    stray_LTR = ((number_LnU >= 0) & ~common).reshape(L, T, R)
    slot_R = jnp.arange(R, dtype=jnp.int32)
    earlier_LTR = (stray_LTR[..., None, :] & (slot_R < slot_R[:, None])).sum(axis=-1, dtype=jnp.int32)
    moved = stray_LTR[..., None, :] & (earlier_LTR[..., None, :] == slot_R[:, None])
    packed_LTR = jnp.where(moved, number_LTR[..., None, :], -1).max(axis=-1)

    parts_Ln = stray_LTR.sum(axis=-1, dtype=jnp.int32).reshape(L, n, neighbours).max(axis=-1)
    sizes_LnV = jnp.where(jnp.arange(places) == 0, head.sum(axis=-1, dtype=jnp.int32)[..., None], parts_Ln[..., None])
    return Split(jnp.stack([lax.bitcast_convert_type(listed_LnV, jnp.int32), start_LnV, sizes_LnV], axis=2), packed_LTR)


def sum_of_equals(number_LnU: jax.Array, says_LnU: jax.Array, *, interpret: plgpu.InterpretGPUParams | None = None) -> jax.Array:
    """For each entry the sum of what the entries of its tile with the same number say.

    U^2 comparisons a tile: one entry a thread, the others come from shared memory one by one. XLA takes five times as long.
    """
    L, n, U = number_LnU.shape
    threads, warpgroups, unrolled = -(-U // 128) * 128, 4, 8
    spare = ((0, 0), (0, threads - U))
    number_XU, says_XU = (jnp.pad(x.reshape(L * n, U), spare, constant_values=-1) for x in (number_LnU, says_LnU))
    thread_blocks = min(tuning.SMS * 4, -(-L * n // warpgroups))
    layout = plgpu.Layout.WG_STRIDED((threads,), vec_size=threads // 128)

    def sparse_attention_sum_of_equals(number_ref, says_ref, sum_ref, number_sm, says_sm):
        x, wg = lax.axis_index("x"), lax.axis_index("wg")
        first, stride = x * warpgroups + wg, thread_blocks * warpgroups

        @pl.loop(0, lax.div(L * n - first + (stride - 1), int32(stride)))
        def _(i):
            tile = first + i * stride
            mine = plgpu.load(number_ref.at[tile], layout=layout, optimized=False)
            number_sm[wg] = mine
            says_sm[wg] = plgpu.load(says_ref.at[tile], layout=layout, optimized=False)
            plgpu.commit_smem()

            def add(j, total):
                for u in range(unrolled):
                    other = number_sm[wg, j * unrolled + u]
                    total = total + jnp.where(mine == other, says_sm[wg, j * unrolled + u], 0)
                return total

            sum_ref[tile] = lax.fori_loop(0, -(-U // unrolled), add, filled((threads,), 0, jnp.int32, layout))
            plgpu.commit_smem()  # the reads are over before the next tile is written

    kernel = plgpu.kernel(
        sparse_attention_sum_of_equals,
        out_type=jax.ShapeDtypeStruct((L * n, threads), jnp.int32),
        grid=(thread_blocks,),
        grid_names=("x",),
        num_threads=warpgroups,
        thread_name="wg",
        scratch_types=[plgpu.SMEM((warpgroups, threads), jnp.int32)] * 2,
        **launch(interpret),
    )
    return kernel(number_XU, says_XU)[:, :U].reshape(L, n, U)
