"""sparse_attention on Hopper (sm_90a): which calls the kernels serve, and the order in which they run.

Forward, for a chunk of queries at a time: split the selection into common and stray entries (mosaic_gpu_split), invert the stray ones
(inverse_index), run them KV-outer (mosaic_gpu_kv_outer), then walk the common blocks and merge (mosaic_gpu_q_tile). The chunk is as long
as the parts of its entries fit tuning.BUDGET_BYTES.
"""

from __future__ import annotations

import functools
import math
from typing import NamedTuple

import jax
import jax.numpy as jnp
from jax import lax
from jax.experimental.pallas import mosaic_gpu as plgpu

from pallas_kernels.block_table import BlockTable, block_table
from pallas_kernels.blocks import Layout
from pallas_kernels.inverse_index import InverseIndex, invert
from pallas_kernels.mosaic import refuse_device
from pallas_kernels.mosaic_pieces import sum_pieces
from pallas_kernels.numerics import vary_alike
from pallas_kernels.sparse_attention import tuning
from pallas_kernels.sparse_attention.mosaic_gpu_backward import backward_items, statistics
from pallas_kernels.sparse_attention.mosaic_gpu_kv_outer import kv_outer
from pallas_kernels.sparse_attention.mosaic_gpu_q_tile import q_tile
from pallas_kernels.sparse_attention.mosaic_gpu_split import split

TEACHER_PAD = 64  # the kernels of index_kl take 64 entries of one block a tile


def refuse(
    device_kind: str, q_BTNH: jax.Array, k_BSKH: jax.Array, v_BSKH: jax.Array, ids_BKTR: jax.Array, layout: Layout, **options
) -> str | None:
    """Why the kernels do not serve a call, or None."""
    del layout
    width, group = q_BTNH.shape[-1], q_BTNH.shape[2] // k_BSKH.shape[2]
    if q_BTNH.dtype not in (jnp.bfloat16, jnp.float16) or not q_BTNH.dtype == k_BSKH.dtype == v_BSKH.dtype:
        return f"serves bfloat16 and float16, not q in {q_BTNH.dtype}, k in {k_BSKH.dtype} and v in {v_BSKH.dtype}"
    if width not in (64, 128) or v_BSKH.shape[-1] != width:
        return f"serves head widths of 64 and 128, the same for q, k and v, not {width} and {v_BSKH.shape[-1]}"
    if options["block_size"] not in (64, 128):
        return f"serves block_size 64 and 128, not {options['block_size']}"
    if group not in (1, 2, 4, 8, 16, 32):
        return f"serves groups of 1, 2, 4, 8, 16 or 32 query heads a KV head, not {group}"
    if not 1 <= ids_BKTR.shape[-1] <= 32:
        return f"serves 1 to 32 blocks a query, not {ids_BKTR.shape[-1]}"
    if k_BSKH.shape[1] // options["block_size"] > 1 << 15:
        return f"numbers at most 32768 blocks a row, not the {k_BSKH.shape[1] // options['block_size']} of S={k_BSKH.shape[1]}"
    if options["scale"] <= 0:
        return f"takes the maximum of unscaled logits and so needs scale > 0, not {options['scale']}"
    return refuse_device(device_kind)


class Grouped:
    """Query heads by KV head, [B, T, K, G, H], padded with zero heads to groups of 8: a tile in shared memory has 8 rows or more."""

    def __init__(self, num_heads: int, num_kv_heads: int):
        self.shape = num_kv_heads, num_heads // num_kv_heads
        self.padded = max(8, self.shape[1])

    def group(self, x_BTNY: jax.Array) -> jax.Array:
        x_BTKGY = x_BTNY.reshape(*x_BTNY.shape[:2], *self.shape, *x_BTNY.shape[3:])
        spare = [(0, 0)] * x_BTKGY.ndim
        spare[3] = (0, self.padded - self.shape[1])
        return jnp.pad(x_BTKGY, spare) if spare[3][1] else x_BTKGY

    def ungroup(self, x_BTKGY: jax.Array) -> jax.Array:
        return x_BTKGY[:, :, :, : self.shape[1]].reshape(*x_BTKGY.shape[:2], -1, *x_BTKGY.shape[4:])


