"""One update: gradients over microbatches, an optimiser by group, experts balanced, and what is worth knowing about it.

Pure; compiled by the loop.
"""

import functools
from collections.abc import Callable, Sequence
from typing import NamedTuple

import jax
import jax.numpy as jnp
import optax
from flax import nnx
from jaxtyping import Array, Bool, Float

from msa_jax.config import Experiment
from msa_jax.data.batch import Batch
from msa_jax.model.attention import Phase
from msa_jax.model.block import KINDS
from msa_jax.model.groups import path_names
from msa_jax.train.balance import balance_experts, imbalance
from msa_jax.train.loss import Losses, Totals, batch_totals, loss_fn, target_weights
from msa_jax.train.optim import group_norms, square_sums
from msa_jax.train.schedule import learning_rates
from msa_jax.train.state import TrainState


class Metrics(NamedTuple):
    """Of one step. Scalars by name:

    loss, loss/lm, loss/kl, loss/kl/layer_2      nats a token (loss/lm as TrainConfig says); the layer's place in the model
    loss/source/plays, tokens/source/plays       nats a predicted token of one source, and how many there are
    tokens, tokens/text, tokens/visual           real tokens of the batch
    loss/z                                       squared log-sum-exp of the logits, where TrainConfig.z_loss_weight counts it
    experts/imbalance/layer_2                    load of the busiest expert over the mean load, minus 1
    gradient_norm/trunk                          before clipping; also index, vision
    parameter_norm/trunk, lr/trunk               after the update, and the rate it used
    """

    scalars: dict[str, Float[Array, ""]]
    finite: Bool[Array, "parameters"]  # whether the norm of each parameter's gradient is, in the order of `parameter_names`


TrainStep = Callable[[TrainState, Batch], tuple[TrainState, Metrics]]


def phase_at(experiment: Experiment, step: int) -> Phase:
    return "warmup" if step < experiment.train.index_warmup_steps else "sparse"


def parameter_names(params: nnx.State) -> list[str]:
    """`layers.0.0.mlp.up.kernel`, ... in the order of the tree's leaves."""
    return [".".join(path_names(path)) for path, _ in jax.tree_util.tree_flatten_with_path(params)[0]]


def make_train_step(
    experiment: Experiment, graphdef: nnx.GraphDef, tx: optax.GradientTransformation, phase: Phase, sources: Sequence[str] = ()
) -> TrainStep:
    """The pure step of a phase: "warmup" is full attention and full-prefix KL, "sparse" is selection. `sources` names metrics."""
    kl_layers = [i for i, kind in enumerate(experiment.model.layer_kinds) if KINDS[kind].has_index]
    rates = learning_rates(experiment.optim, experiment.train.steps)
    merge = experiment.model.vision.merge if experiment.model.vision else 1
    train = experiment.train
    loss = functools.partial(
        loss_fn, graphdef=graphdef, phase=phase, kl_weight=train.kl_weight, num_sources=len(sources), z_loss_weight=train.z_loss_weight
    )

    def train_step(state: TrainState, batch: Batch) -> tuple[TrainState, Metrics]:
        totals = batch_totals(batch, train.loss_rows)
        gradients, losses = accumulate_gradients(loss, state.params, batch, totals, train.microbatches, merge)
        updates, opt_state = tx.update(gradients, state.opt_state, state.params)
        params = optax.apply_updates(state.params, updates)
        if losses.load_XO is not None:
            params = balance_experts(params, losses.load_XO, experiment.model)
        norms = group_norms(gradients)
        scalars = {
            "loss": losses.total,
            "loss/lm": losses.lm,
            "loss/kl": losses.kl,
            **{f"loss/kl/layer_{i}": kl for i, kl in zip(kl_layers, losses.kl_X, strict=True)},
            **source_losses(losses, sources),
            **token_counts(batch, sources),
            **({"loss/z": losses.z} if train.z_loss_weight else {}),
            **({} if losses.load_XO is None else imbalance(losses.load_XO, experiment.model)),
            **{f"gradient_norm/{name}": norm for name, norm in norms.items()},
            **{f"parameter_norm/{name}": norm for name, norm in group_norms(params).items()},
            **{f"lr/{name}": jnp.asarray(rates[name](state.step), jnp.float32) for name in norms},
        }
        finite = jnp.isfinite(jnp.stack(square_sums(gradients)))
        return TrainState(state.step + 1, params, opt_state, state.key), Metrics(scalars, finite)

    return train_step


def accumulate_gradients(
    loss: Callable[..., tuple[Array, Losses]], params: nnx.State, batch: Batch, totals: Totals, microbatches: int, merge: int
) -> tuple[nnx.State, Losses]:
    """Gradient and losses of `batch`, a microbatch after the other: the memory for activations is that of one.

    Denominators (`totals`) are those of the whole batch, so the result does not depend on how it is cut.
    """
    gradient = jax.grad(functools.partial(loss, totals=totals), has_aux=True)
    if microbatches == 1:
        return gradient(params, batch)
    parts = split_batch(batch, microbatches, merge)
    shapes = jax.eval_shape(gradient, params, jax.tree.map(lambda leaf: leaf[0], parts))
    zeros = jax.tree.map(lambda leaf: jnp.zeros(leaf.shape, leaf.dtype), shapes)
    total, _ = jax.lax.scan(lambda total, part: (jax.tree.map(jnp.add, total, gradient(params, part)), None), zeros, parts)
    return total


def split_batch(batch: Batch, parts: int, merge: int) -> Batch:
    """[B, T] arrays as [parts, B / parts, T]; visual indices count from each part's own first visual token.

    Part i owns rows i * B / parts .. and packed sequences i * V / parts .. . Raises ValueError where they do not divide.
    """
    _require_divisible("rows", len(batch.tokens_BT), parts)
    if batch.vision is not None:
        sequences, length = batch.vision.segments_VL.shape
        _require_divisible("packed patch sequences", sequences, parts)
        first_token_B = jnp.repeat(jnp.arange(parts), len(batch.tokens_BT) // parts) * (sequences // parts * length // merge**2)
        index_BT = jnp.asarray(batch.visual_index_BT)
        batch = batch._replace(visual_index_BT=jnp.where(index_BT >= 0, index_BT - first_token_B[:, None], -1))
    return jax.tree.map(lambda leaf: jnp.reshape(leaf, (parts, len(leaf) // parts, *leaf.shape[1:])), batch)


def _require_divisible(name: str, count: int, parts: int) -> None:
    if count % parts:
        raise ValueError(f"a batch of {count} {name} is not divisible by train.microbatches={parts}")


def source_losses(losses: Losses, sources: Sequence[str]) -> dict[str, Array]:
    """Weighted mean by source; 0 / 0 where a source is not in the batch."""
    means = losses.nats_by_source / losses.weight_by_source
    return {f"loss/source/{name}": mean for name, mean in zip(sources, means, strict=True)}


def token_counts(batch: Batch, sources: Sequence[str]) -> dict[str, Array]:
    real_BT = jnp.asarray(batch.segments_BT) > 0
    visual_BT = jnp.asarray(batch.visual_index_BT) >= 0
    predicted_BT = target_weights(batch) > 0
    sources_BT = jnp.asarray(batch.sources_BT)
    masks = {"tokens": real_BT, "tokens/text": real_BT & ~visual_BT, "tokens/visual": visual_BT}
    masks |= {f"tokens/source/{name}": predicted_BT & (sources_BT == i) for i, name in enumerate(sources)}
    return {name: mask_BT.sum(dtype=jnp.int32) for name, mask_BT in masks.items()}
