"""Nats a token and bits a byte, with models whose answers are known, and the loss that training minimises."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx

from msa_jax.config import Experiment
from msa_jax.data.batch import Batch
from msa_jax.data.mixture import load_tokenizer
from msa_jax.data.pack import Pack
from msa_jax.data.text_evaluation import TextEvaluation
from msa_jax.eval.forward import Forward, ForwardOutput, target_nats
from msa_jax.eval.perplexity import TextPerplexity
from msa_jax.train.loss import next_token_nats, target_weights
from msa_jax.train.state import TrainState


class PaysBits:
    """A token costs 2 bits for each of its bytes."""

    def __init__(self, byte_lengths: np.ndarray) -> None:
        self.byte_lengths = byte_lengths

    def __call__(self, state: None, batch: Batch) -> ForwardOutput:
        next_BT = np.roll(batch.tokens_BT, -1, axis=1)
        nats_BT = 2 * np.log(2) * self.byte_lengths[next_BT] * batch.loss_weights_BT
        return ForwardOutput(nats_BT, batch.loss_weights_BT, None, None)


def test_a_model_that_pays_two_bits_a_byte(experiment: Experiment, pack: Pack) -> None:
    tokenizer = load_tokenizer(experiment.data, experiment.model)
    values = dict(TextPerplexity(experiment, pack, PaysBits(tokenizer.byte_lengths), rows=3).run(None))
    text = TextEvaluation(experiment.data, experiment.model, pack, experiment.eval.text_rows)
    assert sum(map(len, text.pieces.values())) > 3, "more than one batch"
    for source in pack.text_sources:
        pieces = text.pieces[source]
        size = sum(len(tokenizer.text_bytes(piece[1:])) for piece in pieces)
        assert values[f"text/bits_per_byte/{source}"] == pytest.approx(2.0, rel=1e-6)
        assert values[f"text/bytes/{source}"] == size
        tokens = sum(len(piece) - 1 for piece in pieces)
        assert values[f"text/nats_per_token/{source}"] == pytest.approx(2 * np.log(2) * size / tokens, rel=1e-6)
        assert 0 < values[f"text/bigram_bits_per_byte/{source}"] < values[f"text/unigram_bits_per_byte/{source}"] < 8


def test_target_nats_by_loops_and_as_in_training() -> None:
    rng = np.random.default_rng(0)
    logits, tokens, weights = rng.normal(size=(2, 5, 7)).astype(np.float32), rng.integers(0, 7, (2, 5)), rng.random((2, 5))
    batch = Batch(tokens, tokens, tokens, weights.astype(np.float32), tokens, tokens, None)
    nats, kept = jax.jit(target_nats)(logits, batch)
    for b in range(2):
        for t in range(4):
            p = np.exp(logits[b, t]) / np.exp(logits[b, t]).sum()
            assert nats[b, t] == pytest.approx(-weights[b, t] * np.log(p[tokens[b, t + 1]]), rel=1e-5)
        assert nats[b, 4] == kept[b, 4] == 0
    np.testing.assert_allclose(kept, target_weights(batch), rtol=1e-6)
    np.testing.assert_allclose(nats, target_weights(batch) * next_token_nats(jnp.asarray(logits), jnp.asarray(tokens)), rtol=1e-5)


def test_the_forward_pass_is_the_models(
    experiment: Experiment, pack: Pack, forward: Forward, state: TrainState, caplog: pytest.LogCaptureFixture
) -> None:
    """block(i) on hidden[i] gives hidden[i + 1]: what the other evaluators look into is what the model computes."""
    text = TextEvaluation(experiment.data, experiment.model, pack, experiment.eval.text_rows)
    batch = next(text.batches(4)).batch
    output = forward(state, batch)
    assert output.nats_BT.shape == batch.tokens_BT.shape
    with jax.log_compiles(), caplog.at_level("WARNING"):
        Forward(nnx.split(nnx.merge(forward.graphdef, state.params))[0])(state, batch)
    assert not [record for record in caplog.records if "_forward" in record.getMessage()], "models of one structure share their programs"
    graphdef, params = forward.block(state, 0)

    @jax.jit
    def layer(params: nnx.State, hidden_BTD: jax.Array) -> jax.Array:
        return nnx.merge(graphdef, params)(hidden_BTD, jnp.asarray(batch.segments_BT), jnp.asarray(batch.positions_BT), kl=False)[0]

    np.testing.assert_allclose(layer(params, output.hidden_XBTD[0]), output.hidden_XBTD[1], atol=1e-4)
