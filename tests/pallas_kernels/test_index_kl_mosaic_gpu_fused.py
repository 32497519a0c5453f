"""sparse_attention_and_index_kl: every implementation equals the two ops in turn, with and without a probe."""

import functools
import sys
from unittest import mock

import jax
import jax.numpy as jnp
import mosaic_tools
import numpy as np
import pytest
from jax.sharding import AbstractMesh, AxisType, PartitionSpec, use_abstract_mesh
from mosaic_tools import needs_mosaic, pack

from pallas_kernels.block_select.api import block_select
from pallas_kernels.blocks import make_layout
from pallas_kernels.index_kl import mosaic_gpu, mosaic_gpu_fused
from pallas_kernels.index_kl.api import index_kl, sparse_attention_and_index_kl
from pallas_kernels.sparse_attention.api import sparse_attention
from pallas_kernels.testing import error_ratio

LIMIT = 5e-3
DOCUMENTS = ((1, 150), (0, 7), (2, 200), (3, 1), (4, 154))


# Bytes that a chunk may take; one chunk is lowered in the fast tests too.
BUDGETS = pytest.mark.parametrize(
    "budget", [pytest.param(1 << 34, id="one_chunk"), pytest.param(1 << 22, id="chunks", marks=pytest.mark.kernels)]
)


def arrays(T: int, K: int, G: int, width: int, dtype: str = "float32") -> tuple[jax.Array, ...]:
    """q, k, v, iq, ik."""
    sizes = ((T, K * G, width), (T, K, width), (T, K, width), (T, K, width), (T, width))
    keys = jax.random.split(jax.random.key(0), len(sizes))
    return tuple(jax.random.normal(key, (1, *size), dtype) for key, size in zip(keys, sizes, strict=True))


def total(out, lse, kl) -> jax.Array:
    """A loss that every result reaches."""
    return (out.astype(jnp.float32) ** 2).mean() + jnp.where(jnp.isfinite(lse), lse, 0).mean() + 3 * kl


def fused(ids, options: dict, probed: bool):
    def loss(*x):
        *x, probe = x
        return total(*sparse_attention_and_index_kl(*x, ids, **options, probe=probe if probed else None))

    return jax.value_and_grad(loss, argnums=tuple(range(6 if probed else 5)))


def in_turn(ids, options: dict):
    def loss(q, k, v, iq, ik):
        out, lse = sparse_attention(q, k, v, ids, **options)
        return total(out, lse, index_kl(iq, ik, q, k, ids, **options))

    return jax.value_and_grad(loss, argnums=(0, 1, 2, 3, 4))


@pytest.mark.parametrize("probed", [False, True])
@pytest.mark.parametrize("implementation", ["reference", "xla"])
def test_equals_both_ops_in_turn(implementation, probed):
    *_, iq, ik = x = arrays(T=40, K=2, G=2, width=8)
    ids = block_select(iq, ik, block_size=4, num_blocks=3).ids
    options = {"block_size": 4, "implementation": implementation}
    value, gradients = jax.jit(fused(ids, options, probed))(*x, jnp.float32(7))
    want_value, want = jax.jit(in_turn(ids, options))(*x)
    for got, expected in zip(gradients[:5], want, strict=True):
        assert error_ratio(got, expected) < 1e-5
    kl = 3 * index_kl(iq, ik, *x[:2], ids, **options)
    np.testing.assert_allclose(value, want_value - (kl if probed else 0), rtol=1e-5)
    if probed:
        np.testing.assert_allclose(gradients[5], kl, rtol=1e-5)


@needs_mosaic
@BUDGETS
@pytest.mark.parametrize("probed", [False, True])
def test_lowers_for_an_h200(probed, budget):
    x = jax.eval_shape(lambda: arrays(512, 2, 16, 128, "bfloat16"))
    ids, segments = jax.ShapeDtypeStruct((1, 2, 512, 3), jnp.int32), jax.ShapeDtypeStruct((1, 512), jnp.int32)

    def value_and_gradients(ids, segments, *x):
        return fused(ids, {"block_size": 128, "segments": segments, "implementation": "mosaic_gpu"}, probed)(*x)

    with mock.patch.object(mosaic_gpu.attention.tuning, "BUDGET_BYTES", budget):
        mosaic_tools.lower(value_and_gradients, ids, segments, *x, jnp.float32(0))


