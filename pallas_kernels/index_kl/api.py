"""index_kl: how far the index branch's ranking is from the attention it steers (MSA paper, arXiv 2606.13392)."""

from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp

from pallas_kernels import dispatch
from pallas_kernels.blocks import Layout
from pallas_kernels.checks import checked_layout, require, require_block_size, require_float, require_groups, require_ids, require_sizes
from pallas_kernels.index_kl import mosaic_gpu, mosaic_gpu_fused, reference, xla
from pallas_kernels.numerics import accumulator
from pallas_kernels.sparse_attention.api import REGISTERED as ATTENTION

OP = "index_kl"


def _differentiable(loss_and_gradients: Callable) -> Callable:
    """`loss_and_gradients(iq, ik, ..., with_gradients=) -> (loss, (diq, dik) or None)` as a function of which jax.grad is right.

    The loss is one number: its gradients are made with it, kept, and multiplied by the cotangent.
    """

    def run(iq_BTKI: jax.Array, ik_BSI: jax.Array, *constants: Any, **options: Any) -> jax.Array:
        @jax.custom_vjp
        def loss(iq_BTKI: jax.Array, ik_BSI: jax.Array, *constants: Any) -> jax.Array:
            return loss_and_gradients(iq_BTKI, ik_BSI, *constants, **options, with_gradients=False)[0]

        def loss_forward(*arrays: Any) -> tuple[jax.Array, tuple]:
            return loss_and_gradients(*arrays, **options, with_gradients=True)

        def loss_backward(gradients: tuple[jax.Array, jax.Array], dloss: jax.Array) -> tuple:
            diq_BTKI, dik_BSI = gradients
            return ((dloss * diq_BTKI).astype(iq_BTKI.dtype), (dloss * dik_BSI).astype(ik_BSI.dtype), *(None for _ in constants))

        loss.defvjp(loss_forward, loss_backward)
        return loss(iq_BTKI, ik_BSI, *constants)

    return run


