"""A gradient against central differences, along one random direction through all arguments."""

from collections.abc import Callable

import jax
import jax.numpy as jnp
import numpy as np
from quick_jit import quick_jit


def slopes(function: Callable[..., jax.Array], *arguments: jax.Array, step: float = 1e-5) -> tuple[float, float]:
    """(by differences, by jax.grad) of a scalar function of float64 arrays; call under jax.enable_x64(True)."""
    random = np.random.default_rng(7)
    direction = tuple(jnp.asarray(random.standard_normal(x.shape)) for x in arguments)

    def both(arguments: tuple, direction: tuple) -> tuple[jax.Array, jax.Array]:
        ahead, behind = (function(*jax.tree.map(lambda x, d: x + sign * step * d, arguments, direction)) for sign in (1, -1))
        gradients = jax.grad(lambda arguments: function(*arguments))(arguments)
        return (ahead - behind) / (2 * step), sum(jnp.vdot(g, d) for g, d in zip(gradients, direction, strict=True))

    numeric, exact = quick_jit(both)(arguments, direction)
    assert exact.dtype == jnp.float64
    return float(numeric), float(exact)
