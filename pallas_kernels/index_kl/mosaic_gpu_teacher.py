"""The teacher of the index loss on the kept blocks on Hopper (sm_90a): the attention's probabilities, averaged over the heads of a group.

Mosaic GPU, KV-outer: one thread block serves one work item of the inverse index (one KV head, one kernel block, at most `per` entries).
Scores are computed transposed, keys by (query, head), so that the probabilities are a register operand of a product with a constant matrix
that averages the heads. The backward of sparse_attention emits the same numbers from tiles that it computes anyway.

    producer (1 warpgroup)      loads the entries and K once, then gathers ROWS / G queries a ring slot, one [G, H] TMA box each
    consumers (C / 64)          own 64 keys each

Memory: the means, C numbers an entry; the caller bounds the queries.
"""

from __future__ import annotations

import math

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax
from jax.experimental import pallas as pl
from jax.experimental.pallas import mosaic_gpu as plgpu

from pallas_kernels.index_kl import tuning
from pallas_kernels.inverse_index import BLOCK, COUNT, ENTRY, LIST, ROWS, START, InverseIndex, slot_bits
from pallas_kernels.mosaic import TILED, all_phases_seen, int32, launch
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


def teacher_means(
    q_BTKGH: jax.Array,
    k_BZKH: jax.Array,
    minus_lse_LX: jax.Array,
    index: InverseIndex,
    first_BT: jax.Array,
    origin_B2: jax.Array,
    *,
    slots: int,
    block_size: int,
    group: int,
    scale: float,
    interpret: plgpu.InterpretGPUParams | None = None,
) -> jax.Array:
    """[L, P, C] in the dtype of q: mean over the first `group` of the G heads; 0 in a tile's padding, unwritten past an item's entries.

    `origin_B2`: of each batch row, the chunk's first query in q, and the key row of that query.
    """
    (_, _, K, G, H), dtype, C = q_BTKGH.shape, q_BTKGH.dtype, block_size
    (L, P), per, rows = index.entry_LP.shape, tuning.PER, tuning.TEACHER_ROWS
    per_tile, scale2 = rows // G, scale * math.log2(math.e)
    ring, consumers, simulated = tuning.TEACHER_RING, C // _HALF, interpret is not None
    queries = max(8, per_tile)  # columns of a wgmma come in eights
    average_QX = (np.arange(rows) // G == np.arange(queries)[:, None]) * (np.arange(rows) % G < group) / group

    def index_kl_teacher(q_ref, k_ref, lse_ref, average_ref, entry_ref, item_ref, first_ref, origin_ref, mean_ref, *scratch):
        q_sm, k_sm, lse_sm, ids_sm, average_sm, mean_sm, ids_bar, k_bar, tile_bar, free_bar, *staging = scratch
        w, wg = lax.axis_index("w"), lax.axis_index("wg")
        l, entry = item_ref[w, LIST], item_ref[w, ENTRY]
        b, h = lax.div(l, int32(K)), lax.rem(l, int32(K))
        tiles = lax.div(item_ref[w, COUNT] + (per_tile - 1), int32(per_tile))
        entries = Entries(ids_sm, slots, per_tile)

        def produce():
            plgpu.set_max_registers(tuning.REGISTERS[1], action="decrease")
            load_entries(entry_ref.at[l], entry, ids_sm, ids_bar)
            block = lax.rem(item_ref[w, BLOCK], int32(k_ref.shape[1] // C))
            plgpu.copy_gmem_to_smem(k_ref.at[b, pl.ds(block * C, C), h], k_sm, k_bar)
            plgpu.copy_gmem_to_smem(average_ref, average_sm, k_bar)
            plgpu.barrier_wait(ids_bar)
            query0 = origin_ref[b, 0]

            @pl.loop(0, tiles)
            def _(i):
                slot = lax.rem(i, int32(ring))
                pl.when(i >= ring)(lambda: plgpu.barrier_wait(free_bar.at[slot]))
                lse_here = pl.ds(pl.multiple_of((entry + i * per_tile) * G, rows), rows)
                plgpu.copy_gmem_to_smem(lse_ref.at[l, lse_here], lse_sm.at[slot], tile_bar.at[slot])
                for j, (t, _, _) in enumerate(entries.of_tile(i)):
                    plgpu.copy_gmem_to_smem(q_ref.at[b, query0 + t, h], q_sm.at[slot, pl.ds(j * G, G)], tile_bar.at[slot])

            all_phases_seen(free_bar, jnp.maximum(tiles - ring, 0), tiles, simulated=simulated)

        def consume():
            plgpu.set_max_registers(tuning.REGISTERS[0], action="increase")
            plgpu.barrier_wait(ids_bar)
            plgpu.barrier_wait(k_bar)
            mine = pl.ds(wg * _HALF, _HALF)
            item = origin_ref[b, 1], item_ref[w, START], item_ref[w, ROWS]

            @pl.loop(0, tiles)
            def _(i):
                slot, out = lax.rem(i, int32(ring)), lax.rem(i, int32(2))
                tile = [t for t, _, _ in entries.of_tile(i)]
                plgpu.barrier_wait(tile_bar.at[slot])

                def scores(acc):
                    plgpu.wgmma(acc, k_sm.at[mine], q_sm.at[slot].T)
                    return acc[...]

                s_CX = pl.run_scoped(scores, plgpu.ACC((_HALF, rows), jnp.float32))
                hidden, mask = visible(tile, first_ref.at[b], item, C, s_CX.shape, query_axis=1, key0=wg * _HALF)
                s_CX = lax.cond(hidden, lambda s: jnp.where(mask(), s, _MASKED), lambda s: s, s_CX)
                minus_lse_X = plgpu.load(lse_sm.at[slot], layout=plgpu.Layout.WGMMA.reduce(0))
                p_CX = jnp.exp2(s_CX * scale2 + lax.broadcast_in_dim(minus_lse_X, s_CX.shape, [1])).astype(dtype)
                if simulated:
                    staging[0][wg] = p_CX
                    plgpu.commit_smem()

                def average(acc):
                    plgpu.wgmma(acc, staging[0].at[wg] if simulated else p_CX, average_sm.T)
                    return acc[...]

                mean_CQ = pl.run_scoped(average, plgpu.ACC((_HALF, queries), jnp.float32))
                plgpu.wait_smem_to_gmem(1, wait_read_only=True)  # the buffer of two tiles ago has left
                mean_sm.at[out, wg].T[...] = mean_CQ.astype(dtype)
                plgpu.commit_smem()
                plgpu.barrier_arrive(free_bar.at[slot])
                target = mean_ref.at[l, pl.ds(entry + i * per_tile, per_tile), mine]
                plgpu.copy_smem_to_gmem(mean_sm.at[out, wg, pl.ds(0, per_tile)], target)

            plgpu.wait_smem_to_gmem(0)

        pl.when((wg < consumers) & (tiles > 0))(consume)
        pl.when((wg == consumers) & (tiles > 0))(produce)

    scratch = [
        plgpu.SMEM((ring, rows, H), dtype, transforms=TILED),
        plgpu.SMEM((C, H), dtype, transforms=TILED),
        plgpu.SMEM((ring, rows), jnp.float32),
        plgpu.SMEM((per,), jnp.int32),
        plgpu.SMEM((queries, rows), dtype, transforms=TILED),
        plgpu.SMEM((2, consumers, queries, _HALF), dtype),
        plgpu.Barrier(num_arrivals=load_arrivals(per)),  # producer -> all: the entries are there
        plgpu.Barrier(num_arrivals=2),  # producer -> consumers: K and the averaging matrix are there
        plgpu.Barrier(num_arrivals=per_tile + 1, num_barriers=ring),  # producer -> consumers: the slot's queries are there
        plgpu.Barrier(num_arrivals=consumers, num_barriers=ring),  # consumers -> producer: the slot's queries have been read
    ]
    if simulated:
        scratch.append(plgpu.SMEM((consumers, _HALF, rows), dtype, transforms=TILED))
    kernel = plgpu.kernel(
        index_kl_teacher,
        out_type=jax.ShapeDtypeStruct((L, P, C), dtype),
        grid=(index.item_WX.shape[0],),
        grid_names=("w",),
        num_threads=consumers + 1,
        thread_name="wg",
        scratch_types=scratch,
        compiler_params=plgpu.CompilerParams(approx_math=True, reduction_scratch_bytes=0),
        **launch(interpret),
    )
    average = jnp.asarray(average_QX, dtype)
    return kernel(q_BTKGH, k_BZKH, minus_lse_LX, average, index.entry_LP, index.item_WX, first_BT, origin_B2)
