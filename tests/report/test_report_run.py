"""Reading run folders: also those that a kill or another version left behind."""

import json
from pathlib import Path

import numpy as np
import pytest

from msa_jax.report.run import RunFolderError, load_run


def test_a_whole_run(run_folder: Path) -> None:
    run = load_run(run_folder)
    assert run.problems == ()
    assert run.evaluated_at == 400
    assert run.evaluation["text/bits_per_byte/plays"] == 2.41
    assert run.keys("text/bits_per_byte") == ["plays", "code"]
    assert set(run.arrays) == {"selection_map", "lift"}
    steps, values = run.curve("loss/lm")
    assert steps.tolist() == list(range(0, 400, 5))
    assert values.dtype == np.float64
    assert run.provenance() == {
        "commit": "deadbeefcafe", "config": "0123456789ab", "seed": "0", "device": "cpu", "implementation": "xla",
    }  # fmt: skip


def test_lines_cut_by_a_kill_are_counted_and_left_out(run_folder: Path) -> None:
    with (run_folder / "metrics.jsonl").open("ab") as file:
        file.write(b'{"step": 400, "loss/lm": 2.')  # the kill
    with (run_folder / "metrics.jsonl").open("ab") as file:
        file.write(b'{"step": 400, "loss/lm": 2.5}\n\xff\xfe\n[1]\n{"loss/lm": 2.5}\n{"step": 405, "loss/lm": 2.25}\n')
    with (run_folder / "evaluation.jsonl").open("a") as file:
        file.write('{"step": 405, "name": "text/bits_per_byte/plays"}\n{"step": 405, "name": "text/bytes/plays", "value": "many"}\n')
    run = load_run(run_folder)
    assert run.problems == (
        "metrics.jsonl: 4 of 85 lines are unreadable and left out",
        "evaluation.jsonl: 2 of 114 lines are unreadable and left out",
    )
    assert run.curve("loss/lm")[0][-1] == 405
    assert run.evaluation["text/bytes/plays"] == 48_213.0


def test_a_resumed_run_counts_a_step_once_and_the_last_value_wins(run_folder: Path) -> None:
    with (run_folder / "metrics.jsonl").open("a") as file:
        file.write('{"step": 390, "loss/lm": 1.5}\n')
    with (run_folder / "evaluation.jsonl").open("a") as file:
        file.write('{"step": 400, "name": "text/bytes/plays", "value": 7}\n{"step": 200, "name": "text/bytes/code", "value": 1}\n')
    run = load_run(run_folder)
    steps, values = run.curve("loss/lm")
    assert np.all(np.diff(steps) > 0)
    assert values[steps.tolist().index(390)] == 1.5
    assert run.evaluation["text/bytes/plays"] == 7
    assert run.evaluation["text/bytes/code"] == 48_213.0, "an older step must not replace a newer one"


def test_null_is_a_value_that_was_not_finite(run_folder: Path) -> None:
    with (run_folder / "evaluation.jsonl").open("a") as file:
        file.write('{"step": 400, "name": "text/bits_per_byte/plays", "value": null}\n')
    with (run_folder / "metrics.jsonl").open("a") as file:
        file.write('{"step": 400, "loss/lm": null}\n')
    run = load_run(run_folder)
    assert run.problems == ()
    assert np.isnan(run.evaluation["text/bits_per_byte/plays"])
    assert run.curve("loss/lm")[0][-1] == 395


def test_layers_are_in_numeric_order(run_folder: Path) -> None:
    with (run_folder / "evaluation.jsonl").open("a") as file:
        file.write('{"step": 400, "name": "index/kl_selected/layer_10", "value": 1}\n')
    assert load_run(run_folder).layers("index/kl_selected")[-2:] == ["layer_3", "layer_10"]


def test_missing_files_are_named(run_folder: Path) -> None:
    (run_folder / "metrics.jsonl").unlink()
    (run_folder / "evaluation.jsonl").unlink()
    run = load_run(run_folder)
    assert run.problems == ("metrics.jsonl is missing", "evaluation.jsonl is missing")
    assert run.metrics == []
    assert run.evaluated_at is None


def test_unreadable_and_pickled_arrays_are_refused(run_folder: Path) -> None:
    lift = run_folder / "arrays" / "lift.npz"
    lift.write_bytes(lift.read_bytes()[:100])
    np.savez(run_folder / "arrays" / "objects.npz", a=np.array([{}], dtype=object))
    run = load_run(run_folder)
    assert set(run.arrays) == {"selection_map"}
    assert [problem.split()[0] for problem in run.problems] == ["arrays/lift.npz", "arrays/objects.npz"]


@pytest.mark.parametrize(
    ("content", "words"),
    [
        (None, "config.json is missing"),
        ("{", "not valid JSON"),
        ('{"format": 2, "experiment": {}}', "format 2"),
        ("[]", "format 'list'"),
    ],
)
def test_what_is_no_run_folder_says_why(tmp_path: Path, content: str | None, words: str) -> None:
    if content is not None:
        (tmp_path / "config.json").write_text(content)
    with pytest.raises(RunFolderError, match=words):
        load_run(tmp_path)


def test_no_folder(tmp_path: Path) -> None:
    with pytest.raises(RunFolderError, match="no such folder"):
        load_run(tmp_path / "absent")


def test_a_run_resumed_with_another_commit_says_so(run_folder: Path) -> None:
    config = json.loads((run_folder / "config.json").read_text())
    config["resumed_with"] = [{"commit": "f00d", "versions": {}}]
    (run_folder / "config.json").write_text(json.dumps(config))
    assert load_run(run_folder).problems == ("config.json: resumed with another commit, versions",)


def test_several_implementations_are_named_by_op(run_folder: Path) -> None:
    config = json.loads((run_folder / "config.json").read_text())
    config["implementations"]["index_kl"] = "reference"
    (run_folder / "config.json").write_text(json.dumps(config))
    assert load_run(run_folder).provenance()["implementation"] == "block_select=xla, sparse_attention=xla, index_kl=reference"
