"""Value and ds of the index loss over the full prefix (warm-up) on Hopper (sm_90a).  Mosaic GPU, flash style.

With P the mean over a group's heads of exp(logit - lse) and Q the student's softmax it leaves ds = w (Q - P) of a chunk of queries, whose
products with ik and iq, plain matrix products, are the gradients. One thread block owns 256 keys of one KV head, walks the chunk's tiles of
64 queries, and for each adds up the heads' probabilities in registers. Tiles whose documents do not reach the keys are skipped.

    producer (1 warpgroup)      loads K and ik once, then for each tile index queries and statistics, and the queries of every head
    consumers (2 warpgroups)    own 128 keys each

Memory: ds, 2 B K S bytes a query of the chunk; the caller bounds the queries.
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
from pallas_kernels.index_kl.mosaic_gpu_prefix import KEYS, TILE, TINY, Reach, Rows, load_row, seen
from pallas_kernels.mosaic import TILED, all_phases_seen, filled, int32, launch, product

OWNED = 2 * KEYS  # keys of a thread block
_MASKED = -1e30


class Statistics(NamedTuple):
    """Of every query; minus log-sum-exps in base 2, 0 where a query sees nothing."""

    minus_lse_BNT: jax.Array
    minus_student_BKT: jax.Array
    weight_BT: jax.Array


class _Inputs(NamedTuple):
    q_BTNH: Any
    k_BSKH: Any
    iq_BTKI: Any
    ik_BSI: Any
    statistics: Statistics
    rows: Rows
    reach_BYX: Any
    start_1: Any

    @property
    def group(self) -> int:
        return self.q_BTNH.shape[2] // self.k_BSKH.shape[2]


class _Scratch(NamedTuple):
    k: Any
    ik: Any
    q: Any
    iq: Any
    lse: Any  # of every head of the tile
    numbers: Any  # of every query of the tile: student, weight, first, last
    value: Any
    ds: Any
    k_bar: Any  # producer -> consumers: K and ik are there
    q_bar: Any  # producer -> consumers: the slot's queries are there
    q_free: Any  # consumers -> producer: they have been read
    tile_bar: Any  # producer -> consumers: the tile's index queries and numbers are there
    tile_free: Any  # consumers -> producer: they have been read


class _Work(NamedTuple):
    """A thread block's part: batch row, KV head, first key, first tile of the chunk."""

    b: jax.Array
    h: jax.Array
    owned: jax.Array
    tile0: jax.Array

    @classmethod
    def read(cls, inputs: _Inputs) -> _Work:
        S, K = inputs.k_BSKH.shape[1:3]
        w, parts = lax.axis_index("w"), S // OWNED
        b, h = lax.div(w, int32(K * parts)), lax.rem(lax.div(w, int32(parts)), int32(K))
        return cls(b, h, lax.rem(w, int32(parts)) * OWNED, lax.div(inputs.start_1[0], int32(TILE)))

    def reach(self, inputs: _Inputs, i: jax.Array) -> Reach:
        return Reach.read(inputs.reach_BYX, self.b, self.tile0 + i)

    def reached(self, inputs: _Inputs, i: jax.Array) -> jax.Array:
        reach = self.reach(inputs, i)
        return (reach.begin < self.owned + OWNED) & (reach.end >= self.owned)

    def queries(self, i: jax.Array) -> Any:
        return pl.ds(pl.multiple_of((self.tile0 + i) * TILE, TILE), TILE)


