"""The ops chained as a layer chains them, under every transformation of jax: the same values and gradients as without it."""

import os
import subprocess
import sys
from pathlib import Path

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from quick_jit import quick_jit

from pallas_kernels.block_select.api import block_select
from pallas_kernels.index_kl.api import index_kl
from pallas_kernels.sparse_attention.api import sparse_attention
from pallas_kernels.testing import assert_close

ROOT = Path(__file__).resolve().parents[2]


def inputs(seed: int = 0) -> dict[str, jax.Array]:
    random = np.random.default_rng(seed)
    shapes = {"iq": (2, 19, 1, 4), "ik": (2, 19, 4), "q": (2, 19, 2, 4), "k": (2, 19, 1, 4), "v": (2, 19, 1, 6)}
    return {name: jnp.asarray(random.standard_normal(shape), jnp.float32) for name, shape in shapes.items()}


def loss(arrays: dict[str, jax.Array], implementation: str = "xla") -> jax.Array:
    """Everything that an MSA layer computes, in both phases, as a sum over rows."""
    iq, ik, q, k, v = (arrays[name] for name in ("iq", "ik", "q", "k", "v"))
    options = {"block_size": 2, "implementation": implementation}
    sel = block_select(iq, ik, num_blocks=2, **options)
    out, lse = sparse_attention(q, k, v, sel.ids, **options)
    kl = index_kl(iq, ik, q, k, sel.ids, denominator=38.0, **options) + index_kl(iq, ik, q, k, None, denominator=38.0, **options)
    return jnp.sum(out**2) + jnp.sum(lse) + jnp.sum(sel.lse) + kl


step = quick_jit(jax.value_and_grad(loss), static_argnames="implementation")


def named(value_and_gradients: tuple) -> dict[str, jax.Array]:
    value, gradients = value_and_gradients
    return {"loss": value} | gradients


@pytest.fixture(scope="module")
def plain() -> dict[str, jax.Array]:
    return named(step(inputs()))


def test_reference_chain(plain: dict[str, jax.Array]) -> None:
    assert_close(named(step(inputs(), implementation="reference")), plain, 2e-6)


def test_vmap_of_forward_and_of_gradient(plain: dict[str, jax.Array]) -> None:
    stacked = jax.tree.map(lambda *x: jnp.stack(x), inputs(0), inputs(1))
    other = named(step(inputs(1)))
    each = named(quick_jit(jax.vmap(jax.value_and_grad(loss)))(stacked))
    assert_close(each, {name: jnp.stack([plain[name], other[name]]) for name in plain}, 2e-6)
    summed = named(quick_jit(jax.value_and_grad(lambda stacked: jax.vmap(loss)(stacked).sum()))(stacked))
    assert_close(summed, each | {"loss": each["loss"].sum()}, 2e-6)


def test_scan_and_remat(plain: dict[str, jax.Array]) -> None:
    """Two layers in a scan, each recomputed in the backward pass."""

    def layers(arrays: dict[str, jax.Array]) -> jax.Array:
        body = jax.checkpoint(lambda total, gain: (total + gain * loss(arrays), None))
        return jax.lax.scan(body, jnp.float32(0), jnp.array([1.0, 2.0]))[0]

    tripled = {name: 3 * x for name, x in plain.items()}
    assert_close(named(quick_jit(jax.value_and_grad(layers))(inputs())), tripled, 2e-6)


def test_nothing_is_nan_on_the_way() -> None:
    """jax_debug_nans raises where an op makes a NaN that a later one hides; rows here have padding and no valid ids."""
    segments = np.repeat([[0, 1, 2, 0]], 2, axis=0).repeat((2, 7, 8, 2), axis=1)

    def padded(arrays: dict[str, jax.Array]) -> jax.Array:
        iq, ik, q, k, v = (arrays[name] for name in ("iq", "ik", "q", "k", "v"))
        options = {"block_size": 2, "segments": segments, "implementation": "xla"}
        ids = block_select(iq, ik, num_blocks=2, **options).ids.at[:, :, 4].set(-1)
        out, lse = sparse_attention(q, k, v, ids, **options)
        finite_lse = jnp.where(jnp.isfinite(lse), lse, 0)
        return jnp.sum(out**2) + jnp.sum(finite_lse) + index_kl(iq, ik, q, k, ids, **options)

    with jax.debug_nans(True):
        gradients = jax.grad(padded)(inputs())
        assert all(np.isfinite(x).all() for x in jax.tree.leaves(gradients))


def test_shard_map_over_two_devices() -> None:
    flags = os.environ.get("XLA_FLAGS", "") + " --xla_force_host_platform_device_count=2"
    environment = os.environ | {"XLA_FLAGS": flags, "JAX_PLATFORMS": "cpu", "PYTHONPATH": str(ROOT)}
    script = Path(__file__).with_name("two_devices.py")
    done = subprocess.run([sys.executable, str(script)], env=environment, capture_output=True, text=True, timeout=300, check=False)
    assert done.returncode == 0, done.stderr[-2000:]
    assert done.stdout.count("error ratios") == 2
