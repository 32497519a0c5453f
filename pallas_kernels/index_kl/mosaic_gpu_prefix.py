"""The two kernels of the index loss over the full prefix (warm-up) on Hopper (sm_90a).  Mosaic GPU, flash style: what is [T, S] exists for
a chunk of queries at a time only.

`prefix_lse` is attention without values: log-sum-exp of every row. Four heads of a KV head share each block of keys.
`prefix_difference` is what `mosaic_gpu_gradient` does on kept blocks: with P the mean over heads of exp(logit - lse) and Q the student's
softmax it leaves ds = w (Q - P) of a chunk of queries, whose products with ik and iq are plain matrix products. One thread block owns 256
keys of one KV head, walks the chunk's tiles of 64 queries, and for each adds up the heads' probabilities in registers.

    producer (1 warpgroup)      loads K and ik once, then for each tile index queries and statistics, and the queries of every head
    consumers (2 warpgroups)    own 128 keys each

Tiles of queries whose documents do not reach the keys are skipped. `Rows` says what each query sees.
"""

from __future__ import annotations

import functools
import math
from typing import NamedTuple

import jax
import jax.numpy as jnp
from jax import lax
from jax.experimental import pallas as pl
from jax.experimental.pallas import mosaic_gpu as plgpu

from pallas_kernels.index_kl import tuning
from pallas_kernels.mosaic import TILED, all_phases_seen, filled, int32, launch

TILE = 64  # queries of a tile: the rows of a wgmma
KEYS = 128  # keys of a wgmma
OWNED = 2 * KEYS  # keys of a thread block of prefix_difference
MASKED = -1e30
_TINY = float(jnp.finfo(jnp.float32).tiny)


class Rows(NamedTuple):
    """What queries see: key rows first..last, none where last < first. int32; T is a multiple of TILE."""

    first_BT: jax.Array
    last_BT: jax.Array

    def tiles(self) -> jax.Array:
        """[B, T / TILE, 4] of each tile: least first and greatest last row of queries with any key; greatest first and least last."""
        first_BYX, last_BYX = (x.reshape(x.shape[0], -1, TILE) for x in self)
        real_BYX = first_BYX <= last_BYX
        least = jnp.where(real_BYX, first_BYX, 1 << 30).min(axis=2)
        greatest = jnp.where(real_BYX, last_BYX, -1).max(axis=2)
        return jnp.stack([least, greatest, first_BYX.max(axis=2), last_BYX.min(axis=2)], axis=-1)


def _seen(first_X: jax.Array, last_X: jax.Array, key0: jax.Array, shape: tuple[int, int]) -> jax.Array:
    """Which of the keys key0.. each row of a tile sees."""
    key_XC = plgpu.broadcasted_iota(jnp.int32, shape, 1, layout=plgpu.Layout.WGMMA) + key0
    first_XC, last_XC = (lax.broadcast_in_dim(x, shape, [0]) for x in (first_X, last_X))
    return (key_XC >= first_XC) & (key_XC <= last_XC)


def _load_row(ref, *, optimized: bool = True) -> jax.Array:
    return plgpu.load(ref, layout=plgpu.Layout.WGMMA.reduce(1), optimized=optimized)


