"""Forward of sparse_attention, KV-outer: one key block stays in shared memory and the queries that chose it come to it.  Hopper (sm_90a).

Source: arXiv 2606.13392, section 4 (the paper's "KV-outer" order). One thread block serves one work item of the inverse index: one KV head,
one kernel block, at most `per` entries. For every entry it leaves the attention of the query's G heads over that block alone, normalised,
and its log-sum-exp (base 2); `merge` puts the R parts of a query together. No atomics, so two runs are bit-equal.

    producer (1 warpgroup)    loads the entries, K and V once, then gathers ROWS / G queries a ring slot, one [G, H] TMA box each
    consumers (3 warpgroups)  take every third slot: S = Q K^T, softmax over the block, O = P V; O overwrites Q in its slot and leaves
                              by TMA, one box an entry, to its (query, slot) place

Memory: the parts, queries * R * N * H * 2 bytes and 8 bytes of log-sum-exp for each H values; the caller bounds the queries.
"""

from __future__ import annotations

import math
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jax import lax
from jax.experimental import pallas as pl
from jax.experimental.pallas import mosaic_gpu as plgpu

from pallas_kernels.inverse_index import InverseIndex
from pallas_kernels.mosaic import MASKED, TILED, all_phases_seen, int32, launch, product, register_product, store_where
from pallas_kernels.mosaic_entries import WorkItem, load_arrivals, load_entries, visible
from pallas_kernels.sparse_attention import tuning


class _Refs(NamedTuple):
    """In the order in which the launch passes them."""

    q: Any
    k: Any
    v: Any
    entry: Any
    item: Any
    first: Any
    origin: Any
    part: Any
    lse: Any
    q_sm: Any
    k_sm: Any
    v_sm: Any
    ids_sm: Any
    lse_sm: Any
    ids_bar: Any
    kv_bar: Any
    q_bar: Any
    free_bar: Any
    staging: Any = None  # simulator only


class _Static(NamedTuple):
    group: int
    ring: int
    block_size: int
    scale2: float  # to base 2
    windows: bool
    simulated: bool


def _produce(refs: _Refs, item: WorkItem, static: _Static) -> None:
    plgpu.set_max_registers(tuning.FORWARD_REGISTERS[1], action="decrease")
    load_entries(refs.entry.at[item.l], item.first_entry, refs.ids_sm, refs.ids_bar)
    here = item.slot_rows(refs.k, static.block_size)
    plgpu.copy_gmem_to_smem(refs.k.at[item.b, here, item.h], refs.k_sm, refs.kv_bar)
    plgpu.copy_gmem_to_smem(refs.v.at[item.b, here, item.h], refs.v_sm, refs.kv_bar)
    plgpu.barrier_wait(refs.ids_bar)
    query0 = refs.origin[item.b, 0]

    @pl.loop(0, item.tiles)
    def _(i):
        slot = lax.rem(i, int32(static.ring))
        pl.when(i >= static.ring)(lambda: plgpu.barrier_wait(refs.free_bar.at[slot]))
        for j, (t, _, _) in enumerate(item.entries.of_tile(i)):
            target = refs.q_sm.at[slot, pl.ds(j * static.group, static.group)]
            plgpu.copy_gmem_to_smem(refs.q.at[item.b, query0 + t, item.h], target, refs.q_bar.at[slot])

    all_phases_seen(refs.free_bar, jnp.maximum(item.tiles - static.ring, 0), item.tiles, simulated=static.simulated)


def _consume(refs: _Refs, item: WorkItem, static: _Static) -> None:
    consumers, rows, wg = tuning.FORWARD_WARPGROUPS, tuning.ROWS, item.wg
    G, per_tile, neighbours, dtype = static.group, rows // static.group, tuning.NEIGHBOURS // static.group, refs.q_sm.dtype
    plgpu.set_max_registers(tuning.FORWARD_REGISTERS[0], action="increase")
    plgpu.barrier_wait(refs.ids_bar)
    plgpu.barrier_wait(refs.kv_bar)
    mine = lax.div(item.tiles - wg + (consumers - 1), int32(consumers))
    where = refs.origin[item.b, 1], *item.extent()

    @pl.loop(0, mine)
    def _(n):
        i = n * consumers + wg
        slot = lax.rem(i, int32(static.ring))
        tile = item.entries.of_tile(i)
        plgpu.barrier_wait(refs.q_bar.at[slot])
        s = product(refs.q_sm.at[slot], refs.k_sm.T, rows, static.block_size)
        if static.windows:
            hidden, mask = visible([t for t, _, _ in tile], refs.first.at[item.b], where, static.block_size, s.shape, query_axis=0)
            s = lax.cond(hidden, lambda s: jnp.where(mask(), s, MASKED), lambda s: s, s)
        top = s.max(axis=1) * static.scale2
        p = jnp.exp2(s * static.scale2 - lax.broadcast_in_dim(top, s.shape, [0]))
        total = p.sum(axis=1)
        o = register_product(p.astype(dtype), refs.v_sm, refs.staging.at[wg] if static.simulated else None)
        refs.q_sm[slot] = (o * lax.broadcast_in_dim(1.0 / total, o.shape, [0])).astype(dtype)
        refs.lse_sm[slot] = top + jnp.log2(total)
        plgpu.commit_smem()
        for j, (t, r, real) in enumerate(tile):
            place = pl.ds(lax.rem(t, int32(neighbours)) * G, G)
            target = refs.part.at[item.l, lax.div(t, int32(neighbours)), r, place]
            store_where(real, refs.q_sm.at[slot, pl.ds(j * G, G)], target, simulated=static.simulated)
        plgpu.copy_smem_to_gmem(refs.lse_sm.at[slot], refs.lse.at[item.l, lax.div(item.first_entry, int32(per_tile)) + i])
        # At most the newest group is still being read: the slot of the tile before is free again.
        plgpu.wait_smem_to_gmem(1, wait_read_only=True)
        pl.when(n > 0)(lambda: plgpu.barrier_arrive(refs.free_bar.at[lax.rem(i - consumers, int32(static.ring))]))

    plgpu.wait_smem_to_gmem(0)
    if static.simulated:
        last = (mine - 1) * consumers + wg
        pl.when(mine > 0)(lambda: plgpu.barrier_arrive(refs.free_bar.at[lax.rem(last, int32(static.ring))]))


