"""Gradient and value of the index loss on the kept blocks on Hopper (sm_90a).  Mosaic GPU, KV-outer.

Source: arXiv 2606.13392, the index branch's KL. With P the teacher's mean over the heads of a group and Q the student's softmax,

    value = w sum_j P (log P - log Q)       ds = w (Q - P)       diq = ds ik       dik = ds^T iq

One thread block serves one work item of the inverse index (one KV head, one kernel block, at most `per` entries), in list order like
mosaic_gpu_student. No atomics, so two runs are bit-equal.

    producer (1 warpgroup)      loads the index keys once, then tiles of 64 entries: index queries, what they see, statistics, P
    consumers (C / 64)          own 64 keys each: scores, Q, ds; ds goes through shared memory over its tile of P; dik stays in registers
                                for the whole item; the tile's diq is shared out by columns
"""

from __future__ import annotations

import math
from typing import NamedTuple

import jax
import jax.numpy as jnp
from jax import lax
from jax.experimental import pallas as pl
from jax.experimental.pallas import mosaic_gpu as plgpu

from pallas_kernels.index_kl import tuning
from pallas_kernels.index_kl.mosaic_gpu_student import TILE, Gathered, hide
from pallas_kernels.inverse_index import BLOCK, COUNT, ENTRY, LIST, ROWS, START, InverseIndex
from pallas_kernels.mosaic import TILED, all_phases_seen, int32, launch, product

_HALF = 64  # keys that one consumer owns: the rows of a wgmma
_NO_ENTRY = -1e30
_TINY = float(jnp.finfo(jnp.float32).tiny)


class Statistics(NamedTuple):
    """Of each entry, in list order, float32 [L, P]."""

    minus_lse_LP: jax.Array  # the student's, base 2; -1e30 in the padding
    weight_LP: jax.Array


