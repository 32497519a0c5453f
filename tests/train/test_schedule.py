"""WSD by its values, rewarms and late groups included."""

import jax
import numpy as np
import pytest

from msa_jax.config import GroupConfig, OptimConfig, RewarmConfig
from msa_jax.train.schedule import learning_rates, wsd


def rates(schedule, steps: int) -> np.ndarray:
    return np.asarray(jax.vmap(schedule)(np.arange(steps)))


def test_warm_up_stable_and_decay() -> None:
    schedule = wsd(1.0, 20, warmup_steps=4, decay_steps=5, final=0.1)
    expected = [0.2, 0.4, 0.6, 0.8, *[1.0] * 12, 0.82, 0.64, 0.46, 0.28]
    np.testing.assert_allclose(rates(schedule, 20), expected, rtol=1e-6)
    assert schedule(20) == pytest.approx(0.1), "where the decay arrives"


@pytest.mark.parametrize(
    ("options", "expected"),
    [
        ({"warmup_steps": 0, "decay_steps": 0, "final": 0.1}, [1.0, 1.0, 1.0, 1.0]),
        ({"warmup_steps": 0, "decay_steps": 4, "final": 0.0}, [1.0, 0.75, 0.5, 0.25]),
        ({"warmup_steps": 2, "decay_steps": 2, "final": 1.0}, [1 / 3, 2 / 3, 1.0, 1.0]),
        ({"warmup_steps": 3, "decay_steps": 1, "final": 0.0}, [0.25, 0.5, 0.75, 1.0]),
        ({"warmup_steps": 1, "decay_steps": 0, "final": 0.0, "initial": 0.2}, [0.6, 1.0, 1.0, 1.0]),
    ],
)
def test_a_phase_may_be_missing(options: dict, expected: list[float]) -> None:
    np.testing.assert_allclose(rates(wsd(1.0, 4, **options), 4), expected, rtol=1e-6)


def test_the_decay_fraction_is_rounded_up() -> None:
    trunk = learning_rates(OptimConfig(learning_rate=1.0, warmup_steps=0, decay_fraction=0.3, final_fraction=0.0), 4)["trunk"]
    np.testing.assert_allclose(rates(trunk, 4), [1.0, 1.0, 1.0, 0.5], rtol=1e-6)


def test_groups_have_their_own_peak_and_warm_up() -> None:
    config = OptimConfig(
        learning_rate=0.01, warmup_steps=1, decay_fraction=0.0,
        index=GroupConfig(learning_rate_scale=0.5, warmup_steps=0), vision=GroupConfig(learning_rate_scale=2.0, warmup_steps=3),
    )  # fmt: skip
    found = {name: rates(schedule, 5) for name, schedule in learning_rates(config, 5).items()}
    np.testing.assert_allclose(found["trunk"], [0.005, 0.01, 0.01, 0.01, 0.01], rtol=1e-6)
    np.testing.assert_allclose(found["index"], [0.005] * 5, rtol=1e-6)
    np.testing.assert_allclose(found["vision"], [0.005, 0.01, 0.015, 0.02, 0.02], rtol=1e-6)


def test_a_frozen_group_has_rate_zero() -> None:
    frozen = learning_rates(OptimConfig(index=GroupConfig(learning_rate_scale=0.0)), 100)["index"]
    assert not rates(frozen, 100).any()


def test_a_rewarm_leaves_from_where_the_decay_arrives_and_decays_again() -> None:
    """Half of the first six steps decays from 1 to 0.1; from step 6 two steps up to 0.4, the rest down to 0.1."""
    config = OptimConfig(
        learning_rate=1.0, warmup_steps=1, decay_fraction=0.5, final_fraction=0.1,
        rewarms=(RewarmConfig(6, warmup_steps=2, peak_fraction=0.4),), index=GroupConfig(learning_rate_scale=0.5),
    )  # fmt: skip
    schedules = learning_rates(config, 11)
    expected = [0.5, 1.0, 1.0, 1.0, 0.7, 0.4, 0.2, 0.3, 0.4, 0.3, 0.2]
    np.testing.assert_allclose(rates(schedules["trunk"], 11), expected, rtol=1e-6)
    np.testing.assert_allclose(rates(schedules["index"], 11), np.multiply(0.5, expected), rtol=1e-6)
    assert schedules["trunk"](11) == pytest.approx(0.1)


@pytest.mark.parametrize(
    ("start", "rewarms", "expected"),
    [
        (1, (), [0, 1 / 3, 2 / 3, 1, 1, 1, 1, 1, 0.7, 0.4]),  # as the trunk from step 7 on
        (5, (), [0, 0, 0, 0, 0, 1 / 3, 2 / 3, 1, 0.7, 0.4]),  # up when the trunk already decays: the full peak all the same
        (6, (), [0, 0, 0, 0, 0, 0, 1 / 3, 2 / 3, 1, 0.55]),
        (4, (RewarmConfig(4, warmup_steps=4, peak_fraction=0.3),), [0, 0, 0, 0, 1 / 3, 2 / 3, 1, 1, 1, 0.55]),
        (10, (), [0] * 10),
    ],
    ids=["early", "at-decay", "in-decay", "rewarm", "never"],
)
def test_new_modules_warm_up_to_the_full_peak_whenever_they_come(start: int, rewarms: tuple, expected: list[float]) -> None:
    vision = GroupConfig(start_step=start, warmup_steps=0 if start == 10 else 2)
    config = OptimConfig(learning_rate=1.0, warmup_steps=1, decay_fraction=0.3, final_fraction=0.1, rewarms=rewarms, vision=vision)
    np.testing.assert_allclose(rates(learning_rates(config, 10)["vision"], 10), expected, rtol=1e-6)
