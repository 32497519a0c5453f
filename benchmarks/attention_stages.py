"""The stages of sparse_attention's kernels, one by one: where the time of gpu_attention.py's rows goes.

The only place outside pallas_kernels that calls the kernels themselves: an op has no name for its stages. Lengths that are one chunk.
"""

import functools
import math
from collections.abc import Callable, Iterator

import jax
import jax.numpy as jnp

from pallas_kernels.block_table import BlockTable, block_table
from pallas_kernels.blocks import make_layout
from pallas_kernels.inverse_index import invert
from pallas_kernels.mosaic_pieces import sum_pieces
from pallas_kernels.sparse_attention import mosaic_gpu, tuning
from pallas_kernels.sparse_attention.mosaic_gpu_backward import backward_items, statistics
from pallas_kernels.sparse_attention.mosaic_gpu_kv_outer import kv_outer
from pallas_kernels.sparse_attention.mosaic_gpu_q_tile import q_tile
from pallas_kernels.sparse_attention.mosaic_gpu_split import split

ONE_CHUNK = 32768
C = 128


def stage_rows(q_BTNH: jax.Array, k_BSKH: jax.Array, v_BSKH: jax.Array, ids_BKTR: jax.Array, time_it: Callable) -> Iterator[dict]:
    """Rows {"stage", "ms"} of the forward's stages, then of the backward's. `time_it(f, *args)` gives milliseconds."""
    (_, T, N, H), K = q_BTNH.shape, k_BSKH.shape[2]
    table = jax.jit(lambda: block_table(make_layout(T, T, 1, None, None, None), C))()
    number_BKTR = table.number(ids_BKTR)
    q_BTKGH = mosaic_gpu.Grouped(N, K).group(q_BTNH)
    static = {"block_size": C, "scale": H**-0.5}
    yield from _forward_rows(q_BTKGH, k_BSKH, v_BSKH, number_BKTR, table, static, time_it)
    yield from _backward_rows(q_BTKGH, k_BSKH, v_BSKH, number_BKTR, table, static, time_it)


def _row(name: str, f: Callable, *args, time_it: Callable) -> tuple[dict, tuple]:
    f = jax.jit(f)
    return {"stage": name, "ms": round(time_it(f, *args), 3)}, f(*args)


def _forward_rows(q_BTKGH, k_BZKH, v_BZKH, number_BKTR, table: BlockTable, static: dict, time_it: Callable) -> Iterator[dict]:
    (B, K, T, R), G = number_BKTR.shape, q_BTKGH.shape[3]
    neighbours, origin_B2 = tuning.NEIGHBOURS // G, jnp.zeros((B, 2), jnp.int32)
    threshold = math.ceil(neighbours * tuning.COMMON_SHARE)
    row = functools.partial(_row, time_it=time_it)

    def split_selection(number_BKTR, table):
        return split(number_BKTR.reshape(B * K, T, R), table, neighbours=neighbours, threshold=threshold, block_size=C)

    def invert_strays(stray_LTR, table):
        return invert(stray_LTR.reshape(B, K, T, R), table, pad=max(4, tuning.ROWS // G), per=tuning.FORWARD_PER)

    def attend_strays(q, k, v, index, table):
        return kv_outer(q, k, v, index, (table.first_BT, origin_B2), slots=R, windows=False, **static)

    said, parts = row("forward: split", split_selection, number_BKTR, table)
    yield said
    said, index = row("forward: inverse index", invert_strays, parts.stray_LTR, table)
    yield said
    said, (part, lse) = row("forward: KV-outer", attend_strays, q_BTKGH, k_BZKH, v_BZKH, index, table)
    yield said
    said, lse = row("forward: gather lse", lambda *x: mosaic_gpu.part_lse(*x, neighbours, G), lse, index, parts.stray_LTR)
    yield said
    walk_and_merge = functools.partial(q_tile, **static)
    said, _ = row("forward: Q-tile and merge", walk_and_merge, q_BTKGH, k_BZKH, v_BZKH, parts.walk_LnYU, part, lse, origin_B2)
    yield said


def _backward_rows(q_BTKGH, k_BZKH, v_BZKH, number_BKTR, table: BlockTable, static: dict, time_it: Callable) -> Iterator[dict]:
    (B, K, _, R), G, H = number_BKTR.shape, q_BTKGH.shape[3], q_BTKGH.shape[-1]
    origin_B2, lse_BTKG = jnp.zeros((B, 2), jnp.int32), jnp.zeros(q_BTKGH.shape[:-1])
    row = functools.partial(_row, time_it=time_it)

    def invert_all(number_BKTR, table):
        return invert(number_BKTR, table, pad=max(4, tuning.ROWS // G), per=tuning.BACKWARD_PER)

    def items(q, dout, k, v, index, stats, table):
        return backward_items(q, dout, k, v, index, (stats, table.first_BT, origin_B2), slots=R, **static)

    said, index = row("backward: inverse index", invert_all, number_BKTR, table)
    yield said
    gather = functools.partial(statistics, slots=R, scale=static["scale"])
    said, stats = row("backward: statistics", gather, lse_BTKG, lse_BTKG, index)
    yield said
    said, (part, dkv) = row("backward: KV-outer", items, q_BTKGH, q_BTKGH, k_BZKH, v_BZKH, index, stats, table)
    yield said
    said, _ = row("backward: sum of dk, dv", lambda x, index: sum_pieces(x.reshape(x.shape[0], -1, H), index), dkv, index)
    yield said
    said, _ = row("backward: sum of dq", lambda x, n: mosaic_gpu.sum_slots(x.reshape(B, K, *x.shape[1:]), n, G), part, number_BKTR)
    yield said
