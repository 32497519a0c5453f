"""Layers of equal structure are stored stacked and run by one scan, so that compile time does not grow with depth."""

import functools
from collections.abc import Callable, Sequence
from typing import Any, TypeVar

import jax
import jax.numpy as jnp
import numpy as np
from flax import nnx
from jax.typing import ArrayLike

Module = TypeVar("Module", bound=nnx.Module)
Carry = TypeVar("Carry")
Kinds = TypeVar("Kinds", str, tuple)


@functools.cache
def scan_plan(kinds: Kinds) -> tuple[tuple[Kinds, int], ...]:
    """Cuts the layers' kinds into repeated units: the fewest blocks to trace, then the fewest scans, then long units first.

    "DDDMMMM" -> (("D", 3), ("M", 4)); "DMMMDMMMDM" -> (("DMMM", 2), ("DM", 1)). A tuple of kinds is cut in the same way.
    """
    if not kinds:
        return ()
    plans = []
    for width in range(1, len(kinds) + 1):
        unit, repeats = kinds[:width], 1
        while kinds[: width * (repeats + 1)] == unit * (repeats + 1):
            repeats += 1
        plans.append(((unit, repeats), *scan_plan(kinds[width * repeats :])))
    return min(plans, key=lambda plan: (sum(len(unit) for unit, _ in plan), len(plan), [-len(unit) for unit, _ in plan]))


def stack_depths(kinds: Kinds) -> list[list[np.ndarray]]:
    """Depths of the layers in every stacked module, by scan and by place in its unit: "DMDMD" -> [[0 2], [1 3]], [[4]]."""
    depths, first = [], 0
    for unit, repeats in scan_plan(kinds):
        depths.append([first + place + len(unit) * np.arange(repeats) for place in range(len(unit))])
        first += len(unit) * repeats
    return depths


def stack_modules(make: Callable[[nnx.Rngs], Module], key: jax.Array, layers: ArrayLike) -> Module:
    """One module whose parameters carry a leading axis, one entry a layer. Layer i starts from `key` folded with i."""
    return nnx.vmap(lambda layer: make(nnx.Rngs(params=jax.random.fold_in(key, layer))))(jnp.asarray(layers))


def unstack_module(stacked: Module, index: int) -> Module:
    """Entry `index` of a stacked module, as a module of its own."""
    graphdef, state = nnx.split(stacked)
    return nnx.merge(graphdef, jax.tree.map(lambda leaf: leaf[index], state))


def scan_modules(call: Callable[[Any, Carry], tuple[Carry, Any]], stacked: Any, carry: Carry, *, remat: bool = False) -> tuple[Carry, Any]:
    """Runs `carry, output = call(module, carry)` over the entries of a stacked module (or a list of them); outputs are stacked.

    Everything a layer yields goes through the scan's outputs: losses written to a side channel would be lost under remat.
    """
    graphdef, state = nnx.split(stacked)
    length = len(jax.tree.leaves(state)[0])

    def body(carry: Carry, entry: nnx.State) -> tuple[Carry, Any]:
        return call(nnx.merge(graphdef, entry), carry)

    if remat:  # a loop already keeps XLA from merging the recomputation with the original; a single pass does not
        body = jax.checkpoint(body, prevent_cse=length == 1)
    return jax.lax.scan(body, carry, state)


def interleave(units: Sequence[Any]) -> Any:
    """[outputs of unit position 0, 1, ...], each stacked over repeats -> one tree stacked over layers, in order of depth."""
    return jax.tree.map(lambda *leaves: jnp.stack(leaves, axis=1).reshape(-1, *leaves[0].shape[1:]), *units)
