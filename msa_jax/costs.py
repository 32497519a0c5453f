"""What a ModelConfig costs: parameters, FLOPs and cache bytes, from shapes alone; nothing is allocated.

FLOPs count 2 per multiply-add. With T the context length, N query heads, K KV heads, head width H, index width I and R blocks
of C keys, one layer's attention over a whole sequence costs forward, causally (arXiv 2606.13392, section on complexity):

    dense GQA   2 N H T^2
    MSA         K I T^2  (index scores)  +  4 N H T min(R C, T / 2)  (main branch)

Training adds the backward pass as kernels do it, scores recomputed: 10 N H per (query, key) pair, and for MSA the KL with its
gradient: 2 (N H + 3 K I) per pair of the selected support.
"""

from collections import Counter

import jax
from flax import nnx

from msa_jax.config import ModelConfig, MsaConfig
from msa_jax.model.block import KINDS
from msa_jax.model.groups import decays, parameter_group, path_names
from msa_jax.model.hybrid import HybridTransformer


def parameter_shapes(config: ModelConfig) -> dict[tuple[str, ...], jax.ShapeDtypeStruct]:
    """Shape and dtype of every parameter by its path, without allocating any."""
    state = jax.eval_shape(lambda: nnx.state(HybridTransformer(config, rngs=nnx.Rngs(0))))
    return {path_names(path): leaf for path, leaf in jax.tree_util.tree_leaves_with_path(state)}


def parameter_counts(config: ModelConfig) -> dict[str, int]:
    """Parameters by group; a group the model lacks is absent. Tied embeddings count once."""
    counts = Counter()
    for path, leaf in parameter_shapes(config).items():
        counts[parameter_group(path)] += leaf.size
    return dict(counts)


def active_parameters(config: ModelConfig) -> int:
    """Parameters that one text token is multiplied by: of the routed experts those it chooses, and neither embeddings nor vision."""
    return round(sum(
        leaf.size * active_share(config, path)
        for path, leaf in parameter_shapes(config).items()
        if parameter_group(path) != "vision" and path[0] not in ("embedding", "unembedding")
    ))  # fmt: skip


def active_share(config: ModelConfig, path: tuple[str, ...]) -> float:
    """Which part of a parameter a token meets: experts_per_token / num_experts of routed experts, all of everything else."""
    return config.moe.experts_per_token / config.moe.num_experts if "experts" in path else 1.0


def attention_flops(config: MsaConfig, kind: str, length: int, *, training: bool = False) -> float:
    """FLOPs of one layer's attention over a sequence of `length` tokens, projections left out.

    `kind` is a letter of `ModelConfig.pattern`. Raises KeyError for another one.
    """
    main = config.num_heads * config.head_dim
    index = config.num_kv_heads * config.index_dim
    indexed = KINDS[kind].has_index
    pairs = length * min(config.num_blocks * config.block_size, length / 2) if indexed else length**2 / 2
    flops = 4 * main * pairs + (index * length**2 if indexed else 0)
    if training:
        flops += 10 * main * pairs + (2 * (main + 3 * index) * pairs if indexed else 0)
    return flops


def flops_per_token(config: ModelConfig, length: int, *, training: bool = False) -> float:
    """FLOPs of one token of the decoder in a sequence of `length`: projections, MLPs or the chosen experts, attention, logits.

    Training counts forward and backward without rematerialisation. The vision tower is left out: see `flops_per_visual_token`.
    """
    flops = 2.0 * config.vocab_size * config.d_model * (3 if training else 1)
    for path, leaf in parameter_shapes(config).items():
        group = parameter_group(path)
        if path[-1] == "kernel" and group != "vision":
            # stop_gradient(x) spares the index projections the gradient of their input
            stopped = group == "index" and config.attention.index_stop_gradient
            flops += 2 * leaf.size * active_share(config, path) * ((2 if stopped else 3) if training else 1)
    for kind in config.layer_kinds:
        flops += attention_flops(config.attention, kind, length, training=training) / length
    return flops


def flops_per_visual_token(config: ModelConfig, segment_length: int, *, training: bool = False) -> float:
    """FLOPs of the vision tower for one visual token, made of merge^2 patches in segments of `segment_length` patches.

    0 without a vision tower. Training counts the backward pass as twice the forward.
    """
    if config.vision is None:
        return 0.0
    patches = config.vision.merge**2
    flops = 4.0 * patches * config.vision.num_layers * config.vision.width * segment_length
    for path, leaf in parameter_shapes(config).items():
        if parameter_group(path) == "vision" and decays(path):
            flops += 2 * leaf.size * (1 if path[1] == "merge_projector" else patches)
    return flops * (3 if training else 1)


def cache_bytes_per_token(config: ModelConfig, *, bytes_per_number: int = 2) -> int:
    """Bytes that decoding keeps for one token over all layers: K and V, and the index key of MSA layers."""
    attention = config.attention
    numbers = sum(
        2 * attention.num_kv_heads * attention.head_dim + (attention.index_dim if KINDS[kind].has_index else 0)
        for kind in config.layer_kinds
    )
    return numbers * bytes_per_number
