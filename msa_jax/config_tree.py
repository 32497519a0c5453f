"""Trees of frozen dataclasses: list their leaves, change one by its dotted path, read one from a config file or plain values.

Reading never evaluates text as code. Errors are ConfigError: they name the path, the value and the nearest known names.
"""

import dataclasses
import difflib
import hashlib
import importlib.util
import json
import types
import typing
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any


class ConfigError(ValueError):
    """A configuration that cannot work; the message names the field, its value and the remedy."""


def to_dict(config: Any) -> dict[str, Any]:
    """Nested plain values, ready for JSON."""
    return _plain(config)


def _plain(value: Any) -> Any:
    if dataclasses.is_dataclass(value):
        return {field.name: _plain(getattr(value, field.name)) for field in dataclasses.fields(value)}
    if isinstance(value, list | tuple):
        return [_plain(item) for item in value]
    return value


def flatten(config: Any) -> dict[str, Any]:
    """{"optim.learning_rate": 0.003, "data.streams.0.name": "text", ...}: every leaf by its dotted path.

    `config` is a tree of dataclasses or what `to_dict` made of one.
    """
    leaves = {}
    for name, value in _children(_plain(config)).items():
        leaves |= {f"{name}.{path}": leaf for path, leaf in flatten(value).items()} or {name: value}
    return leaves


def _children(node: Any) -> dict[str, Any]:
    """The named parts of a plain value: entries of a dictionary, or of a list of dictionaries by their place in it."""
    if isinstance(node, list) and all(isinstance(item, dict) for item in node):
        return {str(place): item for place, item in enumerate(node)}
    return node if isinstance(node, dict) else {}


def config_hash(config: Any) -> str:
    """Twelve hex digits that name the configuration."""
    return hashlib.sha256(json.dumps(to_dict(config), sort_keys=True).encode()).hexdigest()[:12]


def difference(ours: Any, theirs: Any) -> dict[str, tuple[Any, Any]]:
    """{path: (our value, their value)} of the leaves that differ; a missing leaf is None. Either may be a `to_dict`."""
    a, b = flatten(ours), flatten(theirs)
    return {path: (a.get(path), b.get(path)) for path in sorted(a | b) if a.get(path) != b.get(path)}


def from_dict(cls: type, values: Mapping[str, Any], path: str = "") -> Any:
    """Builds `cls` from nested plain values. Raises ConfigError for unknown keys, missing keys and wrong types."""
    hints = typing.get_type_hints(cls)
    unknown = sorted(set(values) - set(hints))
    if unknown:
        raise ConfigError(_unknown_key(path + unknown[0], [path + name for name in hints]))
    required = [field.name for field in dataclasses.fields(cls) if field.default is field.default_factory is dataclasses.MISSING]
    missing = [path + name for name in required if name not in values]
    if missing:
        raise ConfigError(f"config key {', '.join(missing)} is missing")
    return cls(**{name: _coerce(hints[name], value, path + name) for name, value in values.items()})


def override(config: Any, changes: Mapping[str, Any]) -> Any:
    """A copy of `config` with values replaced: {"optim.learning_rate": "1e-3"}. Text is parsed by the field's type.

    All changes apply together, so that values which must agree can change in one call.
    Raises ConfigError for an unknown path (with the nearest known ones) and for a value of the wrong type.
    """
    values = to_dict(config)
    for path, value in changes.items():
        *parents, leaf = path.split(".")
        node = values
        for parent in parents:
            node = _children(node).get(parent)
        if leaf not in _children(node):
            raise ConfigError(_unknown_key(path, list(flatten(values))))
        node[leaf if isinstance(node, dict) else int(leaf)] = _plain(value)
    return from_dict(type(config), values)


def parse_changes(texts: Sequence[str]) -> dict[str, str]:
    """["optim.learning_rate=1e-3"] -> {"optim.learning_rate": "1e-3"}. Raises ConfigError for text without "="."""
    for text in texts:
        if "=" not in text:
            raise ConfigError(f"{text!r} changes nothing: give path=value, as in optim.learning_rate=1e-3")
    return dict(text.split("=", 1) for text in texts)


def load(path: str | Path, variant: str | None = None, changes: Mapping[str, Any] | None = None, *, beside: str | None = None) -> Any:
    """The configuration that a config file makes: a Python module with `config()` and optionally `variants()`.

    A variant is a dictionary of differences from `config()` by dotted path, its name is appended to the configuration's;
    `changes` come on top. `beside=__file__` takes `path` relative to the calling config file, so that an ablation can name
    its baseline. Raises ConfigError for a missing file or variant.
    """
    path = Path(path) if beside is None else Path(beside).parent / path
    module = load_module(path)
    config = module.config()
    if variant is None:
        return override(config, changes or {})
    variants = module.variants() if hasattr(module, "variants") else {}
    if variant not in variants:
        raise ConfigError(f"config file {str(path)!r} has no variant {variant!r}; choose from: {', '.join(variants) or 'none'}")
    return override(config, {"name": f"{config.name}-{variant}", **variants[variant], **(changes or {})})


def load_module(path: str | Path) -> types.ModuleType:
    """A config file as a module, which has at least `config()`. Raises ConfigError for a missing file or function."""
    path = Path(path)
    if not path.is_file():
        near = difflib.get_close_matches(str(path), [str(other) for other in path.parent.glob("*.py")], n=3, cutoff=0.4)
        raise ConfigError(f"no config file {str(path)!r}; nearest: {', '.join(near) or 'none in that folder'}")
    if path.suffix != ".py":
        raise ConfigError(f"config file {str(path)!r} is no Python file; its name must end in .py")
    spec = importlib.util.spec_from_file_location(f"config_{path.stem}", path)
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    if not hasattr(module, "config"):
        raise ConfigError(f"config file {str(path)!r} has no function config()")
    return module


def _unknown_key(key: str, known: list[str]) -> str:
    parent, _, leaf = key.rpartition(".")
    near = [name for name in known if len(leaf) > 1 and leaf == _initials(name)]  # "lr", "bs"
    near = sorted(near, key=lambda name: not name.startswith(parent + "."))[:3] or difflib.get_close_matches(key, known, n=3, cutoff=0.5)
    near = near or difflib.get_close_matches(leaf, known, n=3, cutoff=0.4) or sorted(known)[:8]
    return f"unknown config key {key!r}; nearest: {', '.join(near)}"


def _initials(path: str) -> str:
    return "".join(word[:1] for word in path.rpartition(".")[2].split("_"))


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
    return tuple(_coerce(arm, item, f"{path}.{i}") for i, (arm, item) in enumerate(zip(arms, value, strict=True)))


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
