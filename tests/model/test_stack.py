"""Scanned stacks equal their layers one by one, and the plan covers every pattern in order."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx

from msa_jax.model.init import fan_in_normal
from msa_jax.model.stack import interleave, scan_modules, scan_plan, stack_modules, unstack_module


@pytest.mark.parametrize(
    ("kinds", "plan"),
    [
        ("D", (("D", 1),)),
        ("MMMM", (("M", 4),)),
        ("DDDMMMM", (("D", 3), ("M", 4))),
        ("DMDMD", (("DM", 2), ("D", 1))),
        ("DMMMDMMMDM", (("DMMM", 2), ("DM", 1))),
        ("DDMDDMDD", (("DDM", 2), ("D", 2))),
        ("DDD" + "M" * 57, (("D", 3), ("M", 57))),
    ],
)
def test_plan(kinds: str, plan: tuple) -> None:
    assert scan_plan(kinds) == plan


def test_plans_cover_every_pattern_in_order() -> None:
    rng = np.random.default_rng(0)
    for _ in range(100):
        kinds = "".join(rng.choice(list("DM"), rng.integers(1, 13)))
        assert "".join(unit * repeats for unit, repeats in scan_plan(kinds)) == kinds


def linear(rngs: nnx.Rngs) -> nnx.Linear:
    return nnx.Linear(4, 4, use_bias=False, kernel_init=fan_in_normal(), rngs=rngs)


def test_a_layer_of_a_stack_is_the_layer_made_alone() -> None:
    key = jax.random.key(3)
    stacked = stack_modules(linear, key, np.array([2, 5, 7]))
    assert stacked.kernel.shape == (3, 4, 4)
    alone = linear(nnx.Rngs(params=jax.random.fold_in(key, 5)))
    np.testing.assert_array_equal(unstack_module(stacked, 1).kernel[...], alone.kernel[...])


@pytest.mark.parametrize("remat", [False, True])
def test_scan_equals_a_loop(remat: bool) -> None:
    stacked = nnx.List(
        [stack_modules(linear, jax.random.key(0), np.array([0, 2])), stack_modules(linear, jax.random.key(0), np.array([1, 3]))]
    )

    def call(unit: nnx.List, x: jax.Array) -> tuple[jax.Array, list[jax.Array]]:
        outputs = []
        for layer in unit:
            outputs.append(x)
            x = jnp.tanh(layer(x))
        return x, outputs

    x = jnp.linspace(-1, 1, 8).reshape(2, 4)
    result, outputs = scan_modules(call, stacked, x, remat=remat)
    traced = str(jax.make_jaxpr(lambda x: scan_modules(call, stacked, x, remat=remat))(x))
    assert ("checkpoint" in traced or "remat" in traced) == remat
    hidden = interleave(outputs)
    for depth in range(4):
        np.testing.assert_allclose(hidden[depth], x, rtol=1e-6)
        x = jnp.tanh(linear(nnx.Rngs(params=jax.random.fold_in(jax.random.key(0), depth)))(x))
    np.testing.assert_allclose(result, x, rtol=1e-6)
