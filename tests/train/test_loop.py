"""fit(): resume to the bit, signals, NaN, evaluation, and what is compiled how often."""

import json
import os
import signal
from collections.abc import Iterable
from pathlib import Path
from typing import Any

import chex
import jax
import jax.numpy as jnp
import numpy as np
import pytest
from tiny_experiment import SOURCES, Batches, changed

from msa_jax.config import Experiment, MoeConfig
from msa_jax.data.batch import Batch
from msa_jax.train import loop
from msa_jax.train.checkpoint import Checkpoints
from msa_jax.train.guard import NonFiniteError
from msa_jax.train.interrupt import Interrupted
from msa_jax.train.loop import fit, is_due
from msa_jax.train.optim import weight_average
from msa_jax.train.state import TrainState, build


class Crash(Exception):
    """Stands for whatever ends a process between two steps."""


class FaultyBatches(Batches):
    """Does something on the way to batch `at` (counted from 1)."""

    def __init__(self, experiment: Experiment, at: int, fault: Any) -> None:
        super().__init__(experiment)
        self._at, self._fault = at, fault

    def __next__(self) -> Batch:
        batch = super().__next__()
        return (self._fault(batch) or batch) if self._next == self._at else batch


def crash(batch: Batch) -> None:
    raise Crash


def press_ctrl_c(batch: Batch) -> None:
    os.kill(os.getpid(), signal.SIGINT)


def poison(batch: Batch) -> None:
    batch.loss_weights_BT[0, 0] = np.nan


class Counter:
    """An evaluator that reports how far the parameters are, and counts its runs."""

    def __init__(self, name: str = "count", action: Any = None) -> None:
        self.name, self.runs, self._action = name, 0, action

    def run(self, state: TrainState) -> Iterable[tuple[str, float]]:
        self.runs += 1
        if self._action:
            self._action(None)
        yield f"{self.name}/step", float(jnp.asarray(np.array(state.step)))  # implicit transfers are allowed here


def train(experiment: Experiment, folder: Path, batches: Batches | None = None, **options: Any) -> TrainState:
    folder.mkdir(exist_ok=True)
    return fit(experiment, *build(experiment), batches or Batches(experiment), folder, sources=SOURCES, **options)


def curve(folder: Path, name: str = "loss") -> list[tuple[int, float]]:
    return [(row["step"], row[name]) for row in map(json.loads, (folder / "metrics.jsonl").read_text().splitlines())]


def evaluated(folder: Path) -> list[tuple[int, str]]:
    return [(row["step"], row["name"]) for row in map(json.loads, (folder / "evaluation.jsonl").read_text().splitlines())]


@pytest.fixture(scope="module")
def uninterrupted(text_experiment: Experiment, tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, TrainState]:
    folder = tmp_path_factory.mktemp("run")
    return folder, train(text_experiment, folder)


def assert_same(run: tuple[Path, TrainState], folder: Path, state: TrainState) -> None:
    """The same losses and the same state, to the bit."""
    for name in ("loss", "loss/kl", "gradient_norm/trunk"):
        assert curve(folder, name) == curve(run[0], name)
    for a, b in zip(jax.tree.leaves((run[1].params, run[1].opt_state)), jax.tree.leaves((state.params, state.opt_state)), strict=True):
        np.testing.assert_array_equal(a, b)


def test_a_run_writes_every_step_and_learns(uninterrupted: tuple[Path, TrainState]) -> None:
    folder, state = uninterrupted
    assert [step for step, _ in curve(folder)] == list(range(1, 9))
    assert int(state.step) == 8
    assert Checkpoints(folder / "checkpoints").steps() == [4, 8]
    assert all(rate > 0 for _, rate in curve(folder, "tokens_per_second"))
    assert [rate for _, rate in curve(folder, "lr/trunk")] == pytest.approx(
        [1e-2 * f for f in (1 / 3, 2 / 3, 1, 1, 1, 1, 1, 0.55)], rel=1e-6
    )
    row = json.loads((folder / "metrics.jsonl").read_text().splitlines()[0])
    assert "loss/source/plays" in row
    assert "loss/source/drawings" not in row, "nothing of that source is in a batch"
    assert row["tokens/source/drawings"] == 0


