"""What training carries from step to step, and how it starts."""

import dataclasses

import jax
import jax.numpy as jnp
import optax
from flax import nnx
from jax.typing import ArrayLike
from jaxtyping import Array, Int, Key

from msa_jax.config import Experiment, ModelConfig
from msa_jax.model.hybrid import HybridTransformer
from msa_jax.train.optim import make_optimizer, weight_average


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True)
class TrainState:
    """A pytree; the model is `nnx.merge(graphdef, state.params)`."""

    step: Int[Array, ""]  # int32: updates done so far
    params: nnx.State  # float32 master weights
    opt_state: optax.OptState
    key: Key[Array, ""]  # never split: whatever is random in a step folds the step into it


def abstract_model(config: ModelConfig) -> tuple[nnx.GraphDef, nnx.State]:
    """The model's structure, and its parameters as shapes; nothing is computed or allocated."""
    return nnx.split(nnx.eval_shape(lambda: HybridTransformer(config, rngs=nnx.Rngs(0))), nnx.Param)


def build(experiment: Experiment) -> tuple[nnx.GraphDef, optax.GradientTransformation]:
    """What stays fixed during a run: the model's structure and the optimiser."""
    graphdef, params = abstract_model(experiment.model)
    return graphdef, make_optimizer(experiment.optim, experiment.train.steps, params)


def init_state(experiment: Experiment, tx: optax.GradientTransformation, seed: ArrayLike | None = None) -> TrainState:
    """The state before the first step; the same seed gives the same weights. Meant to be compiled, or traced for shapes.

    `seed` takes the place of the experiment's and may be traced, so that one program starts runs of any seed.
    """
    root = jax.random.key(experiment.seed if seed is None else seed)
    params = nnx.state(HybridTransformer(experiment.model, rngs=nnx.Rngs(root)), nnx.Param)
    return TrainState(jnp.zeros((), jnp.int32), params, tx.init(params), jax.random.fold_in(root, 1))


def for_evaluation(state: TrainState) -> TrainState:
    """`state` with the moving average of its parameters in their place, where OptimConfig.ema_decay keeps one."""
    average = weight_average(state.opt_state)
    return state if average is None else dataclasses.replace(state, params=average)
