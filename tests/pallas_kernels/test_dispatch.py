"""Which implementation runs: named ones, "auto" on each kind of device, the warning, the record."""

import warnings
from collections.abc import Iterator
from contextlib import contextmanager

import jax
import jax.numpy as jnp
import pytest
from jax.sharding import AbstractDevice, AbstractMesh

from pallas_kernels import dispatch
from pallas_kernels.block_select.api import block_select
from pallas_kernels.dispatch import Implementation, Unsupported


@contextmanager
def device(kind: str, platform: str = "gpu") -> Iterator[None]:
    """Code is traced as for this device; nothing can run on it."""
    mesh = AbstractMesh((), (), abstract_device=AbstractDevice(device_kind=kind, num_cores=132, platform=platform))
    with jax.sharding.use_abstract_mesh(mesh):
        yield


@pytest.fixture(autouse=True)
def fresh_warnings() -> None:
    dispatch._warn_once.cache_clear()


def narrow(device_kind: str, x: int, *, block_size: int) -> str | None:
    if "H200" not in device_kind:
        return "needs an H200"
    return f"serves block_size=128, not {block_size}" if block_size != 128 else None


PLAIN = {"reference": Implementation(lambda x, **_: ("reference", x)), "xla": Implementation(lambda x, **_: ("xla", x))}
KERNELS = PLAIN | {"mosaic_gpu": Implementation(lambda x, **_: ("mosaic_gpu", x), narrow)}


def run(implementation: str, registered: dict, block_size: int = 128) -> str:
    return dispatch.run("op", implementation, registered, 1.0, block_size=block_size)[0]


def test_auto_is_xla_on_cpu_and_tpu_silently() -> None:
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        assert run("auto", KERNELS) == "xla"
        with device("TPU v5e", "tpu"):
            assert run("auto", KERNELS) == "xla"
        with device("AMD Instinct MI300X"):
            assert run("auto", KERNELS) == "xla"


def test_auto_takes_the_kernel_where_it_serves_the_call() -> None:
    with warnings.catch_warnings(), device("NVIDIA H200"):
        warnings.simplefilter("error")
        assert run("auto", KERNELS) == "mosaic_gpu"


@pytest.mark.parametrize(
    ("kind", "registered", "block_size", "reason"),
    [
        ("NVIDIA H200", PLAIN, 128, "'mosaic_gpu' does not exist for this op yet"),
        ("NVIDIA H200", KERNELS, 64, "'mosaic_gpu' serves block_size=128, not 64"),
        ("Tesla T4", KERNELS, 128, "'mosaic_gpu' needs an H200"),
    ],
)
def test_auto_on_an_nvidia_gpu_without_kernel_warns_once(kind: str, registered: dict, block_size: int, reason: str) -> None:
    with device(kind), pytest.warns(UserWarning, match=reason) as caught:
        assert [run("auto", registered, block_size) for _ in range(3)] == ["xla"] * 3
    assert len(caught) == 1
    assert str(caught[0].message).startswith(f"op: running 'xla' on {kind}")


def test_naming_an_implementation_gets_it_or_the_reason() -> None:
    assert run("reference", KERNELS) == "reference"
    with pytest.raises(Unsupported, match=r"op: implementation='triton' does not exist for this op yet; use implementation='xla'"):
        run("triton", KERNELS)
    with pytest.raises(Unsupported, match=r"op: implementation='mosaic_gpu' needs an NVIDIA GPU and the device is 'cpu'"):
        run("mosaic_gpu", KERNELS)
    with device("NVIDIA H200"):
        assert run("mosaic_gpu", KERNELS) == "mosaic_gpu"
        assert run("xla", KERNELS) == "xla"
        with pytest.raises(Unsupported, match="serves block_size=128, not 64"):
            run("mosaic_gpu", KERNELS, 64)
    with pytest.raises(ValueError, match=r"op: implementation='cuda'; choose one of auto, reference, xla, mosaic_gpu, triton"):
        run("cuda", KERNELS)


def test_what_ran_is_recorded() -> None:
    run("reference", PLAIN)
    assert dispatch.implementations_used()["op"] == "reference"
    run("auto", PLAIN)
    assert dispatch.implementations_used()["op"] == "xla"


def test_the_ops_say_plainly_what_is_missing() -> None:
    for name, reason in (("mosaic_gpu", "needs an NVIDIA GPU and the device is 'cpu'"), ("triton", "does not exist for this op yet")):
        with pytest.raises(Unsupported, match=f"block_select: implementation='{name}' {reason}"):
            block_select(jnp.ones((1, 4, 1, 2)), jnp.ones((1, 4, 2)), block_size=2, num_blocks=1, implementation=name)


def test_the_default_device_decides_without_a_mesh() -> None:
    assert dispatch.device_kind() == jax.local_devices()[0].device_kind
    with jax.default_device(jax.devices("cpu")[0]):
        assert dispatch.device_kind() == "cpu"
