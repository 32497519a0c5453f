"""Calls of index_kl on which every implementation agrees with the reference."""

import jax.numpy as jnp

from pallas_kernels.sparse_attention.cases import arbitrary_ids
from pallas_kernels.testing import Case, layout_arguments

CASES = (
    Case("one token", T=1, S=1, G=1),
    Case("C - 1 tokens, as many as KV heads", T=3, S=3, K=3, G=2),
    Case("C + 1 tokens", T=5, S=5, K=1, G=3),
    Case("R * C tokens", T=8, S=8, G=7, layout="left padding"),
    Case("R * C + 1 tokens", T=9, S=9, K=1, G=12, layout="right padding"),
    Case("R = T", T=6, S=6, R=6, C=2, G=8),
    Case("gathered", T=43, S=43, G=16, K=1, I=40),
    Case("gathered, packed", T=43, S=43, H=40, I=16, layout="packed"),
    Case("masked, packed with positions", T=43, S=43, R=3, B=3, layout="packed with positions"),
    Case("gathered, continued document", T=43, S=43, layout="continued"),
    Case("decode", T=1, S=43, G=4),
    Case("gathered chunk of packed prompts", T=6, S=43, layout="packed, offset"),
    Case("chunks of queries, masked", T=20, S=1024, K=1, G=32, C=128, R=2),
    Case("chunks of queries, gathered", T=41, S=1100, K=1, G=2, H=64, C=64, R=4, layout="packed, offset"),
)


def inputs(case: Case) -> dict[str, jnp.ndarray]:
    """Arguments of index_kl except block_size."""
    random = case.random()
    arrays = {
        "iq_BTKI": case.normal(random, case.B, case.T, case.K, case.I),
        "ik_BSI": case.normal(random, case.B, case.S, case.I),
        "q_BTNH": case.normal(random, case.B, case.T, case.K * case.G, case.H),
        "k_BSKH": case.normal(random, case.B, case.S, case.K, case.H),
    }
    ids = {"ids_BKTR": jnp.asarray(arbitrary_ids(case, random))}
    return {name: jnp.asarray(x, case.dtype) for name, x in arrays.items()} | ids | layout_arguments(case)
