"""Dense grouped-query attention (Ainslie et al., arXiv 2305.13245): the control of every MSA experiment, and its warm-up phase.

num_kv_heads = 1 is multi-query attention, num_kv_heads = num_heads is multi-head attention.
"""

from typing import ClassVar

import jax
import jax.numpy as jnp
from flax import nnx
from jax.typing import DTypeLike
from jaxtyping import Array, Float, Int

from msa_jax.config import MsaConfig
from msa_jax.model.attention import AttentionAux, MainProjections, Phase, check_call, document_positions, kl_tokens
from msa_jax.model.init import rngs_by_name


def full_attention(
    q_BTNH: Float[Array, "B T N H"],
    k_BTKH: Float[Array, "B T K H"],
    v_BTKH: Float[Array, "B T K H"],
    segments_BT: Int[Array, "B T"] | None,
) -> Float[Array, "B T N H"]:
    """Softmax attention, scale 1/sqrt(H), over the causal prefix of the query's own document. Padding rows return 0.

    A row of segments 1 1 1 2 2 0 (0 = padding), queries downwards, keys to the right:

        1  x . . . . .
        1  x x . . . .
        1  x x x . . .
        2  . . . x . .
        2  . . . x x .
        0  . . . . . .
    """
    if segments_BT is None:
        return jax.nn.dot_product_attention(q_BTNH, k_BTKH, v_BTKH, is_causal=True)
    same_BTS = segments_BT[:, :, None] == segments_BT[:, None, :]
    out_BTNH = jax.nn.dot_product_attention(q_BTNH, k_BTKH, v_BTKH, mask=same_BTS[:, None], is_causal=True)
    return jnp.where((segments_BT > 0)[:, :, None, None], out_BTNH, 0)


class DenseAttention(nnx.Module):
    """Full causal attention inside each document; the same call and the same main weights as `MsaAttention`.

        layer = DenseAttention(MsaConfig(d_model=64, num_heads=4, num_kv_heads=2, head_dim=16, index_dim=16), rngs=nnx.Rngs(0))
        y_BTD, aux = layer(x_BTD)

    Parameters are float32, compute is in `dtype`, the softmax in float32. `phase` changes nothing.
    """

    has_index: ClassVar[bool] = False

    def __init__(self, config: MsaConfig, *, rngs: nnx.Rngs, dtype: DTypeLike = jnp.float32, output_scale: float = 1.0) -> None:
        self.config = config
        self.main = MainProjections(config, rngs=rngs_by_name(rngs)("main"), dtype=dtype, output_scale=output_scale)

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
        """Arguments as `MsaAttention.__call__`; the returned kl is 0 and there is no selection."""
        check_call(self.config, x_BTD, segments, positions, phase)
        content_positions = document_positions(x_BTD.shape[1], segments) if positions is None else positions
        q_BTNH, k_BTKH, v_BTKH = self.main(x_BTD, content_positions)
        y_BTD = self.main.out(full_attention(q_BTNH, k_BTKH, v_BTKH, segments))
        return y_BTD, AttentionAux(jnp.zeros((), jnp.float32), kl_tokens(x_BTD, segments, kl_denominator), None, None)