def chunk_length(num_queries: int, bytes_a_query: int, multiple: int) -> int:
    """Queries a chunk: as many as fit the budget, chunks of nearly equal length."""
    most = max(tuning.BUDGET_BYTES // bytes_a_query, multiple)
    chunks = math.ceil(num_queries / most)
    return math.ceil(num_queries / (chunks * multiple)) * multiple


def chunked(table: BlockTable, number_BKTR: jax.Array, length: int, chunk: jax.Array) -> tuple[BlockTable, jax.Array, jax.Array]:
    """One chunk's queries of a table and a selection, and its origin: its first query and that query's key row.

    Past the last query there is none: no entries.
    """
    T = number_BKTR.shape[2]
    beyond = -T % length
    start = chunk * length

    def queries(x_BTY, axis, fill):
        spare = [(0, 0)] * x_BTY.ndim
        spare[axis] = (0, beyond)
        return lax.dynamic_slice_in_dim(jnp.pad(x_BTY, spare, constant_values=fill), start, length, axis)

    columns = {
        name: queries(getattr(table, name), 1, fill) for name, fill in (("base_BT", 0), ("local_BT", -1), ("first_BT", 0), ("last_BT", 0))
    }
    origin_B2 = jnp.stack([jnp.broadcast_to(start, table.last_BT.shape[:1]), table.last_BT[:, 0] + start], axis=-1).astype(jnp.int32)
    return table._replace(**columns), queries(number_BKTR, 2, -1), origin_B2


def part_lse(lse_LPX: jax.Array, index: InverseIndex, number_LTR: jax.Array, neighbours: int, group: int) -> jax.Array:
    """Log-sum-exp of the parts from list order to the order of the parts, [L, n, R, X * G]; -inf where there is no entry."""
    L, T, R = number_LTR.shape
    place_LN = index.place_BKTR.reshape(L, -1)
    lse_LTRG = jnp.take_along_axis(lse_LPX.reshape(L, -1, group), place_LN[..., None], axis=1, mode="clip").reshape(L, T, R, group)
    lse_LTRG = jnp.where((number_LTR >= 0)[..., None], lse_LTRG, -jnp.inf)
    return lse_LTRG.reshape(L, T // neighbours, neighbours, R, group).swapaxes(2, 3).reshape(L, T // neighbours, R, -1)


def forward_chunk(
    q_BTKGH, k_BZKH, v_BZKH, number_BKTR, table: BlockTable, origin_B2, *, windows: bool, block_size: int, scale: float, interpret=None
):
    """out [B, Tc, K, G, H] and lse [B, Tc, K, G] of one chunk of queries."""
    (B, K, T, R), G = number_BKTR.shape, q_BTKGH.shape[3]
    neighbours = tuning.NEIGHBOURS // G
    threshold = max(1, math.ceil(neighbours * tuning.COMMON_SHARE))
    static = {"block_size": block_size, "scale": scale, "interpret": interpret}
    number_LTR = number_BKTR.reshape(B * K, T, R)
    parts = split(number_LTR, table, neighbours=neighbours, threshold=threshold, block_size=block_size, interpret=interpret)
    index = invert(parts.stray_LTR.reshape(B, K, T, R), table, pad=max(4, tuning.ROWS // G), per=tuning.FORWARD_PER)
    part, lse_LPX = kv_outer(q_BTKGH, k_BZKH, v_BZKH, index, (table.first_BT, origin_B2), slots=R, windows=windows, **static)
    lse_LnRM = part_lse(lse_LPX, index, parts.stray_LTR, neighbours, G)
    out, lse_LnM = q_tile(q_BTKGH, k_BZKH, v_BZKH, parts.walk_LnYU, part, lse_LnRM, origin_B2, **static)
    return out, lse_LnM.reshape(B, K, T, G).swapaxes(1, 2)


@functools.partial(jax.jit, static_argnames=("block_size", "scale", "interpret"))
def forward(
    q_BTNH: jax.Array,
    k_BSKH: jax.Array,
    v_BSKH: jax.Array,
    ids_BKTR: jax.Array,
    layout: Layout,
    *,
    block_size: int,
    scale: float,
    interpret: plgpu.InterpretGPUParams | None = None,
) -> tuple[jax.Array, jax.Array]:
    """out [B, T, N, H] and lse [B, T, N] as api.py describes them."""
    (B, T, N, H), K, R = q_BTNH.shape, k_BSKH.shape[2], ids_BKTR.shape[-1]
    heads = Grouped(N, K)
    table = block_table(layout, block_size)
    q_BTKGH, number_BKTR = heads.group(q_BTNH), table.number(ids_BKTR)
    k_BZKH, v_BZKH = table.to_slots(k_BSKH, block_size), table.to_slots(v_BSKH, block_size)
    bytes_a_query = B * K * heads.padded * R * (H * q_BTNH.dtype.itemsize + 2 * 4)
    length = chunk_length(T, bytes_a_query, tuning.NEIGHBOURS // heads.padded)

    def one(chunk):
        chunk_table, chunk_number, origin_B2 = chunked(table, number_BKTR, length, chunk)
        static = {"windows": not table.whole(k_BSKH.shape[1], block_size), "block_size": block_size, "scale": scale, "interpret": interpret}
        return forward_chunk(q_BTKGH, k_BZKH, v_BZKH, chunk_number, chunk_table, origin_B2, **static)

    out, lse = each_chunk(one, -(-T // length))
    # Inside shard_map what a kernel returns counts as equal on all devices, and its cotangent would be summed over them.
    return vary_alike((heads.ungroup(out[:, :T]), heads.ungroup(lse[:, :T]), q_BTNH))[:2]


def each_chunk(one, chunks: int):
    """one(chunk) for every chunk, results joined along the queries."""
    if chunks == 1:
        return one(jnp.int32(0))
    return joined_chunks(lax.map(one, jnp.arange(chunks, dtype=jnp.int32)))


def joined_chunks(stacked):
    """[chunks, B, length, ...] as [B, chunks * length, ...]."""
    return jax.tree.map(lambda x: jnp.moveaxis(x, 0, 1).reshape(x.shape[1], -1, *x.shape[3:]), stacked)


class Teacher(NamedTuple):
    """What index_kl takes from the backward: for each entry the mean over its heads of the probabilities, and where the entries stand."""

    mean_LPC: jax.Array  # in list order; padding holds no numbers
    index: InverseIndex


def backward_chunk(arrays, number_BKTR, table: BlockTable, origin_B2, *, group, teacher, block_size, scale, interpret=None):
    """dq [B, Tc, K, G, H] of a chunk, its part of (dk, dv) [L, J, 2 C, H] in slots, and the Teacher or None."""
    q_BTKGH, dout_BTKGH, k_BZKH, v_BZKH, lse_BTKG, delta_BTKG = arrays
    (B, K, _, R), G = number_BKTR.shape, q_BTKGH.shape[3]
    pad = TEACHER_PAD if teacher else max(4, tuning.ROWS // G)
    index = invert(number_BKTR, table, pad=pad, per=tuning.BACKWARD_PER)
    stats = statistics(lse_BTKG, delta_BTKG, index, R, scale)
    static = {"slots": R, "block_size": block_size, "scale": scale, "interpret": interpret}
    chunk = stats, table.first_BT, origin_B2
    part, dkv, *mean = backward_items(q_BTKGH, dout_BTKGH, k_BZKH, v_BZKH, index, chunk, teacher=group if teacher else None, **static)
    dkv_LJCH = sum_pieces(dkv.reshape(dkv.shape[0], -1, dkv.shape[-1]), index, interpret)
    dq = sum_slots(part.reshape(B, K, *part.shape[1:]), number_BKTR, G)
    return dq, dkv_LJCH, Teacher(mean[0], index) if teacher else None


def sum_slots(part_BKnRMH: jax.Array, number_BKTR: jax.Array, group: int) -> jax.Array:
    """Sum of a query's parts in float32, [B, T, K, G, H]; places without an entry hold no numbers."""
    B, K, n, R, M, H = part_BKnRMH.shape
    real_BKnRX = (number_BKTR >= 0).reshape(B, K, n, M // group, R).swapaxes(3, 4)
    part_BKnRXGH = part_BKnRMH.reshape(B, K, n, R, M // group, group, H).astype(jnp.float32)
    dq_BKnXGH = jnp.where(real_BKnRX[..., None, None], part_BKnRXGH, 0).sum(axis=3)
    return jnp.moveaxis(dq_BKnXGH.reshape(B, K, -1, group, H), 1, 2).astype(part_BKnRMH.dtype)


def backward_chunks(residuals, cotangents, layout: Layout, *, block_size: int, scale: float, consume=None, interpret=None):
    """(dq, dk, dv) for residuals (q, k, v, ids, out, lse) and cotangents (dout, dlse), and what `consume` made of the teacher.

    `consume(chunk, length, table, number, teacher)` is called for each chunk of `length` queries with the chunk's table, selection and
    Teacher; it returns a tree to be added over the chunks, and a tree of [B, length, ...] to be joined along the queries.
    """
    (q_BTNH, k_BSKH, v_BSKH, ids_BKTR, out_BTNH, lse_BTN), (dout_BTNH, dlse_BTN) = residuals, cotangents
    (B, T, N, H), (_, S, K, _), R = q_BTNH.shape, k_BSKH.shape, ids_BKTR.shape[-1]
    heads, teacher = Grouped(N, K), consume is not None
    table = block_table(layout, block_size)
    number_BKTR = table.number(ids_BKTR)
    # The barrier keeps XLA from computing the row sums inside the gather that reads them, one thread a row.
    delta_BTN = lax.optimization_barrier((dout_BTNH.astype(jnp.float32) * out_BTNH.astype(jnp.float32)).sum(axis=-1)) - dlse_BTN
    k_BZKH, v_BZKH = table.to_slots(k_BSKH, block_size), table.to_slots(v_BSKH, block_size)
    q_BTKGH, dout_BTKGH, lse_BTKG, delta_BTKG = (heads.group(x) for x in (q_BTNH, dout_BTNH.astype(q_BTNH.dtype), lse_BTN, delta_BTN))
    # With a teacher its means, and of each entry what index_kl holds: index query and its gradient, at most 128 wide.
    bytes_a_query = B * K * R * (heads.padded * H * 2 + 4 * 2 * heads.padded + teacher * 2 * (block_size + 2 * 128))
    length = chunk_length(T, bytes_a_query, tuning.NEIGHBOURS // heads.padded)
    chunks = -(-T // length)

    def one(chunk):
        chunk_table, chunk_number, origin_B2 = chunked(table, number_BKTR, length, chunk)
        rows_of_chunk = (rows(x, chunk * length, length) for x in (lse_BTKG, delta_BTKG))
        arrays = q_BTKGH, dout_BTKGH, k_BZKH, v_BZKH, *rows_of_chunk
        static = {"group": N // K, "teacher": teacher, "block_size": block_size, "scale": scale, "interpret": interpret}
        dq, dkv, means = backward_chunk(arrays, chunk_number, chunk_table, origin_B2, **static)
        added, joined = consume(chunk, length, chunk_table, chunk_number, means) if teacher else ((), ())
        return (dkv, added), (dq, joined)

    def add(total, chunk):
        (summed, joined), _ = vary_alike((one(chunk), q_BTNH))
        return jax.tree.map(jnp.add, total, summed), joined

    if chunks == 1:
        summed, joined = one(jnp.int32(0))
    else:
        zeros = jax.tree.map(lambda x: jnp.zeros(x.shape, x.dtype), jax.eval_shape(one, jnp.int32(0))[0])
        zeros, _ = vary_alike((zeros, q_BTNH))
        summed, stacked = lax.scan(add, zeros, jnp.arange(chunks, dtype=jnp.int32))
        joined = joined_chunks(stacked)
    (dkv_LJCH, added), (dq_BTKGH, joined) = summed, jax.tree.map(lambda x: x[:, :T], joined)
    dkv_XBZKH = dkv_LJCH.reshape(B, K, -1, 2, block_size, H).transpose(3, 0, 2, 4, 1, 5).reshape(2, B, -1, K, H)
    dk_BSKH, dv_BSKH = (table.from_slots(x, S).astype(k_BSKH.dtype) for x in dkv_XBZKH)
    return vary_alike((((heads.ungroup(dq_BTKGH), dk_BSKH, dv_BSKH), (added, joined)), q_BTNH))[0]


@functools.partial(jax.jit, static_argnames=("block_size", "scale", "interpret"))
def backward(
    q_BTNH: jax.Array,
    k_BSKH: jax.Array,
    v_BSKH: jax.Array,
    ids_BKTR: jax.Array,
    layout: Layout,
    *results_and_cotangents: jax.Array,
    block_size: int,
    scale: float,
    interpret: plgpu.InterpretGPUParams | None = None,
) -> tuple[jax.Array, jax.Array, jax.Array]:
    """(dq, dk, dv), given also out, lse, dout and dlse."""
    out_BTNH, lse_BTN, *cotangents = results_and_cotangents
    residuals = q_BTNH, k_BSKH, v_BSKH, ids_BKTR, out_BTNH, lse_BTN
    return backward_chunks(residuals, cotangents, layout, block_size=block_size, scale=scale, interpret=interpret)[0]


def rows(x_BTKG: jax.Array, start: jax.Array, length: int) -> jax.Array:
    """Rows start..start + length - 1; past the end, zeros."""
    beyond = -x_BTKG.shape[1] % length
    return lax.dynamic_slice_in_dim(jnp.pad(x_BTKG, ((0, 0), (0, beyond), (0, 0), (0, 0))), start, length, axis=1)
