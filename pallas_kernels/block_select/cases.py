"""Calls of block_select on which every implementation agrees with the reference."""

import jax.numpy as jnp

from pallas_kernels.testing import Case, layout_arguments

CASES = (
    Case("one token", T=1, S=1),
    Case("C - 1 tokens, as many as KV heads", T=3, S=3, K=3),
    Case("C tokens", T=4, S=4),
    Case("C + 1 tokens", T=5, S=5, K=1),
    Case("R * C - 1 tokens", T=7, S=7),
    Case("R * C tokens", T=8, S=8, layout="left padding"),
    Case("R * C + 1 tokens", T=9, S=9, layout="right padding"),
    Case("R = T", T=6, S=6, R=6, C=2),
    Case("tail of a block", T=43, S=43, R=3, I=16),
    Case("packed", T=43, S=43, R=3, layout="packed"),
    Case("packed with positions", T=43, S=43, R=3, B=3, layout="packed with positions"),
    Case("continued document", T=43, S=43, R=3, layout="continued"),
    Case("decode", T=1, S=43, R=3),
    Case("chunk of a prompt", T=6, S=43, R=3, layout="offset"),
    Case("chunk of packed prompts", T=6, S=43, R=3, layout="packed, offset"),
    Case("ties", T=64, S=64, R=4, I=2, layout="packed", integers=True),
    Case("block wider than the keys", T=5, S=5, C=16, R=1),
    Case("chunks of queries and keys", T=600, S=1101, K=1, C=64, R=4, layout="packed"),
)


def inputs(case: Case) -> dict[str, jnp.ndarray]:
    """Arguments of block_select except block_size and num_blocks."""
    random = case.random()
    arrays = {
        "iq_BTKI": case.normal(random, case.B, case.T, case.K, case.I),
        "ik_BSI": case.normal(random, case.B, case.S, case.I),
    }
    return {name: jnp.asarray(x, case.dtype) for name, x in arrays.items()} | layout_arguments(case)