def test_a_crashed_run_continues_to_the_bit(text_experiment: Experiment, tmp_path: Path, uninterrupted: tuple[Path, TrainState]) -> None:
    with pytest.raises(Crash):
        train(text_experiment, tmp_path, FaultyBatches(text_experiment, 7, crash))
    assert Checkpoints(tmp_path / "checkpoints").steps() == [4]
    assert [step for step, _ in curve(tmp_path)] == [1, 2, 3, 4, 5], "the crash came before step 6 was written"
    assert_same(uninterrupted, tmp_path, train(text_experiment, tmp_path))


def test_ctrl_c_saves_where_it_is_and_continues_to_the_bit(
    text_experiment: Experiment, tmp_path: Path, uninterrupted: tuple[Path, TrainState]
) -> None:
    before = signal.getsignal(signal.SIGINT)
    with pytest.raises(Interrupted, match="interrupted at step 2, which is saved") as stopped:
        train(text_experiment, tmp_path, FaultyBatches(text_experiment, 2, press_ctrl_c))
    assert stopped.value.exit_code == 130
    assert signal.getsignal(signal.SIGINT) is before
    assert Checkpoints(tmp_path / "checkpoints").steps() == [2]
    assert_same(uninterrupted, tmp_path, train(text_experiment, tmp_path))


@pytest.mark.slow
def test_experts_muon_and_the_average_continue_to_the_bit(text_experiment: Experiment, tmp_path: Path) -> None:
    """And evaluation sees the average of the weights, before and after."""
    moe = MoeConfig(num_experts=4, experts_per_token=2, expert_dim=8, dense_layers=1)
    experiment = changed(
        text_experiment, model__moe=moe, model__pattern="D", optim__optimizer="muon", optim__ema_decay=0.9, train__z_loss_weight=1e-3
    )
    seen: list[list[np.ndarray]] = []

    class Witness(Counter):
        def run(self, state: TrainState) -> Iterable[tuple[str, float]]:
            seen.append(jax.device_get(jax.tree.leaves(state.params)))
            return super().run(state)

    whole, halves = tmp_path / "whole", tmp_path / "halves"
    state = train(experiment, whole, evaluators=[Witness()])
    with pytest.raises(Crash):
        train(experiment, halves, FaultyBatches(experiment, 7, crash))
    assert_same((whole, state), halves, train(experiment, halves, evaluators=[Witness()]))
    average = jax.device_get(jax.tree.leaves(weight_average(state.opt_state)))
    for ours, ends, theirs in zip(*seen, average, strict=True):
        np.testing.assert_array_equal(ours, theirs)
        np.testing.assert_array_equal(ends, theirs)
    assert all((a != b).any() for a, b in zip(average, jax.tree.leaves(state.params), strict=True))
    assert curve(whole, "loss/z")[0][1] > 0


def test_a_finished_run_is_left_as_it_is(text_experiment: Experiment, uninterrupted: tuple[Path, TrainState]) -> None:
    lines = (uninterrupted[0] / "metrics.jsonl").read_text()
    again = train(text_experiment, uninterrupted[0], FaultyBatches(text_experiment, 9, crash))
    assert (uninterrupted[0] / "metrics.jsonl").read_text() == lines
    assert_same(uninterrupted, uninterrupted[0], again)


@pytest.mark.parametrize(("at", "kept"), [(2, []), (8, [4])])
def test_a_lost_step_is_named_and_never_saved(text_experiment: Experiment, tmp_path: Path, at: int, kept: list[int]) -> None:
    with pytest.raises(NonFiniteError, match=rf"step {at}: loss/lm is nan; gradients of trunk are not finite, first at embedding"):
        train(text_experiment, tmp_path, FaultyBatches(text_experiment, at, poison))
    assert Checkpoints(tmp_path / "checkpoints").steps() == kept
    assert curve(tmp_path)[-1] == (at, None)


