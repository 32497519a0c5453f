"""Forward of sparse_attention, Q-tile: walks the blocks that neighbouring queries share, and merges the parts of the rest.  sm_90a.

A tile is 128 rows: X = 128 / G neighbouring queries with the G heads of one KV head. `split` calls a block *common* to a tile when most of
its queries chose it, or when it is the own block of one of them; the tile reads such a block once and runs the online softmax of flash
attention, one bit a query switching rows off. What is left of a selection is *stray*: KV-outer computes it, and this kernel merges those
parts into its running state as its last step, so there is no separate combine.

    query    0  1  2  3  4  5  6  7
    block 3  x  x  x  .  x  x  x  x     common: walked with bits 1 1 1 0 1 1 1 1
    block 9  x  .  .  .  .  x  .  .     stray: two entries of KV-outer

    producer (1 warpgroup)    rows of Q, then K and V of the common blocks, then the parts, two a ring slot
    consumers (2 warpgroups)  64 rows each

Blocks of several short documents (windows of the block table) are always stray: there KV-outer masks both ends.
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
from pallas_kernels.mosaic import MASKED, TILED, all_phases_seen, filled, int32, launch, product, register_product
from pallas_kernels.sparse_attention import tuning


class Split(NamedTuple):
    """A selection of L lists in n tiles of X queries, parted into common blocks and stray entries."""

    block_LnU: jax.Array  # kernel blocks b * J + j; the first `count` places count
    start_LnU: jax.Array  # their first key rows
    bits_LnU: jax.Array  # bit x: query x of the tile chose the block
    count_Ln: jax.Array
    stray_LTR: jax.Array  # kernel block numbers, packed to the front, -1 after
    strays_Ln: jax.Array  # most stray entries of a query of the tile


def split(number_LTR: jax.Array, table: BlockTable, *, neighbours: int, threshold: int, block_size: int) -> Split:
    """Common are the full blocks that at least `threshold` of `neighbours` queries chose, and those that are one's own block.

    All comparisons of a tile's entries with each other: X * R is small, and nothing is sorted or scattered.
    """
    (L, T, R), (B, J) = number_LTR.shape, table.start_BJ.shape
    n, U = T // neighbours, neighbours * R
    number_LnU = number_LTR.reshape(L, n, U)
    query_U = jnp.arange(U, dtype=jnp.int32) // R
    b_L = jnp.arange(L, dtype=jnp.int32) // (L // B)
    window_BT = jnp.take_along_axis(table.rows_BJ, table.base_BT + jnp.maximum(table.local_BT, 0), axis=1) < block_size
    own_BnX = jnp.where(table.local_BT >= 0, table.base_BT + table.local_BT, -2).reshape(B, n, neighbours)
    own_LnX, window_LnX = own_BnX[b_L], window_BT.reshape(B, n, neighbours)[b_L]

    equal = (number_LnU[..., :, None] == number_LnU[..., None, :]) & (number_LnU >= 0)[..., None]
    bits_LnU = jnp.where(equal, 1 << query_U, 0).sum(axis=-1, dtype=jnp.int32)
    own_of = number_LnU[..., None] == own_LnX[..., None, :]
    common = (lax.population_count(bits_LnU) >= threshold) | own_of.any(axis=-1)
    common &= (number_LnU >= 0) & ~(own_of & window_LnX[..., None, :]).any(axis=-1)
    head = common & (bits_LnU & ((1 << query_U) - 1) == 0)

    places = min(U, -(-(U // threshold + neighbours) // 32) * 32)
    before_UU = jnp.arange(U)[:, None] < jnp.arange(U)
    rank_LnU = jnp.einsum("lnu,uv->lnv", head.astype(jnp.bfloat16), before_UU.astype(jnp.bfloat16), preferred_element_type=jnp.float32)
    at_place = head[..., None, :] & (rank_LnU[..., None, :] == jnp.arange(places, dtype=jnp.float32)[:, None])
    listed_LnV = jnp.where(at_place, number_LnU[..., None, :], 0).sum(axis=-1)
    listed_bits_LnV = jnp.where(at_place, bits_LnU[..., None, :], 0).sum(axis=-1)
    start_LnV = jnp.take_along_axis(table.start_BJ[b_L], listed_LnV.reshape(L, -1), axis=1).reshape(listed_LnV.shape)

    stray_LTR = ((number_LnU >= 0) & ~common).reshape(L, T, R)
    slot_R = jnp.arange(R, dtype=jnp.int32)
    earlier_LTR = (stray_LTR[..., None, :] & (slot_R < slot_R[:, None])).sum(axis=-1, dtype=jnp.int32)
    moved = stray_LTR[..., None, :] & (earlier_LTR[..., None, :] == slot_R[:, None])
    packed_LTR = jnp.where(moved, number_LTR[..., None, :], -1).max(axis=-1)
    strays_Ln = stray_LTR.sum(axis=-1, dtype=jnp.int32).reshape(L, n, neighbours).max(axis=-1)
    count_Ln = head.sum(axis=-1, dtype=jnp.int32)
    return Split(listed_LnV + (b_L * J)[:, None, None], start_LnV, listed_bits_LnV, count_Ln, packed_LTR, strays_Ln)


def q_tile(
    q_BTKGH: jax.Array,
    k_BZKH: jax.Array,
    v_BZKH: jax.Array,
    parts: Split,
    part_LnRMH: jax.Array,
    lse_LnRM: jax.Array,
    origin_B2: jax.Array,
    *,
    block_size: int,
    scale: float,
    interpret: plgpu.InterpretGPUParams | None = None,
) -> tuple[jax.Array, jax.Array]:
    """Attention over the common blocks of `parts`, merged with the stray parts.

    Args:
      q_BTKGH, k_BZKH, v_BZKH, origin_B2: as for kv_outer.
      part_LnRMH: parts of the stray entries, lse_LnRM: their base-2 log-sum-exp, -inf where there is none.

    Returns:
      out [B, Tc, K, G, H] of the chunk's Tc queries and lse [L, n, M] float32, natural; 0 and -inf where a query has no block.
    """
    (B, T, K, G, H), (L, n, U), R, dtype = q_BTKGH.shape, parts.block_LnU.shape, lse_LnRM.shape[2], q_BTKGH.dtype
    rows, ring, neighbours = tuning.ROWS, tuning.Q_TILE_RING, tuning.NEIGHBOURS // G
    per_group = rows // G
    simulated = interpret is not None
    scale2 = scale * math.log2(math.e)
    by_row = plgpu.Layout.WGMMA.reduce(1)
    tile_LnX = jnp.stack([parts.count_Ln, -(-parts.strays_Ln // 2)], axis=-1)

    def sparse_attention_q_tile(q_ref, k_ref, v_ref, block_ref, start_ref, bits_ref, tile_ref, part_ref, part_lse_ref, origin_ref, *rest):
        out_ref, lse_ref, q_sm, k_sm, v_sm, list_sm, lse_sm, list_bar, q_bar, lse_bar, k_bar, v_bar, k_free, v_free, *staging = rest
        l, wg = lax.axis_index("l"), lax.axis_index("wg")
        c = n - 1 - lax.axis_index("c")  # the longest walks first
        b, h = lax.div(l, int32(K)), lax.rem(l, int32(K))
        blocks, pairs = tile_ref[l, c, 0], tile_ref[l, c, 1]

        def produce():
            plgpu.set_max_registers(tuning.Q_TILE_REGISTERS[1], action="decrease")
            for i, ref in enumerate((block_ref, start_ref, bits_ref)):
                plgpu.copy_gmem_to_smem(ref.at[l, c], list_sm.at[i], list_bar)
            query0 = origin_ref[b, 0] + c * neighbours
            for x in range(neighbours):
                t = jnp.minimum(query0 + x, T - 1)
                place = pl.ds(x % per_group * G, G)
                plgpu.copy_gmem_to_smem(q_ref.at[b, t, h], q_sm.at[x // per_group, place], q_bar)
            plgpu.copy_gmem_to_smem(part_lse_ref.at[l, c], lse_sm, lse_bar)
            plgpu.barrier_wait(list_bar)

            def fill(i, k_source, v_source, size):
                slot = lax.rem(i, int32(ring))
                for source, sm, bar, free in ((k_source, k_sm, k_bar, k_free), (v_source, v_sm, v_bar, v_free)):
                    pl.when(i >= ring)(lambda free=free: plgpu.barrier_wait(free.at[slot]))
                    plgpu.copy_gmem_to_smem(source, sm.at[slot, pl.ds(0, size)], bar.at[slot])

            @pl.loop(0, blocks)
            def _(i):
                block = list_sm[0, i] - b * (k_ref.shape[1] // block_size)
                here = pl.ds(block * block_size, block_size)
                fill(i, k_ref.at[b, here, h], v_ref.at[b, here, h], block_size)

            @pl.loop(0, pairs)
            def _(i):
                fill(blocks + i, part_ref.at[l, c, 2 * i], part_ref.at[l, c, 2 * i + 1], 2 * rows)

            for free in (k_free, v_free):
                all_phases_seen(free, jnp.maximum(blocks + pairs - ring, 0), blocks + pairs, simulated=simulated)

        def walk(i, state):
            """One common block: the online softmax step of this warpgroup's rows, or only the barriers where no row wants it."""
            slot = lax.rem(i, int32(ring))
            start, wanted = list_sm[1, i], lax.shift_right_logical(list_sm[2, i], wg * per_group) & ((1 << per_group) - 1)
            key_row = origin_ref[b, 1] + c * neighbours + wg * per_group
            k, v = (sm.at[slot, pl.ds(0, block_size)] for sm in (k_sm, v_sm))
            plgpu.barrier_wait(k_bar.at[slot])

            def mask(s):
                row = plgpu.broadcasted_iota(jnp.int32, s.shape, 0, layout=plgpu.Layout.WGMMA)
                key = plgpu.broadcasted_iota(jnp.int32, s.shape, 1, layout=plgpu.Layout.WGMMA)
                return jnp.where(key + start <= key_row + lax.div(row, int32(G)), s, MASKED)

            def step(state):
                acc, top, total = state
                s = product(q_sm.at[wg], k.T, rows, block_size)
                plgpu.barrier_arrive(k_free.at[slot])
                s = lax.cond(start + block_size > key_row, mask, lambda s: s, s)
                row = plgpu.broadcasted_iota(jnp.int32, (rows,), 0, layout=by_row)
                on = (lax.shift_right_logical(jnp.broadcast_to(wanted, (rows,)), lax.div(row, int32(G))) & 1) > 0
                new_top = jnp.where(on, jnp.maximum(top, s.max(axis=1) * scale2), top)
                # A row that is switched off gets p = 0.
                p = jnp.exp2(s * scale2 - lax.broadcast_in_dim(jnp.where(on, new_top, -MASKED), s.shape, [0]))
                shrink = jnp.exp2(top - new_top)
                total = total * shrink + p.sum(axis=1)
                acc = acc * lax.broadcast_in_dim(shrink, acc.shape, [0])
                plgpu.barrier_wait(v_bar.at[slot])
                if simulated:
                    acc = acc + register_product(p.astype(dtype), v, staging[0].at[wg])
                else:
                    acc = pl.run_state(lambda ref: plgpu.wgmma(ref, p.astype(dtype), v))(plgpu.ACC.init(acc))
                plgpu.barrier_arrive(v_free.at[slot])
                return acc, new_top, total

            def skip(state):
                plgpu.barrier_arrive(k_free.at[slot])
                plgpu.barrier_wait(v_bar.at[slot])
                plgpu.barrier_arrive(v_free.at[slot])
                return state

            return lax.cond(wanted > 0, step, skip, state)

        def merge(state):
            """Adds the stray parts: weights relative to the final maximum, two parts a ring slot."""
            acc, top, total = state
            mine = pl.ds(wg * rows, rows)
            plgpu.barrier_wait(lse_bar)
            new_top = top
            for r in range(R):
                new_top = jnp.maximum(new_top, plgpu.load(lse_sm.at[r, mine], layout=by_row))
            shrink = jnp.exp2(top - new_top)

            def add(i, state):
                acc, total = state
                slot = lax.rem(blocks + i, int32(ring))
                for half, (sm, bar, free) in enumerate(((k_sm, k_bar, k_free), (v_sm, v_bar, v_free))):
                    plgpu.barrier_wait(bar.at[slot])
                    x = plgpu.load(sm.at[slot, mine], layout=plgpu.Layout.WGMMA).astype(jnp.float32)
                    weight = jnp.exp2(plgpu.load(lse_sm.at[2 * i + half, mine], layout=by_row) - new_top)
                    weights = lax.broadcast_in_dim(weight, acc.shape, [0])
                    acc = acc + jnp.where(weights == 0, 0.0, x * weights)  # places without an entry hold no number
                    total = total + weight
                    plgpu.barrier_arrive(free.at[slot])
                return acc, total

            state = acc * lax.broadcast_in_dim(shrink, acc.shape, [0]), total * shrink
            return *lax.fori_loop(0, pairs, add, state), new_top

        def consume():
            plgpu.set_max_registers(tuning.Q_TILE_REGISTERS[0], action="increase")
            plgpu.barrier_wait(list_bar)
            plgpu.barrier_wait(q_bar)
            zeros = filled((rows, H), 0.0, jnp.float32, plgpu.Layout.WGMMA)
            state = zeros, filled((rows,), MASKED, jnp.float32, by_row), filled((rows,), 0.0, jnp.float32, by_row)
            acc, total, top = merge(lax.fori_loop(0, blocks, walk, state))
            some = total != 0  # NaN is some: it has to reach the outputs
            out = acc * lax.broadcast_in_dim(jnp.where(some, 1.0 / total, 0.0), acc.shape, [0])
            q_sm[wg] = out.astype(dtype)
            lse_ref[l, c, pl.ds(wg * rows, rows)] = jnp.where(some, (top + jnp.log2(total)) * math.log(2), -jnp.inf)
            plgpu.commit_smem()
            for x in range(per_group):
                plgpu.copy_smem_to_gmem(q_sm.at[wg, pl.ds(x * G, G)], out_ref.at[b, c * neighbours + wg * per_group + x, h])
            plgpu.wait_smem_to_gmem(0)

        pl.when(wg < 2)(consume)
        pl.when(wg == 2)(produce)

    ring_rows = max(2 * rows, block_size)
    scratch = [
        plgpu.SMEM((2, rows, H), dtype, transforms=TILED),
        plgpu.SMEM((ring, ring_rows, H), dtype, transforms=TILED),
        plgpu.SMEM((ring, ring_rows, H), dtype, transforms=TILED),
        plgpu.SMEM((3, U), jnp.int32),
        plgpu.SMEM((R, 2 * rows), jnp.float32),
        plgpu.Barrier(num_arrivals=3),  # producer -> all: the list of blocks
        plgpu.Barrier(num_arrivals=neighbours),  # producer -> consumers: the queries
        plgpu.Barrier(),  # producer -> consumers: log-sum-exp of the parts
        plgpu.Barrier(num_barriers=ring),  # producer -> consumers: K, or a part with an even number
        plgpu.Barrier(num_barriers=ring),  # producer -> consumers: V, or a part with an odd number
        plgpu.Barrier(num_barriers=ring, num_arrivals=2),  # consumers -> producer: the slot of K is read
        plgpu.Barrier(num_barriers=ring, num_arrivals=2),  # consumers -> producer: the slot of V is read
    ]
    if simulated:
        scratch.append(plgpu.SMEM((2, rows, block_size), dtype, transforms=TILED))
    kernel = plgpu.kernel(
        sparse_attention_q_tile,
        out_type=(
            jax.ShapeDtypeStruct((B, n * neighbours, K, G, H), dtype),
            jax.ShapeDtypeStruct((L, n, 2 * rows), jnp.float32),
        ),
        grid=(L, n),
        grid_names=("l", "c"),
        num_threads=3,
        thread_name="wg",
        scratch_types=scratch,
        compiler_params=plgpu.CompilerParams(approx_math=True),
        **launch(interpret),
    )
    lists = parts.block_LnU, parts.start_LnU, parts.bits_LnU
    return kernel(q_BTKGH, k_BZKH, v_BZKH, *lists, tile_LnX, part_LnRMH, lse_LnRM, origin_B2)
