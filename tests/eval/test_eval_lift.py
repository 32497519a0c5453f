"""Lift, the four-block matrix and separation: uniform attention gives 1, 1 and 0; the rest by hand and by loops."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from msa_jax.eval.attention import visible_keys
from msa_jax.eval.lift import TEXT, VISUAL, block_shares, lift, separation, sinks

T, N = 40, 3
SEGMENTS = jnp.array([1] * 25 + [2] * 13 + [0] * 2)
POSITIONS = jnp.array([*range(25), *range(13), 0, 0])
VISUAL_T = jnp.array([(t % 10) in (2, 3, 4, 5) and t < 38 for t in range(T)])
SPECIAL_T = jnp.array([t in (1, 26) for t in range(T)])
KINDS = jnp.stack([~VISUAL_T & ~SPECIAL_T & (SEGMENTS > 0), VISUAL_T])


def normalised(weights: np.ndarray) -> np.ndarray:
    masked = weights * np.asarray(visible_keys(SEGMENTS, POSITIONS))
    return masked / np.maximum(masked.sum(-1, keepdims=True), 1e-30)


@jax.jit
def measure(probabilities: jax.Array, sinks_NS: jax.Array) -> tuple[jax.Array, jax.Array, jax.Array]:
    mass, keys, queries = block_shares(probabilities, visible_keys(SEGMENTS, POSITIONS), KINDS, sinks_NS)
    values = lift(mass, keys)
    return values, separation(values), queries


def test_uniform_attention_has_lift_one_and_separation_zero_whatever_the_sinks() -> None:
    uniform = normalised(np.ones((N, T, T)))
    for removed in (sinks(uniform, SEGMENTS, SPECIAL_T), jnp.zeros((N, T), bool)):
        values, apart, queries = measure(uniform, removed)
        np.testing.assert_allclose(values, 1.0, rtol=1e-5)
        np.testing.assert_allclose(apart, 0.0, atol=1e-5)
        assert (np.asarray(queries) > 0).all()


def test_a_strong_sink_changes_nothing_once_it_is_removed() -> None:
    weights = np.random.default_rng(0).gamma(1.0, size=(N, T, T))
    removed = sinks(normalised(weights), SEGMENTS, SPECIAL_T)
    before = measure(normalised(weights), removed)
    weights[:, :, [0, 25]] *= 1000
    after = measure(normalised(weights), removed)
    for a, b in zip(before, after, strict=True):
        np.testing.assert_allclose(a, b, rtol=1e-4, atol=1e-5)


def test_attention_inside_the_own_kind_separates_fully() -> None:
    kind = np.where(np.asarray(VISUAL_T), 1, 0)
    own = normalised(np.broadcast_to((kind[:, None] == kind[None, :]) * 1.0, (N, T, T)))
    values, apart, _ = measure(own, jnp.broadcast_to(SPECIAL_T, (N, T)))
    np.testing.assert_allclose(apart, 1.0, rtol=1e-6)
    assert (np.asarray(values)[TEXT, VISUAL] == 0).all()


def test_by_loops() -> None:
    probabilities = normalised(np.random.default_rng(1).gamma(0.3, size=(N, T, T)))
    removed = np.asarray(sinks(probabilities, SEGMENTS, SPECIAL_T))
    values, apart, queries = (np.asarray(value) for value in measure(probabilities, removed))
    visible, kinds = np.asarray(visible_keys(SEGMENTS, POSITIONS)), np.asarray(KINDS)
    for n in range(N):
        expected = np.zeros((2, 2))
        for a in (TEXT, VISUAL):
            shares = []
            for t in np.flatnonzero(kinds[a]):
                keys = [[s for s in range(T) if visible[t, s] and kinds[b, s] and not removed[n, s]] for b in (TEXT, VISUAL)]
                if keys[TEXT] and keys[VISUAL]:
                    mass = np.array([probabilities[n, t, of].sum() for of in keys])
                    shares.append((mass / mass.sum(), np.array([len(of) for of in keys]) / len(keys[TEXT] + keys[VISUAL])))
            expected[a] = np.mean([mass for mass, _ in shares], 0) / np.mean([share for _, share in shares], 0)
            assert queries[a, n] == len(shares)
        np.testing.assert_allclose(values[:, :, n], expected, rtol=1e-4)
        same, cross = np.trace(expected), expected[0, 1] + expected[1, 0]
        assert apart[n] == pytest.approx((same - cross) / (same + cross), rel=1e-3)


def test_sinks_are_first_tokens_special_tokens_and_the_most_attended_percent() -> None:
    weights = np.ones((1, 200, 200))
    weights[:, :, 50] = 100
    weights[:, :, 60] = 90
    probabilities = weights * np.tril(np.ones((200, 200)))
    probabilities /= probabilities.sum(-1, keepdims=True)
    segments = jnp.ones(200, int).at[120:].set(2)
    found = sinks(probabilities, segments, jnp.arange(200) == 7)
    assert np.flatnonzero(found[0]).tolist() == [0, 7, 50, 60, 120]


def test_a_kind_that_never_sees_both_kinds_has_no_lift() -> None:
    segments = jnp.ones(6, int)
    kinds = jnp.array([[False] * 3 + [True] * 3, [True] * 3 + [False] * 3])
    visible = visible_keys(segments, jnp.arange(6))
    uniform = np.asarray(visible / visible.sum(-1, keepdims=True))[None]
    mass, keys, _ = block_shares(uniform, visible, kinds, jnp.zeros((1, 6), bool))
    values = np.asarray(lift(mass, keys))
    np.testing.assert_allclose(values[TEXT], 1.0, rtol=1e-6)
    assert np.isnan(values[VISUAL]).all()
