"""index_kl: how far the index branch's ranking is from the attention it steers (MSA paper, arXiv 2606.13392)."""

import jax
import jax.numpy as jnp

from pallas_kernels import dispatch
from pallas_kernels.blocks import at_queries
from pallas_kernels.checks import checked_layout, require, require_block_size, require_float, require_groups, require_ids, require_sizes
from pallas_kernels.index_kl import mosaic_gpu, reference
from pallas_kernels.numerics import accumulator

OP = "index_kl"
REGISTERED = {
    "reference": dispatch.Implementation(reference.index_kl),
    "xla": dispatch.Implementation(reference.index_kl),
    "mosaic_gpu": dispatch.Implementation(mosaic_gpu.index_kl, mosaic_gpu.refuse),
}


def index_kl(
    iq_BTKI: jax.Array,
    ik_BSI: jax.Array,
    q_BTNH: jax.Array,
    k_BSKH: jax.Array,
    ids_BKTR: jax.Array | None,
    *,
    block_size: int,
    scale: float | None = None,
    index_scale: float | None = None,
    weights_BT: jax.Array | None = None,
    denominator: jax.Array | float | None = None,
    segments: jax.Array | None = None,
    positions: jax.Array | None = None,
    q_offset: jax.Array | int | None = None,
    implementation: str = "auto",
) -> jax.Array:
    """sum over t of w[t] * mean over k of KL(P[t, k] || Q[t, k]) / denominator, a float32 scalar.

        P[t, k] = mean over the heads n of group k of softmax_j(scale * <q[t, n], k[j, k]>)     the teacher
        Q[t, k] = softmax_j(index_scale * <iq[t, k], ik[j]>)                                    the student

    Both softmaxes run over the support of (t, k) as sparse_attention defines it, or over all visible keys where ids are None
    (warm-up). A query without support contributes exactly nothing. With s the student's logits, the gradient is

        ds[t, j, k] = w[t] (Q - P)[t, j, k] / (denominator * K)

    and reaches `iq_BTKI` and `ik_BSI` only; everything else is a constant of the loss.

    Args:
      iq_BTKI, ik_BSI: index queries and keys, as for block_select.
      q_BTNH, k_BSKH: main queries and keys, as for sparse_attention.
      ids_BKTR: integers, block ids from block_select, or None for the full causal prefix.
      block_size: keys a block (C).
      scale: default H ** -0.5. index_scale: default I ** -0.5.
      weights_BT: weight of each query; default 1, and 0 for padding.
      denominator: a number, for example the token count of the global batch; default the sum of weights_BT.
        Where it is 0, the result and its gradients are 0.
      segments, positions, q_offset, implementation: as for block_select.

    Raises:
      ValueError: shapes or numbers that contradict each other. Unsupported: see pallas_kernels.dispatch.
    """
    sizes = require_sizes(OP, iq_BTKI=iq_BTKI, ik_BSI=ik_BSI, q_BTNH=q_BTNH, k_BSKH=k_BSKH)
    require_float(OP, iq_BTKI=iq_BTKI, ik_BSI=ik_BSI, q_BTNH=q_BTNH, k_BSKH=k_BSKH)
    if ids_BKTR is not None:
        require_sizes(OP, iq_BTK=iq_BTKI[..., 0], ids_BKTR=ids_BKTR)
        require_ids(OP, ids_BKTR)
    require_block_size(OP, sizes["S"], block_size)
    require_groups(OP, sizes["N"], sizes["K"])
    layout = checked_layout(OP, sizes, segments, positions, q_offset)
    dtype = accumulator(iq_BTKI, ik_BSI, q_BTNH, k_BSKH)
    if weights_BT is None:
        weights_BT = at_queries(layout.segments_BS, layout.index_BT) > 0
    require(
        jnp.shape(weights_BT) == (sizes["B"], sizes["T"]),
        f"{OP}: weights_BT has shape {jnp.shape(weights_BT)}; it must be [B, T] = {(sizes['B'], sizes['T'])}",
    )
    weights_BT = jax.lax.stop_gradient(jnp.asarray(weights_BT, dtype))
    denominator = weights_BT.sum() if denominator is None else jax.lax.stop_gradient(jnp.asarray(denominator, dtype))
    require(denominator.ndim == 0, f"{OP}: denominator has shape {denominator.shape}; it must be one number")
    # Normalised before the op, so that an implementation sees one kind of weight and a zero count gives exact zeros.
    weights_BT = jnp.where(denominator == 0, 0, weights_BT / jnp.where(denominator == 0, 1, denominator))
    with jax.named_scope(OP):
        return dispatch.run(
            OP,
            implementation,
            REGISTERED,
            iq_BTKI,
            ik_BSI,
            q_BTNH,
            k_BSKH,
            ids_BKTR,
            weights_BT,
            layout,
            block_size=int(block_size),
            scale=sizes["H"] ** -0.5 if scale is None else float(scale),
            index_scale=sizes["I"] ** -0.5 if index_scale is None else float(index_scale),
        )
