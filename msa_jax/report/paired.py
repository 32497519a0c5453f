"""Differences between arms of a study, paired by seed, with 95% confidence intervals.

Arms share initial weights and the order of their data seed by seed, so that what the seed does cancels in the difference:

    mean(d) +- t * s(d) / sqrt(n),  d_i = arm_i - control_i,  t = 0.975 quantile of Student's t with n - 1 degrees of freedom
"""

import math
import statistics
from collections.abc import Mapping
from typing import NamedTuple

# 0.975 quantiles of Student's t with 1, 2, ... degrees of freedom (any table of the distribution; a test integrates the density)
QUANTILES = (12.7062, 4.3027, 3.1824, 2.7764, 2.5706, 2.4469, 2.3646, 2.3060, 2.2622, 2.2281, 2.2010, 2.1788)
NORMAL = 1.959964


class Paired(NamedTuple):
    """`low` and `high` bound the mean difference; they are None for a single pair, which has no spread."""

    seeds: tuple[int, ...]
    difference: float
    low: float | None
    high: float | None


def paired_difference(arm: Mapping[int, float], control: Mapping[int, float]) -> Paired | None:
    """Of values by seed; None where no seed has both."""
    seeds = tuple(sorted(arm.keys() & control.keys()))
    if not seeds:
        return None
    differences = [arm[seed] - control[seed] for seed in seeds]
    mean = statistics.fmean(differences)
    if len(seeds) == 1:
        return Paired(seeds, mean, None, None)
    half = student_quantile(len(seeds) - 1) * statistics.stdev(differences) / math.sqrt(len(seeds))
    return Paired(seeds, mean, mean - half, mean + half)


def student_quantile(degrees: int) -> float:
    """The 0.975 quantile, right to 1e-3: from the table, beyond it by the Cornish-Fisher expansion around the normal one."""
    if degrees <= len(QUANTILES):
        return QUANTILES[degrees - 1]
    z = NORMAL
    terms = (z**3 + z) / 4, (5 * z**5 + 16 * z**3 + 3 * z) / 96, (3 * z**7 + 19 * z**5 + 17 * z**3 - 15 * z) / 384
    return z + sum(term / degrees**power for power, term in enumerate(terms, 1))
