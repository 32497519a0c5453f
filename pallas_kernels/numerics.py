"""Arithmetic that the ops share: the accumulation type, matrix products in it, and a softmax over a support."""

import jax
import jax.numpy as jnp


def accumulator(*arrays: jax.Array) -> jnp.dtype:
    """float32, or float64 where an input is float64."""
    return jnp.result_type(jnp.float32, *arrays)


def einsum(subscripts: str, a: jax.Array, b: jax.Array) -> jax.Array:
    """Product of two operands of one type, accumulated in at least float32; 32-bit operands are not rounded to fewer bits."""
    precision = None if a.dtype.itemsize == 2 else jax.lax.Precision.HIGHEST
    return jnp.einsum(subscripts, a, b, precision=precision, preferred_element_type=accumulator(a, b))


def masked_softmax(logits: jax.Array, keep: jax.Array) -> tuple[jax.Array, jax.Array]:
    """Probabilities and their log-sum-exp over the last axis, on `keep` only; 0 and -inf where nothing is kept.

    Differentiable without NaN: what is not kept is replaced before the exponential, not only after it.
    """
    some = keep.any(axis=-1, keepdims=True)
    top = jnp.max(jnp.where(keep, logits, -jnp.inf), axis=-1, keepdims=True)
    top = jax.lax.stop_gradient(jnp.where(some, top, 0))
    weights = jnp.where(keep, jnp.exp(jnp.where(keep, logits - top, 0)), 0)
    total = jnp.where(some, weights.sum(axis=-1, keepdims=True), 1)
    lse = jnp.where(some, top + jnp.log(total), -jnp.inf)
    return weights / total, lse[..., 0]
