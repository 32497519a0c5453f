"""WSD: linear warm-up, stable, linear decay (Hu et al., arXiv 2404.06395), one schedule a parameter group.

    peak          ________________
                 /                \\                  f = optim.final_fraction
                /                  \\        ___ p * peak, p = rewarm.peak_fraction
    peak/(w+1) /                    \\  ____/   \\___
              0  w                s    end           steps     s = end - ceil(decay_fraction * end), f * peak at end and at steps

Without a rewarm, end = steps. A group of new modules (GroupConfig.start_step) is at zero before its start, then warms up to the full
peak and decays to f * peak, from where the trunk's last decay begins or, if that is later, from the end of its own warm-up.
"""

import optax

from msa_jax.config import GroupConfig, OptimConfig


def wsd(peak: float, steps: int, *, warmup_steps: int, decay_steps: int, final: float, initial: float = 0.0) -> optax.Schedule:
    """Step (0 = first update) -> learning rate, from `initial` over `peak` to `final`.

    Update i of the warm-up (0, 1, ...) gets initial + (peak - initial) * (i + 1) / (warmup_steps + 1), so that none is wasted on
    a rate of zero. The final rate is what step `steps` would get: the last update, `steps - 1`, still lies one decrement above it.
    """
    phases = [optax.constant_schedule(peak)]
    boundaries = []
    if warmup_steps:
        phases.insert(0, optax.linear_schedule(initial + (peak - initial) / (warmup_steps + 1), peak, warmup_steps))
        boundaries.append(warmup_steps)
    if decay_steps:
        phases.append(optax.linear_schedule(peak, final, decay_steps))
        boundaries.append(steps - decay_steps)
    return optax.join_schedules(phases, boundaries)


def learning_rates(config: OptimConfig, steps: int) -> dict[str, optax.Schedule]:
    """One schedule a parameter group: the trunk's shape with the group's own peak and first warm-up, or a late start of its own."""
    return {name: (_late if group.start_step else _cycles)(config, group, steps) for name, group in config.groups.items()}


def _cycles(config: OptimConfig, group: GroupConfig, steps: int) -> optax.Schedule:
    peak = config.learning_rate * group.learning_rate_scale
    final = config.final_fraction * peak
    decay_start, end = config.first_decay(steps)
    cycles = [wsd(peak, end, warmup_steps=config.warmup_of(group), decay_steps=end - decay_start, final=final)]
    starts = [rewarm.start_step for rewarm in config.rewarms]
    for rewarm, next_start in zip(config.rewarms, [*starts, steps][1:], strict=True):
        length, warmup = next_start - rewarm.start_step, rewarm.warmup_steps
        cycles.append(
            wsd(rewarm.peak_fraction * peak, length, warmup_steps=warmup, decay_steps=length - warmup, final=final, initial=final)
        )
    return optax.join_schedules(cycles, starts)


def _late(config: OptimConfig, group: GroupConfig, steps: int) -> optax.Schedule:
    peak, start = config.learning_rate * group.learning_rate_scale, group.start_step
    warmup = config.warmup_of(group)
    last = config.rewarms[-1] if config.rewarms else None
    trunk_decays = last.start_step + last.warmup_steps if last else config.first_decay(steps)[0]
    decay_steps = steps - max(trunk_decays, start + warmup)
    own = wsd(peak, steps - start, warmup_steps=warmup, decay_steps=decay_steps, final=config.final_fraction * peak)
    return optax.join_schedules([optax.constant_schedule(0.0), own], [start])
