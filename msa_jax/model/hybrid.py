"""The model: token embedding, visual tokens in place of placeholders, a pattern of layer kinds, logits."""

import functools
import math
from typing import NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from flax import nnx
from jaxtyping import Array, Float, Int

from msa_jax.config import ModelConfig, MoeConfig, MsaConfig
from msa_jax.data.batch import Batch
from msa_jax.model.attention import Phase
from msa_jax.model.block import KINDS, Block
from msa_jax.model.init import rngs_by_name
from msa_jax.model.norm import RMSNorm
from msa_jax.model.stack import interleave, scan_modules, scan_plan, stack_depths, stack_modules, unstack_module
from msa_jax.model.vision import VisionTower


class ModelTrace(NamedTuple):
    """What evaluation looks into: `model.block(i)` on hidden_XBTD[i] repeats layer i."""

    hidden_XBTD: Float[Array, "X B T D"]  # the input of every layer
    ids_XBKTR: Int[Array, "X B K T R"]  # selected blocks; -1 throughout in layers that select none


class ModelOutput(NamedTuple):
    logits_BTE: Float[Array, "B T E"]  # float32
    kl: Float[Array, ""]  # float32: mean of kl_X (the paper sums over layers)
    kl_X: Float[Array, "X"]  # float32: one entry a layer with an index branch, in order of depth
    load_XO: Int[Array, "X O"] | None  # real tokens that chose each expert, a row a layer (0 without experts); None without any
    trace: ModelTrace | None


class LayerOutput(NamedTuple):
    kl: Array
    load_O: Array | None
    hidden_BTD: Array | None
    ids_BKTR: Array | None


def place_visual_tokens(
    x_BTD: Float[Array, "B T D"], visual: Float[Array, "visual D"], index_BT: Int[Array, "B T"]
) -> Float[Array, "B T D"]:
    """Row t of x becomes visual[index] where index >= 0. Text rows are the same bits whatever the visual tokens hold."""
    return jnp.where((index_BT >= 0)[..., None], visual[jnp.maximum(index_BT, 0)], x_BTD)


