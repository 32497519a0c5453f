"""index_kl on Hopper (sm_90a): which calls the kernels serve, and the order in which they run.

On the kept blocks (`sparse`), for a chunk of queries at a time: invert the selection (inverse_index), log-sum-exp of the student
(mosaic_gpu_student), means of the teacher (mosaic_gpu_teacher, or the backward of sparse_attention), then value and gradients
(mosaic_gpu_gradient).  The chunk is as long as what its entries hold fits the budget of sparse_attention.

Over the full prefix (`full`): log-sum-exp of teacher and student, then for a chunk of queries at a time their difference, whose products
with ik and iq are the gradients (mosaic_gpu_prefix, mosaic_gpu_prefix_difference).
"""

from __future__ import annotations

import functools
import math

import jax
import jax.numpy as jnp
from jax import lax

from pallas_kernels.block_table import BlockTable, block_table
from pallas_kernels.blocks import Layout, at_queries
from pallas_kernels.index_kl import mosaic_gpu_prefix_difference as difference
from pallas_kernels.index_kl import tuning
from pallas_kernels.index_kl.mosaic_gpu_gradient import Statistics, student_gradient
from pallas_kernels.index_kl.mosaic_gpu_prefix import Rows, prefix_lse
from pallas_kernels.index_kl.mosaic_gpu_student import TILE, gather, gather_lists, log_sum_exp, of_chunk
from pallas_kernels.index_kl.mosaic_gpu_teacher import gather_lse, teacher_means
from pallas_kernels.inverse_index import InverseIndex, invert
from pallas_kernels.mosaic_pieces import sum_pieces
from pallas_kernels.numerics import einsum, vary_alike
from pallas_kernels.sparse_attention import mosaic_gpu as attention


def refuse(device_kind: str, iq_BTKI, ik_BSI, q_BTNH, k_BSKH, ids_BKTR, weights_BT, layout: Layout, **options) -> str | None:
    """Why the kernels do not serve a call, or None."""
    del weights_BT
    types = {x.dtype for x in (iq_BTKI, ik_BSI, q_BTNH, k_BSKH)}
    if len(types) > 1 or types.isdisjoint({jnp.dtype(jnp.bfloat16), jnp.dtype(jnp.float16)}):
        return f"serves bfloat16 and float16, the same for iq, ik, q and k, not {', '.join(sorted(map(str, types)))}"
    if iq_BTKI.shape[-1] not in (64, 128):
        return f"serves an index width of 64 or 128, not {iq_BTKI.shape[-1]}"
    if options["index_scale"] <= 0:
        return f"takes the maximum of unscaled scores and so needs index_scale > 0, not {options['index_scale']}"
    if ids_BKTR is None:  # the block size does not matter to the full prefix
        ids_BKTR, options = jax.ShapeDtypeStruct((1, 1, 1, 1), jnp.int32), options | {"block_size": 128}
    attention_options = {"block_size": options["block_size"], "scale": options["scale"]}
    return attention.refuse(device_kind, q_BTNH, k_BSKH, k_BSKH, ids_BKTR, layout, **attention_options)


def index_kl(
    iq_BTKI, ik_BSI, q_BTNH, k_BSKH, ids_BKTR, weights_BT, layout: Layout, *, block_size, scale, index_scale, with_gradients: bool
) -> tuple[jax.Array, tuple[jax.Array, jax.Array] | None]:
    """(loss, (diq, dik) in float32 for a cotangent of 1, or None): both come from the same tiles."""
    if ids_BKTR is None:
        value, *gradients = full(iq_BTKI, ik_BSI, q_BTNH, k_BSKH, weights_BT, layout, scale=scale, index_scale=index_scale)
    else:
        _, lse_BTN = attention.forward(q_BTNH, k_BSKH, k_BSKH, ids_BKTR, layout, block_size=block_size, scale=scale)
        static = {"block_size": block_size, "scale": scale, "index_scale": index_scale}
        value, *gradients = sparse(iq_BTKI, ik_BSI, q_BTNH, k_BSKH, ids_BKTR, lse_BTN, weights_BT, layout, **static)
    return value, tuple(gradients) if with_gradients else None


