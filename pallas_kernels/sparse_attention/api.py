"""sparse_attention: exact softmax attention over the key blocks that each query kept (MSA paper, arXiv 2606.13392)."""

from collections.abc import Callable
from typing import Any

import jax

from pallas_kernels import dispatch
from pallas_kernels.checks import checked_layout, require, require_block_size, require_float, require_groups, require_ids, require_sizes
from pallas_kernels.sparse_attention import mosaic_gpu, reference, xla

OP = "sparse_attention"


def _differentiable(forward: Callable, backward: Callable) -> Callable:
    """`forward(q, k, v, ids, layout, *, block_size, scale) -> (out, lse)` with the gradient that `backward` computes.

    `backward(q, k, v, ids, layout, out, lse, dout, dlse, *, block_size, scale) -> (dq, dk, dv)`.
    """

    def run(*arrays: Any, block_size: int, scale: float) -> tuple[jax.Array, jax.Array]:
        @jax.custom_vjp
        def attend(*arrays: Any) -> tuple[jax.Array, jax.Array]:
            return forward(*arrays, block_size=block_size, scale=scale)

        def attend_forward(*arrays: Any) -> tuple[tuple[jax.Array, jax.Array], tuple]:
            results = attend(*arrays)
            return results, (arrays, results)

        def attend_backward(kept: tuple, cotangents: tuple[jax.Array, jax.Array]) -> tuple:
            arrays, results = kept
            return (*backward(*arrays, *results, *cotangents, block_size=block_size, scale=scale), None, None)

        attend.defvjp(attend_forward, attend_backward)
        return attend(*arrays)

    return run


REGISTERED = {
    "reference": dispatch.Implementation(reference.sparse_attention),
    "xla": dispatch.Implementation(_differentiable(xla.forward, xla.backward)),
    "mosaic_gpu": dispatch.Implementation(_differentiable(mosaic_gpu.forward, mosaic_gpu.backward), mosaic_gpu.refuse),
}


def sparse_attention(
    q_BTNH: jax.Array,
    k_BSKH: jax.Array,
    v_BSKH: jax.Array,
    ids_BKTR: jax.Array,
    *,
    block_size: int,
    scale: float | None = None,
    segments: jax.Array | None = None,
    positions: jax.Array | None = None,
    q_offset: jax.Array | int | None = None,
    implementation: str = "auto",
) -> tuple[jax.Array, jax.Array]:
    """out[t, n] = sum over j of softmax_j(scale * <q[t, n], k[j]>) v[j], j running over the support of (t, n's KV head).

    The support: keys of the query's document, not after it, whose block floor(position / block_size) is among its ids. An id
    outside 0..floor(position of the query / block_size) is ignored wherever it stands, a repeated one counts once. A query
    without any valid id, or a padding query, has out 0, lse -inf and zero gradients. Padding and blocks that a query did not
    choose never matter to it, not even as NaN; nor do later keys of its own block, but in "mosaic_gpu" a NaN among their values.

    Args:
      q_BTNH: queries; the N / K heads of a group share the KV head's blocks.
      k_BSKH: keys.
      v_BSKH: values; their head width may differ from that of q and k.
      ids_BKTR: integers, block ids from block_select.
      block_size: keys a block (C), the one that block_select was called with.
      scale: default H ** -0.5.
      segments, positions, q_offset, implementation: as for block_select.

    Returns:
      (out, lse): out [B, T, N, width of v] in the dtype of q; lse [B, T, N] float32 (float64 for float64 inputs), natural
      log-sum-exp of the scaled logits. Differentiable in q, k and v through both.

    Raises:
      ValueError: shapes or numbers that contradict each other. Unsupported: see pallas_kernels.dispatch.
    """
    sizes = require_sizes(OP, q_BTNH=q_BTNH, k_BSKH=k_BSKH, ids_BKTR=ids_BKTR)
    require(
        v_BSKH.ndim == 4 and v_BSKH.shape[:3] == k_BSKH.shape[:3],
        f"{OP}: v_BSKH has shape {v_BSKH.shape}; it must be [B, S, K, any width] with [B, S, K] = {k_BSKH.shape[:3]}, as in k_BSKH",
    )
    require_float(OP, q_BTNH=q_BTNH, k_BSKH=k_BSKH, v_BSKH=v_BSKH)
    require_ids(OP, ids_BKTR=ids_BKTR)
    require_block_size(OP, sizes["S"], block_size)
    require_groups(OP, sizes["N"], sizes["K"])
    layout = checked_layout(OP, sizes, segments, positions, q_offset)
    with jax.named_scope(OP):
        return dispatch.run(
            OP,
            implementation,
            REGISTERED,
            q_BTNH,
            k_BSKH,
            v_BSKH,
            ids_BKTR,
            layout,
            block_size=int(block_size),
            scale=sizes["H"] ** -0.5 if scale is None else float(scale),
        )