def test_evaluation_runs_when_due_and_once(text_experiment: Experiment, tmp_path: Path) -> None:
    experiment, counter = changed(text_experiment, train__evaluate_every=3), Counter()
    with pytest.raises(Crash):
        train(experiment, tmp_path, FaultyBatches(experiment, 7, crash), evaluators=[counter])
    assert evaluated(tmp_path) == [(3, "count/step"), (6, "count/step")]
    train(experiment, tmp_path, evaluators=[counter, Counter("other")])
    assert evaluated(tmp_path) == [(step, "count/step") for step in (3, 6)] + [(6, "other/step"), (8, "count/step"), (8, "other/step")]
    runs = counter.runs
    train(experiment, tmp_path, evaluators=[counter])
    assert counter.runs == runs, "a finished run is not evaluated again"


def test_ctrl_c_during_the_last_evaluation_loses_no_training(text_experiment: Experiment, tmp_path: Path) -> None:
    second = Counter("second")
    with pytest.raises(Interrupted, match="step 8"):
        train(text_experiment, tmp_path, evaluators=[Counter("first", press_ctrl_c), second])
    assert second.runs == 0
    assert not (tmp_path / "evaluation.jsonl").exists(), "all values of an evaluation, or none"
    train(text_experiment, tmp_path, FaultyBatches(text_experiment, 9, crash), evaluators=[Counter("first"), second])
    assert evaluated(tmp_path) == [(8, "first/step"), (8, "second/step")]


@pytest.mark.parametrize(
    ("rows", "programs"),
    [(((0, 2),), ["warmup", "sparse"]), pytest.param(((0, 2), (6, 3)), ["warmup", "sparse", "sparse"], marks=pytest.mark.slow)],
    ids=["constant", "growing"],
)
def test_one_trace_a_phase_and_row_count(
    text_experiment: Experiment, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, rows: tuple, programs: list[str]
) -> None:
    """Two phases are two programs, a change of the mixture makes one more, and nothing is traced again in eight steps."""
    make, phases = loop.make_train_step, []

    def make_counted(experiment: Experiment, graphdef: Any, tx: Any, phase: str, sources: Any) -> Any:
        phases.append(phase)
        return chex.assert_max_traces(make(experiment, graphdef, tx, phase, sources), n=len(programs))  # chex counts all together

    monkeypatch.setattr(loop, "make_train_step", make_counted)
    chex.clear_trace_counter()
    train(changed(text_experiment, data__streams__0__rows=rows), tmp_path)
    assert phases == programs
    assert [step for step, _ in curve(tmp_path)] == list(range(1, 9))


def test_a_batch_of_another_shape_is_refused_and_not_compiled(text_experiment: Experiment, tmp_path: Path) -> None:
    def longer(batch: Batch) -> Batch:
        return jax.tree.map(lambda leaf: np.pad(leaf, [(0, 0), (0, 1)]), batch)

    with pytest.raises(TypeError, match=r"int32\[2,25\]"):
        train(text_experiment, tmp_path, FaultyBatches(text_experiment, 3, longer))


def test_hidden_transfers_in_the_loop_are_refused(text_experiment: Experiment, tmp_path: Path) -> None:
    def hidden(batch: Batch) -> None:
        jnp.sin(np.ones(3, np.float32)).block_until_ready()

    with pytest.raises(jax.errors.JaxRuntimeError, match="Disallowed host-to-device transfer"):
        train(text_experiment, tmp_path, FaultyBatches(text_experiment, 2, hidden))


def test_when_things_are_due() -> None:
    assert [step for step in range(11) if is_due(step, 4, 10)] == [4, 8, 10]
    assert [step for step in range(11) if is_due(step, 0, 10)] == [10]