def student_gradient(
    gathered: Gathered,
    statistics: Statistics,
    mean_LPC: jax.Array,
    slots_BZI: jax.Array,
    index: InverseIndex,
    *,
    scale: float,
    interpret: plgpu.InterpretGPUParams | None = None,
) -> tuple[jax.Array, jax.Array, jax.Array]:
    """(value, diq, dik) in parts: before weighting and in base 2, by key halves and entries [C / 64, L, P] float32; by entries [L, P, I] in
    the dtype of iq; by items [W, C, I] float32.

    diq and dik are derivatives by the products iq ik. What the padding of `mean_LPC` holds does not matter; value and diq are meaningless
    there.
    """
    (L, P, I), dtype, scale2 = gathered.iq_LPI.shape, gathered.iq_LPI.dtype, scale * math.log2(math.e)
    (B, Z), C, items = slots_BZI.shape[:2], mean_LPC.shape[-1], index.item_WX.shape[0]
    ring, consumers, simulated = tuning.GRADIENT_RING, C // _HALF, interpret is not None
    columns = max(I // consumers, 64)

    def index_kl_gradient(*refs):
        ik_ref, item_ref, *tile_refs = refs[:8]
        value_ref, diq_ref, dik_ref, ik_sm, iq_sm, first_sm, last_sm, lse_sm, weight_sm, mean_sm, value_sm, out_sm, *barriers = refs[8:]
        ik_bar, tile_bar, free_bar, ds_bar = barriers
        w, wg = lax.axis_index("w"), lax.axis_index("wg")
        l, entry = item_ref[w, LIST], item_ref[w, ENTRY]
        tiles = lax.div(item_ref[w, COUNT] + (TILE - 1), int32(TILE))

        def rows(i):
            return pl.ds(pl.multiple_of(entry + i * TILE, TILE), TILE)

        def produce():
            plgpu.set_max_registers(tuning.REGISTERS[1], action="decrease")
            plgpu.copy_gmem_to_smem(ik_ref.at[pl.ds(item_ref[w, BLOCK] * C, C)], ik_sm, ik_bar)

            @pl.loop(0, tiles)
            def _(i):
                slot = lax.rem(i, int32(ring))
                pl.when(i >= ring)(lambda: plgpu.barrier_wait(free_bar.at[slot]))
                for ref, sm in zip(tile_refs, (iq_sm, first_sm, last_sm, lse_sm, weight_sm, mean_sm), strict=True):
                    plgpu.copy_gmem_to_smem(ref.at[l, rows(i)], sm.at[slot], tile_bar.at[slot])

            all_phases_seen(free_bar, jnp.maximum(tiles - ring, 0), tiles, simulated=simulated)

        def consume(dik_acc):
            item = item_ref[w, START], item_ref[w, ROWS]
            mine = pl.ds(wg * _HALF, _HALF)
            plgpu.barrier_wait(ik_bar)

            @pl.loop(0, tiles)
            def _(i):
                slot = lax.rem(i, int32(ring))
                plgpu.barrier_wait(tile_bar.at[slot])
                value_X, ds_XC = compare(ik_sm, iq_sm, (first_sm, last_sm), (lse_sm, weight_sm), mean_sm, slot, item, mine, wg)
                plgpu.wait_smem_to_gmem(0, wait_read_only=True)
                value_sm[wg] = value_X
                mean_sm[slot, :, mine] = ds_XC.astype(dtype)
                plgpu.commit_smem()
                plgpu.barrier_arrive(ds_bar.at[slot])
                plgpu.copy_smem_to_gmem(value_sm.at[wg], value_ref.at[wg, l, rows(i)])
                plgpu.wgmma(dik_acc, mean_sm.at[slot, :, mine].T, iq_sm.at[slot])
                plgpu.barrier_wait(ds_bar.at[slot])

                @pl.when(wg * columns < I)
                def _():
                    part = pl.ds(wg * columns, columns)
                    out_sm[wg] = product(mean_sm.at[slot], ik_sm.at[:, part], TILE, columns).astype(dtype)
                    plgpu.commit_smem()
                    plgpu.copy_smem_to_gmem(out_sm.at[wg], diq_ref.at[l, rows(i), part])

                plgpu.wgmma_wait(0)
                plgpu.barrier_arrive(free_bar.at[slot])

            return dik_acc[...]

        def compare(ik_sm, iq_sm, seen_sm, statistics_sm, mean_sm, slot, item, mine, wg):
            """Value and ds of the tile's entries for this consumer's keys."""
            s_XC = hide(product(iq_sm.at[slot], ik_sm.at[mine].T, TILE, _HALF), seen_sm, slot, item, C, key0=wg * _HALF)
            minus_lse_XC, weight_XC = (
                lax.broadcast_in_dim(plgpu.load(sm.at[slot], layout=plgpu.Layout.WGMMA.reduce(1)), s_XC.shape, [0]) for sm in statistics_sm
            )
            mean_XC = plgpu.load(mean_sm.at[slot, :, mine], layout=plgpu.Layout.WGMMA).astype(jnp.float32)
            mean_XC = jnp.where(minus_lse_XC > 0.1 * _NO_ENTRY, mean_XC, 0.0)
            log_student_XC = s_XC * scale2 + minus_lse_XC
            value_X = (mean_XC * (jnp.log2(jnp.maximum(mean_XC, _TINY)) - log_student_XC)).sum(axis=1)
            return value_X, (jnp.exp2(log_student_XC) - mean_XC) * weight_XC

        @pl.when((wg < consumers) & (tiles > 0))
        def _():
            plgpu.set_max_registers(tuning.REGISTERS[0], action="increase")
            dik_ref[w, pl.ds(wg * _HALF, _HALF)] = pl.run_scoped(consume, plgpu.ACC((_HALF, I), jnp.float32))
            plgpu.wait_smem_to_gmem(0)

        pl.when((wg == consumers) & (tiles > 0))(produce)

    kernel = plgpu.kernel(
        index_kl_gradient,
        out_type=(
            jax.ShapeDtypeStruct((consumers, L, P), jnp.float32),
            jax.ShapeDtypeStruct((L, P, I), dtype),
            jax.ShapeDtypeStruct((items, C, I), jnp.float32),
        ),
        grid=(items,),
        grid_names=("w",),
        num_threads=consumers + 1,
        thread_name="wg",
        scratch_types=[
            plgpu.SMEM((C, I), dtype, transforms=TILED),
            plgpu.SMEM((ring, TILE, I), dtype, transforms=TILED),
            *[plgpu.SMEM((ring, TILE), kind) for kind in (jnp.int32, jnp.int32, jnp.float32, jnp.float32)],
            plgpu.SMEM((ring, TILE, C), dtype, transforms=TILED),  # P, then ds
            plgpu.SMEM((consumers, TILE), jnp.float32),
            plgpu.SMEM((I // columns, TILE, columns), dtype, transforms=TILED),
            plgpu.Barrier(),  # producer -> consumers: the index keys are there
            plgpu.Barrier(num_barriers=ring, num_arrivals=6),  # producer -> consumers: the slot's tile is there
            plgpu.Barrier(num_barriers=ring, num_arrivals=consumers),  # consumers -> producer: the slot's tile has been read
            plgpu.Barrier(num_barriers=ring, num_arrivals=consumers),  # consumers -> consumers: ds of all keys is there
        ],
        compiler_params=plgpu.CompilerParams(approx_math=True, reduction_scratch_bytes=0),
        **launch(interpret),
    )
    return kernel(slots_BZI.reshape(B * Z, I), index.item_WX, *gathered, *statistics, mean_LPC)
