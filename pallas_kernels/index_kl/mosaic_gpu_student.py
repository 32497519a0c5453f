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
from typing import Any, NamedTuple

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


class Item(NamedTuple):
    """A work item of the inverse index, read inside a kernel."""

    list: jax.Array
    block: jax.Array
    start: jax.Array  # first key row of the block
    rows: jax.Array  # of the block
    entry: jax.Array  # the first
    count: jax.Array

    @classmethod
    def read(cls, item_ref: Any, w: jax.Array) -> Item:
        return cls(*(item_ref[w, column] for column in (LIST, BLOCK, START, ROWS, ENTRY, COUNT)))

    def tiles(self, size: int = TILE) -> jax.Array:
        """How many tiles of `size` entries it has."""
        return lax.div(self.count + (size - 1), int32(size))

    def tile(self, i: jax.Array, size: int = TILE) -> Any:
        """The entries of tile i in its list."""
        return pl.ds(pl.multiple_of(self.entry + i * size, size), size)


class Ring(NamedTuple):
    """What the producer fills: the index keys of the block, and tiles of entries."""

    keys: Any
    tiles: Any  # a tree; each leaf has the ring's slots first
    keys_bar: Any  # producer -> consumers: the index keys are there
    tile_bar: Any  # producer -> consumers: the slot's tile is there
    free_bar: Any  # consumers -> producer: the slot's tile has been read

    @classmethod
    def types(cls, keys_CI: tuple[int, int], dtype: Any, lists: Any, slots: int, readers: int) -> Ring:
        """Scratch types for `lists`, a tree of [L, P, ...]: matrices are tiled for wgmma, rows of numbers are not."""

        def tile(x):
            return plgpu.SMEM((slots, TILE, *x.shape[2:]), x.dtype, transforms=TILED if x.ndim > 2 else ())

        loads = len(jax.tree.leaves(lists))
        return cls(
            plgpu.SMEM(keys_CI, dtype, transforms=TILED),
            jax.tree.map(tile, lists),
            plgpu.Barrier(),
            plgpu.Barrier(num_barriers=slots, num_arrivals=loads),
            plgpu.Barrier(num_barriers=slots, num_arrivals=readers),
        )


def produce(item: Item, keys_ref: Any, list_refs: Any, ring: Ring, *, simulated: bool) -> None:
    """The producer: the block's index keys once, then the item's tiles of every list."""
    size, slots = ring.keys.shape[0], ring.free_bar.shape[0]
    plgpu.copy_gmem_to_smem(keys_ref.at[pl.ds(item.block * size, size)], ring.keys, ring.keys_bar)

    @pl.loop(0, item.tiles())
    def _(i):
        slot = lax.rem(i, int32(slots))
        pl.when(i >= slots)(lambda: plgpu.barrier_wait(ring.free_bar.at[slot]))
        for ref, tiles in zip(jax.tree.leaves(list_refs), jax.tree.leaves(ring.tiles), strict=True):
            plgpu.copy_gmem_to_smem(ref.at[item.list, item.tile(i)], tiles.at[slot], ring.tile_bar.at[slot])

    all_phases_seen(ring.free_bar, jnp.maximum(item.tiles() - slots, 0), item.tiles(), simulated=simulated)


def hide(s_XC: jax.Array, seen: Gathered, slot: jax.Array, item: Item, block_size: int, key0=0) -> jax.Array:
    """Scores of a tile with what its entries do not see at MASKED; `key0` is the key of the first column.

    Queries ascend, so only a tile whose first query is in the block, or any tile of a window, has hidden keys.
    """
    window = item.rows < block_size

    def masked(s_XC):
        key_XC = plgpu.broadcasted_iota(jnp.int32, s_XC.shape, 1, layout=plgpu.Layout.WGMMA)
        layout = plgpu.Layout.WGMMA.reduce(1)
        origin = filled((TILE,), item.start + key0, jnp.int32, layout)
        first_XC, last_XC = (
            lax.broadcast_in_dim(plgpu.load(ref.at[slot], layout=layout) - origin, s_XC.shape, [0]) for ref in (seen.first_LP, seen.last_LP)
        )
        all_seen = filled(s_XC.shape, jnp.where(window, 0, 1 << 30), jnp.int32, plgpu.Layout.WGMMA)
        return jnp.where((key_XC <= last_XC) & (key_XC + all_seen >= first_XC), s_XC, MASKED)

    return lax.cond(window | (seen.last_LP[slot, 0] < item.start + block_size - 1), masked, lambda s: s, s_XC)


def _consume(item: Item, ring: Ring, lse_sm: Any, lse_ref: Any, wg: jax.Array, *, scale2: float) -> None:
    """Every `LSE_WARPGROUPS`-th tile: scores, mask, log-sum-exp."""
    block_size, slots, consumers = ring.keys.shape[0], ring.free_bar.shape[0], tuning.LSE_WARPGROUPS
    plgpu.barrier_wait(ring.keys_bar)

    @pl.loop(0, lax.div(item.tiles() - wg + (consumers - 1), int32(consumers)))
    def _(n):
        i = n * consumers + wg
        slot = lax.rem(i, int32(slots))
        plgpu.barrier_wait(ring.tile_bar.at[slot])
        s_XC = hide(product(ring.tiles.iq_LPI.at[slot], ring.keys.T, TILE, block_size), ring.tiles, slot, item, block_size)
        top_X = s_XC.max(axis=1) * scale2
        total_X = jnp.exp2(s_XC * scale2 - lax.broadcast_in_dim(top_X, s_XC.shape, [0])).sum(axis=1)
        plgpu.wait_smem_to_gmem(0, wait_read_only=True)
        lse_sm[wg] = top_X + jnp.log2(total_X)
        plgpu.commit_smem()  # also keeps this tile's reads before the slot's next load
        plgpu.barrier_arrive(ring.free_bar.at[slot])
        plgpu.copy_smem_to_gmem(lse_sm.at[wg], lse_ref.at[item.list, item.tile(i)])

    plgpu.wait_smem_to_gmem(0)


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
    (L, P, I), dtype = gathered.iq_LPI.shape, gathered.iq_LPI.dtype
    consumers = tuning.LSE_WARPGROUPS

    def index_kl_student_lse(lists_ref, ik_ref, item_ref, lse_ref, ring, lse_sm):
        wg, item = lax.axis_index("wg"), Item.read(item_ref, lax.axis_index("w"))

        @pl.when((wg < consumers) & (item.count > 0))
        def _():
            _consume(item, ring, lse_sm, lse_ref, wg, scale2=scale * math.log2(math.e))

        @pl.when((wg == consumers) & (item.count > 0))
        def _():
            produce(item, ik_ref, lists_ref, ring, simulated=interpret is not None)

    kernel = plgpu.kernel(
        index_kl_student_lse,
        out_type=jax.ShapeDtypeStruct((L, P), jnp.float32),
        grid=(index.item_WX.shape[0],),
        grid_names=("w",),
        num_threads=consumers + 1,
        thread_name="wg",
        scratch_types=(
            Ring.types((block_size, I), dtype, gathered, tuning.LSE_RING, readers=1),
            plgpu.SMEM((consumers, TILE), jnp.float32),
        ),
        compiler_params=plgpu.CompilerParams(approx_math=True, reduction_scratch_bytes=0),
        **launch(interpret),
    )
    return kernel(gathered, slots_BZI.reshape(-1, I), index.item_WX)


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
