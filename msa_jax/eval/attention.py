"""A layer's attention over one row, written out: which keys a query sees, which it selected, how much it attends to each.

Recomputed from the layer's own projections for evaluation only: it materialises [N, T, S], so it is for rows of some
thousand tokens, one row at a time. Training never calls it.
"""

import math

import jax
import jax.numpy as jnp
from jaxtyping import Array, Bool, Float, Int


def visible_keys(segments_T: Int[Array, "T"], positions_T: Int[Array, "T"]) -> Bool[Array, "T S"]:
    """Keys of the query's own document that do not lie ahead; none for padding (segment 0).

    Segments 1 1 1 2 2 0, queries downwards, keys to the right:

        1  x . . . . .
        1  x x . . . .
        1  x x x . . .
        2  . . . x . .
        2  . . . x x .
        0  . . . . . .
    """
    same_TS = (segments_T[:, None] == segments_T[None, :]) & (segments_T > 0)[:, None]
    return same_TS & (positions_T[None, :] <= positions_T[:, None])


def visible_blocks(segments_T: Int[Array, "T"], positions_T: Int[Array, "T"], block_size: int) -> Bool[Array, "T J"]:
    """Blocks of the query's document, counted from its start, up to the query's own; none for padding. J = ceil(T / C)."""
    blocks_J = jnp.arange(-(-len(positions_T) // block_size))
    return (blocks_J <= positions_T[:, None] // block_size) & (segments_T > 0)[:, None]


def chosen_blocks(ids_KTR: Int[Array, "K T R"], visible_TJ: Bool[Array, "T J"]) -> Bool[Array, "K T J"]:
    """Which blocks the ids name. Ids that are no visible block are ignored; an id named twice counts once."""
    blocks_J = jnp.arange(visible_TJ.shape[1])
    return (ids_KTR[..., None] == blocks_J).any(-2) & visible_TJ


def keys_of_blocks(
    blocks_KTJ: Bool[Array, "K T J"], visible_TS: Bool[Array, "T S"], positions_T: Int[Array, "T"], block_size: int
) -> Bool[Array, "K T S"]:
    """The visible keys inside the given blocks: the support of sparse attention."""
    return blocks_KTJ[:, :, positions_T // block_size] & visible_TS


def block_mass(
    probabilities: Float[Array, "heads T S"], positions_T: Int[Array, "T"], num_blocks: int, block_size: int
) -> Float[Array, "heads T J"]:
    """Attention mass on each of the first `num_blocks` blocks of the query's document. Other documents' keys must hold 0."""
    member_SJ = (positions_T[:, None] // block_size == jnp.arange(num_blocks)).astype(probabilities.dtype)
    return probabilities @ member_SJ


def attention_probabilities(
    q_TNH: Float[Array, "T N H"], k_SKH: Float[Array, "S K H"], support: Bool[Array, "_ T S"]
) -> Float[Array, "N T S"]:
    """softmax(q k / sqrt(H)) over the support ([K, T, S], or [1, T, S] for all heads), in float32; 0 where that is empty.

    Query head n reads KV head n // G. The index branch has the same form: iq as q with one head a KV head, ik as its only key.
    """
    (T, N, H), K = q_TNH.shape, k_SKH.shape[1]
    q_TKGH = q_TNH.astype(jnp.float32).reshape(T, K, N // K, H)
    logits_KGTS = jnp.einsum("tkgh,skh->kgts", q_TKGH, k_SKH.astype(jnp.float32)) / math.sqrt(H)
    masked_KGTS = jnp.where(support[:, None], logits_KGTS, -jnp.inf)
    probabilities_KGTS = jnp.where(support[:, None], jax.nn.softmax(masked_KGTS, axis=-1), 0.0)
    return probabilities_KGTS.reshape(N, T, -1)
