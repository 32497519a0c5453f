"""Equal loads without a loss: the selection bias of every expert moves a fixed step towards the mean load (arXiv 2408.15664).

    b += bias_rate * sign(mean load - load)

The load is that of the whole batch, all microbatches and devices together. A load-balancing loss would pull on the router's
weights, and so on the model; the bias only changes who is chosen.
"""

import jax
import jax.numpy as jnp
from flax import nnx
from jaxtyping import Array, Float, Int

from msa_jax.config import ModelConfig
from msa_jax.model.groups import path_names
from msa_jax.model.stack import stack_depths


def balance_experts(params: nnx.State, load_XO: Int[Array, "X O"], config: ModelConfig) -> nnx.State:
    """`params` with the routers' biases moved; load_XO has a row a layer, in order of depth (`ModelOutput.load_XO`)."""
    depths, rate = stack_depths(config.layers), config.moe.bias_rate

    def moved(path: tuple, leaf: Array) -> Array:
        names = path_names(path)
        if names[-2:] != ("router", "bias"):
            return leaf
        load = load_XO[depths[int(names[1])][int(names[2])]].astype(leaf.dtype)
        return leaf + rate * jnp.sign(load.mean(-1, keepdims=True) - load)

    return jax.tree_util.tree_map_with_path(moved, params)


def imbalance(load_XO: Int[Array, "X O"], config: ModelConfig) -> dict[str, Float[Array, ""]]:
    """{"experts/imbalance/layer_3": largest load / mean load - 1, ...} of the layers with experts; 0 is perfect."""
    busiest_X = load_XO.max(-1) / load_XO.mean(-1) - 1
    return {f"experts/imbalance/layer_{depth}": busiest_X[depth] for depth, kind in enumerate(config.layers) if kind.experts}
