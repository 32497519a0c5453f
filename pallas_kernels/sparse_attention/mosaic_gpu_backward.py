"""Backward of sparse_attention, KV-outer: a key block's owner keeps dK and dV in registers while its queries come by.  sm_90a.

With p = exp(scale * s - lse) recomputed from lse, and delta = rowsum(dO * O) - dlse (dlse is the cotangent of lse):

    dV = P^T dO        dP = dO V^T        dS = P * (dP - delta)        dK = scale * dS^T Q        dQ = scale * dS K

One thread block serves one work item of the inverse index of the whole selection. Scores are computed transposed, S^T [keys, rows], so that
P^T and dS^T are register operands of the dV and dK products. The accumulators of S^T and dP^T start from -lse and -delta: no statistics
stay in registers. dS^T also goes through shared memory, from which the dQ of the tile is computed.

    producer (1 warpgroup)      entries, K and V once; Q, dO and the statistics of ROWS / G queries a ring slot
    consumers (C / 64)          64 keys each; the H / 64 columns groups of dQ are shared out among them

dQ leaves as one part an entry, in 16 bits, and is summed over a query's slots in float32; dK and dV as one float32 part a work item, summed
in a fixed order. No atomics: two runs are bit-equal. Memory: queries * R * N * H * 2 bytes, bounded by the caller, and the parts of items.
"""

from __future__ import annotations

import math

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax
from jax.experimental import pallas as pl
from jax.experimental.pallas import mosaic_gpu as plgpu

from pallas_kernels.inverse_index import BLOCK, COUNT, ENTRY, LIST, ROWS, START, InverseIndex, slot_bits
from pallas_kernels.mosaic import MASKED, TILED, all_phases_seen, int32, launch, store_where
from pallas_kernels.mosaic_entries import Entries, load_arrivals, load_entries, visible
from pallas_kernels.sparse_attention import tuning

KEYS = 64  # keys a consumer owns
COLUMNS = 64  # columns of dQ that one product computes
TEACHER_ROWS = 8  # queries of the teacher product: the smallest N of wgmma


