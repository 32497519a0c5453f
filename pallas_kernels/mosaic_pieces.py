"""Sum of what the work items of one block leave behind: hot blocks are shared by many thread blocks, which must not add in any order."""

from __future__ import annotations

import jax
import jax.numpy as jnp
from jax import lax
from jax.experimental import pallas as pl
from jax.experimental.pallas import mosaic_gpu as plgpu

from pallas_kernels.inverse_index import InverseIndex
from pallas_kernels.mosaic import filled, launch

_ROWS = 32  # rows that one thread block adds at a time


def sum_pieces(part_WCX: jax.Array, index: InverseIndex, interpret: plgpu.InterpretGPUParams | None = None) -> jax.Array:
    """[L, J, C, X] float32: the sum over each block's work items, in their order; 0 for blocks without any."""
    (L, J), (_, C, X) = index.first_item_LJ.shape, part_WCX.shape
    pieces_Y2 = jnp.stack([index.first_item_LJ, index.num_items_LJ], axis=-1).reshape(L * J, 2)
    layout = plgpu.Layout.WG_STRIDED((_ROWS, X), vec_size=4)

    def sum_pieces_of_block(part_ref, pieces_ref, sum_ref):
        y = lax.axis_index("y")
        first, count = pieces_ref[y, 0], pieces_ref[y, 1]
        for begin in range(0, C, _ROWS):
            rows = pl.ds(begin, _ROWS)

            def add(i, total, rows=rows):
                return total + plgpu.load(part_ref.at[first + i, rows], layout=layout, optimized=False)

            sum_ref[y, rows] = lax.fori_loop(0, count, add, filled((_ROWS, X), 0, jnp.float32, layout))

    kernel = plgpu.kernel(
        sum_pieces_of_block,
        out_type=jax.ShapeDtypeStruct((L * J, C, X), jnp.float32),
        grid=(L * J,),
        grid_names=("y",),
        **launch(interpret),
    )
    return kernel(part_WCX, pieces_Y2).reshape(L, J, C, X)
