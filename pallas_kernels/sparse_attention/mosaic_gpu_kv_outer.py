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

import jax
import jax.numpy as jnp
from jax import lax
from jax.experimental import pallas as pl
from jax.experimental.pallas import mosaic_gpu as plgpu

from pallas_kernels.inverse_index import BLOCK, COUNT, ENTRY, LIST, ROWS, START, InverseIndex
from pallas_kernels.mosaic import MASKED, TILED, all_phases_seen, int32, launch, product, register_product, store_where
from pallas_kernels.mosaic_entries import Entries, load_arrivals, load_entries, visible
from pallas_kernels.sparse_attention import tuning


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
    simulated = interpret is not None
    first_BT, origin_B2 = chunk
    scale2 = scale * math.log2(math.e)

    def sparse_attention_kv_outer(q_ref, k_ref, v_ref, entry_ref, item_ref, first_ref, origin_ref, part_ref, lse_ref, *scratch):
        q_sm, k_sm, v_sm, ids_sm, lse_sm, ids_bar, kv_bar, q_bar, free_bar, *staging = scratch
        w, wg = lax.axis_index("w"), lax.axis_index("wg")
        tiles = lax.div(item_ref[w, COUNT] + (per_tile - 1), int32(per_tile))
        l, first_entry = item_ref[w, LIST], item_ref[w, ENTRY]
        b, h = lax.div(l, int32(K)), lax.rem(l, int32(K))
        entries = Entries(ids_sm, slots, per_tile)

        def produce():
            plgpu.set_max_registers(tuning.FORWARD_REGISTERS[1], action="decrease")
            load_entries(entry_ref.at[l], first_entry, ids_sm, ids_bar)
            block = lax.rem(item_ref[w, BLOCK], int32(k_ref.shape[1] // block_size))
            here = pl.ds(block * block_size, block_size)
            plgpu.copy_gmem_to_smem(k_ref.at[b, here, h], k_sm, kv_bar)
            plgpu.copy_gmem_to_smem(v_ref.at[b, here, h], v_sm, kv_bar)
            plgpu.barrier_wait(ids_bar)
            query0 = origin_ref[b, 0]

            @pl.loop(0, tiles)
            def _(i):
                slot = lax.rem(i, int32(ring))
                pl.when(i >= ring)(lambda: plgpu.barrier_wait(free_bar.at[slot]))
                for j, (t, _, _) in enumerate(entries.of_tile(i)):
                    plgpu.copy_gmem_to_smem(q_ref.at[b, query0 + t, h], q_sm.at[slot, pl.ds(j * G, G)], q_bar.at[slot])

            all_phases_seen(free_bar, jnp.maximum(tiles - ring, 0), tiles, simulated=simulated)

        def consume():
            plgpu.set_max_registers(tuning.FORWARD_REGISTERS[0], action="increase")
            plgpu.barrier_wait(ids_bar)
            plgpu.barrier_wait(kv_bar)
            mine = lax.div(tiles - wg + (consumers - 1), int32(consumers))
            item = origin_ref[b, 1], item_ref[w, START], item_ref[w, ROWS]

            @pl.loop(0, mine)
            def _(n):
                i = n * consumers + wg
                slot = lax.rem(i, int32(ring))
                tile = entries.of_tile(i)
                plgpu.barrier_wait(q_bar.at[slot])
                s = product(q_sm.at[slot], k_sm.T, rows, block_size)
                if windows:
                    hidden, mask = visible([t for t, _, _ in tile], first_ref.at[b], item, block_size, s.shape, query_axis=0)
                    s = lax.cond(hidden, lambda s: jnp.where(mask(), s, MASKED), lambda s: s, s)
                top = s.max(axis=1) * scale2
                p = jnp.exp2(s * scale2 - lax.broadcast_in_dim(top, s.shape, [0]))
                total = p.sum(axis=1)
                o = register_product(p.astype(dtype), v_sm, staging[0].at[wg] if simulated else None)
                q_sm[slot] = (o * lax.broadcast_in_dim(1.0 / total, o.shape, [0])).astype(dtype)
                lse_sm[slot] = top + jnp.log2(total)
                plgpu.commit_smem()
                for j, (t, r, real) in enumerate(tile):
                    place = pl.ds(lax.rem(t, int32(neighbours)) * G, G)
                    target = part_ref.at[l, lax.div(t, int32(neighbours)), r, place]
                    store_where(real, q_sm.at[slot, pl.ds(j * G, G)], target, simulated=simulated)
                plgpu.copy_smem_to_gmem(lse_sm.at[slot], lse_ref.at[l, lax.div(first_entry, int32(per_tile)) + i])
                # At most the newest group is still being read: the slot of the tile before is free again.
                plgpu.wait_smem_to_gmem(1, wait_read_only=True)
                pl.when(n > 0)(lambda: plgpu.barrier_arrive(free_bar.at[lax.rem(i - consumers, int32(ring))]))

            plgpu.wait_smem_to_gmem(0)
            if simulated:
                last = (mine - 1) * consumers + wg
                pl.when(mine > 0)(lambda: plgpu.barrier_arrive(free_bar.at[lax.rem(last, int32(ring))]))

        pl.when((wg < consumers) & (tiles > 0))(consume)
        pl.when((wg == consumers) & (tiles > 0))(produce)

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
    if simulated:
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
