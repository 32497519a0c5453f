"""What the Mosaic GPU kernels share: tiled layouts, NaN-ignoring maxima, and the few places where hardware and simulator part ways."""

from __future__ import annotations

from typing import Any

import jax
import jax.numpy as jnp
from jax import lax
from jax.experimental import pallas as pl
from jax.experimental.pallas import mosaic_gpu as plgpu
from jaxlib.mlir.dialects import arith

# Shared-memory tiles that wgmma reads: 8 rows of 128 bytes, swizzled.  A TMA slice into such a tile must start at a multiple of 8 rows of
# global memory (Mosaic addresses global memory by whole tiles), which is why keys of packed documents are first laid out in block slots.
TILED = (plgpu.TilingTransform((8, 64)), plgpu.SwizzleTransform(128))


MASKED = -1e30  # a masked logit: finite, so that the difference of two is not NaN


def refuse_device(device_kind: str) -> str | None:
    """Why Mosaic GPU kernels of this project do not run here, or None."""
    if not any(name in device_kind for name in ("H100", "H200", "H800", "H20", "GH200")):
        return f"is written for NVIDIA Hopper (sm_90), not for {device_kind}"
    if jax.__version_info__ < (0, 11):
        return f"needs JAX 0.11 (Python 3.12) or newer, not {jax.__version__}"
    return None


def int32(x: int) -> jax.Array:
    """A typed scalar: `lax.div` and `lax.rem` promote nothing."""
    return jnp.int32(x)


def filled(shape: tuple[int, ...], value: float | int | jax.Array, dtype: Any, layout: plgpu.Layout) -> jax.Array:
    """A register array of one value in `layout`."""
    return plgpu.layout_cast(jnp.full(shape, value, dtype), layout)


def product(a: Any, b: Any, rows: int, columns: int) -> jax.Array:
    """a @ b of two shared-memory tiles: float32 registers, waited for."""

    def body(acc):
        plgpu.wgmma(acc, a, b)
        return acc[...]

    return pl.run_scoped(body, plgpu.ACC((rows, columns), jnp.float32))


def row_max(x_XC: jax.Array, *, simulated: bool) -> jax.Array:
    """Maximum of each row of a wgmma accumulator, ignoring NaN; NaN only where the whole row is NaN.

    `jnp.max` lowers to max.NaN, and a `where` on every element would cost as much as the maximum itself; PTX's plain max ignores NaN for
    free.  The simulator runs no inlined code, so it takes the long way.
    """
    if simulated:
        nan_XC = jnp.isnan(x_XC)
        return jnp.where(nan_XC.all(axis=1), jnp.nan, jnp.where(nan_XC, -jnp.inf, x_XC).max(axis=1))

    @plgpu.inline_mgpu(
        arg_types=(plgpu.Layout.WGMMA,),
        return_type=plgpu.ShapeDtypeStruct(x_XC.shape[:1], x_XC.dtype, layout=plgpu.Layout.WGMMA.reduce(1)),
    )
    def reduce(_, x):
        return x.reduce(arith.maxnumf, 1, acc_ilp=4)

    return reduce(x_XC)


def means_width(groups: int) -> int:
    """Columns of `means_of_groups`: those of a wgmma come in eights."""
    return max(8, groups)


def means_of_groups(x_CX: jax.Array, size: int, real: int) -> jax.Array:
    """A wgmma accumulator's means over the first `real` of every `size` columns, [C, means_width], 0 in columns without a group.

    A product with a constant matrix would take the values in 16 bits, and registers for its result while other products are in flight.
    """
    (C, X), layout = x_CX.shape, plgpu.Layout.WGMMA
    shape = C, means_width(X // size)
    place_CQ = plgpu.broadcasted_iota(jnp.int32, shape, 1, layout=layout)
    means_CQ = filled(shape, 0.0, jnp.float32, layout)
    for j in range(X // size):
        group_CG = lax.slice(x_CX, (0, j * size), (C, (j + 1) * size))
        if real < size:
            group_CG = jnp.where(plgpu.broadcasted_iota(jnp.int32, (C, size), 1, layout=layout) < real, group_CG, 0.0)
        mean_CQ = lax.broadcast_in_dim(group_CG.sum(axis=1) * (1 / real), shape, [0])
        means_CQ = jnp.where(place_CQ == j, mean_CQ, means_CQ)
    return means_CQ


def launch(interpret: plgpu.InterpretGPUParams | None) -> dict[str, Any]:
    """Keyword arguments of `plgpu.kernel` that exist only where the simulator is asked for."""
    return {} if interpret is None else {"interpret": interpret}


def register_product(a_XC: jax.Array, b: Any, staging: Any) -> jax.Array:
    """a @ b with `a` in registers and `b` in shared memory: float32 registers, waited for.

    The simulator takes no left operand from registers: it goes through the shared-memory tile `staging`, which is None on hardware.
    """
    if staging is not None:
        staging[...] = a_XC
        plgpu.commit_smem()
    return product(a_XC if staging is None else staging, b, a_XC.shape[0], b.shape[1])


def store_where(predicate: jax.Array, source: Any, target: Any, *, simulated: bool) -> None:
    """Starts a TMA store of its own where `predicate` holds, without committing a group; the simulator knows no predicated store."""
    if simulated:
        pl.when(predicate)(lambda: plgpu.copy_smem_to_gmem(source, target, commit_group=False))
    else:
        plgpu.copy_smem_to_gmem(source, target, predicate=predicate, commit_group=False)


def row_values(values: list[jax.Array], shape: tuple[int, int], axis: int, layout: plgpu.Layout = plgpu.Layout.WGMMA) -> jax.Array:
    """An int32 register array that holds values[i] in the i-th of len(values) equal parts of `axis`."""
    place = plgpu.broadcasted_iota(jnp.int32, shape, axis, layout=layout)
    part = shape[axis] // len(values)
    result = filled(shape, values[-1], jnp.int32, layout)
    for i in reversed(range(len(values) - 1)):
        result = jnp.where(place < (i + 1) * part, values[i], result)
    return result


def all_phases_seen(barriers: Any, first: jax.Array, end: jax.Array, *, simulated: bool) -> None:
    """The simulator wants every completed phase of a ring's barriers to be observed; hardware does not care."""
    if simulated:

        @pl.loop(first, end)
        def _(i):
            plgpu.barrier_wait(barriers.at[lax.rem(i, int32(barriers.shape[0]))])