def kv_outer(
    q_BTKGH: jax.Array,
    k_BZKH: jax.Array,
    v_BZKH: jax.Array,
    index: InverseIndex,
    chunk: tuple[jax.Array, jax.Array],
    *,
    slots: int,
    windows: bool,
    block_size: int,
    scale: float,
    interpret: plgpu.InterpretGPUParams | None = None,
) -> tuple[jax.Array, jax.Array]:
    """Attention of every entry of `index` over its block.

    Args:
      q_BTKGH: all queries, G a multiple of 8; k_BZKH, v_BZKH: keys and values in slots (block_table).
      index: stray entries of a chunk of queries: no full block is among them that is a query's own.
      chunk: (first_BT, origin_B2): the chunk's column of the block table; its first query and the key row at which that stands.
      slots: slots a query, R. windows: whether there may be kernel blocks that are not full.

    Returns:
      part [L, T / X, R, X * G, H]: X neighbouring queries (tuning.NEIGHBOURS rows) stand together; only places of entries are written.
      lse [L, P / Y, Y * G] float32 in list order, base 2, Y = tuning.ROWS / G.
    """
    (_, _, K, G, H), (L, P), dtype = q_BTKGH.shape, index.entry_LP.shape, q_BTKGH.dtype
    rows, per, consumers = tuning.ROWS, tuning.FORWARD_PER, tuning.FORWARD_WARPGROUPS
    per_tile, neighbours, ring = rows // G, tuning.NEIGHBOURS // G, consumers * tuning.FORWARD_SLOTS
    first_BT, origin_B2 = chunk
    static = _Static(G, ring, block_size, scale * math.log2(math.e), windows, interpret is not None)

    def sparse_attention_kv_outer(*refs):
        refs = _Refs(*refs)
        item = WorkItem(refs.item, refs.ids_sm, num_kv_heads=K, slots=slots, per_tile=per_tile)
        pl.when((item.wg < consumers) & (item.tiles > 0))(lambda: _consume(refs, item, static))
        pl.when((item.wg == consumers) & (item.tiles > 0))(lambda: _produce(refs, item, static))

    scratch = [
        plgpu.SMEM((ring, rows, H), dtype, transforms=TILED),
        plgpu.SMEM((block_size, H), dtype, transforms=TILED),
        plgpu.SMEM((block_size, H), dtype, transforms=TILED),
        plgpu.SMEM((per,), jnp.int32),
        plgpu.SMEM((ring, rows), jnp.float32),
        plgpu.Barrier(num_arrivals=load_arrivals(per)),  # producer -> all: the entries are there
        plgpu.Barrier(num_arrivals=2),  # producer -> consumers: K and V are there
        plgpu.Barrier(num_arrivals=per_tile, num_barriers=ring),  # producer -> consumer: the slot's queries are there
        plgpu.Barrier(num_barriers=ring),  # consumer -> producer: the slot's output has left
    ]
    if static.simulated:
        scratch.append(plgpu.SMEM((consumers, rows, block_size), dtype, transforms=TILED))
    queries = first_BT.shape[1]
    kernel = plgpu.kernel(
        sparse_attention_kv_outer,
        out_type=(
            jax.ShapeDtypeStruct((L, queries // neighbours, slots, neighbours * G, H), dtype),
            jax.ShapeDtypeStruct((L, P // per_tile, rows), jnp.float32),
        ),
        grid=(index.item_WX.shape[0],),
        grid_names=("w",),
        num_threads=consumers + 1,
        thread_name="wg",
        scratch_types=scratch,
        compiler_params=plgpu.CompilerParams(approx_math=True),
        **launch(interpret),
    )
    return kernel(q_BTKGH, k_BZKH, v_BZKH, index.entry_LP, index.item_WX, first_BT, origin_B2)
