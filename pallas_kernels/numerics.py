"""Arithmetic that the ops share: the accumulation type, matrix products in it, and a softmax over a support."""

from typing import Any

import jax
import jax.numpy as jnp


def accumulator(*arrays: jax.Array) -> jnp.dtype:
    """float32, or float64 where an input is float64."""
    return jnp.result_type(jnp.float32, *arrays)


def einsum(subscripts: str, a: jax.Array, b: jax.Array) -> jax.Array:
    """Product in the wider type of the two, accumulated in at least float32; 32-bit operands are not rounded to fewer bits."""
    dtype = jnp.result_type(a, b)
    precision = None if dtype.itemsize == 2 else jax.lax.Precision.HIGHEST
    return jnp.einsum(subscripts, a.astype(dtype), b.astype(dtype), precision=precision, preferred_element_type=accumulator(a, b))


def rounded(x: jax.Array, like: jax.Array) -> jax.Array:
    """`x` in the type of `like`, to be multiplied with it; float16 is left out, in which a gradient would vanish."""
    return x if like.dtype == jnp.float16 else x.astype(like.dtype)


def masked_softmax(logits: jax.Array, keep: jax.Array) -> tuple[jax.Array, jax.Array, jax.Array]:
    """(weights, total, lse) over the last axis, on `keep` only: probabilities are weights / total, natural log-sum-exp.

    Where nothing is kept they are 0, 1 and -inf. `total` and `lse` keep the axis, with size 1. Differentiable without NaN:
    what is not kept is replaced before the exponential, not only after it.
    """
    top = jnp.max(jnp.where(keep, logits, -jnp.inf), axis=-1, keepdims=True)
    some = top != -jnp.inf
    top = jax.lax.stop_gradient(jnp.where(some, top, 0))
    weights = jnp.where(keep & some, jnp.exp(jnp.where(keep & some, logits - top, 0)), 0)
    total = jnp.where(some, weights.sum(axis=-1, keepdims=True), 1)
    return weights, total, jnp.where(some, top + jnp.log(total), -jnp.inf)


def vary_alike(tree: Any) -> Any:
    """Inside shard_map: makes every array vary over each mesh axis over which one of them does. Elsewhere: nothing.

    A kernel's loops and its hand-written gradient then need one type only; the gradient of an array that did not vary is
    summed over the axis, as it must be.
    """
    varying = frozenset().union(*(jax.typeof(x).manual_axis_type.varying for x in jax.tree.leaves(tree)))
    return jax.tree.map(lambda x: jax.lax.pcast(x, tuple(varying - jax.typeof(x).manual_axis_type.varying), to="varying"), tree)
