"""MiniMax Sparse Attention (arXiv 2606.13392): THE layer, read top to bottom.

    x --------------> q k v (GQA, QK norm, partial RoPE) ------+--> softmax over the selected blocks --> Wo --> y
    |                                                          |          ^
    stop_gradient(x) -> iq ik (own QK norms, same RoPE) -> top-R blocks --+
                          |                                    |
                          +--> KL(mean of the group's attention || softmax of index scores): trains iq, ik alone

Per query token and KV head, R blocks of C keys are kept: the query's own block and the R - 1 earlier ones that hold the
best index scores. One document, T = 8, C = 2, R = 2, queries downwards, keys to the right ("." = not selected):

    x . | . . | . . | . .
    x x | . . | . . | . .
    x x | x . | . . | . .
    x x | x x | . . | . .
    . . | x x | x . | . .      query 4: own block 2 and block 1
    x x | . . | x x | . .      query 5: own block 2 and block 0
    . . | x x | . . | x .
    . . | . . | x x | x x

In phase "warmup" the main branch attends to everything and the index branch learns on the full prefix.
"""

from typing import ClassVar

import jax
import jax.numpy as jnp
from flax import nnx
from jax.typing import DTypeLike
from jaxtyping import Array, Float, Int

from msa_jax.config import MsaConfig
from msa_jax.model.attention import AttentionAux, Heads, MainProjections, Phase, check_call, document_positions, kl_tokens
from msa_jax.model.dense import full_attention
from msa_jax.model.init import rngs_by_name
from pallas_kernels.block_select.api import block_select
from pallas_kernels.index_kl.api import index_kl, sparse_attention_and_index_kl
from pallas_kernels.sparse_attention.api import sparse_attention


class IndexBranch(nnx.Module):
    """One index query head per KV head and ONE index key head shared by all; no value, no bias, no output."""

    def __init__(self, config: MsaConfig, *, rngs: nnx.Rngs, dtype: DTypeLike) -> None:
        child = rngs_by_name(rngs)
        self.q = Heads(config, config.num_kv_heads, config.index_dim, rngs=child("q"), dtype=dtype)
        self.k = Heads(config, 1, config.index_dim, rngs=child("k"), dtype=dtype)

    def __call__(
        self, x_BTD: Float[Array, "B T D"], positions_BT: Int[Array, "_ T"]
    ) -> tuple[Float[Array, "B T K I"], Float[Array, "B T I"]]:
        return self.q(x_BTD, positions_BT), self.k(x_BTD, positions_BT).squeeze(-2)


class MsaAttention(nnx.Module):
    """One sparse attention layer.

        layer = MsaAttention(MsaConfig(d_model=64, num_heads=4, num_kv_heads=2, head_dim=16, index_dim=16), rngs=nnx.Rngs(0))
        y_BTD, aux = layer(x_BTD)

    Parameters are float32, compute is in `dtype`; scores, softmax, norm statistics and the KL are in float32.
    `layer.main(x_BTD, positions_BT)` gives q, k and v, `layer.index(x_BTD, positions_BT)` gives iq and ik.
    """

    has_index: ClassVar[bool] = True

    def __init__(self, config: MsaConfig, *, rngs: nnx.Rngs, dtype: DTypeLike = jnp.float32, output_scale: float = 1.0) -> None:
        child = rngs_by_name(rngs)
        self.config = config
        self.main = MainProjections(config, rngs=child("main"), dtype=dtype, output_scale=output_scale)
        self.index = IndexBranch(config, rngs=child("index"), dtype=dtype)

    def __call__(
        self,
        x_BTD: Float[Array, "B T D"],
        segments: Int[Array, "B T"] | None = None,
        positions: Int[Array, "B T"] | None = None,
        phase: Phase = "sparse",
        *,
        kl: bool = True,
        kl_denominator: Float[Array, ""] | float | None = None,
        return_selection: bool = False,
    ) -> tuple[Float[Array, "B T D"], AttentionAux]:
        """Attends inside each document; returns y and the index branch's loss.

        segments: 0 = padding, documents 1..; None = one document a row. positions: place inside the document, counted from
        each segment's start where None. kl=False leaves the loss out (exactly 0, at no cost). kl_denominator: the global
        token count under gradient accumulation or data parallelism; None = the real tokens of this call.
        Raises ValueError for a wrong shape or phase, and for positions without segments.
        """
        config = self.config
        check_call(config, x_BTD, segments, positions, phase)
        content_positions = document_positions(x_BTD.shape[1], segments) if positions is None else positions
        documents = {"segments": segments, "positions": positions, "implementation": config.implementation}

        # 1. main projections
        q_BTNH, k_BTKH, v_BTKH = self.main(x_BTD, content_positions)

        # 2. index projections: only the KL trains them, and the KL trains only them
        index_input_BTD = jax.lax.stop_gradient(x_BTD) if config.index_stop_gradient else x_BTD
        iq_BTKI, ik_BTI = self.index(index_input_BTD, content_positions)

        # 3-5. token scores, block scores, selection
        ids_BKTR, lse_BKT = None, None
        if phase == "sparse" or return_selection:
            ids_BKTR, lse_BKT = block_select(
                iq_BTKI, ik_BTI, block_size=config.block_size, num_blocks=config.num_blocks, local_blocks=config.local_blocks,
                init_blocks=config.init_blocks, **documents,
            )  # fmt: skip

        # 6. main attention, and section 2: loss of the index branch on what the main branch attends to
        tokens = kl_tokens(x_BTD, segments, kl_denominator)
        weights_BT = None if segments is None else (segments > 0).astype(jnp.float32)
        blocks = {"block_size": config.block_size, **documents}
        loss_options = {"weights_BT": weights_BT, "denominator": tokens, **blocks}
        loss = jnp.zeros((), jnp.float32)
        if phase == "sparse" and kl:
            out_BTNH, _, loss = sparse_attention_and_index_kl(q_BTNH, k_BTKH, v_BTKH, iq_BTKI, ik_BTI, ids_BKTR, **loss_options)
        elif phase == "sparse":
            out_BTNH, _ = sparse_attention(q_BTNH, k_BTKH, v_BTKH, ids_BKTR, **blocks)
        else:
            out_BTNH = full_attention(q_BTNH, k_BTKH, v_BTKH, segments)
            if kl:
                loss = index_kl(iq_BTKI, ik_BTI, q_BTNH, k_BTKH, None, **loss_options)
        selection = (ids_BKTR, lse_BKT) if return_selection else (None, None)
        return self.main.out(out_BTNH), AttentionAux(loss, tokens, *selection)