class HybridTransformer(nnx.Module):
    """Decoder over text and visual tokens.

        model = HybridTransformer(ModelConfig(attention=MsaConfig(...), vision=VisionConfig()), rngs=nnx.Rngs(0))
        output = model(batch)

    Parameters are float32, compute is in config.dtype, logits are float32. Token embeddings start with variance 1 / D and
    are multiplied by sqrt(D), so that text and visual tokens enter at unit scale and tied embeddings serve both ends.
    """

    def __init__(self, config: ModelConfig, *, rngs: nnx.Rngs) -> None:
        child = rngs_by_name(rngs)
        self.config, self.dtype = config, jnp.dtype(config.dtype)
        self.embedding = self._vocabulary_table(child("embedding"))
        self.unembedding = None if config.tie_embeddings else self._vocabulary_table(child("unembedding"))
        self.vision = (
            VisionTower(config.vision, config.d_model, child("vision"), dtype=self.dtype, remat=config.remat) if config.vision else None
        )
        self.layers = nnx.List()
        key = child("layers").params()
        for (unit, _), places in zip(scan_plan(config.layers), stack_depths(config.layers), strict=True):
            self.layers.append(
                nnx.List(
                    stack_modules(functools.partial(Block, config, kind), key, depths) for kind, depths in zip(unit, places, strict=True)
                )
            )
        self.norm = RMSNorm(config.d_model, eps=config.norm_eps)

    def _vocabulary_table(self, rngs: nnx.Rngs) -> nnx.Param:
        table_ED = nnx.initializers.variance_scaling(1.0, "fan_out", "truncated_normal")(
            rngs.params(), (self.config.vocab_size, self.config.d_model), jnp.float32
        )
        return nnx.Param(table_ED)

    def __call__(
        self,
        batch: Batch,
        phase: Phase = "sparse",
        *,
        kl: bool = True,
        kl_denominator: Float[Array, ""] | float | None = None,
        trace: bool = False,
    ) -> ModelOutput:
        """Next-token logits of every position. kl, kl_denominator and phase as in `MsaAttention.__call__`.

        Raises ValueError for a batch with pictures where the model has no vision tower.
        """
        x_BTD = self.embed(batch)
        unit_pass = functools.partial(
            _unit_pass, segments=jnp.asarray(batch.segments_BT), positions=jnp.asarray(batch.positions_BT), phase=phase, kl=kl,
            kl_denominator=kl_denominator, trace=trace, moe=self.config.moe,
        )  # fmt: skip
        stages = []
        for unit in self.layers:
            x_BTD, outputs = scan_modules(unit_pass, unit, x_BTD, remat=self.config.remat)
            stages.append(interleave(outputs))
        layers = jax.tree.map(lambda *leaves: jnp.concatenate(leaves), *stages)
        indexed = np.array([KINDS[kind].has_index for kind in self.config.layer_kinds])
        kl_X = layers.kl[indexed]
        mean_kl = kl_X.mean() if indexed.any() else jnp.zeros((), jnp.float32)
        traced = ModelTrace(layers.hidden_BTD, layers.ids_BKTR) if trace else None
        return ModelOutput(self.logits(x_BTD), mean_kl, kl_X, layers.load_O, traced)

    def embed(self, batch: Batch) -> Float[Array, "B T D"]:
        """Token embeddings, with visual tokens where batch.visual_index_BT points to one."""
        embedded_BTD = self.embedding[...][jnp.asarray(batch.tokens_BT)].astype(self.dtype)
        x_BTD = embedded_BTD * jnp.asarray(math.sqrt(self.config.d_model), self.dtype)
        if batch.vision is None or batch.vision.patches_VLP.shape[0] == 0:
            return x_BTD
        if self.vision is None:
            raise ValueError("HybridTransformer: the batch has pictures but ModelConfig.vision is None; give the model a VisionConfig")
        return place_visual_tokens(x_BTD, self.vision(batch.vision), jnp.asarray(batch.visual_index_BT))

    def logits(self, x_BTD: Float[Array, "B T D"]) -> Float[Array, "B T E"]:
        """Float32 logits of the last layer's output."""
        table = self.embedding if self.unembedding is None else self.unembedding
        table_ED = table[...].astype(self.dtype)
        return jnp.einsum("btd,ed->bte", self.norm(x_BTD), table_ED, preferred_element_type=jnp.float32)

    def block(self, index: int) -> Block:
        """Layer `index` as a module of its own, whichever way layers are stored. Raises IndexError beyond the depth."""
        for unit, places in zip(self.layers, stack_depths(self.config.layers), strict=True):
            for stacked, depths in zip(unit, places, strict=True):
                if index in depths:
                    return unstack_module(stacked, int(np.flatnonzero(depths == index)[0]))
        raise IndexError(f"HybridTransformer.block({index}): the model has layers 0 .. {self.config.num_layers - 1}")


def _unit_pass(unit: nnx.List, x_BTD: Array, *, trace: bool, moe: MoeConfig | None, **options) -> tuple[Array, list[LayerOutput]]:
    """One pass through a unit of the pattern, with what each layer yields besides its output."""
    outputs = []
    for block in unit:
        y_BTD, aux, load_O = block(x_BTD, return_selection=trace, **options)
        if moe is not None and load_O is None:
            load_O = jnp.zeros(moe.num_experts, jnp.int32)
        ids_BKTR = _no_selection(x_BTD, block.attention.config) if trace and aux.ids is None else aux.ids
        outputs.append(LayerOutput(aux.kl, load_O, x_BTD if trace else None, ids_BKTR))
        x_BTD = y_BTD
    return x_BTD, outputs


def _no_selection(x_BTD: Array, config: MsaConfig) -> Array:
    return jnp.full((x_BTD.shape[0], config.num_kv_heads, x_BTD.shape[1], config.num_blocks), -1, jnp.int32)
