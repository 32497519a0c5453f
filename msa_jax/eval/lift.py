"""Who attends to whom: attention mass between text and visual tokens, against an even spread.

A key's kind is text, visual, or neither: sinks are neither. For a kind a of queries and b of keys,

    lift[a, b] = mean over queries of (mass on keys of kind b / mass on text and visual keys)
               / mean over queries of (number of visible keys of kind b / number of visible text and visual keys)

over the queries of kind a that see keys of both kinds. Attention that does not look at the kind gives 1 everywhere.
"""

import jax
import jax.numpy as jnp
from jaxtyping import Array, Bool, Float, Int

TEXT, VISUAL = 0, 1
_SINK_SHARE = 0.01


def sinks(probabilities_NTS: Float[Array, "N T S"], segments_T: Int[Array, "T"], special_T: Bool[Array, "T"]) -> Bool[Array, "N S"]:
    """Keys that attract attention whatever they hold: each document's first token, special tokens (<bos>, picture marks, ...),
    and, head by head, the 1% of the row's keys that receive the most attention."""
    first_S = jnp.diff(segments_T, prepend=-1) != 0
    received_NS = jnp.where((segments_T > 0)[:, None], probabilities_NTS, 0.0).sum(1)
    _, top = jax.lax.top_k(received_NS, round(_SINK_SHARE * len(segments_T)))
    return (top[..., None] == jnp.arange(len(segments_T))).any(-2) | first_S | special_T


def block_shares(
    probabilities_NTS: Float[Array, "N T S"],
    visible_TS: Bool[Array, "T S"],
    kinds_2T: Bool[Array, "2 T"],
    sinks_NS: Bool[Array, "N S"],
) -> tuple[Float[Array, "2 2 N"], Float[Array, "2 2 N"], Float[Array, "2 N"]]:
    """Sums over queries of mass shares and key shares, [query kind, key kind, head], and the number of queries in them.

    kinds_2T: which tokens are TEXT and which VISUAL. Sums of several rows may be added before `lift` divides them.
    """
    keys_2NTS = kinds_2T[:, None, None, :] & visible_TS & ~sinks_NS[:, None, :]
    mass_2NT = jnp.where(keys_2NTS, probabilities_NTS, 0.0).sum(-1)
    count_2NT = keys_2NTS.sum(-1).astype(jnp.float32)
    total_NT = mass_2NT.sum(0)
    counted_NT = (count_2NT > 0).all(0) & (total_NT > 0)
    mass_share_2NT = jnp.where(counted_NT, mass_2NT / jnp.where(counted_NT, total_NT, 1.0), 0.0)
    key_share_2NT = jnp.where(counted_NT, count_2NT / jnp.maximum(count_2NT.sum(0), 1.0), 0.0)
    queries_2T = kinds_2T.astype(jnp.float32)
    return (
        jnp.einsum("at,bnt->abn", queries_2T, mass_share_2NT),
        jnp.einsum("at,bnt->abn", queries_2T, key_share_2NT),
        jnp.einsum("at,nt->an", queries_2T, counted_NT.astype(jnp.float32)),
    )


def lift(mass_22N: Float[Array, "2 2 N"], keys_22N: Float[Array, "2 2 N"]) -> Float[Array, "2 2 N"]:
    """[query kind, key kind, head]; NaN where no query of that kind sees keys of both kinds."""
    return jnp.where(keys_22N > 0, mass_22N / jnp.where(keys_22N > 0, keys_22N, 1.0), jnp.nan)


def separation(lift_22N: Float[Array, "2 2 N"]) -> Float[Array, "N"]:
    """(same - cross) / (same + cross) of the four lifts: 0 = kinds are ignored, 1 = each kind attends to itself only."""
    same_N = lift_22N[TEXT, TEXT] + lift_22N[VISUAL, VISUAL]
    cross_N = lift_22N[TEXT, VISUAL] + lift_22N[VISUAL, TEXT]
    return (same_N - cross_N) / (same_N + cross_N)