@needs_mosaic
@BUDGETS
@pytest.mark.parametrize("kept", [True, False])
def test_lowers_in_shard_map(kept, budget):
    """Types must agree on what varies over the mesh, or the cotangents of kernels' results would be summed over it."""
    mesh = AbstractMesh((2,), ("d",), axis_types=(AxisType.Auto,), abstract_device=mosaic_tools.H200)
    x = jax.eval_shape(lambda: jax.tree.map(lambda x: jnp.concatenate([x, x]), arrays(512, 2, 16, 128, "bfloat16")))

    def gradients(ids, q, k, v, iq, ik):
        if kept:
            options = {"block_size": 128, "denominator": 1.0, "implementation": "mosaic_gpu"}
            return fused(ids, options, True)(q, k, v, iq, ik, jax.lax.pcast(jnp.float32(0), ("d",), to="varying"))[1][:5]
        prefix = functools.partial(index_kl, ids_BKTR=None, block_size=128, denominator=1.0, implementation="mosaic_gpu")
        return jax.grad(lambda iq, ik: prefix(iq, ik, q, k), argnums=(0, 1))(iq, ik)

    ids = jax.ShapeDtypeStruct((2, 2, 512, 3), jnp.int32)
    sharded = jax.shard_map(gradients, in_specs=(PartitionSpec("d"),) * 6, out_specs=(PartitionSpec("d"),) * (5 if kept else 2))
    with (
        mock.patch.object(mosaic_gpu.attention.tuning, "BUDGET_BYTES", budget),
        mock.patch.object(mosaic_gpu.tuning, "DIFFERENCE_BYTES", budget // 4),
        use_abstract_mesh(mesh),
    ):
        jax.jit(sharded).trace(ids, *x).lower(lowering_platforms=("cuda",))


@needs_mosaic
@pytest.mark.kernels
@pytest.mark.parametrize("name", ["one_chunk", "chunks"])
def test_gradients_equal_the_reference_in_the_simulator(name):
    mosaic_tools.simulate(__file__, name)


def simulated(name: str) -> None:
    """The fused backward pass, kernel by kernel, since two in one program hang the simulator."""
    from jax.experimental.pallas import mosaic_gpu as plgpu

    *_, iq, ik = x = arrays(192, 1, 8, 64, "bfloat16")
    options = {"block_size": 64, "segments": pack((1, 70), (0, 5), (2, 117))}
    ids = block_select(iq, ik, num_blocks=2, **options, implementation="reference").ids
    wide = tuple(y.astype(jnp.float32) for y in x)
    _, want = jax.jit(fused(ids, options | {"implementation": "reference"}, True))(*wide, jnp.float32(0))
    out, lse = sparse_attention(*wide[:3], ids, **options, implementation="reference")
    cotangents = jax.grad(lambda out, lse: total(out, lse, 0.0), argnums=(0, 1))(out, lse)
    layout = make_layout(192, 192, 1, options["segments"], None, None)
    weights_BT = (options["segments"] > 0) * (3 / 187)
    residuals = *x[:3], ids, out.astype(jnp.bfloat16), lse
    with mock.patch.object(mosaic_gpu.attention.tuning, "BUDGET_BYTES", 1 << 34 if name == "one_chunk" else 1 << 18):
        gradients, (value, diq, dik) = mosaic_gpu_fused.backward.__wrapped__(
            residuals,
            cotangents,
            iq,
            ik,
            weights_BT,
            layout,
            block_size=64,
            scale=64**-0.5,
            index_scale=64**-0.5,
            interpret=plgpu.InterpretGPUParams(detect_races=True),
        )
    for part, got, expected in zip(("dq", "dk", "dv", "diq", "dik", "kl"), (*gradients, diq, dik, value), want, strict=True):
        assert error_ratio(got, expected) <= LIMIT, f"{part}: error ratio {error_ratio(got, expected):.2e}"


@pytest.mark.gpu
@pytest.mark.parametrize("budget", [1 << 34, 1 << 22], ids=["one_chunk", "chunks"])
@pytest.mark.parametrize("segments", [None, DOCUMENTS], ids=["one_document", "documents"])
@pytest.mark.parametrize("group", [2, 16])
def test_equals_the_reference_on_the_gpu(group, segments, budget):
    *_, iq, ik = x = arrays(512, 2, group, 128, "bfloat16")
    options = {"block_size": 64, "segments": None if segments is None else pack(*segments)}
    ids = block_select(iq, ik, num_blocks=4, **options).ids
    jax.clear_caches()
    with mock.patch.object(mosaic_gpu.attention.tuning, "BUDGET_BYTES", budget):
        f = jax.jit(fused(ids, options | {"implementation": "mosaic_gpu"}, True))
        (_, gradients), (_, again) = f(*x, jnp.float32(0)), f(*x, jnp.float32(0))
    reference = fused(ids, options | {"implementation": "reference"}, True)
    _, want = jax.jit(reference)(*(y.astype(jnp.float32) for y in x), jnp.float32(0))
    for name, got, expected, repeated in zip(("dq", "dk", "dv", "diq", "dik", "kl"), gradients, want, again, strict=True):
        ratio = error_ratio(got, expected)
        print(f"{name}: error ratio {ratio:.2e}")
        assert ratio <= LIMIT, f"{name}: error ratio {ratio:.2e}"
        np.testing.assert_array_equal(got, repeated)


if __name__ == "__main__":
    simulated(sys.argv[1])