def prefix_lse(q_BTNH: jax.Array, k_BSKH: jax.Array, rows: Rows, *, scale: float, interpret=None) -> jax.Array:
    """Base-2 log-sum-exp of scale * q k over what each query sees, float32 [B, N, T]; about -1e30 where it sees nothing.

    T is a multiple of TILE and S of KEYS.
    """
    (B, T, N, H), K, dtype, scale2 = q_BTNH.shape, k_BSKH.shape[2], q_BTNH.dtype, scale * math.log2(math.e)
    together = math.gcd(N // K, 4)
    consumers, tiles = (2, together // 2) if together > 1 else (1, 1)
    ring, simulated, groups = tuning.PREFIX_RING, interpret is not None, N // together

    def index_kl_prefix_lse(q_ref, k_ref, first_ref, last_ref, tile_ref, lse_ref, q_sm, k_sm, lse_sm, q_bar, k_bar, free_bar):
        w, wg = lax.axis_index("w"), lax.axis_index("wg")
        y, other = T // TILE - 1 - lax.div(w, int32(B * groups)), lax.rem(w, int32(B * groups))  # longest first
        b, n0 = lax.div(other, int32(groups)), lax.rem(other, int32(groups)) * together
        begin = lax.div(jnp.minimum(tile_ref[b, y, 0], tile_ref[b, y, 1]), int32(KEYS))
        blocks = jnp.maximum(lax.div(tile_ref[b, y, 1] + KEYS, int32(KEYS)) - begin, 0)
        here = pl.ds(pl.multiple_of(y * TILE, TILE), TILE)

        def produce():
            for i in range(together):
                plgpu.copy_gmem_to_smem(q_ref.at[b, here, n0 + i], q_sm.at[i], q_bar)

            @pl.loop(0, blocks)
            def _(j):
                slot = lax.rem(j, int32(ring))
                pl.when(j >= ring)(lambda: plgpu.barrier_wait(free_bar.at[slot]))
                keys = pl.ds(pl.multiple_of((begin + j) * KEYS, KEYS), KEYS)
                plgpu.copy_gmem_to_smem(k_ref.at[b, keys, lax.div(n0, int32(N // K))], k_sm.at[slot], k_bar.at[slot])

            all_phases_seen(free_bar, jnp.maximum(blocks - ring, 0), blocks, simulated=simulated)

        def consume():
            first_X, last_X = (_load_row(ref.at[b, here], optimized=False) for ref in (first_ref, last_ref))
            pl.when(blocks > 0)(lambda: plgpu.barrier_wait(q_bar))

            def block(j, carry):
                slot, key0 = lax.rem(j, int32(ring)), (begin + j) * KEYS
                plgpu.barrier_wait(k_bar.at[slot])
                hidden = (tile_ref[b, y, 2] > key0) | (tile_ref[b, y, 3] < key0 + KEYS - 1)

                def scores(*accumulators):
                    for i, acc in enumerate(accumulators):
                        plgpu.wgmma(acc, q_sm.at[wg * tiles + i], k_sm.at[slot].T)
                    return tuple(update(i, acc) for i, acc in enumerate(accumulators))

                def update(i, acc):
                    top_X, total_X = carry[i]
                    s_XC = plgpu.wgmma_accumulator_load(acc, wait_n=tiles - 1 - i)
                    seen = functools.partial(_seen, first_X, last_X, key0, s_XC.shape)
                    s_XC = lax.cond(hidden, lambda s: jnp.where(seen(), s, -jnp.inf), lambda s: s, s_XC)
                    # The running maximum starts finite: a block of which a row sees nothing then adds exactly 0.
                    new_X = jnp.maximum(top_X, s_XC.max(axis=1) * scale2)
                    p_XC = jnp.exp2(s_XC * scale2 - lax.broadcast_in_dim(new_X, s_XC.shape, [0]))
                    return new_X, total_X * jnp.exp2(top_X - new_X) + p_XC.sum(axis=1)

                carry = pl.run_scoped(scores, *[plgpu.ACC((TILE, KEYS), jnp.float32)] * tiles)
                plgpu.barrier_arrive(free_bar.at[slot])
                return carry

            layout = plgpu.Layout.WGMMA.reduce(1)
            start = tuple(filled((TILE,), value, jnp.float32, layout) for value in (MASKED, 0))
            for i, (top_X, total_X) in enumerate(lax.fori_loop(0, blocks, block, (start,) * tiles)):
                lse_sm[wg * tiles + i] = top_X + jnp.log2(jnp.maximum(total_X, _TINY))
            plgpu.commit_smem()
            for i in range(tiles):
                plgpu.copy_smem_to_gmem(lse_sm.at[wg * tiles + i], lse_ref.at[b, n0 + wg * tiles + i, here])
            plgpu.wait_smem_to_gmem(0)

        pl.when(wg < consumers)(consume)
        pl.when((wg == consumers) & (blocks > 0))(produce)

    kernel = plgpu.kernel(
        index_kl_prefix_lse,
        out_type=jax.ShapeDtypeStruct((B, N, T), jnp.float32),
        grid=(T // TILE * B * groups,),
        grid_names=("w",),
        num_threads=consumers + 1,
        thread_name="wg",
        scratch_types=[
            plgpu.SMEM((together, TILE, H), dtype, transforms=TILED),
            plgpu.SMEM((ring, KEYS, H), dtype, transforms=TILED),
            plgpu.SMEM((together, TILE), jnp.float32),
            plgpu.Barrier(num_arrivals=together),  # producer -> consumers: the queries are there
            plgpu.Barrier(num_barriers=ring),  # producer -> consumers: the slot's keys are there
            plgpu.Barrier(num_barriers=ring, num_arrivals=consumers),  # consumers -> producer: the slot's keys have been read
        ],
        compiler_params=plgpu.CompilerParams(approx_math=True, reduction_scratch_bytes=0),
        **launch(interpret),
    )
    return kernel(q_BTNH, k_BSKH, *rows, rows.tiles())


class Statistics(NamedTuple):
    """Of every query; minus log-sum-exps in base 2, 0 where a query sees nothing."""

    minus_lse_BNT: jax.Array
    minus_student_BKT: jax.Array
    weight_BT: jax.Array


def prefix_difference(
    arrays: tuple[jax.Array, ...], statistics: Statistics, rows: Rows, start: jax.Array, length: int, *, scale, index_scale, interpret=None
) -> tuple[jax.Array, jax.Array]:
    """(value [B, K, S / KEYS, length] before weighting and in base 2, ds [B, K, length, S] in the dtype of iq) of `length` queries.

    Args:
      arrays: q [B, T, N, H], k [B, S, K, H], iq [B, T, K, I], ik [B, S, I]; T is a multiple of TILE and S of OWNED.
      start: the first query, a multiple of TILE; as is `length`.
    """
    q_BTNH, k_BSKH, iq_BTKI, ik_BSI = arrays
    (B, S, K, H), N, I, dtype = k_BSKH.shape, q_BTNH.shape[2], iq_BTKI.shape[-1], iq_BTKI.dtype
    G, ring, simulated = N // K, tuning.DIFFERENCE_RING, interpret is not None
    scale2, index_scale2 = scale * math.log2(math.e), index_scale * math.log2(math.e)

    def index_kl_prefix(q_ref, k_ref, iq_ref, ik_ref, lse_ref, student_ref, weight_ref, first_ref, last_ref, tile_ref, start_ref, *refs):
        value_ref, ds_ref, k_sm, ik_sm, q_sm, iq_sm, lse_sm, *refs = refs
        *row_sm, value_sm, ds_sm, k_bar, q_bar, q_free, tile_bar, tile_free = refs
        w, wg = lax.axis_index("w"), lax.axis_index("wg")
        b, h = lax.div(w, int32(K * (S // OWNED))), lax.rem(lax.div(w, int32(S // OWNED)), int32(K))
        owned = lax.rem(w, int32(S // OWNED)) * OWNED
        tile0 = lax.div(start_ref[0], int32(TILE))

        def reached(i):
            return (tile_ref[b, tile0 + i, 0] < owned + OWNED) & (tile_ref[b, tile0 + i, 1] >= owned)

        def queries(i):
            return pl.ds(pl.multiple_of((tile0 + i) * TILE, TILE), TILE)

        def produce():
            plgpu.set_max_registers(tuning.REGISTERS[1], action="decrease")
            keys = pl.ds(pl.multiple_of(owned, OWNED), OWNED)
            plgpu.copy_gmem_to_smem(k_ref.at[b, keys, h], k_sm, k_bar)
            plgpu.copy_gmem_to_smem(ik_ref.at[b, keys], ik_sm, k_bar)

            def load(i, done):
                pl.when(done > 0)(lambda: plgpu.barrier_wait(tile_free))
                plgpu.copy_gmem_to_smem(iq_ref.at[b, queries(i), h], iq_sm, tile_bar)
                plgpu.copy_gmem_to_smem(lse_ref.at[b, pl.ds(h * G, G), queries(i)], lse_sm, tile_bar)
                for ref, sm in zip((student_ref.at[b, h], weight_ref.at[b], first_ref.at[b], last_ref.at[b]), row_sm, strict=True):
                    plgpu.copy_gmem_to_smem(ref.at[queries(i)], sm, tile_bar)

                @pl.loop(0, G)
                def _(g):
                    slot = lax.rem(done * G + g, int32(ring))
                    pl.when(done * G + g >= ring)(lambda: plgpu.barrier_wait(q_free.at[slot]))
                    plgpu.copy_gmem_to_smem(q_ref.at[b, queries(i), h * G + g], q_sm.at[slot], q_bar.at[slot])

                return done + 1

            done = lax.fori_loop(0, length // TILE, lambda i, n: lax.cond(reached(i), load, lambda i, n: n, i, n), jnp.int32(0))
            all_phases_seen(q_free, jnp.maximum(done * G - ring, 0), done * G, simulated=simulated)
            if simulated:
                pl.when(done > 0)(lambda: plgpu.barrier_wait(tile_free))

        def consume():
            plgpu.set_max_registers(tuning.REGISTERS[0], action="increase")
            mine, key0 = pl.ds(wg * KEYS, KEYS), owned + wg * KEYS
            plgpu.barrier_wait(k_bar)

            def product(a, b):
                def body(acc):
                    plgpu.wgmma(acc, a, b)
                    return acc[...]

                return pl.run_scoped(body, plgpu.ACC((TILE, KEYS), jnp.float32))

            def add_head(g, done, p_XC):
                slot = lax.rem(done * G + g, int32(ring))
                plgpu.barrier_wait(q_bar.at[slot])
                s_XC = product(q_sm.at[slot], k_sm.at[mine].T)
                plgpu.barrier_arrive(q_free.at[slot])
                return p_XC + jnp.exp2(s_XC * scale2 + lax.broadcast_in_dim(_load_row(lse_sm.at[g]), s_XC.shape, [0]))

            def compare(i, done):
                """Value and ds of a tile."""
                plgpu.barrier_wait(tile_bar)
                zero_XC = filled((TILE, KEYS), 0, jnp.float32, plgpu.Layout.WGMMA)
                p_XC = lax.fori_loop(0, G, lambda g, p: add_head(g, done, p), zero_XC) * (1 / G)
                s_XC = product(iq_sm, ik_sm.at[mine].T)
                student_X, weight_X, first_X, last_X = (_load_row(sm) for sm in row_sm)
                log_student_XC = s_XC * index_scale2 + lax.broadcast_in_dim(student_X, s_XC.shape, [0])
                seen = functools.partial(_seen, first_X, last_X, key0, s_XC.shape)
                hidden = (tile_ref[b, tile0 + i, 2] > key0) | (tile_ref[b, tile0 + i, 3] < key0 + KEYS - 1)
                p_XC, log_student_XC = lax.cond(
                    hidden,
                    lambda p, s: (jnp.where(seen(), p, 0.0), jnp.where(seen(), s, MASKED)),
                    lambda p, s: (p, s),
                    p_XC,
                    log_student_XC,
                )
                plgpu.wait_smem_to_gmem(0, wait_read_only=True)
                value_sm[wg] = (p_XC * (jnp.log2(jnp.maximum(p_XC, _TINY)) - log_student_XC)).sum(axis=1)
                ds_XC = (jnp.exp2(log_student_XC) - p_XC) * lax.broadcast_in_dim(weight_X, s_XC.shape, [0])
                ds_sm[wg] = ds_XC.astype(dtype)
                plgpu.commit_smem()  # also keeps the reads of this tile before the next load
                plgpu.barrier_arrive(tile_free)
                return done + 1

            def nothing(i, done):
                del i
                plgpu.wait_smem_to_gmem(0, wait_read_only=True)
                value_sm[wg] = filled((TILE,), 0, jnp.float32, plgpu.Layout.WGMMA.reduce(1))
                ds_sm[wg] = filled((TILE, KEYS), 0, dtype, plgpu.Layout.WGMMA)
                plgpu.commit_smem()
                return done

            def tile(i, done):
                done = lax.cond(reached(i), compare, nothing, i, done)
                rows_here = pl.ds(pl.multiple_of(i * TILE, TILE), TILE)
                plgpu.copy_smem_to_gmem(value_sm.at[wg], value_ref.at[b, h, lax.div(key0, int32(KEYS)), rows_here])
                plgpu.copy_smem_to_gmem(ds_sm.at[wg], ds_ref.at[b, h, rows_here, pl.ds(pl.multiple_of(key0, KEYS), KEYS)])
                return done

            lax.fori_loop(0, length // TILE, tile, jnp.int32(0))
            plgpu.wait_smem_to_gmem(0)

        pl.when(wg < 2)(consume)
        pl.when(wg == 2)(produce)

    kernel = plgpu.kernel(
        index_kl_prefix,
        out_type=(jax.ShapeDtypeStruct((B, K, S // KEYS, length), jnp.float32), jax.ShapeDtypeStruct((B, K, length, S), dtype)),
        grid=(B * K * (S // OWNED),),
        grid_names=("w",),
        num_threads=3,
        thread_name="wg",
        scratch_types=[
            plgpu.SMEM((OWNED, H), dtype, transforms=TILED),
            plgpu.SMEM((OWNED, I), dtype, transforms=TILED),
            plgpu.SMEM((ring, TILE, H), dtype, transforms=TILED),
            plgpu.SMEM((TILE, I), dtype, transforms=TILED),
            plgpu.SMEM((G, TILE), jnp.float32),
            *[plgpu.SMEM((TILE,), kind) for kind in (jnp.float32, jnp.float32, jnp.int32, jnp.int32)],
            plgpu.SMEM((2, TILE), jnp.float32),
            plgpu.SMEM((2, TILE, KEYS), dtype, transforms=TILED),
            plgpu.Barrier(num_arrivals=2),  # producer -> consumers: K and ik are there
            plgpu.Barrier(num_barriers=ring),  # producer -> consumers: the slot's queries are there
            plgpu.Barrier(num_barriers=ring, num_arrivals=2),  # consumers -> producer: the slot's queries have been read
            plgpu.Barrier(num_arrivals=6),  # producer -> consumers: the tile's index queries and statistics are there
            plgpu.Barrier(num_arrivals=2),  # consumers -> producer: they have been read
        ],
        compiler_params=plgpu.CompilerParams(approx_math=True, reduction_scratch_bytes=0),
        **launch(interpret),
    )
    start_1 = jnp.reshape(start, (1,)).astype(jnp.int32)
    return kernel(q_BTNH, k_BSKH, iq_BTKI, ik_BSI, *statistics, *rows, rows.tiles(), start_1)
