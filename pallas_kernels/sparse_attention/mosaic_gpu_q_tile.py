"""Forward of sparse_attention, Q-tile: walks the blocks that neighbouring queries share, and merges the parts of the rest.  sm_90a.

A tile is 128 rows: X = 128 / G neighbouring queries with the G heads of one KV head. A block that is *common* to a tile (mosaic_gpu_split:
most of its queries chose it, or it is the own block of one of them) is read once and goes through the online softmax of flash attention,
one bit a query switching rows off. What is left of a selection is *stray*: KV-outer computes it, and this kernel merges those parts into
its running state as its last step, so there is no separate combine.

    query    0  1  2  3  4  5  6  7
    block 3  x  x  x  .  x  x  x  x     common: walked with bits 1 1 1 0 1 1 1 1
    block 9  x  .  .  .  .  x  .  .     stray: two entries of KV-outer

    producer (1 warpgroup)    rows of Q, then K and V of the common blocks, then the parts, two a ring slot
    consumers (2 warpgroups)  64 rows each

One thread block a multiprocessor takes tile after tile, so that the loads of the next tile hide behind the merge of this one.
"""

from __future__ import annotations

import math
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jax import lax
from jax.experimental import pallas as pl
from jax.experimental.pallas import mosaic_gpu as plgpu

from pallas_kernels.mosaic import MASKED, TILED, all_phases_seen, filled, int32, launch, product, register_product
from pallas_kernels.sparse_attention import tuning
from pallas_kernels.sparse_attention.mosaic_gpu_split import CHOICES, NUMBER_BIT, SIZES, STARTS


def _by_row() -> plgpu.SomeLayout:
    """Layout of one value a row of a tile."""
    return plgpu.Layout.WGMMA.reduce(1)


class _Refs(NamedTuple):
    """In the order in which the launch passes them."""

    q: Any
    k: Any
    v: Any
    walk: Any
    part: Any
    part_lse: Any
    origin: Any
    out: Any
    lse: Any
    q_sm: Any
    k_sm: Any
    v_sm: Any
    walk_sm: Any
    lse_sm: Any
    walk_bar: Any
    q_bar: Any
    lse_bar: Any
    tile_free: Any
    k_bar: Any
    v_bar: Any
    k_free: Any
    v_free: Any
    staging: Any = None  # simulator only

    def ring(self) -> tuple:
        """(buffer, barrier "it is there", barrier "it is read") of K or an even part, and of V or an odd part."""
        return (self.k_sm, self.k_bar, self.k_free), (self.v_sm, self.v_bar, self.v_free)


class _Static(NamedTuple):
    heads: int  # K
    group: int  # G
    block_size: int
    scale2: float  # to base 2
    thread_blocks: int
    simulated: bool

    @property
    def per_group(self) -> int:
        """Queries of a warpgroup."""
        return tuning.ROWS // self.group


class _Tile(NamedTuple):
    """A tile of the thread block: list, tile of the list, batch row, KV head, and the buffer that its Q, walk and parts' lse take."""

    l: Any
    c: Any
    b: Any
    h: Any
    buffer: Any


def _tile(i, refs: _Refs, static: _Static) -> _Tile:
    """The thread block's i-th tile; the longest walks come first."""
    L, n = refs.walk.shape[:2]
    place = i * static.thread_blocks + lax.axis_index("x")
    l = lax.rem(place, int32(L))
    return _Tile(
        l, n - 1 - lax.div(place, int32(L)), lax.div(l, int32(static.heads)), lax.rem(l, int32(static.heads)), lax.rem(i, int32(2))
    )


