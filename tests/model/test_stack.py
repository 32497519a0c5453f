"""Scanned stacks equal their layers one by one, and the plan covers every pattern in order."""

from collections.abc import Callable

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx

from msa_jax.model.init import fan_in_normal
from msa_jax.model.stack import interleave, scan_modules, scan_plan, stack_depths, stack_modules, unstack_module


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
        (((0, "a"), (0, "b"), (0, "a"), (0, "b"), (1, "a")), ((((0, "a"), (0, "b")), 2), (((1, "a"),), 1))),
    ],
)
def test_plan(kinds: str, plan: tuple) -> None:
    assert scan_plan(kinds) == plan


def test_plans_cover_every_pattern_in_order() -> None:
    rng = np.random.default_rng(0)
    for _ in range(100):
        kinds = "".join(rng.choice(list("DM"), rng.integers(1, 13)))
        assert "".join(unit * repeats for unit, repeats in scan_plan(kinds)) == kinds


def test_depths_of_stacked_layers() -> None:
    depths = [[[int(depth) for depth in place] for place in places] for places in stack_depths("DMDMD")]
    assert depths == [[[0, 2], [1, 3]], [[4]]]


def linear(rngs: nnx.Rngs) -> nnx.Linear:
    return nnx.Linear(4, 4, use_bias=False, kernel_init=fan_in_normal(), rngs=rngs)


def test_a_layer_of_a_stack_is_the_layer_made_alone() -> None:
    key = jax.random.key(3)
    stacked = stack_modules(linear, key, np.array([2, 5, 7]))
    assert stacked.kernel.shape == (3, 4, 4)
    alone = linear(nnx.Rngs(params=jax.random.fold_in(key, 5)))
    np.testing.assert_array_equal(unstack_module(stacked, 1).kernel[...], alone.kernel[...])


@pytest.mark.parametrize("remat", [False, True])
def test_scan_equals_a_loop(assert_close: Callable, remat: bool) -> None:
    """Outputs in order of depth, and every gradient: layers 0 and 2 are one stack, 1 and 3 the other."""
    key = jax.random.key(0)
    graphdef, params = nnx.split(nnx.List([stack_modules(linear, key, np.array(depths)) for depths in ([0, 2], [1, 3])]))

    def unit_pass(unit: nnx.List, x: jax.Array) -> tuple[jax.Array, list[jax.Array]]:
        outputs = []
        for layer in unit:
            outputs.append(x)
            x = jnp.tanh(layer(x))
        return x, outputs

    def scanned(params: nnx.State, x: jax.Array) -> tuple[jax.Array, jax.Array]:
        y, outputs = scan_modules(unit_pass, nnx.merge(graphdef, params), x, remat=remat)
        hidden = interleave(outputs)
        return (y * jnp.arange(4)).sum() + (hidden * jnp.arange(32).reshape(4, 2, 4)).sum(), hidden

    def looped(params: nnx.State, x: jax.Array) -> tuple[jax.Array, jax.Array]:
        hidden = []
        for depth in range(4):
            hidden.append(x)
            x = jnp.tanh(unstack_module(nnx.merge(graphdef, params)[depth % 2], depth // 2)(x))
        return (x * jnp.arange(4)).sum() + (jnp.stack(hidden) * jnp.arange(32).reshape(4, 2, 4)).sum(), jnp.stack(hidden)

    x = jnp.linspace(-1, 1, 8).reshape(2, 4)
    ours, theirs = (jax.jit(jax.value_and_grad(function, (0, 1), has_aux=True))(params, x) for function in (scanned, looped))
    assert_close(ours, theirs)
    assert ("remat" in str(jax.make_jaxpr(scanned)(params, x))) == remat
