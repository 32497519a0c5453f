"""One optimiser a parameter group: own peak, own warm-up, own weight decay, clipped by its OWN gradient norm.

A common norm would let the index loss scale the trunk's updates. With one norm a group the trunk's updates are the same
bits whatever the weight of the index loss is.

"adamw" is AdamW for every parameter. "muon" replaces the momentum of every matrix inside the network by the nearest orthogonal
matrix times 0.2 sqrt(max(fan in, fan out)), whose RMS is that of an Adam update, so that rates and weight decay carry over
(Jordan 2024; Liu et al., arXiv 2502.16982); embeddings, norms, biases and routers stay with Adam.
"""

import math
from typing import NamedTuple

import jax
import jax.numpy as jnp
import optax
import optax.contrib
from flax import nnx
from jaxtyping import Array, Float, Int

from msa_jax.config import GroupConfig, OptimConfig
from msa_jax.model.groups import decays, matrix_axes, parameter_group
from msa_jax.train.schedule import learning_rates


def group_labels(params: nnx.State) -> nnx.State:
    """`params` with the name of its group in place of every parameter."""
    return jax.tree_util.tree_map_with_path(lambda path, _: parameter_group(path), params)


def make_optimizer(config: OptimConfig, steps: int, params: nnx.State) -> optax.GradientTransformation:
    """`params` may be abstract. A group with learning_rate_scale=0 stands still but keeps its place in the state."""
    labels = group_labels(params)
    present = set(jax.tree.leaves(labels))
    schedules = learning_rates(config, steps)
    by_group = optax.partition(
        {name: _from_its_start(config, group, schedules[name]) for name, group in config.groups.items() if name in present}, labels
    )
    return optax.chain(by_group, average_weights(config.ema_decay)) if config.ema_decay else by_group


class AverageState(NamedTuple):
    count: Int[Array, ""]
    average: nnx.State  # float32, of the parameters' structure


def average_weights(decay: float) -> optax.GradientTransformation:
    """Keeps the moving average of the parameters that the updates lead to; the updates pass as they are. The last of a chain.

        average <- d average + (1 - d) parameters,   d = min(decay, (1 + n) / (10 + n)) at update n = 1, 2, ...

    so that a short run does not average its own start. `weight_average` finds it in an optimiser's state.
    """

    def init(params: nnx.State) -> AverageState:
        return AverageState(jnp.zeros((), jnp.int32), jax.tree.map(jnp.copy, params))

    def update(updates: nnx.State, state: AverageState, params: nnx.State) -> tuple[nnx.State, AverageState]:
        count = optax.safe_increment(state.count)
        now = jnp.minimum(decay, (1 + count) / (10 + count))
        after = optax.apply_updates(params, updates)
        return updates, AverageState(count, jax.tree.map(lambda old, new: now * old + (1 - now) * new, state.average, after))

    return optax.GradientTransformation(init, update)


def weight_average(opt_state: optax.OptState) -> nnx.State | None:
    """The average that OptimConfig.ema_decay keeps, None without one."""
    nodes = jax.tree.leaves(opt_state, is_leaf=lambda node: isinstance(node, AverageState))
    return next((node.average for node in nodes if isinstance(node, AverageState)), None)


def _from_its_start(config: OptimConfig, group: GroupConfig, schedule: optax.Schedule) -> optax.GradientTransformation:
    """An optimiser that begins at the group's start_step, its own count of updates included; nothing moves before."""
    if not group.start_step:
        return _group_optimizer(config, group, schedule)
    late = _group_optimizer(config, group, lambda count: schedule(count + group.start_step))
    return optax.conditionally_mask(late, lambda step: step >= group.start_step)


def _group_optimizer(config: OptimConfig, group: GroupConfig, schedule: optax.Schedule) -> optax.GradientTransformation:
    return optax.chain(
        optax.clip_by_global_norm(group.clip_norm) if group.clip_norm else optax.identity(),
        _DIRECTIONS[config.optimizer](config),
        optax.add_decayed_weights(group.weight_decay, _decay_mask),
        optax.scale_by_learning_rate(schedule),
    )


def _adam(config: OptimConfig) -> optax.GradientTransformation:
    return optax.scale_by_adam(config.b1, config.b2, config.eps)


def _muon(config: OptimConfig) -> optax.GradientTransformation:
    orthogonal = optax.chain(
        optax.contrib.scale_by_muon(beta=config.muon_beta, weight_dimension_numbers=_muon_dimensions),
        optax.stateless(_adam_sized),
    )
    return optax.partition({"muon": orthogonal, "adam": _adam(config)}, _muon_labels)


_DIRECTIONS = {"adamw": _adam, "muon": _muon}


def _muon_labels(params: nnx.State) -> nnx.State:
    return jax.tree_util.tree_map_with_path(lambda path, _: "muon" if matrix_axes(path) else "adam", params)


def _muon_dimensions(params: nnx.State) -> nnx.State:
    return jax.tree_util.tree_map_with_path(lambda path, _: optax.contrib.MuonDimensionNumbers(*matrix_axes(path)), params)


def _adam_sized(updates: nnx.State, params: nnx.State | None) -> nnx.State:
    """An orthogonal matrix has RMS 1 / sqrt(max(fan in, fan out)); an Adam update has about 0.2."""
    del params

    def scaled(path: tuple, leaf: Array) -> Array:
        fans = (math.prod(leaf.shape[axis] for axis in axes) for axes in matrix_axes(path))
        return 0.2 * math.sqrt(max(fans)) * leaf

    return jax.tree_util.tree_map_with_path(scaled, updates)


def _decay_mask(params: nnx.State) -> nnx.State:
    return jax.tree_util.tree_map_with_path(lambda path, _: decays(path), params)


def square_sums(tree: nnx.State) -> list[Float[Array, ""]]:
    """Sum of squares of every leaf, written as optax writes it, so that the clip's and ours are one computation."""
    return [jnp.sum(leaf * leaf) for leaf in jax.tree.leaves(tree)]


def group_norms(tree: nnx.State) -> dict[str, Float[Array, ""]]:
    """L2 norm of every parameter group that occurs in `tree`."""
    groups: dict[str, list[Array]] = {}
    for label, square in zip(jax.tree.leaves(group_labels(tree)), square_sums(tree), strict=True):
        groups.setdefault(label, []).append(square)
    return {name: jnp.sqrt(sum(squares)) for name, squares in sorted(groups.items())}
