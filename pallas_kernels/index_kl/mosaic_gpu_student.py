"""The index branch's own softmax over the kept blocks on Hopper (sm_90a): its log-sum-exp.  Mosaic GPU, KV-outer.

One thread block serves one work item of the inverse index: one KV head, one kernel block, at most `per` entries. Index queries have one
row an entry, which no TMA box can gather into a tile, so they come gathered in list order, with what each of them sees of the block.

    producer (1 warpgroup)    loads the index keys once, then the tiles of 64 entries
    consumers (2 warpgroups)  take every second tile: scores, mask, log-sum-exp of the block alone (base 2) -> list order

Memory: the gathered index queries, I + 8 numbers an entry; the caller bounds the queries.
"""

from __future__ import annotations

import functools
import math
from typing import NamedTuple

import jax
import jax.numpy as jnp
from jax import lax
from jax.experimental import pallas as pl
from jax.experimental.pallas import mosaic_gpu as plgpu

from pallas_kernels.block_table import BlockTable, block_table
from pallas_kernels.blocks import Layout
from pallas_kernels.index_kl import tuning
from pallas_kernels.inverse_index import BLOCK, COUNT, ENTRY, LIST, ROWS, START, InverseIndex, invert, slot_bits
from pallas_kernels.mosaic import TILED, all_phases_seen, filled, int32, launch, product
from pallas_kernels.sparse_attention.mosaic_gpu import chunk_length, chunked

TILE = 64  # entries of a wgmma tile
MASKED = -1e30


def of_chunk(x_BTY: jax.Array, length: int, chunk: jax.Array) -> jax.Array:
    """The queries of one chunk, 0 past the last."""
    spare = [(0, 0)] * x_BTY.ndim
    spare[1] = (0, -x_BTY.shape[1] % length)
    return lax.dynamic_slice_in_dim(jnp.pad(x_BTY, spare), chunk * length, length, axis=1)


class Gathered(NamedTuple):
    """What the student kernels read of each entry, in list order; entries are -1 in the padding, which sees no key."""

    iq_LPI: jax.Array
    first_LP: jax.Array  # key rows first..last are what its query sees of its own block
    last_LP: jax.Array


def gather_lists(x_BTK: jax.Array, index: InverseIndex, slots: int, fill: float) -> jax.Array:
    """Numbers of (query, KV head) in list order [L, P]; `fill` in the padding."""
    x_LT = jnp.moveaxis(x_BTK, 2, 1).reshape(index.entry_LP.shape[0], -1)
    query_LP = jnp.maximum(index.entry_LP, 0) >> slot_bits(slots)
    return jnp.where(index.entry_LP >= 0, jnp.take_along_axis(x_LT, query_LP, axis=1), fill)


def gather(iq_BTKI: jax.Array, index: InverseIndex, table: BlockTable, slots: int) -> Gathered:
    """The entries of one chunk of queries; the table is that of the chunk."""
    B, T, K, I = iq_BTKI.shape
    query_LP = jnp.maximum(index.entry_LP, 0) >> slot_bits(slots)
    iq_LPI = jnp.take_along_axis(jnp.moveaxis(iq_BTKI, 2, 1).reshape(B * K, T, I), query_LP[..., None], axis=1)
    first_LP, last_LP = (
        gather_lists(jnp.broadcast_to(x_BT[..., None], (B, T, K)), index, slots, -1) for x_BT in (table.first_BT, table.last_BT)
    )
    return Gathered(iq_LPI, first_LP, last_LP)


