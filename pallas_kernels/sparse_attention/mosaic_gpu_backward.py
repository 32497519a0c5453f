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
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jax import lax
from jax.experimental import pallas as pl
from jax.experimental.pallas import mosaic_gpu as plgpu

from pallas_kernels.inverse_index import InverseIndex, slot_bits
from pallas_kernels.mosaic import MASKED, TILED, all_phases_seen, int32, launch, means_of_groups, means_width, store_where
from pallas_kernels.mosaic_entries import WorkItem, load_arrivals, load_entries, visible
from pallas_kernels.sparse_attention import tuning

KEYS = 64  # keys a consumer owns
COLUMNS = 64  # columns of dQ that one product computes


def statistics(lse_BTKG: jax.Array, delta_BTKG: jax.Array, index: InverseIndex, slots: int, scale: float) -> jax.Array:
    """What the accumulators start from, in list order [L, P / Y, 2, ROWS]: -lse / scale (MASKED for padding, so that p = 0) and -delta."""
    (_, T, _, G), L = lse_BTKG.shape, index.entry_LP.shape[0]
    both_LTX = jnp.concatenate([lse_BTKG * (-1 / scale), -delta_BTKG], axis=-1).swapaxes(1, 2).reshape(L, T, 2 * G)
    query_LP1 = lax.shift_right_logical(jnp.maximum(index.entry_LP, 0), slot_bits(slots))[..., None]
    padding_X = jnp.repeat(jnp.array([MASKED, 0.0], jnp.float32), G)
    both_LPX = jnp.where((index.entry_LP >= 0)[..., None], jnp.take_along_axis(both_LTX, query_LP1, axis=1), padding_X)
    return both_LPX.reshape(L, -1, tuning.ROWS // G, 2, G).swapaxes(2, 3).reshape(L, -1, 2, tuning.ROWS)


class _Refs(NamedTuple):
    """Operands, results and scratch, each in the order in which the launch passes them; None where there is no teacher."""

    q: Any
    dout: Any
    k: Any
    v: Any
    entry: Any
    item: Any
    stats: Any
    first: Any
    origin: Any
    dq: Any
    dkv: Any
    mean: Any
    q_sm: Any
    dout_sm: Any
    k_sm: Any
    v_sm: Any
    ds_sm: Any
    dq_sm: Any
    stats_sm: Any
    ids_sm: Any
    ids_bar: Any
    kv_bar: Any
    q_bar: Any
    free_bar: Any
    ds_bar: Any
    mean_sm: Any
    staging: Any  # simulator only

    @staticmethod
    def of(refs: tuple, *, teacher: bool, simulated: bool) -> _Refs:
        refs = list(refs)
        for place, there in ((11, teacher), (25, teacher), (26, simulated)):
            if not there:
                refs.insert(place, None)
        return _Refs(*refs)


class _Static(NamedTuple):
    group: int
    heads: int  # of a group's rows, those that are not padding
    block_size: int
    consumers: int
    column_groups: int
    scale: float
    simulated: bool

    @property
    def per_tile(self) -> int:
        return tuning.ROWS // self.group

    def accumulated(self, acc: Any, pending: int) -> jax.Array:
        """Reads an accumulator once at most `pending` later products are in flight; the simulator waits for all."""
        return acc[...] if self.simulated else plgpu.wgmma_accumulator_load(acc, wait_n=pending)


def _produce(refs: _Refs, item: WorkItem, static: _Static) -> None:
    G, ring = static.group, tuning.BACKWARD_RING
    plgpu.set_max_registers(tuning.BACKWARD_REGISTERS[static.consumers][1], action="decrease")
    load_entries(refs.entry.at[item.l], item.first_entry, refs.ids_sm, refs.ids_bar)
    here = item.slot_rows(refs.k, static.block_size)
    plgpu.copy_gmem_to_smem(refs.k.at[item.b, here, item.h], refs.k_sm, refs.kv_bar)
    plgpu.copy_gmem_to_smem(refs.v.at[item.b, here, item.h], refs.v_sm, refs.kv_bar)
    plgpu.barrier_wait(refs.ids_bar)
    query0, tile0 = refs.origin[item.b, 0], lax.div(item.first_entry, int32(static.per_tile))

    @pl.loop(0, item.tiles)
    def _(i):
        slot = lax.rem(i, int32(ring))
        pl.when(i >= ring)(lambda: plgpu.barrier_wait(refs.free_bar.at[slot]))
        plgpu.copy_gmem_to_smem(refs.stats.at[item.l, tile0 + i], refs.stats_sm.at[slot], refs.q_bar.at[slot])
        for j, (t, _, _) in enumerate(item.entries.of_tile(i)):
            place = pl.ds(j * G, G)
            plgpu.copy_gmem_to_smem(refs.q.at[item.b, query0 + t, item.h], refs.q_sm.at[slot, place], refs.q_bar.at[slot])
            plgpu.copy_gmem_to_smem(refs.dout.at[item.b, query0 + t, item.h], refs.dout_sm.at[slot, place], refs.q_bar.at[slot])

    all_phases_seen(refs.free_bar, jnp.maximum(item.tiles - ring, 0), item.tiles, simulated=static.simulated)


def _gradient_of_scores(i, dv_acc, where, refs: _Refs, item: WorkItem, static: _Static) -> jax.Array:
    """P^T of the tile enters dV (and the teacher's means); returns dS^T."""
    slot, shape, wg, dtype = lax.rem(i, int32(tuning.BACKWARD_RING)), (KEYS, tuning.ROWS), item.wg, refs.q_sm.dtype
    mine, simulated = pl.ds(wg * KEYS, KEYS), static.simulated

    def start(x):
        return lax.broadcast_in_dim(plgpu.load(refs.stats_sm.at[slot, x], layout=plgpu.Layout.WGMMA.reduce(0)), shape, [1])

    def body(s_acc, dp_acc):
        # Both are set before the first product is issued: ptxas injects a wait where registers of an accumulator are written while
        # another product is in flight. The simulator cannot set an accumulator.
        if not simulated:
            s_acc[...] = start(0)
            dp_acc[...] = start(1)
        plgpu.wgmma(s_acc, refs.k_sm.at[mine], refs.q_sm.at[slot].T)
        plgpu.wgmma(dp_acc, refs.v_sm.at[mine], refs.dout_sm.at[slot].T)
        s = static.accumulated(s_acc, 1)
        s = s + start(0) if simulated else s
        queries = [t for t, _, _ in item.entries.of_tile(i)]
        hidden, mask = visible(queries, refs.first.at[item.b], where, static.block_size, shape, query_axis=1, key0=wg * KEYS)
        s = lax.cond(hidden, lambda s: jnp.where(mask(), s, MASKED), lambda s: s, s)
        p = jnp.exp2(s * (static.scale * math.log2(math.e)))
        p16 = p.astype(dtype)
        if simulated:
            refs.staging[wg] = p16
            plgpu.commit_smem()
            p16 = refs.staging.at[wg]
        plgpu.wgmma(dv_acc, p16, refs.dout_sm.at[slot])
        if refs.mean is not None:
            # This buffer was last sent sends + 1 tiles ago, so that send is over.
            buffer = lax.rem(i, int32(tuning.BACKWARD_SENDS + 1))
            refs.mean_sm.at[buffer, wg].T[...] = means_of_groups(p, static.group, static.heads).astype(dtype)
        dp = static.accumulated(dp_acc, 1)
        return p * (dp + start(1) if simulated else dp)

    return pl.run_scoped(body, *[plgpu.ACC(shape, jnp.float32)] * 2).astype(dtype)


def _send(i, column_groups: tuple, refs: _Refs, item: WorkItem, static: _Static) -> None:
    """dQ of the tile, one box an entry and group of columns, and the teacher's means."""
    sends, G, per_tile, neighbours = tuning.BACKWARD_SENDS, static.group, static.per_tile, tuning.NEIGHBOURS // static.group
    buffer, tile = lax.rem(i, int32(sends)), item.entries.of_tile(i)
    plgpu.commit_smem()
    for columns in column_groups:
        for j, (t, r, real) in enumerate(tile):
            place = pl.ds(lax.rem(t, int32(neighbours)) * G, G)
            target = refs.dq.at[item.l, lax.div(t, int32(neighbours)), r, place, pl.ds(columns * COLUMNS, COLUMNS)]
            store_where(real, refs.dq_sm.at[buffer, columns, pl.ds(j * G, G)], target, simulated=static.simulated)
    if refs.mean is not None:
        source = refs.mean_sm.at[lax.rem(i, int32(sends + 1)), item.wg, pl.ds(0, per_tile)]
        target = refs.mean.at[item.l, pl.ds(item.first_entry + i * per_tile, per_tile), pl.ds(item.wg * KEYS, KEYS)]
        plgpu.copy_smem_to_gmem(source, target, commit_group=False)
    plgpu.commit_smem_to_gmem_group()


def _gradient_of_queries(i, column_groups: tuple, refs: _Refs, item: WorkItem, static: _Static) -> None:
    """The given groups of columns of the tile's dQ; all products that read the ring slot are over before it is freed."""
    sends, scores = tuning.BACKWARD_SENDS, lax.rem(i, int32(2))

    def product(columns):
        def body(acc):
            plgpu.wgmma(acc, refs.ds_sm.at[scores].T, refs.k_sm.at[:, pl.ds(columns * COLUMNS, COLUMNS)])
            return acc[...]

        return (pl.run_scoped(body, plgpu.ACC((tuning.ROWS, COLUMNS), jnp.float32)) * static.scale).astype(refs.q_sm.dtype)

    def store(columns, values):
        refs.dq_sm[lax.rem(i, int32(sends)), columns] = values

    def free_slot():
        plgpu.barrier_arrive(refs.free_bar.at[lax.rem(i, int32(tuning.BACKWARD_RING))])

    def buffer_is_read():
        plgpu.wait_smem_to_gmem(sends - 1, wait_read_only=True)

    if len(column_groups) <= 1:
        dq16 = [product(columns) for columns in column_groups]
        if not dq16 and not static.simulated:
            plgpu.wgmma_wait(0)
        free_slot()
        buffer_is_read()
        for columns, values in zip(column_groups, dq16, strict=True):
            store(columns, values)
    else:  # one after the other: registers do not hold them all
        buffer_is_read()
        for columns in column_groups:
            store(columns, product(columns))
        free_slot()
    _send(i, column_groups, refs, item, static)


def _consume(refs: _Refs, item: WorkItem, static: _Static) -> None:
    consumers, wg = static.consumers, item.wg
    plgpu.set_max_registers(tuning.BACKWARD_REGISTERS[consumers][0], action="increase")
    plgpu.barrier_wait(refs.ids_bar)
    plgpu.barrier_wait(refs.kv_bar)
    mine = pl.ds(wg * KEYS, KEYS)
    where = refs.origin[item.b, 1], *item.extent()

    def gradient_of_queries(i, *column_groups):
        _gradient_of_queries(i, column_groups, refs, item, static)

    def walk(dk_acc, dv_acc):
        @pl.loop(0, item.tiles)
        def _(i):
            slot, buffer = lax.rem(i, int32(tuning.BACKWARD_RING)), lax.rem(i, int32(2))
            plgpu.barrier_wait(refs.q_bar.at[slot])
            ds16 = _gradient_of_scores(i, dv_acc, where, refs, item, static)
            refs.ds_sm[buffer, mine] = ds16
            plgpu.commit_smem()
            plgpu.barrier_arrive(refs.ds_bar.at[buffer])
            plgpu.wgmma(dk_acc, refs.ds_sm.at[buffer, mine] if static.simulated else ds16, refs.q_sm.at[slot])
            # Two buffers of dS need no "free" barrier: a consumer arrives for tile i + 1 only after its dQ product of tile i.
            plgpu.barrier_wait(refs.ds_bar.at[buffer])
            if static.column_groups == consumers:
                gradient_of_queries(i, wg)
            elif consumers == 1:
                gradient_of_queries(i, *range(static.column_groups))
            else:  # one group of columns: the consumers take turns
                lax.cond(lax.rem(i, int32(consumers)) == wg, lambda: gradient_of_queries(i, 0), lambda: gradient_of_queries(i))

        return dk_acc[...], dv_acc[...]

    dk, dv = pl.run_scoped(walk, *[plgpu.ACC((KEYS, refs.q_sm.shape[-1]), jnp.float32)] * 2)
    refs.dkv[item.w, 0, mine] = dk * static.scale
    refs.dkv[item.w, 1, mine] = dv
    plgpu.wait_smem_to_gmem(0)


def _scratch(static: _Static, H: int, dtype: jnp.dtype, *, teacher: bool) -> list:
    """In the order of _Refs."""
    rows, ring, sends = tuning.ROWS, tuning.BACKWARD_RING, tuning.BACKWARD_SENDS
    block_size, consumers = static.block_size, static.consumers
    scratch = [
        plgpu.SMEM((ring, rows, H), dtype, transforms=TILED),
        plgpu.SMEM((ring, rows, H), dtype, transforms=TILED),
        plgpu.SMEM((block_size, H), dtype, transforms=TILED),
        plgpu.SMEM((block_size, H), dtype, transforms=TILED),
        plgpu.SMEM((2, block_size, rows), dtype, transforms=TILED),
        plgpu.SMEM((sends, static.column_groups, rows, COLUMNS), dtype, transforms=TILED),
        plgpu.SMEM((ring, 2, rows), jnp.float32),
        plgpu.SMEM((tuning.BACKWARD_PER,), jnp.int32),
        plgpu.Barrier(num_arrivals=load_arrivals(tuning.BACKWARD_PER)),  # producer -> all: the entries
        plgpu.Barrier(num_arrivals=2),  # producer -> consumers: K and V
        plgpu.Barrier(num_arrivals=2 * static.per_tile + 1, num_barriers=ring),  # producer -> consumers: Q, dO and statistics of the slot
        plgpu.Barrier(num_arrivals=consumers, num_barriers=ring),  # consumers -> producer: the slot is read
        plgpu.Barrier(num_arrivals=consumers, num_barriers=2),  # consumers -> consumers: dS of the tile is complete
    ]
    if teacher:
        scratch.append(plgpu.SMEM((sends + 1, consumers, means_width(static.per_tile), KEYS), dtype))
    if static.simulated:
        scratch.append(plgpu.SMEM((consumers, KEYS, rows), dtype, transforms=TILED))
    return scratch


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
    teacher: int | None = None,
    interpret: plgpu.InterpretGPUParams | None = None,
) -> tuple[jax.Array, ...]:
    """The parts of dq, dk and dv that each entry and each work item contribute.

    Args:
      q_BTKGH, dout_BTKGH, k_BZKH, v_BZKH: as for kv_outer.
      index: inverse index of the chunk's whole selection.
      chunk: (statistics in list order, first_BT, origin_B2), the last two as for kv_outer.
      teacher: how many of the G heads are real, where the teacher's means are wanted.

    Returns:
      dq parts [L, T / X, R, X * G, H] in the order of kv_outer's parts; (dk, dv) parts [W, 2, C, H] float32;
      with `teacher` also the mean over these heads of p, [L, P, C] in list order, padding unwritten.
    """
    (_, _, K, G, H), (L, P), dtype = q_BTKGH.shape, index.entry_LP.shape, q_BTKGH.dtype
    neighbours, consumers = tuning.NEIGHBOURS // G, block_size // KEYS
    stats_LYXM, first_BT, origin_B2 = chunk
    static = _Static(G, teacher or G, block_size, consumers, H // COLUMNS, scale, interpret is not None)

    def sparse_attention_backward(*refs):
        refs = _Refs.of(refs, teacher=teacher is not None, simulated=static.simulated)
        item = WorkItem(refs.item, refs.ids_sm, num_kv_heads=K, slots=slots, per_tile=static.per_tile)
        pl.when((item.wg < consumers) & (item.tiles > 0))(lambda: _consume(refs, item, static))
        pl.when((item.wg == consumers) & (item.tiles > 0))(lambda: _produce(refs, item, static))

    W, queries = index.item_WX.shape[0], first_BT.shape[1]
    out_type = [
        jax.ShapeDtypeStruct((L, queries // neighbours, slots, neighbours * G, H), dtype),
        jax.ShapeDtypeStruct((W, 2, block_size, H), jnp.float32),
    ]
    if teacher is not None:
        out_type.append(jax.ShapeDtypeStruct((L, P, block_size), dtype))
    kernel = plgpu.kernel(
        sparse_attention_backward,
        out_type=tuple(out_type),
        grid=(W,),
        grid_names=("w",),
        num_threads=consumers + 1,
        thread_name="wg",
        scratch_types=_scratch(static, H, dtype, teacher=teacher is not None),
        compiler_params=plgpu.CompilerParams(approx_math=True, reduction_scratch_bytes=0),
        **launch(interpret),
    )
    return kernel(q_BTKGH, dout_BTKGH, k_BZKH, v_BZKH, index.entry_LP, index.item_WX, stats_LYXM, first_BT, origin_B2)
