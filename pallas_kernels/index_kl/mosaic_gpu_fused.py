"""sparse_attention and index_kl in one on Hopper (sm_90a).

With a probe: the backward of the attention has the teacher's probabilities in registers. It emits their means over the heads, and the
index loss takes its value and its gradients from them, without computing q k a second time.

Without: the forward has to know the value. It computes the teacher from the attention's log-sum-exp, and the gradients with the value.
"""

from __future__ import annotations

import functools

import jax
import jax.numpy as jnp
from jax import lax

from pallas_kernels.block_table import block_table
from pallas_kernels.blocks import Layout
from pallas_kernels.index_kl.mosaic_gpu import normalised, sparse, value_and_gradient
from pallas_kernels.index_kl.mosaic_gpu import refuse as refuse_index_kl
from pallas_kernels.index_kl.mosaic_gpu_student import of_chunk
from pallas_kernels.numerics import vary_alike
from pallas_kernels.sparse_attention import mosaic_gpu as attention
from pallas_kernels.sparse_attention.api import REGISTERED as ATTENTION


def refuse(
    device_kind: str,
    q_BTNH,
    k_BSKH,
    v_BSKH,
    iq_BTKI,
    ik_BSI,
    ids_BKTR,
    weights_BT,
    probe,
    layout: Layout,
    *,
    block_size,
    scale,
    index_scale,
) -> str | None:
    """Why the kernels do not serve a call, or None."""
    del probe
    options = {"block_size": block_size, "scale": scale}
    return attention.refuse(device_kind, q_BTNH, k_BSKH, v_BSKH, ids_BKTR, layout, **options) or refuse_index_kl(
        device_kind, iq_BTKI, ik_BSI, q_BTNH, k_BSKH, ids_BKTR, weights_BT, layout, index_scale=index_scale, **options
    )


def sparse_attention_and_index_kl(
    q_BTNH, k_BSKH, v_BSKH, iq_BTKI, ik_BSI, ids_BKTR, weights_BT, probe, layout: Layout, *, block_size, scale, index_scale
) -> tuple[jax.Array, jax.Array, jax.Array]:
    """(out, lse, kl) as api.py describes them."""
    constants = ids_BKTR, lax.stop_gradient(weights_BT), layout
    if probe is not None:
        return _attend(q_BTNH, k_BSKH, v_BSKH, iq_BTKI, ik_BSI, probe, constants, block_size, scale, index_scale)
    out_BTNH, lse_BTN = ATTENTION["mosaic_gpu"].run(q_BTNH, k_BSKH, v_BSKH, ids_BKTR, layout, block_size=block_size, scale=scale)
    teacher = lax.stop_gradient((q_BTNH, k_BSKH, lse_BTN))
    return out_BTNH, lse_BTN, _loss(iq_BTKI, ik_BSI, teacher, constants, block_size, scale, index_scale)


@functools.partial(jax.custom_vjp, nondiff_argnums=(4, 5, 6))
def _loss(iq_BTKI, ik_BSI, teacher, constants, block_size, scale, index_scale):
    """index_kl, given q, k and the log-sum-exp of the attention."""
    return _loss_forward(iq_BTKI, ik_BSI, teacher, constants, block_size, scale, index_scale)[0]


def _loss_forward(iq_BTKI, ik_BSI, teacher, constants, block_size, scale, index_scale):
    (q_BTNH, k_BSKH, lse_BTN), (ids_BKTR, weights_BT, layout) = teacher, constants
    static = {"block_size": block_size, "scale": scale, "index_scale": index_scale}
    value, *gradients = sparse(iq_BTKI, ik_BSI, q_BTNH, k_BSKH, ids_BKTR, lse_BTN, weights_BT, layout, **static)
    return vary_alike((value, *gradients, iq_BTKI))[0], (gradients, iq_BTKI, ik_BSI)


def _loss_backward(block_size, scale, index_scale, residuals, cotangent):
    gradients, *inputs = residuals
    return *((cotangent * gradient).astype(x.dtype) for gradient, x in zip(gradients, inputs, strict=True)), None, None


_loss.defvjp(_loss_forward, _loss_backward)


@functools.partial(jax.custom_vjp, nondiff_argnums=(7, 8, 9))
def _attend(q_BTNH, k_BSKH, v_BSKH, iq_BTKI, ik_BSI, probe, constants, block_size, scale, index_scale):
    """out, lse and 0, whose gradients are those of the index loss and, by the probe, its value."""
    ids_BKTR, _, layout = constants
    out_BTNH, lse_BTN = attention.forward(q_BTNH, k_BSKH, v_BSKH, ids_BKTR, layout, block_size=block_size, scale=scale)
    return vary_alike((out_BTNH, lse_BTN, jnp.float32(0)))


def _forward(q_BTNH, k_BSKH, v_BSKH, iq_BTKI, ik_BSI, probe, constants, block_size, scale, index_scale):
    ids_BKTR, _, layout = constants
    out_BTNH, lse_BTN = attention.forward(q_BTNH, k_BSKH, v_BSKH, ids_BKTR, layout, block_size=block_size, scale=scale)
    attended = q_BTNH, k_BSKH, v_BSKH, ids_BKTR, out_BTNH, lse_BTN
    return vary_alike((out_BTNH, lse_BTN, jnp.float32(0))), (attended, iq_BTKI, ik_BSI, constants)


def _backward(block_size, scale, index_scale, residuals, cotangents):
    attended, iq_BTKI, ik_BSI, (_, weights_BT, layout) = residuals
    *attended_cotangents, cotangent = cotangents
    static = {"block_size": block_size, "scale": scale, "index_scale": index_scale}
    (dq, dk, dv), (value, diq, dik) = backward(attended, tuple(attended_cotangents), iq_BTKI, ik_BSI, weights_BT, layout, **static)
    diq, dik = ((cotangent * x).astype(iq_BTKI.dtype) for x in (diq, dik))
    return *vary_alike((dq, dk, dv, diq, dik, cotangent * value)), None


_attend.defvjp(_forward, _backward)


@functools.partial(jax.jit, static_argnames=("block_size", "scale", "index_scale", "interpret"))
def backward(attended, cotangents, iq_BTKI, ik_BSI, weights_BT, layout: Layout, *, block_size, scale, index_scale, interpret=None):
    """((dq, dk, dv), (value, diq, dik)): the attention's gradients, and of the index loss value and gradients in float32."""
    table, K = block_table(layout, block_size), iq_BTKI.shape[2]
    slots_BZI = table.to_slots(ik_BSI[:, :, None], block_size)[:, :, 0]
    unit, weights_BT = normalised(weights_BT)

    def consume(chunk, length, part, number, teacher):
        iq, weights = of_chunk(iq_BTKI, length, chunk), of_chunk(weights_BT, length, chunk)
        value, diq_BTKI, dik_BZI = value_and_gradient(
            iq, slots_BZI, teacher.mean_LPC, weights, part, teacher.index, number, index_scale=index_scale, interpret=interpret
        )
        return (value, dik_BZI), diq_BTKI

    static = {"block_size": block_size, "scale": scale, "interpret": interpret}
    gradients, ((value, dik_BZI), diq_BTKI) = attention.backward_chunks(attended, cotangents, layout, consume=consume, **static)
    dik_BSI = table.from_slots(dik_BZI[:, :, None], ik_BSI.shape[1])[:, :, 0]
    return gradients, (value * (unit / K), diq_BTKI * (unit * index_scale / K), dik_BSI * (unit * index_scale / K))
