"""How good a choice of blocks is, against the dense attention that it stands in for (MSA paper, index quality).

The oracle keeps the R blocks that hold the most dense attention mass of the group. Six blocks, R = 3, the query in block 5:

    mass      .30  .02  .25  .05  .08  .30
    oracle     x         x              x       the best 3
    chosen     x              x         x       the index's 3; block 5 is local, kept without asking

    block recall  2/3          chosen blocks among the oracle's, / R
    captured mass .68          dense mass on the chosen blocks
    relative mass .60 / .85    dense mass on blocks that both chose, / on the oracle's ("score recall" of the paper)

Without the local block: the same three over the blocks that the index is asked about, with R - 1 for R.
"""

import jax
import jax.numpy as jnp
from jaxtyping import Array, Bool, Float

_TINY = 1e-30  # keeps 0 / 0 at 0 where a block's mass underflows


def oracle_blocks(mass_J: Float[Array, "*rows J"], candidates_J: Bool[Array, "*rows J"], count: int) -> Bool[Array, "*rows J"]:
    """The `count` candidates of most mass; equal masses go to the lower block. There must be that many candidates."""
    _, ids = jax.lax.top_k(jnp.where(candidates_J, mass_J, -1.0), count)
    return (ids[..., None] == jnp.arange(mass_J.shape[-1])).any(-2)


def kept_unasked(visible_TJ: Bool[Array, "T J"], local_blocks: int, init_blocks: int) -> Bool[Array, "T J"]:
    """The last `local_blocks` and the first `init_blocks` visible blocks, which are kept whatever the index says."""
    blocks_J = jnp.arange(visible_TJ.shape[1])
    visible_T1 = visible_TJ.sum(1, keepdims=True)
    return visible_TJ & ((blocks_J >= visible_T1 - local_blocks) | (blocks_J < init_blocks))


def random_choice(visible_TJ: Bool[Array, "T J"], kept_TJ: Bool[Array, "T J"], num_blocks: int) -> Float[Array, "T J"]:
    """Probability that a block is chosen when the slots left beside the kept blocks are filled at random: the chance level."""
    asked_TJ = visible_TJ & ~kept_TJ
    free_slots_T1 = num_blocks - kept_TJ.sum(1, keepdims=True)
    odds_T1 = free_slots_T1 / jnp.maximum(asked_TJ.sum(1, keepdims=True), free_slots_T1)
    return jnp.where(kept_TJ, 1.0, odds_T1 * asked_TJ)


def index_quality(
    mass_KTJ: Float[Array, "K T J"],
    chosen_KTJ: Float[Array, "K T J"],
    visible_TJ: Bool[Array, "T J"],
    kept_TJ: Bool[Array, "T J"],
    num_blocks: int,
    num_kept: int,
) -> dict[str, Float[Array, "K T"]]:
    """The three measures, also `_without_local`, for each KV head and query that sees more than R = `num_blocks` blocks.

    chosen_KTJ: 1 or 0, or the probability of being chosen, in which all measures are linear. num_kept: how many of the R
    blocks are kept unasked; where that is all of them the `_without_local` measures are left out. Queries that see at most
    R blocks see all of them, so that their values mean nothing: mask them.
    """
    everything = _against_oracle(mass_KTJ, chosen_KTJ, visible_TJ, num_blocks)
    if num_kept == num_blocks:
        return everything
    asked = _against_oracle(mass_KTJ, chosen_KTJ, visible_TJ & ~kept_TJ, num_blocks - num_kept)
    return everything | {f"{name}_without_local": value for name, value in asked.items()}


def _against_oracle(
    mass_KTJ: Float[Array, "K T J"], chosen_KTJ: Float[Array, "K T J"], candidates_TJ: Bool[Array, "T J"], count: int
) -> dict[str, Float[Array, "K T"]]:
    mass_KTJ = jnp.where(candidates_TJ, mass_KTJ, 0.0)
    oracle_KTJ = oracle_blocks(mass_KTJ, jnp.broadcast_to(candidates_TJ, mass_KTJ.shape), count)
    both_KTJ = oracle_KTJ * chosen_KTJ
    return {
        "block_recall": both_KTJ.sum(-1) / count,
        "captured_mass": (mass_KTJ * chosen_KTJ).sum(-1) / (mass_KTJ.sum(-1) + _TINY),
        "relative_mass": (mass_KTJ * both_KTJ).sum(-1) / ((mass_KTJ * oracle_KTJ).sum(-1) + _TINY),
    }
