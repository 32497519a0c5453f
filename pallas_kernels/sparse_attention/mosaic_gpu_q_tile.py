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

One thread block a multiprocessor takes tile after tile, so that the loads of the next tile hide behind the merge of this one.

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

    walk_LnYU: jax.Array  # int32; rows BLOCKS, STARTS and BITS say of each place which block, row SIZES how many of them and of the parts
    stray_LTR: jax.Array  # kernel block numbers, packed to the front, -1 after


BLOCKS, STARTS, BITS, SIZES = range(4)  # kernel block b * J + j; its first key row; bit x: query x chose it; (blocks, parts)
_OWN, _WINDOW = 16, 21  # bits of the sums in `split` that count own blocks and windows, above one bit a query


def split(number_LTR: jax.Array, table: BlockTable, *, neighbours: int, threshold: int, block_size: int, interpret=None) -> Split:
    """Common are the full blocks that at least `threshold` of `neighbours` queries chose, and those that are one's own block.

    Compares a tile's entries with each other: X * R is small, and nothing is sorted or scattered.
    """
    (L, T, R), (B, J) = number_LTR.shape, table.start_BJ.shape
    n, U = T // neighbours, neighbours * R
    b_L = jnp.arange(L, dtype=jnp.int32) // (L // B)
    own_BT = table.base_BT + jnp.maximum(table.local_BT, 0)
    window_BT = jnp.take_along_axis(table.rows_BJ, own_BT, axis=1) < block_size
    own_LTR = number_LTR == own_BT[b_L][..., None]
    bit_T1 = 1 << (jnp.arange(T, dtype=jnp.int32) % neighbours)[:, None]
    says_LTR = bit_T1 + jnp.where(own_LTR, (1 << _OWN) + jnp.where(window_BT[b_L][..., None], 1 << _WINDOW, 0), 0)
    number_LnU, says_LnU = number_LTR.reshape(L, n, U), says_LTR.reshape(L, n, U)

    sums_LnU = sum_of_equals(number_LnU, says_LnU, interpret=interpret)
    bits_LnU = sums_LnU & ((1 << _OWN) - 1)
    chosen_enough = (lax.population_count(bits_LnU) >= threshold) | ((sums_LnU >> _OWN) > 0)
    common = (number_LnU >= 0) & chosen_enough & ((sums_LnU >> _WINDOW) == 0)
    query_U = jnp.arange(U, dtype=jnp.int32) // R
    head = common & (bits_LnU & ((1 << query_U) - 1) == 0)

    places = min(U, -(-(U // threshold + neighbours) // 32) * 32)
    before_UU = (jnp.arange(U)[:, None] < jnp.arange(U)).astype(jnp.bfloat16)
    rank_LnU = jnp.einsum("lnu,uv->lnv", head.astype(jnp.bfloat16), before_UU, preferred_element_type=jnp.float32)
    rank_LnU = jnp.where(head, rank_LnU.astype(jnp.int32), -1)
    both_LnU = number_LnU.astype(jnp.uint32) << _OWN | bits_LnU.astype(jnp.uint32)
    at_place = rank_LnU[..., None, :] == jnp.arange(places, dtype=jnp.int32)[:, None]
    listed_LnV = jnp.where(at_place, both_LnU[..., None, :], 0).sum(axis=-1, dtype=jnp.uint32)
    listed_block_LnV = (listed_LnV >> _OWN).astype(jnp.int32)
    start_LnV = jnp.take_along_axis(table.start_BJ[b_L], listed_block_LnV.reshape(L, -1), axis=1).reshape(listed_LnV.shape)

    stray_LTR = ((number_LnU >= 0) & ~common).reshape(L, T, R)
    slot_R = jnp.arange(R, dtype=jnp.int32)
    earlier_LTR = (stray_LTR[..., None, :] & (slot_R < slot_R[:, None])).sum(axis=-1, dtype=jnp.int32)
    moved = stray_LTR[..., None, :] & (earlier_LTR[..., None, :] == slot_R[:, None])
    packed_LTR = jnp.where(moved, number_LTR[..., None, :], -1).max(axis=-1)

    parts_Ln = stray_LTR.sum(axis=-1, dtype=jnp.int32).reshape(L, n, neighbours).max(axis=-1)
    sizes_LnV = jnp.where(jnp.arange(places) == 0, head.sum(axis=-1, dtype=jnp.int32)[..., None], parts_Ln[..., None])
    bits_LnV = (listed_LnV & ((1 << _OWN) - 1)).astype(jnp.int32)
    return Split(jnp.stack([listed_block_LnV + (b_L * J)[:, None, None], start_LnV, bits_LnV, sizes_LnV], axis=2), packed_LTR)


def sum_of_equals(number_LnU: jax.Array, says_LnU: jax.Array, *, interpret: plgpu.InterpretGPUParams | None = None) -> jax.Array:
    """For each entry the sum of what the entries of its tile with the same number say.

    U^2 comparisons a tile: one entry a thread, the others come from shared memory one by one. XLA takes five times as long.
    """
    L, n, U = number_LnU.shape
    threads, warpgroups, unrolled = -(-U // 128) * 128, 4, 8
    spare = ((0, 0), (0, threads - U))
    number_XU, says_XU = (jnp.pad(x.reshape(L * n, U), spare, constant_values=-1) for x in (number_LnU, says_LnU))
    thread_blocks = min(tuning.SMS * 4, -(-L * n // warpgroups))
    layout = plgpu.Layout.WG_STRIDED((threads,), vec_size=threads // 128)

    def sparse_attention_sum_of_equals(number_ref, says_ref, sum_ref, number_sm, says_sm):
        x, wg = lax.axis_index("x"), lax.axis_index("wg")
        first, stride = x * warpgroups + wg, thread_blocks * warpgroups

        @pl.loop(0, lax.div(L * n - first + (stride - 1), int32(stride)))
        def _(i):
            tile = first + i * stride
            mine = plgpu.load(number_ref.at[tile], layout=layout, optimized=False)
            number_sm[wg] = mine
            says_sm[wg] = plgpu.load(says_ref.at[tile], layout=layout, optimized=False)
            plgpu.commit_smem()

            def add(j, total):
                for u in range(unrolled):
                    other = number_sm[wg, j * unrolled + u]
                    total = total + jnp.where(mine == other, says_sm[wg, j * unrolled + u], 0)
                return total

            sum_ref[tile] = lax.fori_loop(0, -(-U // unrolled), add, filled((threads,), 0, jnp.int32, layout))
            plgpu.commit_smem()  # the reads are over before the next tile is written

    kernel = plgpu.kernel(
        sparse_attention_sum_of_equals,
        out_type=jax.ShapeDtypeStruct((L * n, threads), jnp.int32),
        grid=(thread_blocks,),
        grid_names=("x",),
        num_threads=warpgroups,
        thread_name="wg",
        scratch_types=[plgpu.SMEM((warpgroups, threads), jnp.int32)] * 2,
        **launch(interpret),
    )
    return kernel(number_XU, says_XU)[:, :U].reshape(L, n, U)


def q_tile(
    q_BTKGH: jax.Array,
    k_BZKH: jax.Array,
    v_BZKH: jax.Array,
    walk_LnYU: jax.Array,
    part_LnRMH: jax.Array,
    lse_LnRM: jax.Array,
    origin_B2: jax.Array,
    *,
    block_size: int,
    scale: float,
    interpret: plgpu.InterpretGPUParams | None = None,
) -> tuple[jax.Array, jax.Array]:
    """Attention over the common blocks, merged with the stray parts.

    Args:
      q_BTKGH, k_BZKH, v_BZKH, origin_B2: as for kv_outer. walk_LnYU: see Split.
      part_LnRMH: parts of the stray entries, lse_LnRM: their base-2 log-sum-exp, -inf where there is none.

    Returns:
      out [B, Tc, K, G, H] of the chunk's Tc queries and lse [L, n, M] float32, natural; 0 and -inf where a query has no block.
    """
    (B, T, K, G, H), (L, n, _, U), R, dtype = q_BTKGH.shape, walk_LnYU.shape, lse_LnRM.shape[2], q_BTKGH.dtype
    rows, ring, neighbours = tuning.ROWS, tuning.Q_TILE_RING, tuning.NEIGHBOURS // G
    per_group, thread_blocks = rows // G, min(tuning.SMS, L * n)
    simulated = interpret is not None
    scale2 = scale * math.log2(math.e)
    by_row = plgpu.Layout.WGMMA.reduce(1)

    def sparse_attention_q_tile(q_ref, k_ref, v_ref, walk_ref, part_ref, part_lse_ref, origin_ref, out_ref, lse_ref, *scratch):
        q_sm, k_sm, v_sm, walk_sm, lse_sm, walk_bar, q_bar, lse_bar, tile_free, k_bar, v_bar, k_free, v_free, *staging = scratch
        x, wg = lax.axis_index("x"), lax.axis_index("wg")
        mine = lax.div(L * n - x + (thread_blocks - 1), int32(thread_blocks))

        def tile_of(i):
            """The thread block's i-th tile, as (list, tile, batch row, KV head, buffer); the longest walks come first."""
            place = i * thread_blocks + x
            l = lax.rem(place, int32(L))
            return l, n - 1 - lax.div(place, int32(L)), lax.div(l, int32(K)), lax.rem(l, int32(K)), lax.rem(i, int32(2))

        def produce():
            plgpu.set_max_registers(tuning.Q_TILE_REGISTERS[1], action="decrease")

            def load(step, k_source, v_source, size):
                slot = lax.rem(step, int32(ring))
                for source, sm, bar, free in ((k_source, k_sm, k_bar, k_free), (v_source, v_sm, v_bar, v_free)):
                    pl.when(step >= ring)(lambda free=free: plgpu.barrier_wait(free.at[slot]))
                    plgpu.copy_gmem_to_smem(source, sm.at[slot, pl.ds(0, size)], bar.at[slot])

            def tile(i, done):
                l, c, b, h, buffer = tile_of(i)
                pl.when(i >= 2)(lambda: plgpu.barrier_wait(tile_free.at[buffer]))
                plgpu.commit_smem()  # orders this warpgroup's own reads of the walk before the TMA write
                plgpu.copy_gmem_to_smem(walk_ref.at[l, c], walk_sm.at[buffer], walk_bar.at[buffer])
                query0 = origin_ref[b, 0] + c * neighbours
                for j in range(neighbours):
                    target = q_sm.at[buffer, j // per_group, pl.ds(j % per_group * G, G)]
                    plgpu.copy_gmem_to_smem(q_ref.at[b, jnp.minimum(query0 + j, T - 1), h], target, q_bar.at[buffer])
                plgpu.copy_gmem_to_smem(part_lse_ref.at[l, c], lse_sm.at[buffer], lse_bar.at[buffer])
                plgpu.barrier_wait(walk_bar.at[buffer])
                blocks, parts = walk_sm[buffer, SIZES, 0], walk_sm[buffer, SIZES, 1]
                pairs = lax.div(parts + 1, int32(2))

                @pl.loop(0, blocks)
                def _(j):
                    block = walk_sm[buffer, BLOCKS, j] - b * (k_ref.shape[1] // block_size)
                    here = pl.ds(block * block_size, block_size)
                    load(done + j, k_ref.at[b, here, h], v_ref.at[b, here, h], block_size)

                @pl.loop(0, pairs)
                def _(j):
                    # An odd part has no companion: the first one is in the cache and does no harm.
                    second = jnp.where(2 * j + 1 < parts, 2 * j + 1, 0)
                    load(done + blocks + j, part_ref.at[l, c, 2 * j], part_ref.at[l, c, second], 2 * rows)

                return done + blocks + pairs

            done = lax.fori_loop(0, mine, tile, int32(0))
            if simulated:  # every phase has to be observed
                pl.when(mine > 1)(lambda: plgpu.barrier_wait(tile_free.at[lax.rem(mine, int32(2))]))
                for free in (k_free, v_free):
                    all_phases_seen(free, jnp.maximum(done - ring, 0), done, simulated=simulated)

        def walk(tile, done, j, state):
            """One common block: the online softmax step of this warpgroup's rows, or only the barriers where no row wants it."""
            (_, c, b, _, buffer), slot = tile, lax.rem(done + j, int32(ring))
            start = walk_sm[buffer, STARTS, j]
            wanted = lax.shift_right_logical(walk_sm[buffer, BITS, j], wg * per_group) & ((1 << per_group) - 1)
            key_row = origin_ref[b, 1] + c * neighbours + wg * per_group
            k, v = (sm.at[slot, pl.ds(0, block_size)] for sm in (k_sm, v_sm))
            plgpu.barrier_wait(k_bar.at[slot])

            def mask(s):
                row = plgpu.broadcasted_iota(jnp.int32, s.shape, 0, layout=plgpu.Layout.WGMMA)
                key = plgpu.broadcasted_iota(jnp.int32, s.shape, 1, layout=plgpu.Layout.WGMMA)
                return jnp.where(key + start <= key_row + lax.div(row, int32(G)), s, MASKED)

            def step(state):
                acc, top, total = state
                s = product(q_sm.at[buffer, wg], k.T, rows, block_size)
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

        def merge(buffer, done, parts, state):
            """Adds the stray parts: weights relative to the final maximum, two parts a ring slot."""
            acc, top, total = state
            my_rows = pl.ds(wg * rows, rows)
            plgpu.barrier_wait(lse_bar.at[buffer])
            new_top = top
            for r in range(R):
                new_top = jnp.maximum(new_top, plgpu.load(lse_sm.at[buffer, r, my_rows], layout=by_row))
            shrink = jnp.exp2(top - new_top)

            def add(j, state):
                acc, total = state
                slot = lax.rem(done + j, int32(ring))
                for half, (sm, bar) in enumerate(((k_sm, k_bar), (v_sm, v_bar))):
                    plgpu.barrier_wait(bar.at[slot])
                    part = plgpu.load(sm.at[slot, my_rows], layout=plgpu.Layout.WGMMA).astype(jnp.float32)
                    r = 2 * j + half
                    lse = plgpu.load(lse_sm.at[buffer, jnp.minimum(r, R - 1), my_rows], layout=by_row)
                    weight = jnp.exp2(lse - new_top + jnp.where(r < parts, 0.0, MASKED))
                    weights = lax.broadcast_in_dim(weight, acc.shape, [0])
                    acc = acc + jnp.where(weights == 0, 0.0, part * weights)  # places without an entry hold no numbers
                    total = total + weight
                plgpu.commit_smem()  # orders these reads before the TMA writes that the barriers let go
                plgpu.barrier_arrive(k_free.at[slot])
                plgpu.barrier_arrive(v_free.at[slot])
                return acc, total

            state = acc * lax.broadcast_in_dim(shrink, acc.shape, [0]), total * shrink
            return *lax.fori_loop(0, lax.div(parts + 1, int32(2)), add, state), new_top

        def consume():
            plgpu.set_max_registers(tuning.Q_TILE_REGISTERS[0], action="increase")

            def tile(i, done):
                where = l, c, b, h, buffer = tile_of(i)
                plgpu.barrier_wait(walk_bar.at[buffer])
                plgpu.barrier_wait(q_bar.at[buffer])
                blocks, parts = walk_sm[buffer, SIZES, 0], walk_sm[buffer, SIZES, 1]
                zeros = filled((rows, H), 0.0, jnp.float32, plgpu.Layout.WGMMA)
                state = zeros, filled((rows,), MASKED, jnp.float32, by_row), filled((rows,), 0.0, jnp.float32, by_row)
                state = lax.fori_loop(0, blocks, lambda j, state: walk(where, done, j, state), state)
                # By now the output of the tile before has left its buffer.
                plgpu.wait_smem_to_gmem(0, wait_read_only=True)
                pl.when(i > 0)(lambda: plgpu.barrier_arrive(tile_free.at[1 - buffer]))
                acc, total, top = merge(buffer, done + blocks, parts, state)
                some = total != 0  # NaN is some: it has to reach the outputs
                out = acc * lax.broadcast_in_dim(jnp.where(some, 1.0 / total, 0.0), acc.shape, [0])
                q_sm[buffer, wg] = out.astype(dtype)
                lse_ref[l, c, pl.ds(wg * rows, rows)] = jnp.where(some, (top + jnp.log2(total)) * math.log(2), -jnp.inf)
                plgpu.commit_smem()
                for j in range(per_group):
                    target = out_ref.at[b, c * neighbours + wg * per_group + j, h]
                    plgpu.copy_smem_to_gmem(q_sm.at[buffer, wg, pl.ds(j * G, G)], target)
                return done + blocks + lax.div(parts + 1, int32(2))

            lax.fori_loop(0, mine, tile, int32(0))
            plgpu.wait_smem_to_gmem(0)

        pl.when(wg < 2)(consume)
        pl.when(wg == 2)(produce)

    ring_rows = max(2 * rows, block_size)
    scratch = [
        plgpu.SMEM((2, 2, rows, H), dtype, transforms=TILED),
        plgpu.SMEM((ring, ring_rows, H), dtype, transforms=TILED),
        plgpu.SMEM((ring, ring_rows, H), dtype, transforms=TILED),
        plgpu.SMEM((2, 4, U), jnp.int32),
        plgpu.SMEM((2, R, 2 * rows), jnp.float32),
        plgpu.Barrier(num_barriers=2),  # producer -> all: what the tile walks
        plgpu.Barrier(num_barriers=2, num_arrivals=neighbours),  # producer -> consumers: the queries
        plgpu.Barrier(num_barriers=2),  # producer -> consumers: log-sum-exp of the parts
        plgpu.Barrier(num_barriers=2, num_arrivals=2),  # consumers -> producer: the three above can be filled again
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
        grid=(thread_blocks,),
        grid_names=("x",),
        num_threads=3,
        thread_name="wg",
        scratch_types=scratch,
        compiler_params=plgpu.CompilerParams(approx_math=True, reduction_scratch_bytes=0),
        **launch(interpret),
    )
    return kernel(q_BTKGH, k_BZKH, v_BZKH, walk_LnYU, part_LnRMH, lse_LnRM, origin_B2)
