"""The forward pass that all evaluators share, so that a model is compiled once for each shape of batch and not by each of them."""

import functools
from typing import NamedTuple

import jax
import jax.numpy as jnp
import optax
from flax import nnx
from jaxtyping import Array, Float, Int

from msa_jax.data.batch import Batch
from msa_jax.train.state import TrainState


class ForwardOutput(NamedTuple):
    nats_BT: Float[Array, "B T"]  # -log p of the next token, times its weight; 0 at the last position
    weights_BT: Float[Array, "B T"]
    hidden_XBTD: Float[Array, "X B T D"]  # the input of every layer
    ids_XBKTR: Int[Array, "X B K T R"]  # selected blocks; -1 throughout in layers that select none


class Forward:
    """The model in its sparse phase. `forward(state, batch)` compiles once a shape, for all models of one structure together."""

    def __init__(self, graphdef: nnx.GraphDef) -> None:
        self.graphdef = graphdef

    def __call__(self, state: TrainState, batch: Batch) -> ForwardOutput:
        return _forward(self.graphdef, state.params, batch)

    def block(self, state: TrainState, layer: int) -> tuple[nnx.GraphDef, nnx.State]:
        """Layer number `layer` alone, split: layers of one kind have equal structure, so that a function of it compiles once."""
        return nnx.split(nnx.merge(self.graphdef, state.params).block(layer))


@functools.partial(jax.jit, static_argnums=0)
def _forward(graphdef: nnx.GraphDef, params: nnx.State, batch: Batch) -> ForwardOutput:
    output = nnx.merge(graphdef, params)(batch, kl=False, trace=True)
    return ForwardOutput(*target_nats(output.logits_BTE, batch), *output.trace)


def target_nats(logits_BTE: Float[Array, "B T E"], batch: Batch) -> tuple[Float[Array, "B T"], Float[Array, "B T"]]:
    """(-log p of the next token times its weight, weight) at every position; 0 at the last, which has no next token."""
    nats_BT = optax.softmax_cross_entropy_with_integer_labels(logits_BTE[:, :-1], jnp.asarray(batch.tokens_BT)[:, 1:])
    last_column = ((0, 0), (0, 1))
    weights_BT = jnp.pad(jnp.asarray(batch.loss_weights_BT, jnp.float32)[:, :-1], last_column)
    return weights_BT * jnp.pad(nats_BT, last_column), weights_BT
