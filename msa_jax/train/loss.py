"""The training loss: next-token cross-entropy plus the index branch's KL, both divided by counts of the WHOLE batch.

    total = sum_t w_t nats_t / sum_t w_t + lambda * mean over MSA layers of L_KL                       (msa.md, section 2)
            + z_loss_weight * sum_t w_t (log sum_e exp logit_te)^2 / sum_t w_t        (keeps logits near zero; arXiv 2204.02311)

With TrainConfig.loss_rows a constant takes the place of sum_t w_t, so that a token weighs the same whatever else is in a batch.

Sums over a microbatch are divided by the counts of all microbatches, so that losses and gradients of microbatches add up
to those of one big batch also where their token counts differ.
"""

from typing import NamedTuple

import jax
import jax.numpy as jnp
from flax import nnx
from jaxtyping import Array, Float, Int

from msa_jax.data.batch import Batch
from msa_jax.model.attention import Phase


class Totals(NamedTuple):
    """Denominators of a whole batch, float32."""

    loss_weight: Float[Array, ""]  # sum of the weights of predicted tokens, or a fixed number of tokens
    tokens: Float[Array, ""]  # real tokens, visual ones included


class Losses(NamedTuple):
    """Shares of a (micro)batch in the loss, float32; those of all microbatches add up."""

    total: Float[Array, ""]
    lm: Float[Array, ""]  # nats a predicted token, weighted; nats a token of the fixed number, where there is one
    kl: Float[Array, ""]  # nats a real token, mean over MSA layers
    kl_X: Float[Array, "X"]  # the same by MSA layer
    nats_by_source: Float[Array, "sources"]  # sums, not means
    weight_by_source: Float[Array, "sources"]
    z: Float[Array, ""]  # squared log-sum-exp of a token's logits, weighted as lm; 0 where it has no weight
    load_XO: Int[Array, "X O"] | None  # int32: real tokens that chose each expert, by layer; None without experts


def target_weights(batch: Batch) -> Float[Array, "B T"]:
    """Weight of predicting tokens_BT[:, t + 1] at t; the last position has no next token, whatever the batch says."""
    return jnp.asarray(batch.loss_weights_BT, jnp.float32).at[:, -1].set(0)


def batch_totals(batch: Batch, loss_rows: int | None = None) -> Totals:
    """With `loss_rows` the language loss is divided by the tokens of so many full rows, whatever the batch holds."""
    weights_BT = target_weights(batch)
    loss_weight = weights_BT.sum() if loss_rows is None else jnp.asarray(loss_rows * weights_BT.shape[1], jnp.float32)
    return Totals(loss_weight, jnp.sum(jnp.asarray(batch.segments_BT) > 0, dtype=jnp.float32))


def next_token_nats(logits_BTE: Float[Array, "B T E"], tokens_BT: Int[Array, "B T"]) -> Float[Array, "B T"]:
    """-log p(tokens[t + 1] | tokens[..t]) in float32; the last position holds the loss of predicting tokens[0], ignore it."""
    logits_BTE = logits_BTE.astype(jnp.float32)
    next_BT1 = jnp.roll(tokens_BT, -1, axis=1)[..., None]
    return jax.nn.logsumexp(logits_BTE, axis=-1) - jnp.take_along_axis(logits_BTE, next_BT1, axis=-1)[..., 0]


def loss_fn(
    params: nnx.State,
    batch: Batch,
    *,
    graphdef: nnx.GraphDef,
    totals: Totals,
    phase: Phase,
    kl_weight: float,
    num_sources: int,
    z_loss_weight: float = 0.0,
) -> tuple[Float[Array, ""], Losses]:
    """(total, parts). What has weight 0 is not computed and is exactly zero. A batch without weights has lm = 0."""
    output = nnx.merge(graphdef, params)(batch, phase, kl=kl_weight > 0, kl_denominator=totals.tokens)
    weights_BT = target_weights(batch)
    weighted_BT = weights_BT * next_token_nats(output.logits_BTE, jnp.asarray(batch.tokens_BT))
    by_source = jax.nn.one_hot(jnp.asarray(batch.sources_BT), num_sources)  # source -1, padding, is all zeros
    loss_weight = jnp.maximum(totals.loss_weight, jnp.finfo(jnp.float32).tiny)
    lm, z = weighted_BT.sum() / loss_weight, jnp.zeros((), jnp.float32)
    if z_loss_weight:
        z = (weights_BT * jnp.square(jax.nn.logsumexp(output.logits_BTE, axis=-1))).sum() / loss_weight
    total = lm + kl_weight * output.kl
    if z_loss_weight:
        total = total + z_loss_weight * z
    parts = Losses(
        total,
        lm,
        output.kl,
        output.kl_X,
        jnp.einsum("bt,bts->s", weighted_BT, by_source),
        jnp.einsum("bt,bts->s", weights_BT, by_source),
        z,
        output.load_XO,
    )
    return total, parts
