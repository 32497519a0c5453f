"""Paired differences by hand, and quantiles against the distribution they belong to."""

import math

import numpy as np
import pytest

from msa_jax.report.paired import paired_difference, student_quantile


def probability_below(x: float, degrees: int) -> float:
    """Student's distribution function for x > 0: one half plus the integral of its density, by Simpson's rule."""
    points = np.linspace(0, x, 20_001)
    log_constant = math.lgamma((degrees + 1) / 2) - math.lgamma(degrees / 2) - 0.5 * math.log(degrees * math.pi)
    density = np.exp(log_constant - (degrees + 1) / 2 * np.log1p(points**2 / degrees))
    weights = np.ones(len(points))
    weights[1:-1:2], weights[2:-1:2] = 4, 2
    return 0.5 + float(density @ weights) * (points[1] - points[0]) / 3


@pytest.mark.parametrize("degrees", [*range(1, 40), 100, 1000])
def test_quantiles_are_those_of_the_distribution(degrees: int) -> None:
    assert probability_below(student_quantile(degrees), degrees) == pytest.approx(0.975, abs=1e-5)


def test_a_difference_by_hand() -> None:
    arm, control = {0: 3.0, 1: 4.0, 2: 8.0, 9: 1.0}, {0: 1.0, 1: 3.0, 2: 5.0, 7: 0.0}
    found = paired_difference(arm, control)
    half = 4.3027 * 1.0 / math.sqrt(3)  # differences 2, 1, 3
    assert found.seeds == (0, 1, 2)
    assert found.difference == pytest.approx(2.0)
    assert (found.low, found.high) == pytest.approx((2 - half, 2 + half))


def test_pairing_takes_out_what_the_seed_does() -> None:
    """Seeds differ by tens, the arms by one."""
    control = {seed: 10.0 * seed for seed in range(5)}
    found = paired_difference({seed: value + 1 + 0.01 * seed for seed, value in control.items()}, control)
    assert 1.0 < found.low < found.difference < found.high < 1.05


def test_too_few_pairs_say_so() -> None:
    assert paired_difference({0: 1.0}, {0: 0.5}) == ((0,), 0.5, None, None)
    assert paired_difference({0: 1.0}, {1: 0.5}) is None
