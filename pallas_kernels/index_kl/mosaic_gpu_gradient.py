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

import functools
import math
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jax import lax
from jax.experimental import pallas as pl
from jax.experimental.pallas import mosaic_gpu as plgpu

from pallas_kernels.index_kl import tuning
from pallas_kernels.index_kl.mosaic_gpu_student import TILE, Gathered, Item, Ring, hide, produce
from pallas_kernels.inverse_index import InverseIndex
from pallas_kernels.mosaic import TILED, int32, launch, product

_HALF = 64  # keys that one consumer owns: the rows of a wgmma
_NO_ENTRY = -1e30
_TINY = float(jnp.finfo(jnp.float32).tiny)


class Statistics(NamedTuple):
    """Of each entry, in list order, float32 [L, P]."""

    minus_lse_LP: jax.Array  # the student's, base 2; -1e30 in the padding
    weight_LP: jax.Array


class _Lists(NamedTuple):
    gathered: Gathered
    statistics: Statistics
    mean_LPC: jax.Array  # P; in shared memory ds takes its place


class _Out(NamedTuple):
    """Shared memory of the consumers."""

    value: Any
    diq: Any
    ds_bar: Any  # consumers -> consumers: ds of all keys is there


def _compare(item: Item, ring: Ring, slot: jax.Array, wg: jax.Array, scale2: float) -> tuple[jax.Array, jax.Array]:
    """Value and ds of a tile's entries for the keys of this consumer."""
    lists, mine = ring.tiles, pl.ds(wg * _HALF, _HALF)
    s_XC = product(lists.gathered.iq_LPI.at[slot], ring.keys.at[mine].T, TILE, _HALF)
    s_XC = hide(s_XC, lists.gathered, slot, item, ring.keys.shape[0], key0=wg * _HALF)
    minus_lse_XC, weight_XC = (
        lax.broadcast_in_dim(plgpu.load(sm.at[slot], layout=plgpu.Layout.WGMMA.reduce(1)), s_XC.shape, [0]) for sm in lists.statistics
    )
    mean_XC = plgpu.load(lists.mean_LPC.at[slot, :, mine], layout=plgpu.Layout.WGMMA).astype(jnp.float32)
    mean_XC = jnp.where(minus_lse_XC > 0.1 * _NO_ENTRY, mean_XC, 0.0)
    log_student_XC = s_XC * scale2 + minus_lse_XC
    value_X = (mean_XC * (jnp.log2(jnp.maximum(mean_XC, _TINY)) - log_student_XC)).sum(axis=1)
    return value_X, (jnp.exp2(log_student_XC) - mean_XC) * weight_XC


def _consume(item: Item, ring: Ring, out: _Out, value_ref: Any, diq_ref: Any, wg: jax.Array, dik_acc: Any, *, scale2: float) -> jax.Array:
    """Every tile, for 64 keys: value and ds; dik of these keys, which is returned; diq of all keys for a part of the columns."""
    ds_sm, iq_sm, slots = ring.tiles.mean_LPC, ring.tiles.gathered.iq_LPI, ring.free_bar.shape[0]
    width, columns = iq_sm.shape[-1], out.diq.shape[-1]
    mine = pl.ds(wg * _HALF, _HALF)
    plgpu.barrier_wait(ring.keys_bar)

    @pl.loop(0, item.tiles())
    def _(i):
        slot = lax.rem(i, int32(slots))
        plgpu.barrier_wait(ring.tile_bar.at[slot])
        value_X, ds_XC = _compare(item, ring, slot, wg, scale2)
        plgpu.wait_smem_to_gmem(0, wait_read_only=True)
        out.value[wg] = value_X
        ds_sm[slot, :, mine] = ds_XC.astype(ds_sm.dtype)
        plgpu.commit_smem()
        plgpu.barrier_arrive(out.ds_bar.at[slot])
        plgpu.copy_smem_to_gmem(out.value.at[wg], value_ref.at[wg, item.list, item.tile(i)])
        plgpu.wgmma(dik_acc, ds_sm.at[slot, :, mine].T, iq_sm.at[slot])
        plgpu.barrier_wait(out.ds_bar.at[slot])

        @pl.when(wg * columns < width)
        def _():
            part = pl.ds(wg * columns, columns)
            out.diq[wg] = product(ds_sm.at[slot], ring.keys.at[:, part], TILE, columns).astype(ds_sm.dtype)
            plgpu.commit_smem()
            plgpu.copy_smem_to_gmem(out.diq.at[wg], diq_ref.at[item.list, item.tile(i), part])

        plgpu.wgmma_wait(0)
        plgpu.barrier_arrive(ring.free_bar.at[slot])

    return dik_acc[...]


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
    (L, P, I), dtype, C, items = gathered.iq_LPI.shape, gathered.iq_LPI.dtype, mean_LPC.shape[-1], index.item_WX.shape[0]
    consumers, scale2 = C // _HALF, scale * math.log2(math.e)
    lists, columns = _Lists(gathered, statistics, mean_LPC), max(I // consumers, 64)

    def index_kl_gradient(lists_ref, ik_ref, item_ref, value_ref, diq_ref, dik_ref, ring, out):
        w, wg = lax.axis_index("w"), lax.axis_index("wg")
        item = Item.read(item_ref, w)

        @pl.when((wg < consumers) & (item.count > 0))
        def _():
            plgpu.set_max_registers(tuning.REGISTERS[0], action="increase")
            consume = functools.partial(_consume, item, ring, out, value_ref, diq_ref, wg, scale2=scale2)
            dik_ref[w, pl.ds(wg * _HALF, _HALF)] = pl.run_scoped(consume, plgpu.ACC((_HALF, I), jnp.float32))
            plgpu.wait_smem_to_gmem(0)

        @pl.when((wg == consumers) & (item.count > 0))
        def _():
            plgpu.set_max_registers(tuning.REGISTERS[1], action="decrease")
            produce(item, ik_ref, lists_ref, ring, simulated=interpret is not None)

    out = _Out(
        plgpu.SMEM((consumers, TILE), jnp.float32),
        plgpu.SMEM((I // columns, TILE, columns), dtype, transforms=TILED),
        plgpu.Barrier(num_barriers=tuning.GRADIENT_RING, num_arrivals=consumers),
    )
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
        scratch_types=(Ring.types((C, I), dtype, lists, tuning.GRADIENT_RING, readers=consumers), out),
        compiler_params=plgpu.CompilerParams(approx_math=True, reduction_scratch_bytes=0),
        **launch(interpret),
    )
    return kernel(lists, slots_BZI.reshape(-1, I), index.item_WX)
