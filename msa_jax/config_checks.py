"""Checks of configuration values: each raises ConfigError with the class, the field, its value and the remedy."""

import math
from typing import Any

from msa_jax.config_tree import ConfigError


def require(condition: bool, message: str) -> None:
    if not condition:
        raise ConfigError(message)


def require_positive(config: Any, *names: str) -> None:
    for name in names:
        value = getattr(config, name)
        require(value >= 1, f"{type(config).__name__}.{name}={value}; it must be >= 1")


def require_within(config: Any, low: float, high: float, *names: str) -> None:
    """Real numbers in [low, high); infinity and NaN never pass."""
    for name in names:
        value = getattr(config, name)
        bound = f">= {low} and finite" if math.isinf(high) else f"in [{low}, {high})"
        require(low <= value < high, f"{type(config).__name__}.{name}={value}; it must be {bound}")


def require_above_zero(config: Any, *names: str) -> None:
    for name in names:
        value = getattr(config, name)
        require(0 < value < math.inf, f"{type(config).__name__}.{name}={value}; it must be > 0 and finite")
