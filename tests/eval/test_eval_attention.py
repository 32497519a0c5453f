"""Attention written out: against loops over queries and keys, and against the operators of the training path."""

import jax
import jax.numpy as jnp
import numpy as np

from msa_jax.eval.attention import attention_probabilities, block_mass, chosen_blocks, keys_of_blocks, visible_blocks, visible_keys
from pallas_kernels.block_select.api import block_select
from pallas_kernels.sparse_attention.api import sparse_attention

SEGMENTS = jnp.array([1, 1, 1, 1, 1, 2, 2, 2, 2, 2, 2, 2, 0])
POSITIONS = jnp.array([0, 1, 2, 3, 4, 0, 1, 2, 3, 4, 5, 6, 0])
N, K, H, C, R = 4, 2, 8, 2, 2


def random_heads() -> tuple[jax.Array, jax.Array, jax.Array]:
    keys = jax.random.split(jax.random.key(0), 3)
    return tuple(jax.random.normal(key, (len(SEGMENTS), heads, H)) for key, heads in zip(keys, (N, K, K), strict=True))


def test_visible_keys_and_blocks_by_loops() -> None:
    visible = np.asarray(visible_keys(SEGMENTS, POSITIONS))
    blocks = np.asarray(visible_blocks(SEGMENTS, POSITIONS, C))
    for t in range(len(SEGMENTS)):
        for s in range(len(SEGMENTS)):
            assert visible[t, s] == (s <= t and SEGMENTS[s] == SEGMENTS[t] > 0)
        assert np.flatnonzero(blocks[t]).tolist() == (list(range(POSITIONS[t] // C + 1)) if SEGMENTS[t] > 0 else [])


def test_chosen_blocks_ignore_what_is_no_visible_block_and_count_a_block_once() -> None:
    visible = visible_blocks(jnp.ones(6, int), jnp.arange(6), 2)
    ids = jnp.array([[[-1, 0], [0, 0], [1, 2], [-7, 1], [2, 5], [1, 2]]])
    assert np.asarray(chosen_blocks(ids, visible)).astype(int).tolist() == [
        [[1, 0, 0], [1, 0, 0], [0, 1, 0], [0, 1, 0], [0, 0, 1], [0, 1, 1]]
    ]


def test_probabilities_by_loops() -> None:
    q, k, _ = random_heads()
    visible = visible_keys(SEGMENTS, POSITIONS)
    ours = np.asarray(jax.jit(attention_probabilities)(q, k, visible[None]))
    q, k, visible = np.asarray(q), np.asarray(k), np.asarray(visible)
    for n in range(N):
        for t in range(len(SEGMENTS)):
            keys = np.flatnonzero(visible[t])
            scores = k[keys, n // (N // K)] @ q[t, n] / np.sqrt(H)
            expected = np.zeros(len(SEGMENTS))
            expected[keys] = np.exp(scores) / np.exp(scores).sum()
            np.testing.assert_allclose(ours[n, t], expected, atol=1e-6)


def test_probabilities_times_values_are_the_output_of_sparse_attention() -> None:
    q, k, v = random_heads()
    batch = {"segments": SEGMENTS[None], "positions": POSITIONS[None], "block_size": C, "implementation": "reference"}

    @jax.jit
    def both() -> tuple[jax.Array, jax.Array]:
        ids = block_select(q[None, :, :K], k[None, :, 0], num_blocks=R, **batch).ids
        theirs, _ = sparse_attention(q[None], k[None], v[None], ids, **batch)
        blocks = chosen_blocks(ids[0], visible_blocks(SEGMENTS, POSITIONS, C))
        support = keys_of_blocks(blocks, visible_keys(SEGMENTS, POSITIONS), POSITIONS, C)
        return jnp.einsum("nts,snh->tnh", attention_probabilities(q, k, support), jnp.repeat(v, N // K, axis=1)), theirs[0]

    ours, theirs = both()
    np.testing.assert_allclose(ours, theirs, atol=1e-5)


def test_block_mass_adds_up_by_loops() -> None:
    q, k, _ = random_heads()
    probabilities = np.asarray(attention_probabilities(q, k, visible_keys(SEGMENTS, POSITIONS)[None]))
    mass = np.asarray(block_mass(probabilities, POSITIONS, 4, C))
    for t in range(len(SEGMENTS)):
        for block in range(4):
            members = [s for s in range(len(SEGMENTS)) if SEGMENTS[s] == SEGMENTS[t] and POSITIONS[s] // C == block]
            np.testing.assert_allclose(mass[:, t, block], probabilities[:, t, members].sum(-1), atol=1e-6)
