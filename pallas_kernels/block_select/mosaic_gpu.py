"""block_select on Hopper (sm_90a): index scores, block maximum and streaming top-R in one kernel.  Mosaic GPU.

Source: arXiv 2606.13392, section 2 ("exp-free" selection): no exponential is needed to rank, only the maximum of each key block.

One thread block takes a tile of 64 * n rows (queries x index heads that share the keys) and walks the key blocks that lie before the tile's
local blocks.  Blocks before a row's local block are entirely visible, so no token is ever masked; whether a block comes before the local
one is decided a row.  A tile holds at most C queries: every document but the one of its first row starts inside it and has no earlier
block, so one document a tile is scored.

    scorers (2 warpgroups)    two 64-row tiles each: wgmma against the ring of key blocks, NaN-ignoring row maximum -> shared memory
    ranker (one warpgroup)    keeps the sorted list of the best (score, block) pairs of its rows in registers, and is the TMA producer:
                              that a block's maxima have arrived means that its ring slot is free

Memory beyond the inputs: ids twice, tables of T integers and, for packed documents, one copy of ik (documents start anywhere, and a TMA
tile may not).  Nothing grows with T * S.
"""

from __future__ import annotations

import functools
import math

import jax
import jax.numpy as jnp
from jax import lax
from jax.experimental import pallas as pl
from jax.experimental.pallas import mosaic_gpu as plgpu

from pallas_kernels.block_select import tuning
from pallas_kernels.block_table import block_table
from pallas_kernels.blocks import Layout, at_queries
from pallas_kernels.index_kl.mosaic_gpu_student import kept_log_sum_exp
from pallas_kernels.mosaic import TILED, filled, int32, launch, refuse_device, row_max

_LOWEST = float(jnp.finfo(jnp.float32).min)


def refuse(device_kind: str, iq_BTKI: jax.Array, ik_BSI: jax.Array, layout: Layout, **options) -> str | None:
    """Why the kernel does not serve a call, or None."""
    del layout
    ranked = options["num_blocks"] - options["local_blocks"] - options["init_blocks"]
    if iq_BTKI.dtype != ik_BSI.dtype or iq_BTKI.dtype not in (jnp.bfloat16, jnp.float16):
        return f"serves bfloat16 and float16, not iq in {iq_BTKI.dtype} with ik in {ik_BSI.dtype}"
    if iq_BTKI.shape[-1] not in (64, 128):
        return f"serves an index width of 64 or 128, not {iq_BTKI.shape[-1]}"
    if options["block_size"] not in (64, 128):
        return f"serves block_size 64 or 128, not {options['block_size']}"
    if ranked > 31:
        return f"ranks at most 31 blocks besides those always kept, not {ranked}"
    if options["local_blocks"] < 1:
        return "always keeps the own block, so local_blocks must be at least 1"
    if options["scale"] <= 0:
        return f"ranks by unscaled scores and so needs scale > 0, not {options['scale']}"
    return refuse_device(device_kind)


def block_select(
    iq_BTKI: jax.Array, ik_BSI: jax.Array, layout: Layout, *, block_size: int, scale: float, **options: int
) -> tuple[jax.Array, jax.Array]:
    """ids [B, K, T, R] and lse [B, K, T] as api.py describes them; the kernels of an lse that nobody reads are compiled away."""
    ids_BKTR = select_ids(iq_BTKI, ik_BSI, layout, block_size=block_size, **options)
    return ids_BKTR, kept_log_sum_exp(iq_BTKI, ik_BSI, ids_BKTR, layout, block_size=block_size, scale=scale)


