"""Log-sum-exp over the full prefix (warm-up) on Hopper (sm_90a): attention without values.  Mosaic GPU, flash style.

One thread block serves 64 queries and up to four heads of one KV head, which share each block of keys. It serves teacher (q, k) and student
(iq, ik) alike. Blocks of keys outside the reach of the tile's documents are skipped; `Rows` says what each query sees.

    producer (1 warpgroup)      loads the queries of all heads once, then blocks of keys
    consumers (2 warpgroups)    half of the heads each: scores, running maximum and sum of every row
"""

from __future__ import annotations

import functools
import math
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jax import lax
from jax.experimental import pallas as pl
from jax.experimental.pallas import mosaic_gpu as plgpu

from pallas_kernels.index_kl import tuning
from pallas_kernels.mosaic import TILED, all_phases_seen, filled, int32, launch

TILE = 64  # queries of a tile: the rows of a wgmma
KEYS = 128  # keys of a wgmma
TINY = float(jnp.finfo(jnp.float32).tiny)
_NOTHING = -1e30


class Rows(NamedTuple):
    """What queries see: key rows first..last, none where last < first. int32; T is a multiple of TILE."""

    first_BT: jax.Array
    last_BT: jax.Array

    def reaches(self) -> jax.Array:
        """[B, T / TILE, 4], a Reach of each tile."""
        first_BYX, last_BYX = (x.reshape(x.shape[0], -1, TILE) for x in self)
        real_BYX = first_BYX <= last_BYX
        least = jnp.where(real_BYX, first_BYX, 1 << 30).min(axis=2)
        greatest = jnp.where(real_BYX, last_BYX, -1).max(axis=2)
        return jnp.stack([least, greatest, first_BYX.max(axis=2), last_BYX.min(axis=2)], axis=-1)


class Reach(NamedTuple):
    """Which key rows a tile of queries sees, read inside a kernel."""

    begin: jax.Array  # some query sees keys begin..end and none sees others
    end: jax.Array
    first: jax.Array  # every query sees first..last
    last: jax.Array

    @classmethod
    def read(cls, reach_ref: Any, b: jax.Array, y: jax.Array) -> Reach:
        return cls(*(reach_ref[b, y, i] for i in range(4)))

    def hides(self, key0: jax.Array) -> jax.Array:
        """Whether some query does not see all of the KEYS keys from key0 on."""
        return (self.first > key0) | (self.last < key0 + KEYS - 1)


def seen(first_X: jax.Array, last_X: jax.Array, key0: jax.Array) -> jax.Array:
    """[TILE, KEYS]: which of the keys from key0 on each query of a tile sees."""
    shape = (TILE, KEYS)
    key_XC = plgpu.broadcasted_iota(jnp.int32, shape, 1, layout=plgpu.Layout.WGMMA) + key0
    first_XC, last_XC = (lax.broadcast_in_dim(x, shape, [0]) for x in (first_X, last_X))
    return (key_XC >= first_XC) & (key_XC <= last_XC)


def load_row(ref: Any, *, optimized: bool = True) -> jax.Array:
    """One number a row of a tile."""
    return plgpu.load(ref, layout=plgpu.Layout.WGMMA.reduce(1), optimized=optimized)


class _Scratch(NamedTuple):
    q: Any
    k: Any
    lse: Any
    q_bar: Any  # producer -> consumers: the queries are there
    k_bar: Any  # producer -> consumers: the slot's keys are there
    free_bar: Any  # consumers -> producer: the slot's keys have been read


class _Work(NamedTuple):
    """A thread block's part: batch row, tile of queries, first head, its first block of keys and their number."""

    b: jax.Array
    y: jax.Array
    n: jax.Array
    begin: jax.Array
    blocks: jax.Array
    reach: Reach

    @classmethod
    def read(cls, reach_ref: Any, heads: int, together: int) -> _Work:
        """Longest first: the tiles of a batch row in descending order."""
        batch, tiles = reach_ref.shape[:2]
        w, groups = lax.axis_index("w"), heads // together
        y, other = tiles - 1 - lax.div(w, int32(batch * groups)), lax.rem(w, int32(batch * groups))
        b = lax.div(other, int32(groups))
        reach = Reach.read(reach_ref, b, y)
        begin = lax.div(jnp.minimum(reach.begin, reach.end), int32(KEYS))
        blocks = jnp.maximum(lax.div(reach.end + KEYS, int32(KEYS)) - begin, 0)
        return cls(b, y, lax.rem(other, int32(groups)) * together, begin, blocks, reach)

    def queries(self) -> Any:
        return pl.ds(pl.multiple_of(self.y * TILE, TILE), TILE)


def _produce(work: _Work, q_ref: Any, k_ref: Any, scratch: _Scratch, *, simulated: bool) -> None:
    together, slots, group = scratch.q.shape[0], scratch.k.shape[0], q_ref.shape[2] // k_ref.shape[2]
    for i in range(together):
        plgpu.copy_gmem_to_smem(q_ref.at[work.b, work.queries(), work.n + i], scratch.q.at[i], scratch.q_bar)

    @pl.loop(0, work.blocks)
    def _(j):
        slot = lax.rem(j, int32(slots))
        pl.when(j >= slots)(lambda: plgpu.barrier_wait(scratch.free_bar.at[slot]))
        keys = pl.ds(pl.multiple_of((work.begin + j) * KEYS, KEYS), KEYS)
        plgpu.copy_gmem_to_smem(k_ref.at[work.b, keys, lax.div(work.n, int32(group))], scratch.k.at[slot], scratch.k_bar.at[slot])

    all_phases_seen(scratch.free_bar, jnp.maximum(work.blocks - slots, 0), work.blocks, simulated=simulated)


