"""Trees of frozen dataclasses: list their leaves, change one by its dotted path, write and read them as plain values.

Reading never evaluates text as code. Errors are ConfigError: they name the path, the value and the nearest known names.
"""

import dataclasses
import difflib
import hashlib
import json
import types
import typing
from typing import Any


class ConfigError(ValueError):
    """A configuration that cannot work; the message names the field, its value and the remedy."""


def to_dict(config: Any) -> dict[str, Any]:
    """Nested plain values, ready for JSON."""
    return dataclasses.asdict(config)


def flatten(config: Any) -> dict[str, Any]:
    """{"optim.learning_rate": 0.003, ...}: every leaf by its dotted path."""
    leaves = {}
    for field in dataclasses.fields(config):
        value = getattr(config, field.name)
        if dataclasses.is_dataclass(value):
            leaves |= {f"{field.name}.{path}": leaf for path, leaf in flatten(value).items()}
        else:
            leaves[field.name] = value
    return leaves


def config_hash(config: Any) -> str:
    """Twelve hex digits that name the configuration."""
    return hashlib.sha256(json.dumps(to_dict(config), sort_keys=True).encode()).hexdigest()[:12]


def difference(ours: Any, theirs: Any) -> dict[str, tuple[Any, Any]]:
    """{path: (our value, their value)} of the leaves that differ; a missing leaf is None."""
    a, b = flatten(ours), flatten(theirs)
    return {path: (a.get(path), b.get(path)) for path in sorted(a | b) if a.get(path) != b.get(path)}


def from_dict(cls: type, values: dict[str, Any], path: str = "") -> Any:
    """Builds `cls` from nested plain values. Raises ConfigError for unknown keys, missing keys and wrong types."""
    hints = typing.get_type_hints(cls)
    unknown = sorted(set(values) - set(hints))
    if unknown:
        raise ConfigError(_unknown_key(path + unknown[0], [path + name for name in hints]))
    try:
        return cls(**{name: _coerce(hints[name], value, path + name) for name, value in values.items()})
    except TypeError as error:
        raise ConfigError(f"{path or cls.__name__}: {error}") from error


def override(config: Any, changes: dict[str, Any]) -> Any:
    """A copy of `config` with leaves replaced: {"optim.learning_rate": "1e-3"}. Text is parsed by the field's type.

    All changes apply together, so that values which must agree can change in one call.
    Raises ConfigError for an unknown path (with the nearest known ones) and for a value of the wrong type.
    """
    values = to_dict(config)
    known = [*flatten(config), *(field.name for field in dataclasses.fields(config))]
    for path, value in changes.items():
        *parents, leaf = path.split(".")
        node = values
        for parent in parents:
            node = node.get(parent) if isinstance(node, dict) else None
        if not isinstance(node, dict) or leaf not in node:
            raise ConfigError(_unknown_key(path, known))
        node[leaf] = to_dict(value) if dataclasses.is_dataclass(value) else value
    return from_dict(type(config), values)


def _unknown_key(key: str, known: list[str]) -> str:
    near = difflib.get_close_matches(key, known, n=3, cutoff=0.5) or difflib.get_close_matches(
        key.rsplit(".", 1)[-1], known, n=3, cutoff=0.4
    )
    return f"unknown config key {key!r}; nearest: {', '.join(near) if near else ', '.join(sorted(known)[:8])}"


def _coerce(hint: Any, value: Any, path: str) -> Any:
    """`value` as `hint`, or ConfigError naming the path. Text is parsed; nothing is evaluated."""
    if isinstance(hint, types.UnionType):
        if value is None or (isinstance(value, str) and value.lower() == "none"):
            return None
        return _coerce(next(arm for arm in typing.get_args(hint) if arm is not type(None)), value, path)
    if dataclasses.is_dataclass(hint):
        if isinstance(value, hint):
            return value
        if isinstance(value, dict):
            return from_dict(hint, value, path + ".")
        raise ConfigError(f"{path}={value!r} is not a {hint.__name__}; set its fields one by one, as {path}.<field>=...")
    if typing.get_origin(hint) is tuple:
        return _coerce_tuple(hint, value, path)
    try:
        return _coerce_scalar(hint, value)
    except (TypeError, ValueError):
        raise ConfigError(f"{path}={value!r} is not of type {hint.__name__}") from None


def _coerce_tuple(hint: Any, value: Any, path: str) -> tuple:
    if isinstance(value, str):
        try:
            value = json.loads(value)
        except json.JSONDecodeError:
            raise ConfigError(f"{path}={value!r} is not a JSON list") from None
    if not isinstance(value, list | tuple):
        raise ConfigError(f"{path}={value!r} is not a list")
    arms = typing.get_args(hint)
    if arms[-1] is Ellipsis:
        arms = (arms[0],) * len(value)
    if len(arms) != len(value):
        raise ConfigError(f"{path}={value!r} needs {len(arms)} entries")
    return tuple(_coerce(arm, item, f"{path}[{i}]") for i, (arm, item) in enumerate(zip(arms, value, strict=True)))


def _coerce_scalar(hint: type, value: Any) -> Any:
    if hint is bool:
        if isinstance(value, str) and value.lower() in ("true", "false"):
            return value.lower() == "true"
        if not isinstance(value, bool):
            raise TypeError
        return value
    if isinstance(value, bool):
        raise TypeError
    if hint is float and isinstance(value, int | float | str):
        return float(value)
    if hint is int and isinstance(value, str):
        return int(value)
    if not isinstance(value, hint):
        raise TypeError
    return value
