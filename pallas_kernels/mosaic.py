"""What the Mosaic GPU kernels share: tiled layouts, NaN-ignoring maxima, and the few places where hardware and simulator part ways."""

from typing import Any

import jax
import jax.numpy as jnp
from jax.experimental import pallas as pl
from jax.experimental.pallas import mosaic_gpu as plgpu
from jaxlib.mlir.dialects import arith

# Shared-memory tiles that wgmma reads: 8 rows of 128 bytes, swizzled.  A TMA slice into such a tile must start at a multiple of 8 rows of
# global memory (Mosaic addresses global memory by whole tiles), which is why keys of packed documents are first laid out in block slots.
TILED = (plgpu.TilingTransform((8, 64)), plgpu.SwizzleTransform(128))


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


def launch(interpret: plgpu.InterpretGPUParams | None) -> dict[str, Any]:
    """Keyword arguments of `plgpu.kernel` that exist only where the simulator is asked for."""
    return {} if interpret is None else {"interpret": interpret}