def _consume(work: _Work, rows: Rows, scratch: _Scratch, lse_ref: Any, wg: jax.Array, *, tiles: int, scale2: float) -> None:
    """`tiles` heads: running maximum and sum over all blocks of keys."""
    slots, layout = scratch.k.shape[0], plgpu.Layout.WGMMA.reduce(1)
    first_X, last_X = (load_row(ref.at[work.b, work.queries()], optimized=False) for ref in rows)
    pl.when(work.blocks > 0)(lambda: plgpu.barrier_wait(scratch.q_bar))

    def update(carry, acc, waiting, key0):
        top_X, total_X = carry
        s_XC = plgpu.wgmma_accumulator_load(acc, wait_n=waiting)
        s_XC = lax.cond(work.reach.hides(key0), lambda s: jnp.where(seen(first_X, last_X, key0), s, -jnp.inf), lambda s: s, s_XC)
        # The running maximum starts finite: a block of which a row sees nothing then adds exactly 0.
        new_X = jnp.maximum(top_X, s_XC.max(axis=1) * scale2)
        p_XC = jnp.exp2(s_XC * scale2 - lax.broadcast_in_dim(new_X, s_XC.shape, [0]))
        return new_X, total_X * jnp.exp2(top_X - new_X) + p_XC.sum(axis=1)

    def block(j, carries):
        slot = lax.rem(j, int32(slots))
        plgpu.barrier_wait(scratch.k_bar.at[slot])

        def heads(*accumulators):
            for i, acc in enumerate(accumulators):
                plgpu.wgmma(acc, scratch.q.at[wg * tiles + i], scratch.k.at[slot].T)
            return tuple(update(carries[i], acc, tiles - 1 - i, (work.begin + j) * KEYS) for i, acc in enumerate(accumulators))

        carries = pl.run_scoped(heads, *[plgpu.ACC((TILE, KEYS), jnp.float32)] * tiles)
        plgpu.barrier_arrive(scratch.free_bar.at[slot])
        return carries

    start = tuple(filled((TILE,), value, jnp.float32, layout) for value in (_NOTHING, 0))
    for i, (top_X, total_X) in enumerate(lax.fori_loop(0, work.blocks, block, (start,) * tiles)):
        scratch.lse[wg * tiles + i] = top_X + jnp.log2(jnp.maximum(total_X, TINY))
    plgpu.commit_smem()
    for i in range(tiles):
        target = lse_ref.at[work.b, work.n + wg * tiles + i, work.queries()]
        plgpu.copy_smem_to_gmem(scratch.lse.at[wg * tiles + i], target)
    plgpu.wait_smem_to_gmem(0)


def prefix_lse(q_BTNH: jax.Array, k_BSKH: jax.Array, rows: Rows, *, scale: float, interpret=None) -> jax.Array:
    """Base-2 log-sum-exp of scale * q k over what each query sees, float32 [B, N, T]; about -1e30 where it sees nothing.

    T is a multiple of TILE and S of KEYS.
    """
    (B, T, N, H), K, dtype = q_BTNH.shape, k_BSKH.shape[2], q_BTNH.dtype
    together = math.gcd(N // K, 4)
    consumers, tiles = (2, together // 2) if together > 1 else (1, 1)

    def index_kl_prefix_lse(q_ref, k_ref, rows, reach_ref, lse_ref, scratch):
        wg, work = lax.axis_index("wg"), _Work.read(reach_ref, N, together)
        consume = functools.partial(_consume, work, rows, scratch, lse_ref, wg, tiles=tiles, scale2=scale * math.log2(math.e))
        pl.when(wg < consumers)(consume)

        @pl.when((wg == consumers) & (work.blocks > 0))
        def _():
            _produce(work, q_ref, k_ref, scratch, simulated=interpret is not None)

    scratch = _Scratch(
        q=plgpu.SMEM((together, TILE, H), dtype, transforms=TILED),
        k=plgpu.SMEM((tuning.PREFIX_RING, KEYS, H), dtype, transforms=TILED),
        lse=plgpu.SMEM((together, TILE), jnp.float32),
        q_bar=plgpu.Barrier(num_arrivals=together),
        k_bar=plgpu.Barrier(num_barriers=tuning.PREFIX_RING),
        free_bar=plgpu.Barrier(num_barriers=tuning.PREFIX_RING, num_arrivals=consumers),
    )
    kernel = plgpu.kernel(
        index_kl_prefix_lse,
        out_type=jax.ShapeDtypeStruct((B, N, T), jnp.float32),
        grid=(T // TILE * B * (N // together),),
        grid_names=("w",),
        num_threads=consumers + 1,
        thread_name="wg",
        scratch_types=(scratch,),
        compiler_params=plgpu.CompilerParams(approx_math=True, reduction_scratch_bytes=0),
        **launch(interpret),
    )
    return kernel(q_BTNH, k_BSKH, rows, rows.reaches())