def _produce(work: _Work, inputs: _Inputs, scratch: _Scratch, tiles: int, *, simulated: bool) -> None:
    G, slots, b, h = inputs.group, scratch.q.shape[0], work.b, work.h
    keys = pl.ds(pl.multiple_of(work.owned, OWNED), OWNED)
    plgpu.copy_gmem_to_smem(inputs.k_BSKH.at[b, keys, h], scratch.k, scratch.k_bar)
    plgpu.copy_gmem_to_smem(inputs.ik_BSI.at[b, keys], scratch.ik, scratch.k_bar)

    def load(i, done):
        here, (lse_ref, student_ref, weight_ref) = work.queries(i), inputs.statistics
        pl.when(done > 0)(lambda: plgpu.barrier_wait(scratch.tile_free))
        plgpu.copy_gmem_to_smem(inputs.iq_BTKI.at[b, here, h], scratch.iq, scratch.tile_bar)
        plgpu.copy_gmem_to_smem(lse_ref.at[b, pl.ds(h * G, G), here], scratch.lse, scratch.tile_bar)
        for ref, sm in zip((student_ref.at[b, h], weight_ref.at[b], *(x.at[b] for x in inputs.rows)), scratch.numbers, strict=True):
            plgpu.copy_gmem_to_smem(ref.at[here], sm, scratch.tile_bar)

        @pl.loop(0, G)
        def _(g):
            slot = lax.rem(done * G + g, int32(slots))
            pl.when(done * G + g >= slots)(lambda: plgpu.barrier_wait(scratch.q_free.at[slot]))
            plgpu.copy_gmem_to_smem(inputs.q_BTNH.at[b, here, h * G + g], scratch.q.at[slot], scratch.q_bar.at[slot])

        return done + 1

    def tile(i, done):
        return lax.cond(work.reached(inputs, i), load, lambda i, done: done, i, done)

    done = lax.fori_loop(0, tiles, tile, jnp.int32(0))
    all_phases_seen(scratch.q_free, jnp.maximum(done * G - slots, 0), done * G, simulated=simulated)
    if simulated:
        pl.when(done > 0)(lambda: plgpu.barrier_wait(scratch.tile_free))


def _teacher(inputs: _Inputs, scratch: _Scratch, mine: Any, done: jax.Array, scale2: float) -> jax.Array:
    """Mean over the heads of the probabilities of a tile, before the mask; `done` counts the tiles before it."""
    G, slots = inputs.group, scratch.q.shape[0]

    def add_head(g, p_XC):
        slot = lax.rem(done * G + g, int32(slots))
        plgpu.barrier_wait(scratch.q_bar.at[slot])
        s_XC = product(scratch.q.at[slot], scratch.k.at[mine].T, TILE, KEYS)
        plgpu.barrier_arrive(scratch.q_free.at[slot])
        return p_XC + jnp.exp2(s_XC * scale2 + lax.broadcast_in_dim(load_row(scratch.lse.at[g]), s_XC.shape, [0]))

    return lax.fori_loop(0, G, add_head, filled((TILE, KEYS), 0, jnp.float32, plgpu.Layout.WGMMA)) * (1 / G)


def _consume(
    work: _Work, inputs: _Inputs, scratch: _Scratch, value_ref: Any, ds_ref: Any, tiles: int, scales2: tuple[float, float]
) -> None:
    """Every tile, for 128 keys."""
    wg, (scale2, index_scale2) = lax.axis_index("wg"), scales2
    mine, key0 = pl.ds(wg * KEYS, KEYS), work.owned + wg * KEYS
    plgpu.barrier_wait(scratch.k_bar)

    def compare(i, done):
        plgpu.barrier_wait(scratch.tile_bar)
        p_XC = _teacher(inputs, scratch, mine, done, scale2)
        s_XC = product(scratch.iq, scratch.ik.at[mine].T, TILE, KEYS)
        student_X, weight_X, first_X, last_X = (load_row(sm) for sm in scratch.numbers)
        log_student_XC = s_XC * index_scale2 + lax.broadcast_in_dim(student_X, s_XC.shape, [0])

        def mask(p, s):
            visible = seen(first_X, last_X, key0)
            return jnp.where(visible, p, 0.0), jnp.where(visible, s, _MASKED)

        p_XC, log_student_XC = lax.cond(work.reach(inputs, i).hides(key0), mask, lambda p, s: (p, s), p_XC, log_student_XC)
        plgpu.wait_smem_to_gmem(0, wait_read_only=True)
        scratch.value[wg] = (p_XC * (jnp.log2(jnp.maximum(p_XC, TINY)) - log_student_XC)).sum(axis=1)
        ds_XC = (jnp.exp2(log_student_XC) - p_XC) * lax.broadcast_in_dim(weight_X, s_XC.shape, [0])
        scratch.ds[wg] = ds_XC.astype(ds_ref.dtype)
        plgpu.commit_smem()  # also keeps the reads of this tile before the next load
        plgpu.barrier_arrive(scratch.tile_free)
        return done + 1

    def nothing(_, done):
        plgpu.wait_smem_to_gmem(0, wait_read_only=True)
        scratch.value[wg] = filled((TILE,), 0, jnp.float32, plgpu.Layout.WGMMA.reduce(1))
        scratch.ds[wg] = filled((TILE, KEYS), 0, ds_ref.dtype, plgpu.Layout.WGMMA)
        plgpu.commit_smem()
        return done

    def tile(i, done):
        done = lax.cond(work.reached(inputs, i), compare, nothing, i, done)
        here = pl.ds(pl.multiple_of(i * TILE, TILE), TILE)
        plgpu.copy_smem_to_gmem(scratch.value.at[wg], value_ref.at[work.b, work.h, lax.div(key0, int32(KEYS)), here])
        plgpu.copy_smem_to_gmem(scratch.ds.at[wg], ds_ref.at[work.b, work.h, here, pl.ds(pl.multiple_of(key0, KEYS), KEYS)])
        return done

    lax.fori_loop(0, tiles, tile, jnp.int32(0))
    plgpu.wait_smem_to_gmem(0)


