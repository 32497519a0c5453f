"""Which implementation of an op runs: the only place of the project that looks at the device.

    "reference"   the slow definition, any device           "mosaic_gpu"  Pallas Mosaic GPU kernels, NVIDIA Hopper and newer
    "xla"         chunked plain JAX, any device             "triton"      Triton kernels, other NVIDIA GPUs

Naming one gets that one or `Unsupported` with the reason. "auto" takes a GPU kernel where one is registered and serves the
call, else "xla"; only on an NVIDIA GPU that misses its kernel does it say so, once.

An op registers its implementations in its api.py, one line each: `"mosaic_gpu": Implementation(run, refuse)`.
"""

import functools
import warnings
from collections.abc import Callable, Mapping
from typing import Any, NamedTuple

import jax

from pallas_kernels.numerics import vary_alike

IMPLEMENTATIONS = ("auto", "reference", "xla", "mosaic_gpu", "triton")
GPU_KERNELS = ("mosaic_gpu", "triton")  # in the order in which "auto" tries them
NVIDIA_KINDS = ("NVIDIA", "Tesla", "Quadro", "GeForce")  # how the device kinds of NVIDIA GPUs begin


class Unsupported(NotImplementedError):
    """The named implementation does not serve this call; the message says why and what does."""


class Implementation(NamedTuple):
    """`run(*arrays, **options)` computes; `refuse(device_kind, *arrays, **options)` returns why it cannot, or None.

    `refuse` may look at shapes, dtypes and options only: it runs while tracing.
    """

    run: Callable[..., Any]
    refuse: Callable[..., str | None] = lambda device_kind, *arrays, **options: None


_used: dict[str, str] = {}


def implementations_used() -> dict[str, str]:
    """The implementation last chosen for each op in this process, for the record of a run."""
    return dict(_used)


def run(op: str, implementation: str, registered: Mapping[str, Implementation], *arrays: Any, **options: Any) -> Any:
    """Calls the implementation of `op` that the rules above choose.

    Raises ValueError for an unknown name and Unsupported where the named implementation does not serve the call.
    """
    if implementation not in IMPLEMENTATIONS:
        raise ValueError(f"{op}: implementation={implementation!r}; choose one of {', '.join(IMPLEMENTATIONS)}")
    kind = device_kind()
    name = implementation
    if implementation == "auto":
        name = _choose(op, kind, registered, arrays, options)
    elif reason := _reason_against(name, kind, registered, arrays, options):
        raise Unsupported(f"{op}: implementation={name!r} {reason}; use implementation='xla', which serves every shape and device")
    _used[op] = name
    return registered[name].run(*vary_alike(arrays), **options)


def _choose(op: str, kind: str, registered: Mapping[str, Implementation], arrays: tuple, options: dict) -> str:
    if not _is_nvidia(kind):
        return "xla"
    reasons = {name: _reason_against(name, kind, registered, arrays, options) for name in GPU_KERNELS}
    for name, reason in reasons.items():
        if reason is None:
            return name
    _warn_once(f"{op}: running 'xla' on {kind}, because {'; '.join(f'{name!r} {reason}' for name, reason in reasons.items())}")
    return "xla"


def _reason_against(name: str, kind: str, registered: Mapping[str, Implementation], arrays: tuple, options: dict) -> str | None:
    if name not in registered:
        return "does not exist for this op yet"
    if name in GPU_KERNELS and not _is_nvidia(kind):
        return f"needs an NVIDIA GPU and the device is {kind!r}"
    return registered[name].refuse(kind, *arrays, **options)


def _is_nvidia(kind: str) -> bool:
    return kind.startswith(NVIDIA_KINDS)


@functools.cache
def _warn_once(message: str) -> None:
    warnings.warn(message, stacklevel=5)


def device_kind() -> str:
    """Kind of the device that traced code is meant for: that of the abstract mesh in force, else of the default device."""
    device = jax.sharding.get_abstract_mesh().abstract_device
    return device.device_kind if device is not None else _default_device_kind(jax.config.jax_default_device)


@functools.cache
def _default_device_kind(default: Any) -> str:
    if default is None or isinstance(default, str):
        default = jax.local_devices(backend=default)[0]
    return default.device_kind