def hide(s_XC: jax.Array, seen_sm: tuple, slot: jax.Array, item: tuple, block_size: int, key0=0) -> jax.Array:
    """Scores of a tile with what its entries do not see at MASKED.

    Queries ascend, so only a tile whose first query is in the block, or any tile of a window, has hidden keys.  `seen_sm`: first and last
    key row of each entry, a row a slot; `item`: the block's (first key row, rows); `key0`: the key of the first column.
    """
    start, rows = item
    window = rows < block_size

    def masked(s_XC):
        key_XC = plgpu.broadcasted_iota(jnp.int32, s_XC.shape, 1, layout=plgpu.Layout.WGMMA)
        layout = plgpu.Layout.WGMMA.reduce(1)
        seen = [
            lax.broadcast_in_dim(
                plgpu.load(ref.at[slot], layout=layout) - filled((TILE,), start + key0, jnp.int32, layout), s_XC.shape, [0]
            )
            for ref in seen_sm
        ]
        all_seen = filled(s_XC.shape, jnp.where(window, 0, 1 << 30), jnp.int32, plgpu.Layout.WGMMA)
        return jnp.where((key_XC <= seen[1]) & (key_XC + all_seen >= seen[0]), s_XC, MASKED)

    return lax.cond(window | (seen_sm[1][slot, 0] < start + block_size - 1), masked, lambda s: s, s_XC)


def student_lse(
    gathered: Gathered,
    slots_BZI: jax.Array,
    index: InverseIndex,
    *,
    block_size: int,
    scale: float,
    interpret: plgpu.InterpretGPUParams | None = None,
) -> jax.Array:
    """Base-2 log-sum-exp of each entry's scores over its block, float32 [L, P]; meaningless in the padding."""
    (L, P, I), dtype, scale2 = gathered.iq_LPI.shape, gathered.iq_LPI.dtype, scale * math.log2(math.e)
    B, Z = slots_BZI.shape[:2]
    ring, consumers, simulated = tuning.LSE_RING, tuning.LSE_WARPGROUPS, interpret is not None

    def index_kl_student_lse(iq_ref, first_ref, last_ref, ik_ref, item_ref, lse_ref, *scratch):
        iq_sm, ik_sm, first_sm, last_sm, lse_sm, ik_bar, tile_bar, free_bar = scratch
        w, wg = lax.axis_index("w"), lax.axis_index("wg")
        l, entry = item_ref[w, LIST], item_ref[w, ENTRY]
        tiles = lax.div(item_ref[w, COUNT] + (TILE - 1), int32(TILE))

        def rows(i):
            return pl.ds(pl.multiple_of(entry + i * TILE, TILE), TILE)

        def produce():
            plgpu.copy_gmem_to_smem(ik_ref.at[pl.ds(item_ref[w, BLOCK] * block_size, block_size)], ik_sm, ik_bar)

            @pl.loop(0, tiles)
            def _(i):
                slot = lax.rem(i, int32(ring))
                pl.when(i >= ring)(lambda: plgpu.barrier_wait(free_bar.at[slot]))
                for ref, sm in ((iq_ref, iq_sm), (first_ref, first_sm), (last_ref, last_sm)):
                    plgpu.copy_gmem_to_smem(ref.at[l, rows(i)], sm.at[slot], tile_bar.at[slot])

            all_phases_seen(free_bar, jnp.maximum(tiles - ring, 0), tiles, simulated=simulated)

        def consume():
            item = item_ref[w, START], item_ref[w, ROWS]
            plgpu.barrier_wait(ik_bar)

            @pl.loop(0, lax.div(tiles - wg + (consumers - 1), int32(consumers)))
            def _(n):
                i = n * consumers + wg
                slot = lax.rem(i, int32(ring))
                plgpu.barrier_wait(tile_bar.at[slot])
                s_XC = hide(product(iq_sm.at[slot], ik_sm.T, TILE, block_size), (first_sm, last_sm), slot, item, block_size)
                top_X = s_XC.max(axis=1) * scale2
                total_X = jnp.exp2(s_XC * scale2 - lax.broadcast_in_dim(top_X, s_XC.shape, [0])).sum(axis=1)
                plgpu.wait_smem_to_gmem(0, wait_read_only=True)
                lse_sm[wg] = top_X + jnp.log2(total_X)
                plgpu.commit_smem()  # also keeps this tile's reads before the slot's next load
                plgpu.barrier_arrive(free_bar.at[slot])
                plgpu.copy_smem_to_gmem(lse_sm.at[wg], lse_ref.at[l, rows(i)])

            plgpu.wait_smem_to_gmem(0)

        pl.when((wg < consumers) & (tiles > 0))(consume)
        pl.when((wg == consumers) & (tiles > 0))(produce)

    kernel = plgpu.kernel(
        index_kl_student_lse,
        out_type=jax.ShapeDtypeStruct((L, P), jnp.float32),
        grid=(index.item_WX.shape[0],),
        grid_names=("w",),
        num_threads=consumers + 1,
        thread_name="wg",
        scratch_types=[
            plgpu.SMEM((ring, TILE, I), dtype, transforms=TILED),
            plgpu.SMEM((block_size, I), dtype, transforms=TILED),
            plgpu.SMEM((ring, TILE), jnp.int32),
            plgpu.SMEM((ring, TILE), jnp.int32),
            plgpu.SMEM((consumers, TILE), jnp.float32),
            plgpu.Barrier(),  # producer -> consumers: the index keys are there
            plgpu.Barrier(num_barriers=ring, num_arrivals=3),  # producer -> consumer: the slot's tile is there
            plgpu.Barrier(num_barriers=ring),  # consumer -> producer: the slot's tile has been read
        ],
        compiler_params=plgpu.CompilerParams(approx_math=True, reduction_scratch_bytes=0),
        **launch(interpret),
    )
    return kernel(gathered.iq_LPI, gathered.first_LP, gathered.last_LP, slots_BZI.reshape(B * Z, I), index.item_WX)


