"""Seeds in one program: each folder ends as a run of its own would have left it."""

import json
from pathlib import Path
from typing import Any

import jax
import numpy as np
import pytest
from tiny_experiment import SOURCES, TEXT_EXPERIMENT, Batches, changed, make_batch

from msa_jax.config import Experiment
from msa_jax.data.batch import Batch
from msa_jax.train.checkpoint import Checkpoints
from msa_jax.train.guard import NonFiniteError
from msa_jax.train.loop import Run, fit, fit_side_by_side
from msa_jax.train.state import TrainState, build

SEEDS = (0, 3)


class SeededBatches(Batches):
    """Each seed has its own; batch `lose` is poisoned."""

    def __init__(self, experiment: Experiment, lose: int | None = None) -> None:
        super().__init__(experiment)
        self._seed, self._lose = experiment.seed, lose

    def __next__(self) -> Batch:
        self._next += 1
        batch = make_batch(self._experiment, 1000 * self._seed + self._next)
        if self._next == self._lose:
            batch.loss_weights_BT[0, 0] = np.nan
        return batch


class Counter:
    """An evaluator that says how far the run is."""

    name = "count"

    def __init__(self) -> None:
        self.runs = 0

    def run(self, state: TrainState) -> Any:
        self.runs += 1
        yield "count/step", float(np.asarray(state.step))


def seeded(seed: int) -> Experiment:
    return changed(TEXT_EXPERIMENT, seed=seed, train__index_warmup_steps=0)  # one program


def train_together(folder: Path, lose: dict[int, int] | None = None, evaluators: Any = ()) -> list[TrainState]:
    runs = []
    for seed in SEEDS:
        (folder / f"seed_{seed}").mkdir(exist_ok=True)
        runs.append(Run(seeded(seed), SeededBatches(seeded(seed), (lose or {}).get(seed)), folder / f"seed_{seed}", evaluators))
    return fit_side_by_side(runs, *build(runs[0].experiment), sources=SOURCES)


def rows(folder: Path) -> list[dict[str, float]]:
    return [json.loads(line) for line in (folder / "metrics.jsonl").read_text().splitlines()]


@pytest.fixture(scope="module")
def together(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, list[TrainState]]:
    folder = tmp_path_factory.mktemp("together")
    return folder, train_together(folder, evaluators=[Counter()])


def assert_same_state(ours: TrainState, theirs: TrainState, limit: float) -> None:
    """Error ratio of every parameter and moment."""
    assert int(ours.step) == int(theirs.step)
    np.testing.assert_array_equal(jax.random.key_data(ours.key), jax.random.key_data(theirs.key))
    found, expected = ({"params": state.params, "opt_state": state.opt_state} for state in (ours, theirs))
    for (path, leaf), other in zip(jax.tree_util.tree_flatten_with_path(found)[0], jax.tree.leaves(expected), strict=True):
        a, b = np.asarray(leaf, np.float64), np.asarray(other, np.float64)
        ratio = np.sqrt(np.mean((a - b) ** 2) / max(np.mean(b**2), 1e-30))
        assert ratio <= limit, f"{jax.tree_util.keystr(path)}: error ratio {ratio:.1e}"


def test_each_seed_equals_its_separate_run(together: tuple[Path, list[TrainState]], tmp_path: Path) -> None:
    for place, seed in enumerate(SEEDS):
        alone = tmp_path / str(seed)
        alone.mkdir()
        state = fit(seeded(seed), *build(seeded(seed)), SeededBatches(seeded(seed)), alone, sources=SOURCES)
        assert_same_state(together[1][place], state, 2e-5)
        ours, theirs = rows(together[0] / f"seed_{seed}"), rows(alone)
        assert [row["step"] for row in ours] == list(range(1, 9))
        assert ours[0].keys() == theirs[0].keys()
        for name in ("loss", "loss/kl/layer_1", "gradient_norm/trunk", "lr/index", "tokens", "loss/source/plays", "seed"):
            np.testing.assert_allclose([row[name] for row in ours], [row[name] for row in theirs], rtol=2e-5)


def test_rows_carry_their_seed_and_seeds_differ(together: tuple[Path, list[TrainState]]) -> None:
    found = {seed: rows(together[0] / f"seed_{seed}") for seed in SEEDS}
    assert all(row["seed"] == seed for seed in SEEDS for row in found[seed])
    assert found[0][0]["loss"] != found[3][0]["loss"]
    assert found[0][0]["tokens"] != found[3][0]["tokens"]


def test_a_checkpoint_made_together_is_one_of_a_single_run(together: tuple[Path, list[TrainState]]) -> None:
    folder, states = together
    alone = fit(seeded(3), *build(seeded(3)), SeededBatches(seeded(3)), folder / "seed_3", sources=SOURCES)
    assert_same_state(alone, states[1], 0.0)


def test_runs_go_on_from_the_latest_step_that_all_have(together: tuple[Path, list[TrainState]], tmp_path: Path) -> None:
    """Seed 3 loses its numbers at step 7; later one folder lacks the last checkpoint, as after a kill between two saves."""
    with pytest.raises(NonFiniteError, match="seed 3, step 7: loss/lm is nan"):
        train_together(tmp_path, {3: 7})
    saved = [Checkpoints(tmp_path / f"seed_{seed}" / "checkpoints") for seed in SEEDS]
    assert [folder.steps() for folder in saved] == [[4], [4]]
    for ours, theirs in zip(train_together(tmp_path), together[1], strict=True):
        assert_same_state(ours, theirs, 0.0)
    saved[0].path(8).rename(tmp_path / "away")
    for ours, theirs in zip(train_together(tmp_path), together[1], strict=True):
        assert_same_state(ours, theirs, 0.0)
    assert saved[0].steps() == [4, 8], "steps 5 to 8 were repeated"
    assert [row["step"] for row in rows(tmp_path / "seed_3")] == list(range(1, 9))


def test_each_run_is_evaluated_into_its_own_folder_and_once(together: tuple[Path, list[TrainState]]) -> None:
    folder, evaluator = together[0], Counter()
    for seed in SEEDS:
        lines = (folder / f"seed_{seed}" / "evaluation.jsonl").read_text().splitlines()
        assert [json.loads(line) for line in lines] == [{"step": 8, "name": "count/step", "value": 8.0}]
    (folder / "seed_3" / "evaluation.jsonl").unlink()
    train_together(folder, evaluators=[evaluator])
    assert evaluator.runs == 1, "only what is missing"
