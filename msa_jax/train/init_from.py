"""A run that starts from another run's checkpoint: it inherits weights and moments, and neither step, schedule nor random key.

A resumed run (checkpoint.py) is the same run and inherits everything; a finished one would then have nothing left to do.
"""

import dataclasses
from pathlib import Path

import jax
import optax

from msa_jax.train.checkpoint import CHECKPOINTS, Checkpoints
from msa_jax.train.state import TrainState


def init_from(folder: Path, fresh: TrainState) -> TrainState:
    """`fresh` with the parameters and optimiser moments of the latest checkpoint in the run folder `folder`.

    Adam's own count of updates goes with its moments. A parameter group that the checkpoint lacks altogether starts as in
    `fresh`. Raises CheckpointError where there is no checkpoint or it is of another model or optimiser.
    """
    saved = Checkpoints(folder / CHECKPOINTS).restore_groups(fresh)
    return dataclasses.replace(fresh, params=saved.params, opt_state=_with_own_clock(fresh.opt_state, saved.opt_state))


def _with_own_clock(fresh: optax.OptState, saved: optax.OptState) -> optax.OptState:
    """`saved` with the counts of `fresh` wherever a learning rate or a late start is looked up by them."""

    def merge(ours: optax.OptState, theirs: optax.OptState) -> optax.OptState:
        if isinstance(ours, optax.ScaleByScheduleState):
            return ours
        if isinstance(ours, optax.transforms.ConditionallyMaskState):
            return theirs._replace(step=ours.step, inner_state=_with_own_clock(ours.inner_state, theirs.inner_state))
        return theirs

    clocks = (optax.ScaleByScheduleState, optax.transforms.ConditionallyMaskState)
    return jax.tree.map(merge, fresh, saved, is_leaf=lambda node: isinstance(node, clocks))
