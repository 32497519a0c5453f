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
        whole = isinstance(value, int) and not isinstance(value, bool)
        require(whole, f"{type(config).__name__}.{name}={value!r}; it must be a whole number")
        require(value >= 1, f"{type(config).__name__}.{name}={value}; it must be >= 1")


def _require_real(config: Any, name: str, value: Any) -> None:
    require(
        isinstance(value, int | float) and not isinstance(value, bool), f"{type(config).__name__}.{name}={value!r}; it must be a number"
    )


def require_within(config: Any, low: float, high: float, *names: str) -> None:
    """Real numbers in [low, high); infinity and NaN never pass."""
    for name in names:
        value = getattr(config, name)
        _require_real(config, name, value)
        bound = f">= {low} and finite" if math.isinf(high) else f"in [{low}, {high})"
        require(low <= value < high, f"{type(config).__name__}.{name}={value}; it must be {bound}")


def require_above_zero(config: Any, *names: str) -> None:
    for name in names:
        value = getattr(config, name)
        _require_real(config, name, value)
        require(0 < value < math.inf, f"{type(config).__name__}.{name}={value}; it must be > 0 and finite")
