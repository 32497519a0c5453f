"""Recall, captured and relative mass: by hand, by brute force, at the oracle and at chance."""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from msa_jax.eval.attention import visible_blocks
from msa_jax.eval.index_quality import index_quality, kept_unasked, oracle_blocks, random_choice

T, J, R, K = 24, 12, 4, 2
NAMES = ("block_recall", "captured_mass", "relative_mass")


def masses(seed: int = 0) -> np.ndarray:
    """Positive, summing to one over the visible blocks of one document with blocks of two."""
    visible = np.asarray(visible_blocks(jnp.ones(T, int), jnp.arange(T), 2))
    mass = np.random.default_rng(seed).gamma(0.5, size=(K, T, J)) * visible
    return mass / mass.sum(-1, keepdims=True)


@functools.partial(jax.jit, static_argnames=("local", "init"))
def quality(mass: jax.Array, chosen: jax.Array, local: int = 1, init: int = 0) -> dict[str, jax.Array]:
    visible = visible_blocks(jnp.ones(T, int), jnp.arange(T), 2)
    return index_quality(mass, chosen, visible, kept_unasked(visible, local, init), R, local + init)


def queries() -> np.ndarray:
    """Those that see more than R blocks."""
    return np.flatnonzero(np.arange(T) // 2 + 1 > R)


def random_picks(rng: np.random.Generator, local: int = 1, init: int = 0) -> np.ndarray:
    chosen = np.zeros((K, T, J), bool)
    for head in range(K):
        for t in range(T):
            seen = t // 2 + 1
            kept = set(range(max(0, seen - local), seen)) | set(range(min(init, seen)))
            others = [block for block in range(seen) if block not in kept]
            picked = rng.permutation(others)[: max(0, R - len(kept))].astype(int)
            chosen[head, t, [*kept, *picked]] = True
    return chosen


def test_the_picture_in_the_docstring() -> None:
    mass = jnp.array([[[0.30, 0.02, 0.25, 0.05, 0.08, 0.30]]])
    chosen = jnp.array([[[1.0, 0, 0, 0, 1, 1]]])
    visible, kept = jnp.ones((1, 6), bool), jnp.array([[False] * 5 + [True]])
    values = {name: float(value[0, 0]) for name, value in index_quality(mass, chosen, visible, kept, 3, 1).items()}
    assert values == pytest.approx(
        {
            "block_recall": 2 / 3, "captured_mass": 0.68, "relative_mass": 0.60 / 0.85,
            "block_recall_without_local": 1 / 2, "captured_mass_without_local": 0.38 / 0.70, "relative_mass_without_local": 0.30 / 0.55,
        }
    )  # fmt: skip


def test_brute_force() -> None:
    mass, chosen = masses(), random_picks(np.random.default_rng(1))
    ours = {name: np.asarray(value) for name, value in quality(mass, chosen * 1.0).items()}
    for head in range(K):
        for t in queries():
            for suffix, blocks, count in (("", range(t // 2 + 1), R), ("_without_local", range(t // 2), R - 1)):
                oracle = sorted(blocks, key=lambda block: -mass[head, t, block])[:count]
                picked = [block for block in blocks if chosen[head, t, block]]
                common = [block for block in oracle if block in picked]
                m = mass[head, t]
                assert ours["block_recall" + suffix][head, t] == pytest.approx(len(common) / count)
                assert ours["captured_mass" + suffix][head, t] == pytest.approx(m[picked].sum() / m[list(blocks)].sum(), rel=1e-5)
                assert ours["relative_mass" + suffix][head, t] == pytest.approx(m[common].sum() / m[oracle].sum(), rel=1e-5)


def test_the_oracle_scores_one_and_the_worst_choice_scores_less_than_chance() -> None:
    mass = masses()
    visible = visible_blocks(jnp.ones(T, int), jnp.arange(T), 2)
    at = queries()
    best = np.zeros((K, T, J))
    best[:, at] = oracle_blocks(jnp.asarray(mass[:, at]), jnp.broadcast_to(visible[at], mass[:, at].shape), R)
    values = quality(mass, best)
    for name in ("block_recall", "relative_mass"):
        np.testing.assert_allclose(values[name][:, at], 1.0, atol=1e-6)
    worst = np.zeros((K, T, J))
    worst[:, at] = oracle_blocks(-jnp.asarray(mass[:, at]) - 1, jnp.broadcast_to(~visible[at], mass[:, at].shape), 0)
    assert float(np.max(quality(mass, worst)["captured_mass"][:, at])) == 0.0


@pytest.mark.parametrize(("local", "init"), [(1, 0), (2, 1), (0, 0)])
def test_chance_is_the_mean_over_random_choices(local: int, init: int) -> None:
    mass = masses()
    visible = visible_blocks(jnp.ones(T, int), jnp.arange(T), 2)
    odds = random_choice(visible, kept_unasked(visible, local, init), R)
    expected = quality(mass, jnp.broadcast_to(odds, mass.shape), local, init)
    rng = np.random.default_rng(2)
    draws = [quality(mass, random_picks(rng, local, init) * 1.0, local, init) for _ in range(400)]
    for name in NAMES:
        for suffix in ("", "_without_local"):
            mean = np.mean([np.asarray(draw[name + suffix])[:, queries()] for draw in draws], axis=0)
            np.testing.assert_allclose(mean.mean(), np.asarray(expected[name + suffix])[:, queries()].mean(), atol=0.01)
            np.testing.assert_allclose(mean, np.asarray(expected[name + suffix])[:, queries()], atol=0.12)


def test_random_choice_fills_the_slots() -> None:
    visible = visible_blocks(jnp.ones(T, int), jnp.arange(T), 2)
    kept = kept_unasked(visible, 1, 1)
    odds = np.asarray(random_choice(visible, kept, R))
    np.testing.assert_allclose(odds.sum(-1), np.minimum(np.arange(T) // 2 + 1, R), rtol=1e-6)
    assert (odds[np.asarray(kept)] == 1).all()
    assert odds[T - 1].tolist() == pytest.approx([1.0] + [0.2] * 10 + [1.0])


def test_nothing_to_ask_means_no_measure_without_local() -> None:
    visible = visible_blocks(jnp.ones(T, int), jnp.arange(T), 2)
    values = index_quality(jnp.asarray(masses()), jnp.ones((K, T, J)), visible, kept_unasked(visible, R, 0), R, R)
    assert set(values) == set(NAMES)


def test_mass_that_underflows_gives_no_nan() -> None:
    mass = np.zeros((K, T, J))
    mass[:, np.arange(T), np.arange(T) // 2] = 1.0
    chosen = random_picks(np.random.default_rng(3)) * 1.0
    for value in quality(mass, chosen).values():
        assert np.isfinite(value).all()
