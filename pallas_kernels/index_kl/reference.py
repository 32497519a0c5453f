"""The definition of index_kl: for each query, the two distributions over all keys of which its support is kept."""

import functools

import jax
import jax.numpy as jnp

from pallas_kernels.blocks import Layout, support
from pallas_kernels.numerics import accumulator, einsum, masked_softmax


@functools.partial(jax.jit, static_argnames=("block_size", "scale", "index_scale"))
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
) -> jax.Array:
    """Sum over queries of weight * mean over KV heads of KL(teacher || student); see api.py. Its gradients are those of autodiff."""
    batch, _, num_heads, _ = q_BTNH.shape
    num_kv_heads = k_BSKH.shape[2]
    dtype = accumulator(iq_BTKI, ik_BSI, q_BTNH, k_BSKH)
    q_BTNH, k_BSKH = jax.lax.stop_gradient((q_BTNH.astype(dtype), k_BSKH.astype(dtype)))
    support_BKTS = support(ids_BKTR, layout, block_size, num_kv_heads)

    # One query at a time, so that keys outside its support are replaced by zero: multiplied by zero, a NaN would stay.
    @jax.checkpoint
    def divergence(query: tuple[jax.Array, jax.Array, jax.Array]) -> jax.Array:
        iq_BKI, q_BNH, support_BKS = query
        kept_BSK1 = support_BKS.swapaxes(1, 2)[..., None]
        q_BKGH = q_BNH.reshape(batch, num_kv_heads, num_heads // num_kv_heads, -1)
        logits_BKGS = einsum("bkgh,bskh->bkgs", q_BKGH, jnp.where(kept_BSK1, k_BSKH, 0)) * scale
        weights_BKGS, total_BKG1, _ = masked_softmax(logits_BKGS, support_BKS[:, :, None])
        teacher_BKS = (weights_BKGS / total_BKG1).mean(axis=2)
        s_BKS = einsum("bki,bski->bks", iq_BKI.astype(dtype), jnp.where(kept_BSK1, ik_BSI[:, :, None].astype(dtype), 0)) * index_scale
        _, _, lse_BK1 = masked_softmax(s_BKS, support_BKS)
        log_student_BKS = jnp.where(support_BKS, s_BKS - lse_BK1, 0)
        log_teacher_BKS = jnp.log(jnp.where(teacher_BKS > 0, teacher_BKS, 1))
        return (teacher_BKS * (log_teacher_BKS - log_student_BKS)).sum(axis=-1).mean(axis=-1)

    rows = (iq_BTKI.swapaxes(0, 1), q_BTNH.swapaxes(0, 1), jnp.moveaxis(support_BKTS, 2, 0))
    return (weights_BT.T * jax.lax.map(divergence, rows)).sum()
