"""WSD: linear warm-up, stable, linear decay (Hu et al., arXiv 2404.06395), one schedule a parameter group.

    peak          ________________
                 /                \\
                /                  \\
    peak/(w+1) /                    \\  final_fraction * peak
              0  w                s    steps          s = steps - ceil(decay_fraction * steps)
"""

import math

import optax

from msa_jax.config import OptimConfig


def wsd(peak: float, steps: int, *, warmup_steps: int, decay_fraction: float, final_fraction: float) -> optax.Schedule:
    """Step (0 = first update) -> learning rate.

    Warm-up is peak * (step + 1) / (warmup_steps + 1), so that no update is wasted on a rate of zero. The final rate is
    what step `steps` would get: the last update, step `steps - 1`, still lies one decrement above it.
    """
    decay_steps = math.ceil(steps * decay_fraction)
    phases = [optax.constant_schedule(peak)]
    boundaries = []
    if warmup_steps:
        phases.insert(0, optax.linear_schedule(peak / (warmup_steps + 1), peak, warmup_steps))
        boundaries.append(warmup_steps)
    if decay_steps:
        phases.append(optax.linear_schedule(peak, final_fraction * peak, decay_steps))
        boundaries.append(steps - decay_steps)
    return optax.join_schedules(phases, boundaries)


def learning_rates(config: OptimConfig, steps: int) -> dict[str, optax.Schedule]:
    """One schedule a parameter group: the trunk's shape with the group's own peak and warm-up."""
    return {
        name: wsd(
            config.learning_rate * group.learning_rate_scale,
            steps,
            warmup_steps=config.warmup_steps if group.warmup_steps is None else group.warmup_steps,
            decay_fraction=config.decay_fraction,
            final_fraction=config.final_fraction,
        )
        for name, group in config.groups.items()
    }