REGISTERED = {
    "reference": dispatch.Implementation(reference.index_kl),
    "xla": dispatch.Implementation(_differentiable(xla.index_kl)),
    "mosaic_gpu": dispatch.Implementation(_differentiable(mosaic_gpu.index_kl), mosaic_gpu.refuse),
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
    vectors = {"iq_BTKI": iq_BTKI, "ik_BSI": ik_BSI, "q_BTNH": q_BTNH, "k_BSKH": k_BSKH}
    require_float(OP, **vectors)
    ids = {} if ids_BKTR is None else {"ids_BKTR": ids_BKTR}
    require_ids(OP, **ids)
    sizes = require_sizes(OP, **vectors, **ids)
    require_block_size(OP, sizes["S"], block_size)
    require_groups(OP, sizes["N"], sizes["K"])
    layout = checked_layout(OP, sizes, segments, positions, q_offset)
    dtype = accumulator(iq_BTKI, ik_BSI, q_BTNH, k_BSKH)
    weights_BT = _weights(sizes, layout, weights_BT, denominator, dtype)
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


def _weights(
    sizes: dict[str, int], layout: Layout, weights_BT: jax.Array | None, denominator: jax.Array | float | None, dtype: jnp.dtype
) -> jax.Array:
    """Weights over their denominator, so that an implementation sees one kind of weight; a zero count gives exact zeros."""
    if weights_BT is None:
        weights_BT = layout.reach.count_BT > 0
    require(
        jnp.shape(weights_BT) == (sizes["B"], sizes["T"]),
        f"{OP}: weights_BT has shape {jnp.shape(weights_BT)}; it must be [B, T] = {(sizes['B'], sizes['T'])}",
    )
    weights_BT = jax.lax.stop_gradient(jnp.asarray(weights_BT, dtype))
    denominator = weights_BT.sum() if denominator is None else jax.lax.stop_gradient(jnp.asarray(denominator, dtype))
    require(denominator.ndim == 0, f"{OP}: denominator has shape {denominator.shape}; it must be one number")
    return jnp.where(denominator == 0, 0, weights_BT / jnp.where(denominator == 0, 1, denominator))


def _in_turn(name: str) -> Callable:
    """Both ops, one after the other, by the implementation `name`."""

    def run(q_BTNH, k_BSKH, v_BSKH, iq_BTKI, ik_BSI, ids_BKTR, weights_BT, probe, layout, *, block_size, scale, index_scale):
        options = {"block_size": block_size, "scale": scale}
        out_BTNH, lse_BTN = ATTENTION[name].run(q_BTNH, k_BSKH, v_BSKH, ids_BKTR, layout, **options)
        constants = *jax.lax.stop_gradient((q_BTNH, k_BSKH)), ids_BKTR, weights_BT, layout
        kl = REGISTERED[name].run(iq_BTKI, ik_BSI, *constants, index_scale=index_scale, **options)
        if probe is None:
            return out_BTNH, lse_BTN, kl
        value = jax.lax.stop_gradient(kl)
        return out_BTNH, lse_BTN, (kl - value) + (probe - jax.lax.stop_gradient(probe)) * value

    return run


FUSED_OP = "sparse_attention_and_index_kl"
FUSED = {
    "reference": dispatch.Implementation(_in_turn("reference")),
    "xla": dispatch.Implementation(_in_turn("xla")),
    "mosaic_gpu": dispatch.Implementation(mosaic_gpu_fused.sparse_attention_and_index_kl, mosaic_gpu_fused.refuse),
}


def sparse_attention_and_index_kl(
    q_BTNH: jax.Array,
    k_BSKH: jax.Array,
    v_BSKH: jax.Array,
    iq_BTKI: jax.Array,
    ik_BSI: jax.Array,
    ids_BKTR: jax.Array,
    *,
    block_size: int,
    scale: float | None = None,
    index_scale: float | None = None,
    weights_BT: jax.Array | None = None,
    denominator: jax.Array | float | None = None,
    probe: jax.Array | None = None,
    segments: jax.Array | None = None,
    positions: jax.Array | None = None,
    q_offset: jax.Array | int | None = None,
    implementation: str = "auto",
) -> tuple[jax.Array, jax.Array, jax.Array]:
    """(out, lse, kl): sparse_attention and index_kl on the same blocks, in one op because their backward passes share work.

    Gradients and arguments are those of the two ops; out and lse send none to iq and ik, kl none to q, k and v.

    The value of kl needs the teacher, which the backward pass has anyway and the forward pass does not. Where a step wants gradients and
    the value for its log, a `probe` saves computing it twice: with any float32 scalar as probe, kl is 0 in the forward pass, its gradients
    are the same, and its gradient by the probe is the value.

        gradients, value_of_kl = jax.grad(lambda params, probe: lm_loss(params) + kl(params, probe), argnums=(0, 1))(params, 0.0)

    Raises:
      ValueError: shapes or numbers that contradict each other. Unsupported: see pallas_kernels.dispatch.
    """
    sizes = require_sizes(FUSED_OP, q_BTNH=q_BTNH, k_BSKH=k_BSKH, iq_BTKI=iq_BTKI, ik_BSI=ik_BSI, ids_BKTR=ids_BKTR)
    require_sizes(FUSED_OP, k_BSK=k_BSKH[..., 0], v_BSK=v_BSKH[..., 0])
    require_float(FUSED_OP, q_BTNH=q_BTNH, k_BSKH=k_BSKH, v_BSKH=v_BSKH, iq_BTKI=iq_BTKI, ik_BSI=ik_BSI)
    require_ids(FUSED_OP, ids_BKTR=ids_BKTR)
    require_block_size(FUSED_OP, sizes["S"], block_size)
    require_groups(FUSED_OP, sizes["N"], sizes["K"])
    layout = checked_layout(FUSED_OP, sizes, segments, positions, q_offset)
    weights_BT = _weights(sizes, layout, weights_BT, denominator, accumulator(iq_BTKI, ik_BSI, q_BTNH, k_BSKH))
    with jax.named_scope(FUSED_OP):
        return dispatch.run(
            FUSED_OP,
            implementation,
            FUSED,
            *(q_BTNH, k_BSKH, v_BSKH, iq_BTKI, ik_BSI, ids_BKTR),
            weights_BT,
            probe,
            layout,
            block_size=int(block_size),
            scale=sizes["H"] ** -0.5 if scale is None else float(scale),
            index_scale=sizes["I"] ** -0.5 if index_scale is None else float(index_scale),
        )
