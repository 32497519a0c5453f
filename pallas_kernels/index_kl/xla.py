"""index_kl in plain JAX, a chunk of queries at a time (pallas_kernels/chunks.py), with a hand-written gradient.

The loss is a scalar, so its gradient is made in the same pass and only scaled later: both distributions are at hand then,
and recomputing them would cost the whole op again. Kept for it: diq and dik, of the sizes of iq and ik.
"""

import functools

import jax
import jax.numpy as jnp

from pallas_kernels.blocks import Layout
from pallas_kernels.chunks import Dense, Gathered, by_group, finite, for_heads, key_view, logits, row_elements, scan_queries
from pallas_kernels.numerics import accumulator, masked_softmax


def _divergence(view: Dense | Gathered, logits_BKZGU: jax.Array, s_BKZ1U: jax.Array) -> tuple[jax.Array, jax.Array]:
    """KL(teacher || student) [B, K, Z] and student - teacher [B, K, Z, 1, U], the gradient of the KL with respect to s."""
    weights_BKZGU, total_BKZG1, _ = masked_softmax(logits_BKZGU, view.keep_BKZ1U)
    teacher_BKZ1U = (weights_BKZGU / total_BKZG1).mean(axis=3, keepdims=True)
    weights_BKZ1U, total_BKZ11, lse_BKZ11 = masked_softmax(s_BKZ1U, view.keep_BKZ1U)
    log_ratio_BKZ1U = jnp.log(jnp.where(teacher_BKZ1U > 0, teacher_BKZ1U, 1)) - (s_BKZ1U - lse_BKZ11)
    kl_BKZ = jnp.where(view.keep_BKZ1U, teacher_BKZ1U * log_ratio_BKZ1U, 0).sum(axis=(-1, -2))
    return kl_BKZ, weights_BKZ1U / total_BKZ11 - teacher_BKZ1U


@functools.partial(jax.jit, static_argnames=("block_size", "scale", "index_scale", "with_gradients"))
def index_kl(
    iq_BTKI: jax.Array,
    ik_BSI: jax.Array,
    q_BTNH: jax.Array,
    k_BSKH: jax.Array,
    ids_BKTR: jax.Array | None,
    weights_BT: jax.Array,
    layout: Layout,
    *,
    block_size: int,
    scale: float,
    index_scale: float,
    with_gradients: bool,
) -> tuple[jax.Array, tuple[jax.Array, jax.Array] | None]:
    """The loss of reference.py and, when asked for, its gradients (diq [B, T, K, I], dik [B, S, I]) in float32."""
    num_keys, num_kv_heads = k_BSKH.shape[1:3]
    block_size = min(block_size, num_keys)
    dtype = accumulator(iq_BTKI, ik_BSI, q_BTNH, k_BSKH)
    k_BKSH = finite(k_BSKH.swapaxes(1, 2))
    ik_BKSI = for_heads(ik_BSI, num_kv_heads)

    def chunk_loss(sums: tuple, queries: tuple) -> tuple[tuple, jax.Array | None]:
        loss, dik_BKSI = sums
        iq_BZKI, q_BZNH, weights_BZ, ids_BZKR, chunk_reach = queries
        ids_BKZR = None if ids_BZKR is None else ids_BZKR.swapaxes(1, 2)
        view = key_view(ids_BKZR, chunk_reach, num_keys, block_size)
        iq_BKZ1I = finite(by_group(iq_BZKI, num_kv_heads))
        logits_BKZGU = logits(view, finite(by_group(q_BZNH, num_kv_heads)), k_BKSH, scale)
        kl_BKZ, difference_BKZ1U = _divergence(view, logits_BKZGU, logits(view, iq_BKZ1I, ik_BKSI, index_scale))
        weights_B1Z = weights_BZ[:, None] / num_kv_heads
        loss += (weights_B1Z * kl_BKZ).sum()
        if not with_gradients:
            return (loss, None), None
        ds_BKZ1U = difference_BKZ1U * (weights_B1Z * index_scale)[..., None, None]
        dik_BKSI = view.spread(ds_BKZ1U, iq_BKZ1I.values.astype(dtype), dik_BKSI)
        return (loss, dik_BKSI), view.mix(ds_BKZ1U, ik_BKSI.values)[:, :, :, 0].swapaxes(1, 2)

    width = max(k_BSKH.shape[-1], ik_BSI.shape[-1])
    elements = row_elements(ids_BKTR, k_BKSH, q_BTNH.shape[2], width, block_size)
    zeros = (jnp.zeros_like(weights_BT[0, 0], dtype), jnp.zeros_like(ik_BKSI.values, dtype) if with_gradients else None)
    queries = (iq_BTKI, q_BTNH, weights_BT, None if ids_BKTR is None else ids_BKTR.swapaxes(1, 2), layout.reach)
    (loss, dik_BKSI), diq_BTKI = scan_queries(chunk_loss, zeros, elements, queries)
    return loss, (diq_BTKI, dik_BKSI.sum(axis=1)) if with_gradients else None
