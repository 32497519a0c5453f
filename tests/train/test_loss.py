"""The loss by hand, with a model that answers with fixed logits."""

from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx

from msa_jax.data.batch import Batch
from msa_jax.model.hybrid import ModelOutput
from msa_jax.train.loss import Totals, batch_totals, loss_fn, next_token_nats

B, T, E = 2, 4, 3
LOGITS = np.random.default_rng(0).normal(size=(B, T, E)).astype(np.float32)
TOKENS = np.array([[0, 1, 2, 0], [2, 2, 1, 1]], np.int32)
WEIGHTS = np.array([[1, 0.5, 0, 9], [1, 1, 0, 9]], np.float32)  # the last column has no next token
SEGMENTS = np.array([[1, 1, 1, 1], [1, 1, 1, 0]], np.int32)
BATCH = Batch(TOKENS, SEGMENTS, np.tile(np.arange(T, dtype=np.int32), (B, 1)), WEIGHTS, np.array([[0, 0, 2, 2], [1, 2, 2, -1]], np.int32),
              np.full((B, T), -1, np.int32), None)  # fmt: skip


class FixedModel(nnx.Module):
    """kl per layer is scale * (1, 3), divided by the denominator it is given; it notes how it was called."""

    def __init__(self) -> None:
        self.logits, self.scale, self.calls = nnx.Param(jnp.asarray(LOGITS)), nnx.Param(jnp.ones(())), []

    def __call__(self, batch: Batch, phase: str, *, kl: bool, kl_denominator: Any) -> ModelOutput:
        CALLS.append((phase, kl))
        kl_X = jnp.asarray([1.0, 3.0]) * self.scale[...] / kl_denominator if kl else jnp.zeros(2)
        return ModelOutput(self.logits[...], kl_X.mean(), kl_X, None, None)


CALLS: list[tuple[str, bool]] = []


def run(batch: Batch = BATCH, totals: Totals | None = None, **options: Any) -> Any:
    graphdef, params = nnx.split(FixedModel(), nnx.Param)
    options = {"phase": "sparse", "kl_weight": 0.5, "num_sources": 3} | options
    CALLS.clear()
    return jax.jit(
        jax.value_and_grad(
            lambda params: loss_fn(params, batch, graphdef=graphdef, totals=totals or batch_totals(batch), **options), has_aux=True
        )
    )(params)


def nats() -> np.ndarray:
    logits = LOGITS.astype(np.float64)
    log_p = logits - np.log(np.exp(logits).sum(-1, keepdims=True))
    return np.array([[-log_p[b, t, TOKENS[b, t + 1]] for t in range(T - 1)] for b in range(B)])


def test_cross_entropy_of_the_next_token() -> None:
    np.testing.assert_allclose(next_token_nats(jnp.asarray(LOGITS), jnp.asarray(TOKENS))[:, :-1], nats(), rtol=1e-5)
    half = next_token_nats(jnp.asarray(LOGITS, jnp.bfloat16), jnp.asarray(TOKENS))
    assert half.dtype == jnp.float32


def test_large_logits_stay_finite() -> None:
    (value, _), gradient = run(BATCH)
    assert np.isfinite(value)
    assert float(next_token_nats(jnp.full((1, 2, 3), 1e30).at[0, 0, 1].set(-1e30), jnp.array([[0, 1]]))[0, 0]) == pytest.approx(2e30)
    assert all(np.isfinite(leaf).all() for leaf in jax.tree.leaves(gradient))


def test_weights_tokens_and_kl_by_hand() -> None:
    (total, losses), gradient = run()
    weights = WEIGHTS[:, :-1]
    lm = (nats() * weights).sum() / 3.5
    kl = np.array([1, 3]) / 7  # seven real tokens, padding does not count
    np.testing.assert_allclose(losses.lm, lm, rtol=1e-5)
    np.testing.assert_allclose(losses.kl_X, kl, rtol=1e-6)
    np.testing.assert_allclose(losses.kl, kl.mean(), rtol=1e-6)
    np.testing.assert_allclose(total, lm + 0.5 * kl.mean(), rtol=1e-5)
    np.testing.assert_allclose(gradient["scale"][...], 0.5 * kl.mean(), rtol=1e-6)
    p = np.exp(LOGITS) / np.exp(LOGITS).sum(-1, keepdims=True)
    expected = np.zeros_like(LOGITS)
    expected[:, :-1] = (p[:, :-1] - np.eye(E)[TOKENS[:, 1:]]) * weights[..., None] / 3.5
    np.testing.assert_allclose(gradient["logits"][...], expected, atol=1e-6)