def value_and_gradient(
    iq_BTKI, slots_BZI, mean_LPC, weights_BT, table: BlockTable, index: InverseIndex, number_BKTR, *, index_scale, interpret=None
):
    """Of one chunk of queries: (value, diq [B, T, K, I], dik in slots [B, J * C, I]) in float32.

    Value in nats, summed over KV heads; diq and dik by the products iq ik, for weights in 0..1 or so.
    """
    (B, K, T, R), I, C = number_BKTR.shape, iq_BTKI.shape[-1], mean_LPC.shape[-1]
    gathered = gather(iq_BTKI, index, table, R)
    lse2_BKT = log_sum_exp(gathered, slots_BZI, index, number_BKTR, block_size=C, scale=index_scale, interpret=interpret)
    statistics = Statistics(
        gather_lists(-jnp.moveaxis(lse2_BKT, 1, 2), index, R, -1e30),
        gather_lists(jnp.broadcast_to(weights_BT[..., None], (B, T, K)).astype(jnp.float32), index, R, 0),
    )
    value_XLP, diq_LPI, dik_WCI = student_gradient(gathered, statistics, mean_LPC, slots_BZI, index, scale=index_scale, interpret=interpret)
    value = jnp.where(index.entry_LP >= 0, value_XLP.sum(0) * statistics.weight_LP, 0).sum() * math.log(2)
    diq_LNI = jnp.take_along_axis(diq_LPI, index.place_BKTR.reshape(B * K, -1, 1), axis=1, mode="clip")
    kept_LNI = (number_BKTR >= 0).reshape(B * K, -1, 1)
    diq_BKTI = jnp.where(kept_LNI, diq_LNI.astype(jnp.float32), 0).reshape(B, K, T, R, I).sum(axis=3)
    dik_BJCI = sum_pieces(dik_WCI, index, interpret).reshape(B, K, -1, C, I).sum(axis=1)
    return value, jnp.moveaxis(diq_BKTI, 1, 2), dik_BJCI.reshape(B, -1, I)


def normalised(weights_BT: jax.Array) -> tuple[jax.Array, jax.Array]:
    """(unit, weights / unit): weights come divided by the number of tokens, and in float16 their products with probabilities vanish."""
    unit = jnp.abs(weights_BT).max()
    return unit, jnp.where(unit > 0, weights_BT / jnp.where(unit > 0, unit, 1), 0).astype(jnp.float32)


