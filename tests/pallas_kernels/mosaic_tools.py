"""Kernels tested without a GPU: lowered for an H200, run in the Mosaic simulator, compiled by ptxas."""

import contextlib
import os
import re
import shutil
import subprocess
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any, NamedTuple
from unittest import mock

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.experimental.pallas import mosaic_gpu as plgpu
from jax.sharding import AbstractDevice, AbstractMesh, NamedSharding, PartitionSpec, use_abstract_mesh

ROOT = Path(__file__).parents[2]
# A folder with jax-cuda13-pjrt and jax-cuda13-plugin (pip install --no-deps --target), kept out of every other test's path.
PLUGIN = os.environ.get("JAX_CUDA_PLUGIN_DIR", "")

needs_mosaic = pytest.mark.skipif(jax.__version_info__ < (0, 11), reason="Mosaic GPU kernels need JAX 0.11")
needs_ptxas = pytest.mark.skipif(
    not (PLUGIN and shutil.which("ptxas")), reason="needs ptxas and JAX's CUDA plugin in the folder that JAX_CUDA_PLUGIN_DIR names"
)

_H200 = """
gpu_device_info {
  threads_per_block_limit: 1024 threads_per_warp: 32 threads_per_core_limit: 2048
  shared_memory_per_block: 49152 shared_memory_per_core: 233472 shared_memory_per_block_optin: 232448
  registers_per_core_limit: 65536 registers_per_block_limit: 65536
  core_count: 132 fpus_per_core: 128 clock_rate_ghz: 1.98
  block_dim_limit_x: 2147483647 block_dim_limit_y: 65535 block_dim_limit_z: 65535
  memory_bandwidth: 4800000000000 l2_cache_size: 52428800 device_memory_size: 150000000000
  cuda_compute_capability { major: 9 }
}
platform_name: "CUDA" device_description_str: "NVIDIA H200"
dnn_version_info { major: 9 minor: 12 } runtime_version { major: 13 minor: 0 patch: 0 }
"""


H200 = AbstractDevice(device_kind="NVIDIA H200", num_cores=132, platform="gpu")


def h200() -> Any:
    """Context in which kernels lower for an H200 although none is present."""
    return use_abstract_mesh(AbstractMesh((), (), abstract_device=H200))


def shapes(tree: Any) -> Any:
    """Arrays as their shapes and types."""
    return jax.tree.map(lambda x: jax.ShapeDtypeStruct(jnp.shape(x), jnp.result_type(x)), tree)


def lower(f: Callable, *args: Any) -> Any:
    """Lowers f for an H200; fails where a kernel does not fit it, or a copy starts where TMA cannot."""
    with h200(), _aligned_copies():
        return jax.jit(f).trace(*shapes(args)).lower(lowering_platforms=("cuda",))


@contextlib.contextmanager
def _aligned_copies() -> Iterator[None]:
    """Fails where a TMA copy can start off a 128-byte boundary of shared memory: only hardware would notice, and end the process."""

    def checked(copy: Callable, side: int) -> Callable:
        def run(*args: Any, **options: Any) -> Any:
            _check_aligned(args[side])
            return copy(*args, **options)

        return run

    load, store = plgpu.copy_gmem_to_smem, plgpu.copy_smem_to_gmem
    with mock.patch.object(plgpu, "copy_gmem_to_smem", checked(load, 1)), mock.patch.object(plgpu, "copy_smem_to_gmem", checked(store, 0)):
        yield


def _check_aligned(smem: Any) -> None:
    for indexer in (transform for transform in getattr(smem, "transforms", ()) if hasattr(transform, "indices")):
        stride = np.dtype(smem.dtype).itemsize
        for index, size in reversed(list(zip(indexer.indices, indexer.shape, strict=True))):
            start = getattr(index, "start", index)
            moves = stride * (start if isinstance(start, int) else 1)
            assert moves % 128 == 0, (
                f"a copy's start in shared memory {indexer.shape} {smem.dtype} moves in steps of {moves} bytes, not of 128"
            )
            stride *= size


def _subprocess(arguments: list[str], seconds: float, **environment: str) -> str:
    env = {**os.environ, "JAX_PLATFORMS": "cpu", "PYTHONPATH": str(ROOT), **environment}
    done = subprocess.run([sys.executable, *arguments], env=env, cwd=ROOT, capture_output=True, text=True, timeout=seconds)
    assert done.returncode == 0, f"{' '.join(arguments)} failed:\n{done.stdout}\n{done.stderr[-4000:]}"
    return done.stdout + done.stderr


def simulate(script: str, case: str) -> None:
    """Runs `script case` in a process of its own: after a failure in the simulator other threads can hang."""
    # On few cores the simulator's thread pool starves and correct kernels hang.
    log = _subprocess([script, case], 300, NPROC="16")
    assert "RACE DETECTED" not in log, f"{case}:\n{log}"


class Assembled(NamedTuple):
    """What ptxas says of one kernel."""

    name: str
    registers: int
    spill_bytes: int


def assemble(script: str, case: str) -> list[Assembled]:
    """Runs `script case`, which compiles for an H200, and returns ptxas's report; fails on notes of serialised or waiting wgmma."""
    log = _subprocess(
        [script, case],
        300,
        PYTHONPATH=f"{ROOT}:{PLUGIN}",
        JAX_SKIP_CUDA_CONSTRAINTS_CHECK="1",
        MOSAIC_GPU_DUMP_PTXAS="1",
    )
    for note in ("C7507", "C7512", "C7514", "C7517"):
        assert note not in log, f"{case}: ptxas notes {note}:\n{log}"
    report = r"Compiling entry function '(\w+)'.*?(\d+) bytes spill stores.*?Used (\d+) registers"
    found = [Assembled(name, int(registers), int(spill)) for name, spill, registers in re.findall(report, log, re.DOTALL)]
    assert found, f"{case}: no report of ptxas in\n{log}"
    return found


def compile_for_h200(f: Callable, *args: Any) -> Any:
    """The compiled executable of f for arguments like `args`; needs the plugin, so only in the process that `assemble` starts."""
    from jax.experimental import topologies

    topology = topologies.get_topology_desc(platform="cuda", target_config=_H200, topology="1x1x1")
    sharding = NamedSharding(topologies.make_mesh(topology, (1,), ("d",)), PartitionSpec())
    placed = jax.tree.map(lambda x: jax.ShapeDtypeStruct(x.shape, x.dtype, sharding=sharding), shapes(args))
    with h200():
        return jax.jit(f).trace(*placed).lower(lowering_platforms=("cuda",)).compile()


def pack(*documents: tuple[int, int]) -> jax.Array:
    """segments [1, S] of (segment, length) pairs."""
    return jnp.asarray(np.concatenate([np.full(length, segment) for segment, length in documents])[None], jnp.int32)