def test_z_loss_by_hand() -> None:
    """Its value and its gradient, weighted as the language loss; padding and the last column do not count."""
    plain, (total, losses), gradient = run(), *run(z_loss_weight=0.1)
    log_z = np.log(np.exp(LOGITS.astype(np.float64)).sum(-1))[:, :-1]
    weights = WEIGHTS[:, :-1] / 3.5
    np.testing.assert_allclose(losses.z, (weights * log_z**2).sum(), rtol=1e-5)
    np.testing.assert_allclose(total, plain[0][0] + 0.1 * losses.z, rtol=1e-5)
    np.testing.assert_array_equal(losses.total, total)
    p = np.exp(LOGITS) / np.exp(LOGITS).sum(-1, keepdims=True)
    expected = 0.1 * 2 * (weights * log_z)[..., None] * p[:, :-1]
    np.testing.assert_allclose((gradient["logits"][...] - plain[1]["logits"][...])[:, :-1], expected, atol=1e-6)
    assert plain[0][1].z == 0.0


def test_sums_by_source_leave_padding_out() -> None:
    losses = run()[0][1]
    weighted = nats() * WEIGHTS[:, :-1]
    np.testing.assert_allclose(losses.nats_by_source, [weighted[0, 0] + weighted[0, 1], weighted[1, 0], weighted[1, 1]], rtol=1e-5)
    np.testing.assert_allclose(losses.weight_by_source, [1.5, 1, 1], rtol=1e-6)


def test_denominators_are_those_given() -> None:
    losses = run(totals=Totals(jnp.asarray(35.0), jnp.asarray(70.0)))[0][1]
    np.testing.assert_allclose(losses.lm, (nats() * WEIGHTS[:, :-1]).sum() / 35, rtol=1e-5)
    np.testing.assert_allclose(losses.kl, 2 / 70, rtol=1e-6)


def test_with_loss_rows_a_token_weighs_the_same_whatever_else_is_in_the_batch() -> None:
    """Gradients of row 0, alone and beside row 1."""
    alone = BATCH._replace(**{name: value[:1] for name, value in BATCH._asdict().items() if value is not None})
    gradients = {}
    for loss_rows in (None, 5):
        _, together = run(totals=batch_totals(BATCH, loss_rows))
        _, diluted = run(totals=batch_totals(alone, loss_rows), batch=BATCH._replace(loss_weights_BT=WEIGHTS * [[1], [0]]))
        gradients[loss_rows] = together["logits"][...][0], diluted["logits"][...][0]
    np.testing.assert_array_equal(*gradients[5])
    assert (np.abs(gradients[None][0]) < np.abs(gradients[None][1])).any(), "by the batch's own count it is diluted"
    assert float(batch_totals(BATCH, 5).loss_weight) == 5 * T
    assert float(batch_totals(BATCH, 5).tokens) == 7, "the index branch's loss is a mean over real tokens as ever"


def test_weight_zero_switches_the_kl_off() -> None:
    (total, losses), gradient = run(kl_weight=0.0, phase="warmup")
    assert CALLS == [("warmup", False)]
    assert float(total) == float(losses.lm)
    assert not losses.kl_X.any()
    assert float(gradient["scale"][...]) == 0.0
    run(kl_weight=1e-3)
    assert CALLS == [("sparse", True)]


def test_a_batch_without_weights_has_no_loss_and_no_gradient() -> None:
    (total, losses), gradient = run(BATCH._replace(loss_weights_BT=np.zeros((B, T), np.float32)), kl_weight=0.0)
    assert float(total) == float(losses.lm) == 0.0
    assert not gradient["logits"][...].any()