def _scratch_types(dtype, *, G: int, H: int, I: int) -> _Scratch:
    slots = tuning.DIFFERENCE_RING
    return _Scratch(
        k=plgpu.SMEM((OWNED, H), dtype, transforms=TILED),
        ik=plgpu.SMEM((OWNED, I), dtype, transforms=TILED),
        q=plgpu.SMEM((slots, TILE, H), dtype, transforms=TILED),
        iq=plgpu.SMEM((TILE, I), dtype, transforms=TILED),
        lse=plgpu.SMEM((G, TILE), jnp.float32),
        numbers=tuple(plgpu.SMEM((TILE,), kind) for kind in (jnp.float32, jnp.float32, jnp.int32, jnp.int32)),
        value=plgpu.SMEM((2, TILE), jnp.float32),
        ds=plgpu.SMEM((2, TILE, KEYS), dtype, transforms=TILED),
        k_bar=plgpu.Barrier(num_arrivals=2),
        q_bar=plgpu.Barrier(num_barriers=slots),
        q_free=plgpu.Barrier(num_barriers=slots, num_arrivals=2),
        tile_bar=plgpu.Barrier(num_arrivals=6),
        tile_free=plgpu.Barrier(num_arrivals=2),
    )


def prefix_difference(
    arrays: tuple[jax.Array, ...], statistics: Statistics, rows: Rows, start: jax.Array, length: int, *, scale, index_scale, interpret=None
) -> tuple[jax.Array, jax.Array]:
    """(value [B, K, S / KEYS, length] before weighting and in base 2, ds [B, K, length, S] in the dtype of iq) of `length` queries.

    Args:
      arrays: q [B, T, N, H], k [B, S, K, H], iq [B, T, K, I], ik [B, S, I]; T is a multiple of TILE and S of OWNED.
      start: the first query, a multiple of TILE; as is `length`.
    """
    inputs = _Inputs(*arrays, statistics, rows, rows.reaches(), jnp.reshape(start, (1,)).astype(jnp.int32))
    (B, S, K, H), I, dtype = inputs.k_BSKH.shape, inputs.iq_BTKI.shape[-1], inputs.iq_BTKI.dtype
    scales2, tiles = (scale * math.log2(math.e), index_scale * math.log2(math.e)), length // TILE

    def index_kl_prefix_difference(inputs, value_ref, ds_ref, scratch):
        wg, work = lax.axis_index("wg"), _Work.read(inputs)

        @pl.when(wg < 2)
        def _():
            plgpu.set_max_registers(tuning.REGISTERS[0], action="increase")
            _consume(work, inputs, scratch, value_ref, ds_ref, tiles, scales2)

        @pl.when(wg == 2)
        def _():
            plgpu.set_max_registers(tuning.REGISTERS[1], action="decrease")
            _produce(work, inputs, scratch, tiles, simulated=interpret is not None)

    kernel = plgpu.kernel(
        index_kl_prefix_difference,
        out_type=(jax.ShapeDtypeStruct((B, K, S // KEYS, length), jnp.float32), jax.ShapeDtypeStruct((B, K, length, S), dtype)),
        grid=(B * K * (S // OWNED),),
        grid_names=("w",),
        num_threads=3,
        thread_name="wg",
        scratch_types=(_scratch_types(dtype, G=inputs.group, H=H, I=I),),
        compiler_params=plgpu.CompilerParams(approx_math=True, reduction_scratch_bytes=0),
        **launch(interpret),
    )
    return kernel(inputs)
