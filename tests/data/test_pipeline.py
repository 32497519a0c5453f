"""The iterator: positions of delivered batches, restarts, threads."""

import dataclasses
import json
import threading
from collections.abc import Callable

import numpy as np
import pytest

from msa_jax.config import ConfigError, DataConfig, ModelConfig
from msa_jax.data.mixture import Mixture
from msa_jax.data.pack import Pack
from msa_jax.data.pipeline import StateError, TrainBatches, fill, train_batches


@pytest.fixture(params=[0, 1, 4])
def batches(request: pytest.FixtureRequest, data: DataConfig, model: ModelConfig, pack: Pack) -> TrainBatches:
    made = train_batches(dataclasses.replace(data, prefetch=request.param), model, pack, seed=0)
    yield made
    made.close()


def test_batches_come_in_order_with_cumulative_counts(
    batches: TrainBatches, data: DataConfig, model: ModelConfig, pack: Pack, assert_same: Callable
) -> None:
    mixture = Mixture(data, model, pack, seed=0)
    total: dict[str, int] = {}
    for step in range(12):
        expected, counts = mixture.batch(step)
        total = {name: total.get(name, 0) + count for name, count in counts.items()}
        assert_same(next(batches), expected)
        assert batches.counts == total
        assert batches.step == step + 1


def test_a_restart_goes_on_with_the_next_batch(
    batches: TrainBatches, data: DataConfig, model: ModelConfig, pack: Pack, assert_same: Callable
) -> None:
    for _ in range(5):
        next(batches)
    state = batches.get_state()
    assert isinstance(state, bytes)
    assert json.loads(state)["step"] == 5
    expected = [next(batches) for _ in range(6)]
    final = dict(batches.counts)
    again = train_batches(data, model, pack, seed=0)
    again.set_state(state)
    assert again.get_state() == state
    for batch in expected:
        assert_same(next(again), batch)
    assert again.counts == final
    batches.set_state(state)  # also backwards, in a running iterator
    assert_same(next(batches), expected[0])
    again.close()


def test_a_changed_schedule_keeps_the_order(data: DataConfig, model: ModelConfig, pack: Pack) -> None:
    first = train_batches(data, model, pack, seed=0)
    for _ in range(3):
        next(first)
    text = dataclasses.replace(data, streams=data.streams[:1])
    second = train_batches(text, model, pack, seed=0)
    second.set_state(first.get_state())
    np.testing.assert_array_equal(next(second).tokens_BT, next(first).tokens_BT[:2])
    first.close()
    second.close()


@pytest.mark.parametrize(("state", "message"), [
    (b"", "not a saved data position"),
    (b"\xff", "not a saved data position"),
    (b"[1]", "not a saved data position"),
    (b'{"step": 1}', "not a saved data position"),
])  # fmt: skip
def test_damaged_positions_are_refused(batches: TrainBatches, state: bytes, message: str) -> None:
    with pytest.raises(StateError, match=message):
        batches.set_state(state)


@pytest.mark.parametrize("name", ["pack", "tokenizer", "format"])
def test_positions_of_other_data_are_refused(batches: TrainBatches, name: str) -> None:
    state = json.loads(batches.get_state())
    state[name] = "other"
    with pytest.raises(StateError, match=rf"has {name} other, this run .*Continue with the {name} .* or start anew"):
        batches.set_state(json.dumps(state).encode())
    assert batches.step == 0


def test_errors_of_the_threads_reach_the_caller_unchanged(batches: TrainBatches, monkeypatch: pytest.MonkeyPatch) -> None:
    def fail(*_: object) -> None:
        raise ConfigError("broken row")

    monkeypatch.setattr(batches.mixture._rows["text"], "write", fail)
    with pytest.raises(ConfigError, match="broken row"):
        next(batches)


def test_prefetching_uses_threads_that_end(data: DataConfig, model: ModelConfig, pack: Pack) -> None:
    before = set(threading.enumerate())
    made = train_batches(dataclasses.replace(data, prefetch=2), model, pack, seed=0)
    next(made)
    started = set(threading.enumerate()) - before
    assert started
    made.close()
    for thread in started:
        thread.join(timeout=5)
        assert not thread.is_alive()
    with pytest.raises(ValueError, match="closed"):
        next(made)


def test_fill_reports_what_packing_wastes() -> None:
    counts = {"text": 50, "caption": 20, "visual": 20, "padding": 10, "patches": 3, "patch_padding": 1}
    assert fill(counts) == {"tokens": 0.9, "patches": 0.75}
    assert fill({**counts, "patches": 0, "patch_padding": 0}) == {"tokens": 0.9}