def statistics(lse_BTKG: jax.Array, delta_BTKG: jax.Array, index: InverseIndex, slots: int, scale: float) -> jax.Array:
    """What the accumulators start from, in list order [L, P / Y, 2, ROWS]: -lse / scale (MASKED for padding, so that p = 0) and -delta."""
    (_, T, _, G), L = lse_BTKG.shape, index.entry_LP.shape[0]
    both_LTX = jnp.concatenate([lse_BTKG * (-1 / scale), -delta_BTKG], axis=-1).swapaxes(1, 2).reshape(L, T, 2 * G)
    query_LP1 = lax.shift_right_logical(jnp.maximum(index.entry_LP, 0), slot_bits(slots))[..., None]
    padding_X = jnp.repeat(jnp.array([MASKED, 0.0], jnp.float32), G)
    both_LPX = jnp.where((index.entry_LP >= 0)[..., None], jnp.take_along_axis(both_LTX, query_LP1, axis=1), padding_X)
    return both_LPX.reshape(L, -1, tuning.ROWS // G, 2, G).swapaxes(2, 3).reshape(L, -1, 2, tuning.ROWS)


def teacher_weights(group: int, padded: int, dtype: jnp.dtype) -> jax.Array:
    """[8, ROWS]: row i averages the real heads of the tile's i-th query."""
    row = np.arange(tuning.ROWS)
    return jnp.asarray(((row // padded == np.arange(TEACHER_ROWS)[:, None]) & (row % padded < group)) / group, dtype)


def backward_items(
    q_BTKGH: jax.Array,
    dout_BTKGH: jax.Array,
    k_BZKH: jax.Array,
    v_BZKH: jax.Array,
    index: InverseIndex,
    chunk: tuple[jax.Array, jax.Array, jax.Array],
    *,
    slots: int,
    block_size: int,
    scale: float,
    teacher: jax.Array | None = None,
    interpret: plgpu.InterpretGPUParams | None = None,
) -> tuple[jax.Array, ...]:
    """The parts of dq, dk and dv that each entry and each work item contribute.

    Args:
      q_BTKGH, dout_BTKGH, k_BZKH, v_BZKH: as for kv_outer.
      index: inverse index of the chunk's whole selection.
      chunk: (statistics in list order, first_BT, origin_B2), the last two as for kv_outer.
      teacher: `teacher_weights`, or None.

    Returns:
      dq parts [L, T / X, R, X * G, H] in the order of kv_outer's parts; (dk, dv) parts [W, 2, C, H] float32;
      with `teacher` also the mean over the group's heads of p, [L, P, C] in list order, padding unwritten.
    """
    (_, _, K, G, H), (L, P), dtype = q_BTKGH.shape, index.entry_LP.shape, q_BTKGH.dtype
    rows, per, ring, sends = tuning.ROWS, tuning.BACKWARD_PER, tuning.BACKWARD_RING, tuning.BACKWARD_SENDS
    per_tile, neighbours, consumers, groups = rows // G, tuning.NEIGHBOURS // G, block_size // KEYS, H // COLUMNS
    simulated = interpret is not None
    scale2 = scale * math.log2(math.e)
    by_column = plgpu.Layout.WGMMA.reduce(0)
    stats_LYXM, first_BT, origin_B2 = chunk

    def accumulated(acc, pending):
        """Reads an accumulator once at most `pending` later products are in flight; the simulator waits for all."""
        return acc[...] if simulated else plgpu.wgmma_accumulator_load(acc, wait_n=pending)

    def sparse_attention_backward(q_ref, dout_ref, k_ref, v_ref, entry_ref, item_ref, stats_ref, first_ref, origin_ref, *refs):
        weights_ref, *refs = refs if teacher is not None else (None, *refs)
        (dq_ref, dkv_ref, *teacher_refs), scratch = refs[: 2 + (teacher is not None)], refs[2 + (teacher is not None) :]
        q_sm, dout_sm, k_sm, v_sm, ds_sm, dq_sm, stats_sm, ids_sm, ids_bar, kv_bar, q_bar, free_bar, ds_bar, *scratch = scratch
        weights_sm, mean_sm, *scratch = scratch if teacher is not None else (None, None, *scratch)
        staging = scratch[0] if simulated else None
        w, wg = lax.axis_index("w"), lax.axis_index("wg")
        tiles = lax.div(item_ref[w, COUNT] + (per_tile - 1), int32(per_tile))
        l, first_entry = item_ref[w, LIST], item_ref[w, ENTRY]
        b, h = lax.div(l, int32(K)), lax.rem(l, int32(K))
        entries = Entries(ids_sm, slots, per_tile)

        def produce():
            plgpu.set_max_registers(tuning.BACKWARD_REGISTERS[1], action="decrease")
            load_entries(entry_ref.at[l], first_entry, ids_sm, ids_bar)
            block = lax.rem(item_ref[w, BLOCK], int32(k_ref.shape[1] // block_size))
            here = pl.ds(block * block_size, block_size)
            if teacher is not None:
                plgpu.copy_gmem_to_smem(weights_ref, weights_sm, kv_bar)
            plgpu.copy_gmem_to_smem(k_ref.at[b, here, h], k_sm, kv_bar)
            plgpu.copy_gmem_to_smem(v_ref.at[b, here, h], v_sm, kv_bar)
            plgpu.barrier_wait(ids_bar)
            query0, tile0 = origin_ref[b, 0], lax.div(first_entry, int32(per_tile))

            @pl.loop(0, tiles)
            def _(i):
                slot = lax.rem(i, int32(ring))
                pl.when(i >= ring)(lambda: plgpu.barrier_wait(free_bar.at[slot]))
                plgpu.copy_gmem_to_smem(stats_ref.at[l, tile0 + i], stats_sm.at[slot], q_bar.at[slot])
                for j, (t, _, _) in enumerate(entries.of_tile(i)):
                    place = pl.ds(j * G, G)
                    plgpu.copy_gmem_to_smem(q_ref.at[b, query0 + t, h], q_sm.at[slot, place], q_bar.at[slot])
                    plgpu.copy_gmem_to_smem(dout_ref.at[b, query0 + t, h], dout_sm.at[slot, place], q_bar.at[slot])

            all_phases_seen(free_bar, jnp.maximum(tiles - ring, 0), tiles, simulated=simulated)

        def gradients_of_scores(i, dv_acc, item, mine):
            """p^T of the tile enters dV (and the teacher means); returns dS^T."""
            slot, shape = lax.rem(i, int32(ring)), (KEYS, rows)

            def start(x):
                return lax.broadcast_in_dim(plgpu.load(stats_sm.at[slot, x], layout=by_column), shape, [1])

            def body(s_acc, dp_acc):
                # Both are set before the first product is issued: ptxas injects a wait where registers of an accumulator are written while
                # another product is in flight. The simulator cannot set an accumulator.
                if not simulated:
                    s_acc[...] = start(0)
                    dp_acc[...] = start(1)
                plgpu.wgmma(s_acc, k_sm.at[mine], q_sm.at[slot].T)
                plgpu.wgmma(dp_acc, v_sm.at[mine], dout_sm.at[slot].T)
                s = accumulated(s_acc, 1)
                s = s + start(0) if simulated else s
                queries = [t for t, _, _ in entries.of_tile(i)]
                hidden, mask = visible(queries, first_ref.at[b], item, block_size, shape, query_axis=1, key0=wg * KEYS)
                s = lax.cond(hidden, lambda s: jnp.where(mask(), s, MASKED), lambda s: s, s)
                p = jnp.exp2(s * scale2)
                p16 = p.astype(dtype)
                if simulated:
                    staging[wg] = p16
                    plgpu.commit_smem()
                    p16 = staging.at[wg]
                if teacher is None:
                    plgpu.wgmma(dv_acc, p16, dout_sm.at[slot])
                else:
                    pl.run_scoped(lambda acc: teacher_means(i, acc, p16, dv_acc), plgpu.ACC((KEYS, TEACHER_ROWS), jnp.float32))
                dp = accumulated(dp_acc, 1)
                return p * (dp + start(1) if simulated else dp)

            def teacher_means(i, mean_acc, p16, dv_acc):
                # This buffer was last sent sends + 1 tiles ago, so that send is over.
                plgpu.wgmma(mean_acc, p16, weights_sm.T)
                plgpu.wgmma(dv_acc, p16, dout_sm.at[slot])
                mean_sm.at[lax.rem(i, int32(sends + 1)), wg].T[...] = accumulated(mean_acc, 1).astype(dtype)

            return pl.run_scoped(body, *[plgpu.ACC(shape, jnp.float32)] * 2).astype(dtype)

        def send(i, dq16):
            """dQ of the tile, one box an entry and group of columns, and the teacher means."""
            plgpu.wait_smem_to_gmem(sends - 1, wait_read_only=True)  # the buffer has been read
            buffer, tile = lax.rem(i, int32(sends)), entries.of_tile(i)
            for columns, values in dq16:
                dq_sm[buffer, columns] = values
            plgpu.commit_smem()
            for columns, _ in dq16:
                for j, (t, r, real) in enumerate(tile):
                    place = pl.ds(lax.rem(t, int32(neighbours)) * G, G)
                    target = dq_ref.at[l, lax.div(t, int32(neighbours)), r, place, pl.ds(columns * COLUMNS, COLUMNS)]
                    store_where(real, dq_sm.at[buffer, columns, pl.ds(j * G, G)], target, simulated=simulated)
            if teacher is not None:
                source = mean_sm.at[lax.rem(i, int32(sends + 1)), wg, pl.ds(0, per_tile)]
                target = teacher_refs[0].at[l, pl.ds(first_entry + i * per_tile, per_tile), pl.ds(wg * KEYS, KEYS)]
                plgpu.copy_smem_to_gmem(source, target, commit_group=False)
            plgpu.commit_smem_to_gmem_group()

        def gradient_of_queries(i, *groups_of_columns):
            """The given groups of columns of the tile's dQ; all products that read the ring slot are over after it."""
            buffer = lax.rem(i, int32(2))

            def product(columns):
                def body(acc):
                    plgpu.wgmma(acc, ds_sm.at[buffer].T, k_sm.at[:, pl.ds(columns * COLUMNS, COLUMNS)])
                    return acc[...]

                return (pl.run_scoped(body, plgpu.ACC((rows, COLUMNS), jnp.float32)) * scale).astype(dtype)

            dq16 = [(columns, product(columns)) for columns in groups_of_columns]
            if not dq16 and not simulated:
                plgpu.wgmma_wait(0)
            plgpu.barrier_arrive(free_bar.at[lax.rem(i, int32(ring))])
            send(i, dq16)

        def consume():
            plgpu.set_max_registers(tuning.BACKWARD_REGISTERS[0], action="increase")
            plgpu.barrier_wait(ids_bar)
            plgpu.barrier_wait(kv_bar)
            mine = pl.ds(wg * KEYS, KEYS)
            item = origin_ref[b, 1], item_ref[w, START], item_ref[w, ROWS]

            def walk(dk_acc, dv_acc):
                @pl.loop(0, tiles)
                def _(i):
                    slot, buffer = lax.rem(i, int32(ring)), lax.rem(i, int32(2))
                    plgpu.barrier_wait(q_bar.at[slot])
                    ds16 = gradients_of_scores(i, dv_acc, item, mine)
                    ds_sm[buffer, mine] = ds16
                    plgpu.commit_smem()
                    plgpu.barrier_arrive(ds_bar.at[buffer])
                    plgpu.wgmma(dk_acc, ds_sm.at[buffer, mine] if simulated else ds16, q_sm.at[slot])
                    # Two buffers of dS need no "free" barrier: a consumer arrives for tile i + 1 only after its dQ product of tile i.
                    plgpu.barrier_wait(ds_bar.at[buffer])
                    if groups == consumers:
                        gradient_of_queries(i, wg)
                    elif consumers == 1:
                        gradient_of_queries(i, *range(groups))
                    else:  # one group of columns: the consumers take turns
                        lax.cond(lax.rem(i, int32(consumers)) == wg, lambda: gradient_of_queries(i, 0), lambda: gradient_of_queries(i))

                return dk_acc[...], dv_acc[...]

            dk, dv = pl.run_scoped(walk, *[plgpu.ACC((KEYS, H), jnp.float32)] * 2)
            dkv_ref[w, 0, mine] = dk * scale
            dkv_ref[w, 1, mine] = dv
            plgpu.wait_smem_to_gmem(0)

        pl.when((wg < consumers) & (tiles > 0))(consume)
        pl.when((wg == consumers) & (tiles > 0))(produce)

    scratch = [
        plgpu.SMEM((ring, rows, H), dtype, transforms=TILED),
        plgpu.SMEM((ring, rows, H), dtype, transforms=TILED),
        plgpu.SMEM((block_size, H), dtype, transforms=TILED),
        plgpu.SMEM((block_size, H), dtype, transforms=TILED),
        plgpu.SMEM((2, block_size, rows), dtype, transforms=TILED),
        plgpu.SMEM((sends, groups, rows, COLUMNS), dtype, transforms=TILED),
        plgpu.SMEM((ring, 2, rows), jnp.float32),
        plgpu.SMEM((per,), jnp.int32),
        plgpu.Barrier(num_arrivals=load_arrivals(per)),  # producer -> all: the entries
        plgpu.Barrier(num_arrivals=2 + (teacher is not None)),  # producer -> consumers: K and V
        plgpu.Barrier(num_arrivals=2 * per_tile + 1, num_barriers=ring),  # producer -> consumers: Q, dO and statistics of the slot
        plgpu.Barrier(num_arrivals=consumers, num_barriers=ring),  # consumers -> producer: the slot is read
        plgpu.Barrier(num_arrivals=consumers, num_barriers=2),  # consumers -> consumers: dS of the tile is complete
    ]
    W, queries = index.item_WX.shape[0], first_BT.shape[1]
    out_type = [
        jax.ShapeDtypeStruct((L, queries // neighbours, slots, neighbours * G, H), dtype),
        jax.ShapeDtypeStruct((W, 2, block_size, H), jnp.float32),
    ]
    if teacher is not None:
        scratch += [
            plgpu.SMEM((TEACHER_ROWS, rows), dtype, transforms=TILED),
            plgpu.SMEM((sends + 1, consumers, TEACHER_ROWS, KEYS), dtype),
        ]
        out_type.append(jax.ShapeDtypeStruct((L, P, block_size), dtype))
    if simulated:
        scratch.append(plgpu.SMEM((consumers, KEYS, rows), dtype, transforms=TILED))
    kernel = plgpu.kernel(
        sparse_attention_backward,
        out_type=tuple(out_type),
        grid=(W,),
        grid_names=("w",),
        num_threads=consumers + 1,
        thread_name="wg",
        scratch_types=scratch,
        compiler_params=plgpu.CompilerParams(approx_math=True, reduction_scratch_bytes=0),
        **launch(interpret),
    )
    operands = (q_BTKGH, dout_BTKGH, k_BZKH, v_BZKH, index.entry_LP, index.item_WX, stats_LYXM, first_BT, origin_B2)
    return kernel(*operands, *([] if teacher is None else [teacher]))
