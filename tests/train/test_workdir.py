"""Run folders: never another configuration's, never two writers, and nothing is ever deleted."""

import json
import subprocess
import sys
from pathlib import Path

import pytest

from msa_jax.config import Experiment, config_hash, override, to_dict
from msa_jax.train.workdir import WorkdirError, open_workdir, provenance, record

FACTS = {"commit": "abc", "device": "cpu"}


def test_a_new_folder_gets_its_configuration(tmp_path: Path, experiment: Experiment) -> None:
    with open_workdir(tmp_path / "runs" / "x", experiment, FACTS) as folder:
        assert folder == tmp_path / "runs" / "x"
        content = json.loads((folder / "config.json").read_text())
    assert content == {"format": 1, "hash": config_hash(experiment), "commit": "abc", "device": "cpu"} | {
        "experiment": json.loads(json.dumps(to_dict(experiment)))
    }


def test_a_run_that_was_killed_while_it_made_its_folder_starts_anew(tmp_path: Path, experiment: Experiment) -> None:
    for name in ("lock", "config.json.new"):
        (tmp_path / name).write_text("{")
    with open_workdir(tmp_path, experiment, FACTS) as folder:
        assert json.loads((folder / "config.json").read_text())["hash"] == config_hash(experiment)


def test_the_same_configuration_may_come_back(tmp_path: Path, experiment: Experiment) -> None:
    for _ in range(2):
        with open_workdir(tmp_path, experiment, FACTS) as folder:
            before = (folder / "config.json").read_text()
    assert (tmp_path / "config.json").read_text() == before


@pytest.mark.parametrize("work", ["metrics.jsonl", "checkpoints"])
def test_another_configuration_is_refused_with_the_difference(tmp_path: Path, experiment: Experiment, work: str) -> None:
    with open_workdir(tmp_path, experiment, FACTS) as folder:
        (folder / work).mkdir() if work == "checkpoints" else (folder / work).write_text("{}")
    other = override(experiment, {"optim.learning_rate": 0.5, "data.streams.0.rows": ((0, 4),)})
    with pytest.raises(WorkdirError) as refused, open_workdir(tmp_path, other, FACTS):
        pass
    assert "optim.learning_rate: 0.01 there, 0.5 now" in str(refused.value)
    assert "data.streams.0.rows: [[0, 2]] there, [[0, 4]] now" in str(refused.value)
    assert "--force-new" in str(refused.value)
    assert json.loads((tmp_path / "config.json").read_text())["hash"] == config_hash(experiment)


def test_a_run_that_failed_before_its_first_step_binds_nobody(tmp_path: Path, experiment: Experiment) -> None:
    """As when the configuration turns out not to work on this device: the corrected one may use the same folder."""
    with open_workdir(tmp_path, experiment, FACTS) as folder:
        (folder / "metrics.jsonl").write_text("")
    corrected = override(experiment, {"seed": 1})
    with open_workdir(tmp_path, corrected, FACTS) as folder:
        assert json.loads((folder / "config.json").read_text())["hash"] == config_hash(corrected)


def test_force_new_moves_the_old_run_aside_and_deletes_nothing(tmp_path: Path, experiment: Experiment) -> None:
    path = tmp_path / "x"
    for run in range(3):
        with open_workdir(path, override(experiment, {"seed": run}), FACTS, force_new=True) as folder:
            assert sorted(entry.name for entry in folder.iterdir()) == ["config.json", "lock"]
            (folder / "metrics.jsonl").write_text(f"run {run}")
    assert (path / "metrics.jsonl").read_text() == "run 2"
    assert (tmp_path / "x.old-1" / "metrics.jsonl").read_text() == "run 0"
    assert (tmp_path / "x.old-2" / "metrics.jsonl").read_text() == "run 1"


