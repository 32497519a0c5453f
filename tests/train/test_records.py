"""metrics.jsonl, evaluation.jsonl and TensorBoard of a run that may be killed and continued."""

import json
import math
import resource
from pathlib import Path

import pytest
from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

from msa_jax.train.records import NotLearned, Records, check_learning


def lines(path: Path) -> list[dict]:
    return [json.loads(line) for line in path.read_text().splitlines()]


def test_steps_and_evaluations_are_written_at_once(tmp_path: Path) -> None:
    with Records(tmp_path, seed=3) as records:
        records.write(1, {"loss": 5.25, "loss/lm": math.nan, "tokens": 80})
        assert lines(tmp_path / "metrics.jsonl") == [{"step": 1, "seed": 3, "loss": 5.25, "loss/lm": None, "tokens": 80}], (
            "readable before the run ends"
        )
        records.write_evaluation(1, [("text/bits", 2.0), ("image/gain", 0.5)])
        records.write_evaluation(2, iter([("text/bits", 1.5)]))
    assert lines(tmp_path / "evaluation.jsonl") == [
        {"step": 1, "name": "text/bits", "value": 2.0},
        {"step": 1, "name": "image/gain", "value": 0.5},
        {"step": 2, "name": "text/bits", "value": 1.5},
    ]


def test_a_resumed_run_takes_back_what_lies_beyond_its_checkpoint(tmp_path: Path) -> None:
    with Records(tmp_path) as records:
        for step in (1, 2, 3, 4):
            records.write(step, {"loss": float(step)})
            records.write_evaluation(step, [("bits", 0.0)])
    with (tmp_path / "metrics.jsonl").open("a") as file:
        file.write('{"step": 5, "lo')  # killed while writing
    with Records(tmp_path, step=2) as records:
        assert [records.has_evaluation(step) for step in (1, 2, 3, 4)] == [True, True, False, False]
        records.write(3, {"loss": 30.0})
    assert [(row["step"], row["loss"]) for row in lines(tmp_path / "metrics.jsonl")] == [(1, 1.0), (2, 2.0), (3, 30.0)]
    assert [row["step"] for row in lines(tmp_path / "evaluation.jsonl")] == [1, 2]


def test_a_half_line_at_the_checkpoint_is_dropped(tmp_path: Path) -> None:
    (tmp_path / "metrics.jsonl").write_text('{"step": 1, "loss": 1.0}\n{"step": 2, "loss"')
    with Records(tmp_path, step=2) as records:
        records.write(3, {"loss": 3.0})
    assert [row["step"] for row in lines(tmp_path / "metrics.jsonl")] == [1, 3]


@pytest.mark.filterwarnings("ignore::DeprecationWarning")
def test_tensorboard_shows_every_step_once(tmp_path: Path) -> None:
    for start in (0, 2):
        with Records(tmp_path, step=start) as records:
            for step in range(start + 1, start + 4):
                records.write(step, {"loss": float(step + start)})
            records.write_evaluation(start + 3, [("text/bits", 2.0)])
    board = EventAccumulator(str(tmp_path / "tensorboard"))
    board.Reload()
    assert [(event.step, event.value) for event in board.Scalars("loss")] == [(1, 1.0), (2, 2.0), (3, 5.0), (4, 6.0), (5, 7.0)]
    assert [event.step for event in board.Scalars("text/bits")] == [5]


def test_a_value_that_json_cannot_hold_is_null_in_evaluations_too(tmp_path: Path) -> None:
    with Records(tmp_path) as records:
        records.write_evaluation(1, [("gain", math.inf)])
    assert lines(tmp_path / "evaluation.jsonl") == [{"step": 1, "name": "gain", "value": None}]


def test_a_smoke_run_has_learned_if_its_language_loss_fell(tmp_path: Path) -> None:
    with Records(tmp_path) as records:
        for step in range(1, 21):
            records.write(step, {"loss": 0.0, "loss/lm": 5.0 - 0.1 * step})
    assert check_learning(tmp_path) == "language loss 4.700 -> 3.200 nats a token (means of the first and the last five of 20 steps)"
    with Records(tmp_path, step=20) as records:
        for step in range(21, 26):
            records.write(step, {"loss": 0.0, "loss/lm": 4.75})
    with pytest.raises(NotLearned, match=r"4\.700 -> 4\.750 .*: it did not fall"):
        check_learning(tmp_path)


def write_much(folder: Path) -> None:
    with Records(folder) as records:
        for step in range(1, 500):
            records.write(step, dict.fromkeys("abcdefgh", 1.0))


def test_a_full_disk_is_an_error_and_not_a_wait(tmp_path: Path) -> None:
    """Events take more room than rows, so TensorBoard's file is the one that meets the limit, in place of the disk's end."""
    before = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (2**14, before[1]))
    try:
        with pytest.raises(OSError, match=f"File too large; make room .* run the same command to continue: '{tmp_path}'"):
            write_much(tmp_path)
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, before)
    assert (tmp_path / "metrics.jsonl").stat().st_size < 2**14
    assert next((tmp_path / "tensorboard").iterdir()).stat().st_size >= 2**14
