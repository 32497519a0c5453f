"""Calls of sparse_attention on which every implementation agrees with the reference."""

import jax.numpy as jnp
import numpy as np

from pallas_kernels.testing import Case, layout_arguments

CASES = (
    Case("one token", T=1, S=1, G=1),
    Case("C - 1 tokens, as many as KV heads", T=3, S=3, K=3, G=2),
    Case("C tokens", T=4, S=4, G=3),
    Case("C + 1 tokens, one KV head", T=5, S=5, K=1, G=4),
    Case("R * C - 1 tokens", T=7, S=7, G=7, width=5),
    Case("R * C tokens", T=8, S=8, G=8, layout="left padding"),
    Case("R * C + 1 tokens", T=9, S=9, K=1, G=12, layout="right padding"),
    Case("R = T", T=6, S=6, R=6, C=2, G=1),
    Case("gathered", T=43, S=43, G=16, K=1),
    Case("gathered, packed", T=43, S=43, H=40, width=80, layout="packed"),
    Case("masked, packed with positions", T=43, S=43, R=3, B=3, H=80, width=40, layout="packed with positions"),
    Case("gathered, continued document", T=43, S=43, layout="continued"),
    Case("decode", T=1, S=43, G=4),
    Case("chunk of a prompt", T=6, S=43, R=3, layout="offset"),
    Case("gathered chunk of packed prompts", T=6, S=43, layout="packed, offset"),
    Case("block wider than the keys", T=5, S=5, C=16, R=1),
    Case("chunks of queries, masked", T=20, S=1024, K=1, G=32, C=128, R=2),
    Case("chunks of queries, gathered", T=41, S=1100, K=1, G=2, H=64, C=64, R=4, layout="packed, offset"),
)


def inputs(case: Case) -> dict[str, jnp.ndarray]:
    """Arguments of sparse_attention except block_size."""
    random = case.random()
    arrays = {
        "q_BTNH": case.normal(random, case.B, case.T, case.K * case.G, case.H),
        "k_BSKH": case.normal(random, case.B, case.S, case.K, case.H),
        "v_BSKH": case.normal(random, case.B, case.S, case.K, case.width),
    }
    ids = {"ids_BKTR": jnp.asarray(arbitrary_ids(case, random))}
    return {name: jnp.asarray(x, case.dtype) for name, x in arrays.items()} | ids | layout_arguments(case)


def arbitrary_ids(case: Case, random: np.random.Generator) -> np.ndarray:
    """[B, K, T, R] ids as they must be survived: valid, future, repeated, far out, -1 before valid ones, none at all."""
    num_blocks = -(-case.S // case.C)
    ids_BKTR = random.integers(-1, num_blocks + 2, (case.B, case.K, case.T, case.R)).astype(np.int32)
    wild_BKTR = random.random(ids_BKTR.shape) < 0.05
    ids_BKTR[wild_BKTR] = random.choice(np.array([-7, np.iinfo(np.int32).min, np.iinfo(np.int32).max], np.int32), wild_BKTR.sum())
    ids_BKTR[..., -1] = np.where(random.random(ids_BKTR.shape[:3]) < 0.7, 0, ids_BKTR[..., -1])
    ids_BKTR[random.random(ids_BKTR.shape[:3]) < 0.1] = -1
    return ids_BKTR
