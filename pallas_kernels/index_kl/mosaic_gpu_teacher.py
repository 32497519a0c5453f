"""The teacher of the index loss on the kept blocks on Hopper (sm_90a): the attention's probabilities, averaged over the heads of a group.

Mosaic GPU, KV-outer: one thread block serves one work item of the inverse index (one KV head, one kernel block, at most `per` entries).
Scores are computed transposed, keys by (query, head), so that a mean over heads is one over neighbouring columns. The backward of
sparse_attention emits the same numbers from tiles that it computes anyway.

    producer (1 warpgroup)      loads the entries and K once, then gathers ROWS / G queries a ring slot, one [G, H] TMA box each
    consumers (C / 64)          own 64 keys each

Memory: the means, C numbers an entry; the caller bounds the queries.
"""

from __future__ import annotations

import math
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jax import lax
from jax.experimental import pallas as pl
from jax.experimental.pallas import mosaic_gpu as plgpu

from pallas_kernels.index_kl import tuning
from pallas_kernels.index_kl.mosaic_gpu_student import Item
from pallas_kernels.inverse_index import InverseIndex, slot_bits
from pallas_kernels.mosaic import TILED, all_phases_seen, int32, launch, means_of_groups, means_width, product
from pallas_kernels.mosaic_entries import Entries, load_arrivals, load_entries, visible

_HALF = 64  # keys that one consumer owns: the rows of a wgmma
_MASKED = -1e30


def gather_lse(lse_BTKG: jax.Array, index: InverseIndex, slots: int) -> jax.Array:
    """Minus the base-2 log-sum-exp of each entry's heads, float32 [L, P * G]; -1e30 in the padding and for absent heads (-inf)."""
    B, T, K, G = lse_BTKG.shape
    minus_LTG = jnp.moveaxis(lse_BTKG, 2, 1).reshape(B * K, T, G) * -math.log2(math.e)
    minus_LTG = jnp.where(jnp.isinf(minus_LTG), _MASKED, minus_LTG)
    query_LP1 = (jnp.maximum(index.entry_LP, 0) >> slot_bits(slots))[..., None]
    minus_LPG = jnp.where(index.entry_LP[..., None] >= 0, jnp.take_along_axis(minus_LTG, query_LP1, axis=1), _MASKED)
    return minus_LPG.reshape(B * K, -1)


class _Scratch(NamedTuple):
    q: Any
    k: Any
    lse: Any
    ids: Any
    mean: Any  # two buffers a consumer
    ids_bar: Any  # producer -> all: the entries are there
    k_bar: Any  # producer -> consumers: K is there
    tile_bar: Any  # producer -> consumers: the slot's queries are there
    free_bar: Any  # consumers -> producer: the slot's queries have been read


class _Inputs(NamedTuple):
    q_BTKGH: Any
    k_BZKH: Any
    minus_lse_LX: Any
    entry_LP: Any
    first_BT: Any
    origin_B2: Any

    def row(self, item: Item) -> tuple[jax.Array, jax.Array]:
        """Batch row and KV head of an item."""
        K = self.k_BZKH.shape[2]
        return lax.div(item.list, int32(K)), lax.rem(item.list, int32(K))


