"""AdamW with one transformation a parameter group: own peak, own warm-up, own weight decay, clipped by its OWN gradient norm.

A common norm would let the index loss scale the trunk's updates. With one norm a group the trunk's updates are the same
bits whatever the weight of the index loss is.
"""

import jax
import jax.numpy as jnp
import optax
from flax import nnx
from jaxtyping import Array, Float

from msa_jax.config import GroupConfig, OptimConfig
from msa_jax.model.groups import decays, parameter_group
from msa_jax.train.schedule import learning_rates


def group_labels(params: nnx.State) -> nnx.State:
    """`params` with the name of its group in place of every parameter."""
    return jax.tree_util.tree_map_with_path(lambda path, _: parameter_group(path), params)


def make_optimizer(config: OptimConfig, steps: int, params: nnx.State) -> optax.GradientTransformation:
    """`params` may be abstract. A group with learning_rate_scale=0 stands still but keeps its place in the state."""
    labels = group_labels(params)
    present = set(jax.tree.leaves(labels))
    schedules = learning_rates(config, steps)
    return optax.partition(
        {name: _from_its_start(config, group, schedules[name]) for name, group in config.groups.items() if name in present}, labels
    )


def _from_its_start(config: OptimConfig, group: GroupConfig, schedule: optax.Schedule) -> optax.GradientTransformation:
    """AdamW that begins at the group's start_step, its own count of updates included; nothing moves before."""
    if not group.start_step:
        return _adamw(config, group, schedule)
    late = _adamw(config, group, lambda count: schedule(count + group.start_step))
    return optax.conditionally_mask(late, lambda step: step >= group.start_step)


def _adamw(config: OptimConfig, group: GroupConfig, schedule: optax.Schedule) -> optax.GradientTransformation:
    return optax.chain(
        optax.clip_by_global_norm(group.clip_norm) if group.clip_norm else optax.identity(),
        optax.scale_by_adam(config.b1, config.b2, config.eps),
        optax.add_decayed_weights(group.weight_decay, _decay_mask),
        optax.scale_by_learning_rate(schedule),
    )


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
