"""How parameters start: every weight from its own key, found by name and not by order.

A module draws ONE key from its rngs and folds its children's names into it. The same seed therefore gives the same
weights to the same names, whatever else exists: a ViT starts alike with and without an index branch beside it, and the
dense and the sparse form of a layer share their main projections. Studies that pair arms by seed rest on this.
"""

import math
import zlib
from collections.abc import Callable, Sequence

import jax
from flax import nnx


def rngs_by_name(rngs: nnx.Rngs) -> Callable[[str], nnx.Rngs]:
    """Draws one key from `rngs` and returns name -> nnx.Rngs of the child of that name."""
    key = rngs.params()
    return lambda name: nnx.Rngs(params=jax.random.fold_in(key, zlib.crc32(name.encode())))


def fan_in_normal(scale: float = 1.0, *, batch_axes: Sequence[int] = ()) -> nnx.Initializer:
    """Truncated normal with standard deviation scale / sqrt(fan in): outputs have `scale` times the RMS of the inputs.

    Along `batch_axes` stand independent matrices.
    """
    return nnx.initializers.variance_scaling(scale**2, "fan_in", "truncated_normal", batch_axis=batch_axes)


def residual_scale(num_layers: int) -> float:
    """1 / sqrt(2 L): each layer adds two outputs to the residual stream, whose variance then stays independent of depth."""
    return 1.0 / math.sqrt(2 * num_layers)