def tile_shape(num_heads: int, block_size: int) -> tuple[int, int]:
    """(queries, heads) of a tile: rows of up to four warpgroups, and no more queries than a block has keys."""
    heads = math.gcd(num_heads, 64 * tuning.TILES)
    return min(64 * tuning.TILES // heads, block_size), heads


@functools.partial(jax.jit, static_argnames=("block_size", "num_blocks", "local_blocks", "init_blocks", "interpret"))
def select_ids(
    iq_BTKI: jax.Array,
    ik_BSI: jax.Array,
    layout: Layout,
    *,
    block_size: int,
    num_blocks: int,
    local_blocks: int,
    init_blocks: int,
    interpret: plgpu.InterpretGPUParams | None = None,
) -> jax.Array:
    """ids [B, K, T, R] as api.py describes them: the ranked blocks, best first, then the first blocks, then the local ones."""
    table = block_table(layout, block_size)
    ranked = num_blocks - local_blocks - init_blocks
    end_BT = jnp.maximum(table.local_BT - local_blocks + 1, 0)
    if ranked == 0 or ik_BSI.shape[1] < block_size * (init_blocks + 1):
        best_BKTR = jnp.zeros((*iq_BTKI.swapaxes(1, 2).shape[:3], 0), jnp.int32)
    else:
        document_BT = at_queries(layout.segments_BS, layout.reach.index_BT)
        slots_BYI = table.to_slots(ik_BSI[:, :, None], block_size)[:, :, 0]
        best_BKTR = _rank_all(iq_BTKI, slots_BYI, (document_BT, table.base_BT, end_BT), (block_size, ranked, init_blocks), interpret)

    # Slots: first the ranked blocks that exist, then the first blocks that are not local, then the local ones up to the own block.
    slot_R = jnp.arange(num_blocks, dtype=jnp.int32)
    own_BT1, end_BT1 = table.local_BT[..., None], end_BT[..., None]
    first_BTR = slot_R - jnp.clip(end_BT1 - init_blocks, 0, best_BKTR.shape[-1])
    local_BTR = first_BTR - jnp.minimum(end_BT1, init_blocks) + end_BT1
    always_BTR = jnp.where(local_BTR < end_BT1, first_BTR, jnp.where(local_BTR <= own_BT1, local_BTR, -1))
    best_BKTR = jnp.pad(best_BKTR, ((0, 0),) * 3 + ((0, num_blocks - best_BKTR.shape[-1]),), constant_values=-1)
    return jnp.where((first_BTR < 0)[:, None], best_BKTR, always_BTR[:, None])


def _rank_all(iq_BTKI, slots_BYI, per_query, shape, interpret) -> jax.Array:
    """Lays the operands out for `rank_blocks` and takes its lists apart: [B, K, T, ranked].

    `per_query`: [B, T] each: its document, the slot of that document's block 0, one past the last block that competes.
    """
    (document_BT, slot0_BT, end_BT) = per_query
    (batch, num_queries, num_heads, width), (block_size, ranked, first) = iq_BTKI.shape, shape
    queries, heads = tile_shape(num_heads, block_size)
    groups, tiles = num_heads // heads, -(-num_queries // queries)
    padding = ((0, 0), (0, tiles * queries - num_queries))

    def by_tile(x_BT):
        return jnp.pad(x_BT, padding).reshape(batch, tiles, queries)

    # The document of a tile is that of its first row; rows of other documents have no block before their local ones.
    document_BLQ = by_tile(document_BT)
    end_BLQ = jnp.where(document_BLQ == document_BLQ[..., :1], by_tile(end_BT), 0)
    slot0_BL = by_tile(slot0_BT)[..., 0] + (slots_BYI.shape[1] // block_size) * jnp.arange(batch)[:, None]
    tile_BAL = jnp.arange(batch * groups * tiles, dtype=jnp.int32).reshape(batch, groups, tiles)
    tile_W3 = jnp.stack([tile_BAL, *(jnp.broadcast_to(x[:, None], tile_BAL.shape) for x in (slot0_BL, end_BLQ.max(2)))], -1).reshape(-1, 3)
    order_W = jnp.argsort(-tile_W3[:, 2], stable=True)

    iq_BTKI = jnp.pad(iq_BTKI, (*padding, (0, 0), (0, 0))).reshape(batch, tiles * queries, groups, heads, width)
    row_end_BALQK = jnp.broadcast_to(end_BLQ[:, None, ..., None], (batch, groups, tiles, queries, heads))
    best_WRX = rank_blocks(
        iq_BTKI.swapaxes(1, 2).reshape(-1, width),
        slots_BYI.reshape(-1, width),
        tile_W3[order_W],
        row_end_BALQK.reshape(-1),
        shape=(queries * heads, block_size, ranked),
        first=first,
        interpret=interpret,
    )
    best_BALRQK = best_WRX.reshape(batch, groups, tiles, ranked, queries, heads)
    return best_BALRQK.transpose(0, 1, 5, 2, 4, 3).reshape(batch, num_heads, tiles * queries, ranked)[:, :, :num_queries]


def _rank(work, q_ref, k_ref, row_end_ref, out_ref, scratch, *, shape, first):
    """The ranking warpgroup: feeds the key ring, inserts each block's maxima into the sorted lists of its rows, writes the lists."""
    (tile, slot0, end), (q_sm, k_sm, max_sm, q_bar, k_bar, max_bar) = work, scratch
    (rows, block_size, kept), stages = shape, k_sm.shape[0]
    count = end - first
    layout = plgpu.Layout.WG_STRIDED((rows,), vec_size=rows // 128) if rows >= 128 else plgpu.Layout.WGMMA.reduce(1)
    fill = functools.partial(filled, (rows,), layout=layout)

    def load(i, slot):
        plgpu.copy_gmem_to_smem(k_ref.at[pl.ds((slot0 + first + i) * block_size, block_size)], k_sm.at[slot], k_bar.at[slot])

    @pl.when(count > 0)
    def _():
        plgpu.copy_gmem_to_smem(q_ref.at[pl.ds(tile * rows, rows)], q_sm, q_bar)
        for i in range(stages):
            pl.when(i < count)(functools.partial(load, i, i))

    row_end = plgpu.load(row_end_ref.at[pl.ds(tile * rows, rows)], layout=layout, optimized=False)

    def insert(i, lists):
        scores, ids = lists
        slot = lax.rem(i, int32(stages))
        plgpu.barrier_wait(max_bar.at[slot])
        x = plgpu.load(max_sm.at[slot], layout=layout)

        # The maxima of this slot are in registers and its keys have been read: it can be filled again.
        @pl.when(i + stages < count)
        def _():
            load(i + stages, slot)

        block = fill(i + first, jnp.int32)
        # A block of NaN or -inf ranks below every other but is still visible, so it beats an empty place.
        x = jnp.where(x >= _LOWEST, x, fill(_LOWEST, jnp.float32))
        x = jnp.where(block < row_end, x, fill(-jnp.inf, jnp.float32))
        better = [x > score for score in scores]
        new_scores, new_ids = [], []
        for r in range(kept):
            shifted, shifted_id = (x, block)
            if r > 0:
                shifted = jnp.where(better[r - 1], scores[r - 1], x)
                shifted_id = jnp.where(better[r - 1], ids[r - 1], block)
            new_scores.append(jnp.where(better[r], shifted, scores[r]))
            new_ids.append(jnp.where(better[r], shifted_id, ids[r]))
        return new_scores, new_ids

    empty = [fill(-jnp.inf, jnp.float32)] * kept, [fill(-1, jnp.int32)] * kept
    _, ids = lax.fori_loop(0, count, insert, empty)
    for r in range(kept):
        out_ref[tile, r] = ids[r]


def _score(count, scratch, *, first_row, tiles, hold, simulated):
    """A scoring warpgroup: `tiles` x 64 rows against every key block of the ring; while one tile is reduced the next one multiplies."""
    q_sm, k_sm, max_sm, q_bar, k_bar, max_bar = scratch
    stages, block_size = k_sm.shape[:2]
    part = [pl.ds(first_row + 64 * i, 64) for i in range(tiles)]
    plgpu.barrier_wait(q_bar)
    # One tile of queries stays in registers: less shared-memory traffic, and so less power, which is what limits long runs.
    held = 0 if simulated or not hold else 1
    q = [plgpu.load(q_sm.at[rows], layout=plgpu.Layout.WGMMA) for rows in part[:held]] + [q_sm.at[rows] for rows in part[held:]]

    @pl.loop(0, count)
    def _(i):
        slot = lax.rem(i, int32(stages))
        plgpu.barrier_wait(k_bar.at[slot])

        def products(*accumulators):
            for a, acc in zip(q, accumulators, strict=True):
                plgpu.wgmma(acc, a, k_sm.at[slot].T)
            for n, (rows, acc) in enumerate(zip(part, accumulators, strict=True)):
                score_XC = plgpu.wgmma_accumulator_load(acc, wait_n=tiles - 1 - n)
                max_sm[slot, rows] = row_max(score_XC, simulated=simulated)

        pl.run_scoped(products, *[plgpu.ACC((64, block_size), jnp.float32)] * tiles)
        plgpu.barrier_arrive(max_bar.at[slot])


def rank_blocks(iq_XI, slots_YI, tiles_W3, row_end_X, *, shape, first, interpret=None) -> jax.Array:
    """The kernel: for each row the `kept` best blocks of first <= block < row_end, best first, ties to the lower block, then -1.

    Args:
      iq_XI: rows of index queries, tiles x rows of them.
      slots_YI: index keys in block slots: block j of a tile's document is slot `slot0 + j`.
      tiles_W3: (tile, slot0, end): the tile's rows, its document's first slot, and one past the last block any of its rows may keep.  The
        thread blocks start in this order: longest first balances them.
      row_end_X: one past the last block a row may keep.
      shape: (rows, block_size, kept).
      first: the first block that competes.

    Returns:
      ids [tiles, kept, rows] int32.
    """
    rows, block_size, kept = shape
    width, dtype = iq_XI.shape[-1], iq_XI.dtype
    tiles = tuning.TILES_A_WARPGROUP if rows >= 128 else 1
    scorers = rows // (64 * tiles)
    hold = kept <= tuning.HOLD_LIMIT
    shared_out = hold and scorers == 2

    def block_select_rank(q_ref, k_ref, tiles_ref, row_end_ref, out_ref, *scratch):
        w, wg = lax.axis_index("w"), lax.axis_index("wg")
        tile, slot0, end = (tiles_ref[w, i] for i in range(3))

        @pl.when((wg < scorers) & (end > first))
        def _():
            if shared_out:
                plgpu.set_max_registers(tuning.REGISTERS[0], action="increase")
            _score(end - first, scratch, first_row=wg * 64 * tiles, tiles=tiles, hold=hold, simulated=interpret is not None)

        @pl.when(wg == scorers)
        def _():
            if shared_out:
                plgpu.set_max_registers(tuning.REGISTERS[1], action="decrease")
            _rank((tile, slot0, end), q_ref, k_ref, row_end_ref, out_ref, scratch, shape=shape, first=first)

    kernel = plgpu.kernel(
        block_select_rank,
        out_type=jax.ShapeDtypeStruct((tiles_W3.shape[0], kept, rows), jnp.int32),
        grid=(tiles_W3.shape[0],),
        grid_names=("w",),
        num_threads=scorers + 1,
        thread_name="wg",
        scratch_types=[
            plgpu.SMEM((rows, width), dtype, transforms=TILED),
            plgpu.SMEM((tuning.STAGES, block_size, width), dtype, transforms=TILED),
            plgpu.SMEM((tuning.STAGES, rows), jnp.float32),
            plgpu.Barrier(),  # producer -> scorers: the queries are there
            plgpu.Barrier(num_barriers=tuning.STAGES),  # producer -> scorers: the slot's keys are there
            plgpu.Barrier(num_barriers=tuning.STAGES, num_arrivals=scorers),  # scorers -> ranker: the slot's maxima are there
        ],
        compiler_params=plgpu.CompilerParams(approx_math=True, reduction_scratch_bytes=0),
        **launch(interpret),
    )
    return kernel(iq_XI, slots_YI, tiles_W3, row_end_X)