def _produce(inputs: _Inputs, item: Item, entries: Entries, scratch: _Scratch, *, simulated: bool) -> None:
    (b, h), slots, (_, rows, _) = inputs.row(item), scratch.free_bar.shape[0], scratch.q.shape
    C, G = scratch.k.shape[0], inputs.q_BTKGH.shape[3]
    tiles = item.tiles(rows // G)
    load_entries(inputs.entry_LP.at[item.list], item.entry, scratch.ids, scratch.ids_bar)
    block = lax.rem(item.block, int32(inputs.k_BZKH.shape[1] // C))
    plgpu.copy_gmem_to_smem(inputs.k_BZKH.at[b, pl.ds(block * C, C), h], scratch.k, scratch.k_bar)
    plgpu.barrier_wait(scratch.ids_bar)
    query0 = inputs.origin_B2[b, 0]

    @pl.loop(0, tiles)
    def _(i):
        slot = lax.rem(i, int32(slots))
        pl.when(i >= slots)(lambda: plgpu.barrier_wait(scratch.free_bar.at[slot]))
        lse_here = pl.ds(pl.multiple_of(item.entry * G + i * rows, rows), rows)
        plgpu.copy_gmem_to_smem(inputs.minus_lse_LX.at[item.list, lse_here], scratch.lse.at[slot], scratch.tile_bar.at[slot])
        for j, (t, _, _) in enumerate(entries.of_tile(i)):
            here = scratch.q.at[slot, pl.ds(j * G, G)]
            plgpu.copy_gmem_to_smem(inputs.q_BTKGH.at[b, query0 + t, h], here, scratch.tile_bar.at[slot])

    all_phases_seen(scratch.free_bar, jnp.maximum(tiles - slots, 0), tiles, simulated=simulated)


def _consume(inputs: _Inputs, item: Item, entries: Entries, scratch: _Scratch, mean_ref: Any, *, group: int, scale2: float) -> None:
    """Every tile, for 64 keys."""
    wg = lax.axis_index("wg")
    (b, _), slots, (_, rows, _) = inputs.row(item), scratch.free_bar.shape[0], scratch.q.shape
    per_tile, mine = rows // inputs.q_BTKGH.shape[3], pl.ds(wg * _HALF, _HALF)
    plgpu.barrier_wait(scratch.ids_bar)
    plgpu.barrier_wait(scratch.k_bar)

    @pl.loop(0, item.tiles(per_tile))
    def _(i):
        slot, out = lax.rem(i, int32(slots)), lax.rem(i, int32(2))
        tile = [t for t, _, _ in entries.of_tile(i)]
        plgpu.barrier_wait(scratch.tile_bar.at[slot])
        s_CX = product(scratch.k.at[mine], scratch.q.at[slot].T, _HALF, rows)
        place = inputs.origin_B2[b, 1], item.start, item.rows
        hidden, mask = visible(tile, inputs.first_BT.at[b], place, scratch.k.shape[0], s_CX.shape, query_axis=1, key0=wg * _HALF)
        s_CX = lax.cond(hidden, lambda s: jnp.where(mask(), s, _MASKED), lambda s: s, s_CX)
        minus_lse_X = plgpu.load(scratch.lse.at[slot], layout=plgpu.Layout.WGMMA.reduce(0))
        p_CX = jnp.exp2(s_CX * scale2 + lax.broadcast_in_dim(minus_lse_X, s_CX.shape, [1]))
        mean_CQ = means_of_groups(p_CX, rows // per_tile, group)
        plgpu.wait_smem_to_gmem(1, wait_read_only=True)  # the buffer of two tiles ago has left
        scratch.mean.at[out, wg].T[...] = mean_CQ.astype(mean_ref.dtype)
        plgpu.commit_smem()
        plgpu.barrier_arrive(scratch.free_bar.at[slot])
        target = mean_ref.at[item.list, item.tile(i, per_tile), mine]
        plgpu.copy_smem_to_gmem(scratch.mean.at[out, wg, pl.ds(0, per_tile)], target)

    plgpu.wait_smem_to_gmem(0)


def _scratch_types(dtype, *, C, H, G) -> _Scratch:
    rows, slots, consumers = tuning.TEACHER_ROWS, tuning.TEACHER_RING, C // _HALF
    return _Scratch(
        q=plgpu.SMEM((slots, rows, H), dtype, transforms=TILED),
        k=plgpu.SMEM((C, H), dtype, transforms=TILED),
        lse=plgpu.SMEM((slots, rows), jnp.float32),
        ids=plgpu.SMEM((tuning.PER,), jnp.int32),
        mean=plgpu.SMEM((2, consumers, means_width(rows // G), _HALF), dtype),
        ids_bar=plgpu.Barrier(num_arrivals=load_arrivals(tuning.PER)),
        k_bar=plgpu.Barrier(),
        tile_bar=plgpu.Barrier(num_arrivals=rows // G + 1, num_barriers=slots),
        free_bar=plgpu.Barrier(num_arrivals=consumers, num_barriers=slots),
    )


def teacher_means(
    q_BTKGH: jax.Array,
    k_BZKH: jax.Array,
    minus_lse_LX: jax.Array,
    index: InverseIndex,
    view: tuple[jax.Array, jax.Array],
    *,
    slots: int,
    block_size: int,
    group: int,
    scale: float,
    interpret: plgpu.InterpretGPUParams | None = None,
) -> jax.Array:
    """[L, P, C] in the dtype of q: mean over the first `group` of the G heads; 0 in a tile's padding, unwritten past an item's entries.

    `view`: first_BT of the chunk's BlockTable, and [B, 2]: the chunk's first query in q, and the key row of that query.
    """
    (_, _, _, G, H), dtype, C = q_BTKGH.shape, q_BTKGH.dtype, block_size
    (L, P), rows, consumers = index.entry_LP.shape, tuning.TEACHER_ROWS, C // _HALF

    def index_kl_teacher(inputs, item_ref, mean_ref, scratch):
        wg, item = lax.axis_index("wg"), Item.read(item_ref, lax.axis_index("w"))
        entries = Entries(scratch.ids, slots, rows // G)

        @pl.when((wg < consumers) & (item.count > 0))
        def _():
            plgpu.set_max_registers(tuning.REGISTERS[0], action="increase")
            _consume(inputs, item, entries, scratch, mean_ref, group=group, scale2=scale * math.log2(math.e))

        @pl.when((wg == consumers) & (item.count > 0))
        def _():
            plgpu.set_max_registers(tuning.REGISTERS[1], action="decrease")
            _produce(inputs, item, entries, scratch, simulated=interpret is not None)

    kernel = plgpu.kernel(
        index_kl_teacher,
        out_type=jax.ShapeDtypeStruct((L, P, C), dtype),
        grid=(index.item_WX.shape[0],),
        grid_names=("w",),
        num_threads=consumers + 1,
        thread_name="wg",
        scratch_types=(_scratch_types(dtype, C=C, H=H, G=G),),
        compiler_params=plgpu.CompilerParams(approx_math=True, reduction_scratch_bytes=0),
        **launch(interpret),
    )
    return kernel(_Inputs(q_BTKGH, k_BZKH, minus_lse_LX, index.entry_LP, *view), index.item_WX)
