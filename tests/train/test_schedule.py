"""WSD by its values."""

import jax
import numpy as np
import pytest

from msa_jax.config import GroupConfig, OptimConfig
from msa_jax.train.schedule import learning_rates, wsd


def rates(schedule, steps: int) -> np.ndarray:
    return np.asarray(jax.vmap(schedule)(np.arange(steps)))


def test_warm_up_stable_and_decay() -> None:
    schedule = wsd(1.0, 20, warmup_steps=4, decay_fraction=0.25, final_fraction=0.1)
    expected = [0.2, 0.4, 0.6, 0.8, *[1.0] * 12, 0.82, 0.64, 0.46, 0.28]
    np.testing.assert_allclose(rates(schedule, 20), expected, rtol=1e-6)
    assert schedule(20) == pytest.approx(0.1), "where the decay arrives"


@pytest.mark.parametrize(
    ("options", "expected"),
    [
        ({"warmup_steps": 0, "decay_fraction": 0.0, "final_fraction": 0.1}, [1.0, 1.0, 1.0, 1.0]),
        ({"warmup_steps": 0, "decay_fraction": 1.0, "final_fraction": 0.0}, [1.0, 0.75, 0.5, 0.25]),
        ({"warmup_steps": 2, "decay_fraction": 0.5, "final_fraction": 1.0}, [1 / 3, 2 / 3, 1.0, 1.0]),
        ({"warmup_steps": 3, "decay_fraction": 0.01, "final_fraction": 0.0}, [0.25, 0.5, 0.75, 1.0]),
    ],
)
def test_a_phase_may_be_missing(options: dict, expected: list[float]) -> None:
    np.testing.assert_allclose(rates(wsd(1.0, 4, **options), 4), expected, rtol=1e-6)


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
