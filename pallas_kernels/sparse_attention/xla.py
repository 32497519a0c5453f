"""sparse_attention in plain JAX, a chunk of queries at a time (pallas_kernels/chunks.py), with a hand-written gradient.

Kept for the gradient: the inputs, out and lse. With P = exp(logits - lse) recomputed from them,

    dV = P^T dO        dS = scale * P * (dO V^T - rowsum(dO * O) + dlse)        dQ = dS K        dK = dS^T Q

Memory beside inputs and outputs: one chunk. A key or value that is not finite makes every row that keeps it NaN, and no other.
"""

import functools

import jax
import jax.numpy as jnp

from pallas_kernels.blocks import Layout
from pallas_kernels.chunks import Finite, by_group, by_head, finite, key_view, logits, row_elements, scan_queries
from pallas_kernels.numerics import accumulator, masked_softmax, rounded


def _keys(k_BSKH: jax.Array, v_BSKH: jax.Array) -> tuple[Finite, jax.Array]:
    """Keys and values as [B, K, S, H]; the fault of a value counts as one of its key."""
    k_BKSH, v_BKSH = finite(k_BSKH.swapaxes(1, 2)), finite(v_BSKH.swapaxes(1, 2))
    return k_BKSH._replace(fault=k_BKSH.fault + v_BKSH.fault.astype(k_BSKH.dtype)), v_BKSH.values


@functools.partial(jax.jit, static_argnames=("block_size", "scale"))
def forward(
    q_BTNH: jax.Array, k_BSKH: jax.Array, v_BSKH: jax.Array, ids_BKTR: jax.Array, layout: Layout, *, block_size: int, scale: float
) -> tuple[jax.Array, jax.Array]:
    """out [B, T, N, H] and lse [B, T, N]; see api.py."""
    num_keys, num_kv_heads = k_BSKH.shape[1:3]
    block_size = min(block_size, num_keys)
    k_BKSH, v_BKSH = _keys(k_BSKH, v_BSKH)

    def attend(carry: None, queries: tuple) -> tuple[None, tuple[jax.Array, jax.Array]]:
        q_BZNH, ids_BZKR, chunk_reach = queries
        view = key_view(ids_BZKR.swapaxes(1, 2), chunk_reach, num_keys, block_size)
        logits_BKZGU = logits(view, finite(by_group(q_BZNH, num_kv_heads)), k_BKSH, scale)
        weights_BKZGU, total_BKZG1, lse_BKZG1 = masked_softmax(logits_BKZGU, view.keep_BKZ1U)
        out_BKZGH = view.mix(rounded(weights_BKZGU, v_BKSH), v_BKSH) / total_BKZG1
        return carry, (by_head(out_BKZGH).astype(q_BTNH.dtype), by_head(lse_BKZG1)[..., 0])

    queries = (q_BTNH, ids_BKTR.swapaxes(1, 2), layout.reach)
    elements = row_elements(ids_BKTR, k_BKSH, q_BTNH.shape[2], max(k_BSKH.shape[-1], v_BSKH.shape[-1]), block_size)
    return scan_queries(attend, None, elements, queries)[1]


@functools.partial(jax.jit, static_argnames=("block_size", "scale"))
def backward(
    q_BTNH: jax.Array,
    k_BSKH: jax.Array,
    v_BSKH: jax.Array,
    ids_BKTR: jax.Array,
    layout: Layout,
    out_BTNH: jax.Array,
    lse_BTN: jax.Array,
    dout_BTNH: jax.Array,
    dlse_BTN: jax.Array,
    *,
    block_size: int,
    scale: float,
) -> tuple[jax.Array, jax.Array, jax.Array]:
    """Gradients of q, k and v from those of out and lse."""
    num_keys, num_kv_heads = k_BSKH.shape[1:3]
    block_size = min(block_size, num_keys)
    k_BKSH, v_BKSH = _keys(k_BSKH, v_BSKH)
    dtype = accumulator(q_BTNH, k_BSKH, v_BSKH)
    shift_BTN = (dout_BTNH.astype(dtype) * out_BTNH.astype(dtype)).sum(axis=-1) - dlse_BTN

    def chunk_gradients(sums: tuple, queries: tuple) -> tuple[tuple, jax.Array]:
        dk_BKSH, dv_BKSH = sums
        q_BZNH, dout_BZNH, lse_BZN, shift_BZN, ids_BZKR, chunk_reach = queries
        view = key_view(ids_BZKR.swapaxes(1, 2), chunk_reach, num_keys, block_size)
        q_BKZGH, dout_BKZGH = finite(by_group(q_BZNH, num_kv_heads)), finite(by_group(dout_BZNH, num_kv_heads))
        q_BKZGH = q_BKZGH._replace(fault=q_BKZGH.fault + dout_BKZGH.fault.astype(q_BTNH.dtype))
        lse_BKZG1, shift_BKZG1 = by_group(lse_BZN, num_kv_heads)[..., None], by_group(shift_BZN, num_kv_heads)[..., None]
        exponent_BKZGU = jnp.where(view.keep_BKZ1U, logits(view, q_BKZGH, k_BKSH, scale) - lse_BKZG1, -jnp.inf)
        probs_BKZGU = jnp.exp(exponent_BKZGU)
        dprobs_BKZGU = view.dot(dout_BKZGH.values, v_BKSH)
        ds_BKZGU = jnp.where(view.keep_BKZ1U, probs_BKZGU * (dprobs_BKZGU - shift_BKZG1) * scale, 0)
        ds_BKZGU = rounded(ds_BKZGU, q_BTNH)
        dk_BKSH = view.spread(ds_BKZGU, q_BKZGH.values, dk_BKSH)
        dv_BKSH = view.spread(rounded(probs_BKZGU, q_BTNH), dout_BKZGH.values, dv_BKSH)
        dq_BZNH = by_head(view.mix(ds_BKZGU, k_BKSH.values)).astype(q_BTNH.dtype)
        return (dk_BKSH, dv_BKSH), dq_BZNH

    zeros = (jnp.zeros_like(k_BKSH.values, dtype), jnp.zeros_like(v_BKSH, dtype))
    queries = (q_BTNH, dout_BTNH, lse_BTN, shift_BTN, ids_BKTR.swapaxes(1, 2), layout.reach)
    elements = row_elements(ids_BKTR, k_BKSH, q_BTNH.shape[2], max(k_BSKH.shape[-1], v_BSKH.shape[-1]), block_size)
    (dk_BKSH, dv_BKSH), dq_BTNH = scan_queries(chunk_gradients, zeros, elements, queries)
    return dq_BTNH, dk_BKSH.swapaxes(1, 2).astype(k_BSKH.dtype), dv_BKSH.swapaxes(1, 2).astype(v_BSKH.dtype)