def log_sum_exp(gathered: Gathered, slots_BZI, index: InverseIndex, number_BKTR, *, block_size, scale, interpret=None) -> jax.Array:
    """Base-2 log-sum-exp over all kept blocks [B, K, T]; -inf where none is kept."""
    B, K, T, R = number_BKTR.shape
    lse_LP = student_lse(gathered, slots_BZI, index, block_size=block_size, scale=scale, interpret=interpret)
    lse_LN = jnp.take_along_axis(lse_LP, index.place_BKTR.reshape(B * K, -1), axis=1, mode="clip")
    lse_BKTR = jnp.where(number_BKTR >= 0, lse_LN.reshape(B, K, T, R), -jnp.inf)
    top_BKT1 = lse_BKTR.max(axis=-1, keepdims=True)
    top_BKT1 = jnp.where(top_BKT1 == -jnp.inf, 0, top_BKT1)
    return jnp.log2(jnp.exp2(lse_BKTR - top_BKT1).sum(axis=-1)) + top_BKT1[..., 0]


@functools.partial(jax.jit, static_argnames=("block_size", "scale", "interpret"))
def kept_log_sum_exp(iq_BTKI, ik_BSI, ids_BKTR, layout: Layout, *, block_size: int, scale: float, interpret=None) -> jax.Array:
    """Natural log-sum-exp [B, K, T] of scale * iq ik over the visible keys of the kept blocks, a chunk of queries at a time."""
    (B, T, K, I), R = iq_BTKI.shape, ids_BKTR.shape[-1]
    table = block_table(layout, block_size)
    number_BKTR, slots_BZI = table.number(ids_BKTR), table.to_slots(ik_BSI[:, :, None], block_size)[:, :, 0]
    length = chunk_length(T, B * K * R * (iq_BTKI.dtype.itemsize * I + 6 * 4), TILE)

    def one(chunk):
        part, number, _ = chunked(table, number_BKTR, length, chunk)
        index = invert(number, part, pad=TILE, per=tuning.PER)
        gathered = gather(of_chunk(iq_BTKI, length, chunk), index, part, R)
        return log_sum_exp(gathered, slots_BZI, index, number, block_size=block_size, scale=scale, interpret=interpret)

    chunks = -(-T // length)
    lse_ZBKT = one(jnp.int32(0))[None] if chunks == 1 else lax.map(one, jnp.arange(chunks, dtype=jnp.int32))
    return jnp.moveaxis(lse_ZBKT, 0, 2).reshape(B, K, chunks * length)[:, :, :T] * math.log(2)