def test_a_folder_in_use_is_refused_and_free_again_afterwards(tmp_path: Path, experiment: Experiment) -> None:
    for force_new in (False, True):
        with (
            open_workdir(tmp_path / "x", experiment, FACTS),
            pytest.raises(WorkdirError, match=r"x is in use by process \d+ on .+; wait for it or choose another --workdir"),
            open_workdir(tmp_path / "x", experiment, FACTS, force_new=force_new),
        ):
            pass
    with open_workdir(tmp_path / "x", experiment, FACTS):
        assert list(tmp_path.iterdir()) == [tmp_path / "x"]


def test_the_lock_of_a_killed_process_is_free(tmp_path: Path, experiment: Experiment) -> None:
    program = (
        "import sys, time, msa_jax.train.workdir as w\n"
        "with w._lock(w.Path(sys.argv[1])):\n"
        "    print('locked', flush=True)\n"
        "    time.sleep(60)"
    )
    holder = subprocess.Popen([sys.executable, "-c", program, str(tmp_path)], stdout=subprocess.PIPE, text=True)
    try:
        assert holder.stdout.readline() == "locked\n"
        with pytest.raises(WorkdirError, match=f"in use by process {holder.pid} on"), open_workdir(tmp_path, experiment, FACTS):
            pass
    finally:
        holder.kill()
        holder.wait()
    with open_workdir(tmp_path, experiment, FACTS):
        pass


def test_what_is_no_run_folder_is_refused(tmp_path: Path, experiment: Experiment) -> None:
    (tmp_path / "thesis.tex").write_text("")
    with pytest.raises(WorkdirError, match=r"holds other files and no config.json; choose another --workdir"):
        open_workdir(tmp_path, experiment, FACTS, force_new=True).__enter__()
    with pytest.raises(WorkdirError, match=r"thesis.tex is a file; --workdir names a folder"):
        open_workdir(tmp_path / "thesis.tex", experiment, FACTS).__enter__()
    assert list(tmp_path.iterdir()) == [tmp_path / "thesis.tex"]


def test_another_format_is_refused(tmp_path: Path, experiment: Experiment) -> None:
    (tmp_path / "config.json").write_text('{"format": 7}')
    (tmp_path / "metrics.jsonl").write_text("{}")
    with pytest.raises(WorkdirError, match="has format 7, this code writes 1"), open_workdir(tmp_path, experiment, FACTS):
        pass


def test_a_damaged_configuration_is_refused(tmp_path: Path, experiment: Experiment) -> None:
    (tmp_path / "config.json").write_text('{"format": 1, "exp')
    (tmp_path / "metrics.jsonl").write_text("{}")
    with pytest.raises(WorkdirError, match=r"config.json is no readable JSON .*; mend it"), open_workdir(tmp_path, experiment, FACTS):
        pass


def test_facts_that_change_on_the_way_are_all_kept(tmp_path: Path, experiment: Experiment) -> None:
    for commit in ("abc", "def", "def"):
        with open_workdir(tmp_path, experiment, {"commit": commit}) as folder:
            record(folder, {"implementations": {"index_kl": "xla"}})
            (folder / "metrics.jsonl").write_text("{}")
    content = json.loads((tmp_path / "config.json").read_text())
    assert content["commit"] == "abc"
    assert content["implementations"] == {"index_kl": "xla"}
    assert content["resumed_with"] == [{"commit": "def"}]


def test_provenance_names_commit_and_versions(tmp_path: Path) -> None:
    assert provenance(tmp_path)["commit"] == "unknown"
    assert {"jax", "flax", "python"} <= set(provenance(tmp_path)["versions"])
    git = ["git", "-C", str(tmp_path), "-c", "user.name=x", "-c", "user.email=x@example.org"]
    (tmp_path / "file").write_text("1")
    for command in (["init", "-q"], ["add", "file"], ["commit", "-qm", "first"]):
        subprocess.run([*git, *command], check=True)
    commit = provenance(tmp_path)["commit"]
    assert len(commit) == 40
    (tmp_path / "file").write_text("2")
    assert provenance(tmp_path)["commit"] == commit + "+"