def _produce(refs: _Refs, mine, static: _Static) -> None:
    G, ring, per_group, rows = static.group, tuning.Q_TILE_RING, static.per_group, tuning.ROWS
    plgpu.set_max_registers(tuning.Q_TILE_REGISTERS[1], action="decrease")

    def load(step, sources, size):
        slot = lax.rem(step, int32(ring))
        for source, (sm, bar, free) in zip(sources, refs.ring(), strict=True):
            pl.when(step >= ring)(lambda free=free: plgpu.barrier_wait(free.at[slot]))
            plgpu.copy_gmem_to_smem(source, sm.at[slot, pl.ds(0, size)], bar.at[slot])

    def tile(i, done):
        l, c, b, h, buffer = _tile(i, refs, static)
        pl.when(i >= 2)(lambda: plgpu.barrier_wait(refs.tile_free.at[buffer]))
        plgpu.commit_smem()  # orders this warpgroup's own reads of the walk before the TMA write
        plgpu.copy_gmem_to_smem(refs.walk.at[l, c], refs.walk_sm.at[buffer], refs.walk_bar.at[buffer])
        query0 = refs.origin[b, 0] + c * (2 * per_group)
        for j in range(2 * per_group):
            target = refs.q_sm.at[buffer, j // per_group, pl.ds(j % per_group * G, G)]
            plgpu.copy_gmem_to_smem(refs.q.at[b, jnp.minimum(query0 + j, refs.q.shape[1] - 1), h], target, refs.q_bar.at[buffer])
        plgpu.copy_gmem_to_smem(refs.part_lse.at[l, c], refs.lse_sm.at[buffer], refs.lse_bar.at[buffer])
        plgpu.barrier_wait(refs.walk_bar.at[buffer])
        blocks, parts = refs.walk_sm[buffer, SIZES, 0], refs.walk_sm[buffer, SIZES, 1]
        pairs = lax.div(parts + 1, int32(2))

        @pl.loop(0, blocks)
        def _(j):
            block = lax.shift_right_logical(refs.walk_sm[buffer, CHOICES, j], NUMBER_BIT)
            here = pl.ds(block * static.block_size, static.block_size)
            load(done + j, (refs.k.at[b, here, h], refs.v.at[b, here, h]), static.block_size)

        @pl.loop(0, pairs)
        def _(j):
            # An odd part has no companion: the first one is in the cache and does no harm.
            second = jnp.where(2 * j + 1 < parts, 2 * j + 1, 0)
            load(done + blocks + j, (refs.part.at[l, c, 2 * j], refs.part.at[l, c, second]), 2 * rows)

        return done + blocks + pairs

    done = lax.fori_loop(0, mine, tile, int32(0))
    if static.simulated:  # every phase has to be observed
        pl.when(mine > 1)(lambda: plgpu.barrier_wait(refs.tile_free.at[lax.rem(mine, int32(2))]))
        for _, _, free in refs.ring():
            all_phases_seen(free, jnp.maximum(done - ring, 0), done, simulated=True)


def _walk(tile: _Tile, done, j, state, wg, refs: _Refs, static: _Static):
    """One common block: the online softmax step of this warpgroup's rows, or only the barriers where no row wants it."""
    (_, c, b, _, buffer), slot, per_group = tile, lax.rem(done + j, int32(tuning.Q_TILE_RING)), static.per_group
    start = refs.walk_sm[buffer, STARTS, j]
    wanted = lax.shift_right_logical(refs.walk_sm[buffer, CHOICES, j], wg * per_group) & ((1 << per_group) - 1)
    key_row = refs.origin[b, 1] + c * (2 * per_group) + wg * per_group
    k, v = (sm.at[slot, pl.ds(0, static.block_size)] for sm in (refs.k_sm, refs.v_sm))
    plgpu.barrier_wait(refs.k_bar.at[slot])

    def mask(s):
        row = plgpu.broadcasted_iota(jnp.int32, s.shape, 0, layout=plgpu.Layout.WGMMA)
        key = plgpu.broadcasted_iota(jnp.int32, s.shape, 1, layout=plgpu.Layout.WGMMA)
        return jnp.where(key + start <= key_row + lax.div(row, int32(static.group)), s, MASKED)

    def step(state):
        acc, top, total = state
        dtype, rows = refs.q_sm.dtype, tuning.ROWS
        s = product(refs.q_sm.at[buffer, wg], k.T, rows, static.block_size)
        plgpu.barrier_arrive(refs.k_free.at[slot])
        s = lax.cond(start + static.block_size > key_row, mask, lambda s: s, s)
        row = plgpu.broadcasted_iota(jnp.int32, (rows,), 0, layout=_by_row())
        on = (lax.shift_right_logical(jnp.broadcast_to(wanted, (rows,)), lax.div(row, int32(static.group))) & 1) > 0
        new_top = jnp.where(on, jnp.maximum(top, s.max(axis=1) * static.scale2), top)
        # A row that is switched off gets p = 0.
        p = jnp.exp2(s * static.scale2 - lax.broadcast_in_dim(jnp.where(on, new_top, -MASKED), s.shape, [0]))
        shrink = jnp.exp2(top - new_top)
        total = total * shrink + p.sum(axis=1)
        acc = acc * lax.broadcast_in_dim(shrink, acc.shape, [0])
        plgpu.barrier_wait(refs.v_bar.at[slot])
        if static.simulated:
            acc = acc + register_product(p.astype(dtype), v, refs.staging.at[wg])
        else:
            acc = pl.run_state(lambda ref: plgpu.wgmma(ref, p.astype(dtype), v))(plgpu.ACC.init(acc))
        plgpu.barrier_arrive(refs.v_free.at[slot])
        return acc, new_top, total

    def skip(state):
        plgpu.barrier_arrive(refs.k_free.at[slot])
        plgpu.barrier_wait(refs.v_bar.at[slot])
        plgpu.barrier_arrive(refs.v_free.at[slot])
        return state

    return lax.cond(wanted > 0, step, skip, state)


def _merge(buffer, done, parts, state, wg, refs: _Refs):
    """Adds the stray parts: weights relative to the final maximum, two parts a ring slot."""
    acc, top, total = state
    R, my_rows = refs.part_lse.shape[2], pl.ds(wg * tuning.ROWS, tuning.ROWS)
    plgpu.barrier_wait(refs.lse_bar.at[buffer])
    new_top = top
    for r in range(R):
        new_top = jnp.maximum(new_top, plgpu.load(refs.lse_sm.at[buffer, r, my_rows], layout=_by_row()))
    shrink = jnp.exp2(top - new_top)

    def add(j, state):
        acc, total = state
        slot = lax.rem(done + j, int32(tuning.Q_TILE_RING))
        for half, (sm, bar, _) in enumerate(refs.ring()):
            plgpu.barrier_wait(bar.at[slot])
            part = plgpu.load(sm.at[slot, my_rows], layout=plgpu.Layout.WGMMA).astype(jnp.float32)
            r = 2 * j + half
            lse = plgpu.load(refs.lse_sm.at[buffer, jnp.minimum(r, R - 1), my_rows], layout=_by_row())
            weight = jnp.exp2(lse - new_top + jnp.where(r < parts, 0.0, MASKED))
            weights = lax.broadcast_in_dim(weight, acc.shape, [0])
            acc = acc + jnp.where(weights == 0, 0.0, part * weights)  # places without an entry hold no numbers
            total = total + weight
        plgpu.commit_smem()  # orders these reads before the TMA writes that the barriers let go
        plgpu.barrier_arrive(refs.k_free.at[slot])
        plgpu.barrier_arrive(refs.v_free.at[slot])
        return acc, total

    state = acc * lax.broadcast_in_dim(shrink, acc.shape, [0]), total * shrink
    return *lax.fori_loop(0, lax.div(parts + 1, int32(2)), add, state), new_top


def _consume(refs: _Refs, mine, wg, static: _Static) -> None:
    rows, H, per_group = tuning.ROWS, refs.q_sm.shape[-1], static.per_group
    plgpu.set_max_registers(tuning.Q_TILE_REGISTERS[0], action="increase")

    def tile(i, done):
        where = l, c, b, h, buffer = _tile(i, refs, static)
        plgpu.barrier_wait(refs.walk_bar.at[buffer])
        plgpu.barrier_wait(refs.q_bar.at[buffer])
        blocks, parts = refs.walk_sm[buffer, SIZES, 0], refs.walk_sm[buffer, SIZES, 1]
        zeros = filled((rows, H), 0.0, jnp.float32, plgpu.Layout.WGMMA)
        state = zeros, filled((rows,), MASKED, jnp.float32, _by_row()), filled((rows,), 0.0, jnp.float32, _by_row())
        state = lax.fori_loop(0, blocks, lambda j, state: _walk(where, done, j, state, wg, refs, static), state)
        # By now the output of the tile before has left its buffer.
        plgpu.wait_smem_to_gmem(0, wait_read_only=True)
        pl.when(i > 0)(lambda: plgpu.barrier_arrive(refs.tile_free.at[1 - buffer]))
        acc, total, top = _merge(buffer, done + blocks, parts, state, wg, refs)
        some = total != 0  # NaN is some: it has to reach the outputs
        out = acc * lax.broadcast_in_dim(jnp.where(some, 1.0 / total, 0.0), acc.shape, [0])
        refs.q_sm[buffer, wg] = out.astype(refs.q_sm.dtype)
        refs.lse[l, c, pl.ds(wg * rows, rows)] = jnp.where(some, (top + jnp.log2(total)) * math.log(2), -jnp.inf)
        plgpu.commit_smem()
        for j in range(per_group):
            target = refs.out.at[b, c * (2 * per_group) + wg * per_group + j, h]
            plgpu.copy_smem_to_gmem(refs.q_sm.at[buffer, wg, pl.ds(j * static.group, static.group)], target)
        return done + blocks + lax.div(parts + 1, int32(2))

    lax.fori_loop(0, mine, tile, int32(0))
    plgpu.wait_smem_to_gmem(0)


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
      q_BTKGH, k_BZKH, v_BZKH, origin_B2: as for kv_outer. walk_LnYU: see mosaic_gpu_split.Split.
      part_LnRMH: parts of the stray entries, lse_LnRM: their base-2 log-sum-exp, -inf where there is none.

    Returns:
      out [B, Tc, K, G, H] of the chunk's Tc queries and lse [L, n, M] float32, natural; 0 and -inf where a query has no block.
    """
    (B, _, K, G, H), (L, n, _, U), R, dtype = q_BTKGH.shape, walk_LnYU.shape, lse_LnRM.shape[2], q_BTKGH.dtype
    rows, ring, neighbours = tuning.ROWS, tuning.Q_TILE_RING, tuning.NEIGHBOURS // G
    thread_blocks = min(tuning.SMS, L * n)
    static = _Static(K, G, block_size, scale * math.log2(math.e), thread_blocks, interpret is not None)

    def sparse_attention_q_tile(*refs):
        refs, x, wg = _Refs(*refs), lax.axis_index("x"), lax.axis_index("wg")
        mine = lax.div(L * n - x + (thread_blocks - 1), int32(thread_blocks))
        pl.when(wg < 2)(lambda: _consume(refs, mine, wg, static))
        pl.when(wg == 2)(lambda: _produce(refs, mine, static))

    ring_rows = max(2 * rows, block_size)
    scratch = [
        plgpu.SMEM((2, 2, rows, H), dtype, transforms=TILED),
        plgpu.SMEM((ring, ring_rows, H), dtype, transforms=TILED),
        plgpu.SMEM((ring, ring_rows, H), dtype, transforms=TILED),
        plgpu.SMEM((2, 3, U), jnp.int32),
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
    if static.simulated:
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