@functools.partial(jax.jit, static_argnames=("block_size", "scale", "index_scale", "interpret"))
def sparse(
    iq_BTKI, ik_BSI, q_BTNH, k_BSKH, ids_BKTR, lse_BTN, weights_BT, layout: Layout, *, block_size, scale, index_scale, interpret=None
):
    """(value, diq, dik) in float32 on the kept blocks, for a cotangent of 1. `lse_BTN`: of sparse_attention on the same support."""
    (B, T, N, _), S, K, R, I = q_BTNH.shape, k_BSKH.shape[1], k_BSKH.shape[2], ids_BKTR.shape[-1], iq_BTKI.shape[-1]
    heads, table = attention.Grouped(N, K), block_table(layout, block_size)
    q_BTKGH, number_BKTR = heads.group(q_BTNH), table.number(ids_BKTR)
    lse_BTKG = jnp.where(jnp.arange(heads.padded) < heads.shape[1], heads.group(lse_BTN), -jnp.inf)
    k_BZKH, slots_BZI = table.to_slots(k_BSKH, block_size), table.to_slots(ik_BSI[:, :, None], block_size)[:, :, 0]
    unit, weights_BT = normalised(weights_BT)
    bytes_a_query = B * K * R * (2 * (2 * I + block_size) + 4 * (heads.padded + 8))
    length = attention.chunk_length(T, bytes_a_query, TILE)

    def one(dik_BZI, chunk):
        part, number, origin_B2 = attention.chunked(table, number_BKTR, length, chunk)

        def here(x_BTY):
            return of_chunk(x_BTY, length, chunk)

        index = invert(number, part, pad=TILE, per=tuning.PER)
        mean_LPC = teacher_means(
            q_BTKGH,
            k_BZKH,
            gather_lse(here(lse_BTKG), index, R),
            index,
            (part.first_BT, origin_B2),
            slots=R,
            block_size=block_size,
            group=heads.shape[1],
            scale=scale,
            interpret=interpret,
        )
        value, diq_BTKI, more_BZI = value_and_gradient(
            here(iq_BTKI), slots_BZI, mean_LPC, here(weights_BT), part, index, number, index_scale=index_scale, interpret=interpret
        )
        return dik_BZI + more_BZI, (value, diq_BTKI)

    chunks = -(-T // length)
    dik_BZI, _ = vary_alike((jnp.zeros(slots_BZI.shape, jnp.float32), slots_BZI))
    if chunks == 1:
        dik_BZI, (value, diq_BTKI) = one(dik_BZI, jnp.int32(0))
    else:
        dik_BZI, (values, diq) = lax.scan(one, dik_BZI, jnp.arange(chunks, dtype=jnp.int32))
        value, diq_BTKI = values.sum(), jnp.moveaxis(diq, 0, 1).reshape(B, chunks * length, K, I)
    dik_BSI = table.from_slots(dik_BZI[:, :, None], S)[:, :, 0]
    return value * (unit / K), diq_BTKI[:, :T] * (unit * index_scale / K), dik_BSI * (unit * index_scale / K)


@functools.partial(jax.jit, static_argnames=("scale", "index_scale", "interpret"))
def full(iq_BTKI, ik_BSI, q_BTNH, k_BSKH, weights_BT, layout: Layout, *, scale, index_scale, interpret=None):
    """(value, diq, dik) in float32 over the full prefix, for a cotangent of 1."""
    (B, T), (S, K) = q_BTNH.shape[:2], k_BSKH.shape[1:3]
    unit, weights_BT = normalised(weights_BT)
    most = max(tuning.DIFFERENCE_BYTES // (B * K * S * iq_BTKI.dtype.itemsize), TILE)
    chunks = -(-T // most)
    length = -(-T // (chunks * TILE)) * TILE

    def padded(x, to, value=0):
        return jnp.pad(x, [(0, 0), (0, to - x.shape[1])] + [(0, 0)] * (x.ndim - 2), constant_values=value)

    real_BT = at_queries(layout.segments_BS, layout.reach.index_BT) > 0
    first_BT = jnp.where(real_BT, layout.reach.index_BT - at_queries(layout.positions_BS, layout.reach.index_BT), 0)
    last_BT = jnp.where(real_BT, layout.reach.index_BT, -1)
    queries, keys = chunks * length, -(-S // difference.OWNED) * difference.OWNED
    rows = Rows(padded(first_BT, queries), padded(last_BT, queries, -1))
    # A key that no query sees has no part in any product, not even as NaN.
    seen_BS1 = ((layout.segments_BS > 0) & (jnp.arange(S) <= last_BT.max(axis=1, keepdims=True)))[..., None]
    ik_BSI = padded(jnp.where(seen_BS1, ik_BSI, 0), keys)
    k_BSKH = padded(jnp.where(seen_BS1[..., None], k_BSKH, 0), keys)
    iq_BTKI, q_BTNH = padded(iq_BTKI, queries), padded(q_BTNH, queries)
    lse_BNT = prefix_lse(q_BTNH, k_BSKH, rows, scale=scale, interpret=interpret)
    student_BKT = prefix_lse(iq_BTKI, ik_BSI[:, :, None], rows, scale=index_scale, interpret=interpret)
    sees_B1T = (rows.first_BT <= rows.last_BT)[:, None]
    weights_BT = padded(weights_BT, queries)
    statistics = difference.Statistics(jnp.where(sees_B1T, -lse_BNT, 0), jnp.where(sees_B1T, -student_BKT, 0), weights_BT)

    def one(dik_BSI, start):
        arrays = q_BTNH, k_BSKH, iq_BTKI, ik_BSI
        value_BKYZ, ds_BKZS = difference.prefix_difference(
            arrays, statistics, rows, start, length, scale=scale, index_scale=index_scale, interpret=interpret
        )
        value = (value_BKYZ.sum(axis=(1, 2)) * lax.dynamic_slice_in_dim(weights_BT, start, length, axis=1)).sum()
        diq_BZKI = einsum("bkzs,bsi->bzki", ds_BKZS, ik_BSI)
        iq_BZKI = lax.dynamic_slice_in_dim(iq_BTKI, start, length, axis=1)
        return dik_BSI + einsum("bkzs,bzki->bsi", ds_BKZS, iq_BZKI), (value, diq_BZKI)

    dik_BSI, _ = vary_alike((jnp.zeros(ik_BSI.shape, jnp.float32), ik_BSI))
    dik_BSI, (values, diq) = lax.scan(one, dik_BSI, jnp.arange(chunks, dtype=jnp.int32) * length)
    diq_BTKI = jnp.moveaxis(diq, 0, 1).reshape(B, queries, K, -1)[:, :T]
    return values.sum() * (unit / K * math.log(2)), diq_BTKI * (unit * index_scale / K), dik_BSI[:, :S] * (unit * index_scale / K)
