"""The sweep's bookkeeping, with runs that are written instead of trained; one real sweep is a slow test."""

import json
import os
import signal
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import pytest

from msa_jax import sweep
from msa_jax.config import ConfigError, Experiment, config_hash, load, override, smoke, to_dict
from msa_jax.launch import parse_seeds
from msa_jax.train.guard import NonFiniteError
from msa_jax.train.interrupt import Interrupted
from msa_jax.train.tokens import TokenCountError
from msa_jax.train.workdir import WorkdirError

ROOT = Path(__file__).resolve().parents[1]
CONFIG = """
from msa_jax.config import DataConfig, EvalConfig, Experiment, ModelConfig, MsaConfig, OptimConfig, StreamConfig, TrainConfig

def config():
    attention = MsaConfig(d_model=32, num_heads=2, num_kv_heads=1, head_dim=16, index_dim=16, block_size=8, num_blocks=2)
    return Experiment(
        "tiny", ModelConfig(attention, num_layers=1, mlp_dim=32),
        data=DataConfig(pack="synthetic", sequence_length=64, streams=(StreamConfig("text", rows=((0, 2),)),)),
        optim=OptimConfig(learning_rate=1e-2, warmup_steps=4),
        train=TrainConfig(steps=120, index_warmup_steps=8, checkpoint_every=20),
        eval=EvalConfig(text_rows=2),
    )

def variants():
    return {"slow": {"optim.learning_rate": 1e-4}, "lost": {"optim.learning_rate": 1e3}}
"""


@pytest.fixture
def file(tmp_path: Path) -> str:
    path = tmp_path / "tiny.py"
    path.write_text(CONFIG)
    return str(path)


class Launches:
    """Stands for training: writes finished run folders, or fails as told."""

    def __init__(self) -> None:
        self.calls: list[tuple[str, list[int]]] = []
        self.failures: dict[str, Exception] = {}

    def __call__(self, experiment: Experiment, folders: dict[int, Path], *, force_new: bool = False) -> None:
        self.calls.append((experiment.name, list(folders)))
        if experiment.name in self.failures:
            raise self.failures[experiment.name]
        for seed, folder in folders.items():
            folder.mkdir(parents=True)
            seeded = override(experiment, {"seed": seed})
            content = {"format": 1, "hash": config_hash(seeded), "experiment": to_dict(seeded)}
            (folder / "config.json").write_text(json.dumps(content))
            value = seed + 1000 * experiment.optim.learning_rate
            row = {"step": experiment.train.steps, "name": "text/nats_per_token/sums", "value": value}
            (folder / "evaluation.jsonl").write_text(json.dumps(row) + "\n")


@pytest.fixture
def launches(monkeypatch: pytest.MonkeyPatch) -> Launches:
    stub = Launches()
    monkeypatch.setattr(sweep, "launch", stub)
    return stub


def test_every_arm_is_launched_once_with_all_its_seeds(
    file: str, tmp_path: Path, launches: Launches, capsys: pytest.CaptureFixture[str]
) -> None:
    assert sweep.main([file, "--seeds", "0..2", "--workdir", str(tmp_path / "runs")]) == 0
    assert launches.calls == [("tiny", [0, 1, 2]), ("tiny-slow", [0, 1, 2]), ("tiny-lost", [0, 1, 2])]
    lines = capsys.readouterr().out.splitlines()
    assert [line.split(":")[0] for line in lines if "trained" in line] == [
        f"{arm} seed {seed}" for arm in ("baseline", "slow", "lost") for seed in range(3)
    ]
    summary = json.loads((tmp_path / "runs" / "summary.json").read_text())
    rows = {(row["metric"], row["arm"]): row for row in summary["differences"]}
    assert rows["text/nats_per_token", "slow"]["control"] == "baseline"
    assert rows["text/nats_per_token", "slow"]["difference"] == pytest.approx(0.1 - 10)


def test_only_what_is_missing_runs(file: str, tmp_path: Path, launches: Launches, capsys: pytest.CaptureFixture[str]) -> None:
    command = [file, "--arms", "slow,baseline", "--workdir", str(tmp_path / "runs")]
    assert sweep.main([*command, "--seeds", "0,1"]) == 0
    (tmp_path / "runs" / "slow" / "seed_1" / "evaluation.jsonl").write_text("")
    (tmp_path / "runs" / "slow" / "seed_1").rename(tmp_path / "unfinished")
    launches.calls.clear()
    capsys.readouterr()
    assert sweep.main([*command, "--seeds", "0..2"]) == 0
    assert launches.calls == [("tiny-slow", [1, 2]), ("tiny", [2])]
    assert "slow seed 0: kept, text/nats_per_token 0.1000" in capsys.readouterr().out


def test_another_configuration_is_not_kept(file: str, tmp_path: Path, launches: Launches) -> None:
    command = [file, "--arms", "slow", "--seeds", "0", "--workdir", str(tmp_path / "runs")]
    assert sweep.main(command) == 0
    launches.failures["tiny-slow"] = WorkdirError("holds a run of another configuration")
    assert sweep.main([*command, "--set", "optim.eps=1e-6"]) == 2
    assert len(launches.calls) == 2


def test_an_arm_that_loses_its_numbers_does_not_stop_the_others(
    file: str, tmp_path: Path, launches: Launches, capsys: pytest.CaptureFixture[str]
) -> None:
    launches.failures["tiny"] = NonFiniteError("seed 0, step 3: loss is nan")
    assert sweep.main([file, "--seeds", "0,1", "--workdir", str(tmp_path / "runs")]) == 1
    assert [name for name, _ in launches.calls] == ["tiny", "tiny-slow", "tiny-lost"]
    assert "baseline seeds 0, 1: lost, seed 0, step 3: loss is nan" in capsys.readouterr().out
    assert (tmp_path / "runs" / "summary.json").exists()


def test_a_stopped_sweep_says_how_to_continue(file: str, tmp_path: Path, launches: Launches, capsys: pytest.CaptureFixture[str]) -> None:
    launches.failures["tiny"] = Interrupted(7, signal.SIGINT)
    assert sweep.main([file, "--workdir", str(tmp_path / "my runs")]) == 130
    error = capsys.readouterr().err
    assert f"continue with: {sys.executable} -m msa_jax.sweep {file} --workdir '{tmp_path / 'my runs'}'" in error


def test_a_run_that_miscounts_its_tokens_ends_the_sweep_in_words(
    file: str, tmp_path: Path, launches: Launches, capsys: pytest.CaptureFixture[str]
) -> None:
    launches.failures["tiny"] = TokenCountError("text: 5 tokens counted, 6 configured")
    assert sweep.main([file, "--workdir", str(tmp_path)]) == 1
    assert capsys.readouterr().err == "sweep: text: 5 tokens counted, 6 configured\n"


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["--arms", "slow,fast"], "has no arms ['fast']; choose from: baseline, slow, lost"),
        (["--seeds", "a"], "seeds 'a': give a range as 0..7, or a list as 0,3,5"),
        (["--set", "optim.rate=1"], "unknown config key 'optim.rate'"),
    ],
)
def test_what_is_refused(
    file: str, tmp_path: Path, launches: Launches, capsys: pytest.CaptureFixture[str], arguments: list[str], message: str
) -> None:
    assert sweep.main([file, "--workdir", str(tmp_path / "runs"), *arguments]) == 2
    assert message in capsys.readouterr().err
    assert not launches.calls


def test_arms_and_controls_of_the_study_of_timing() -> None:
    path = str(ROOT / "configs" / "ablations" / "when_to_add_vision.py")
    options = sweep.argparse.Namespace(config=path, arms=None, set=["train.steps=1100"], smoke=True)
    arms = sweep.load_arms(options)
    assert list(arms)[:2] == ["native", "pre_decay_50"], "native is the baseline, which is not run twice"
    assert arms["post_decay"] == smoke(load(path, "post_decay"))
    assert sweep.controls(path, arms)["post_decay"] == ("text_only_post_decay", "text_only")


@pytest.mark.parametrize(("text", "seeds"), [("0..3", [0, 1, 2, 3]), ("5", [5]), ("4,0,2", [4, 0, 2]), ("2..2", [2])])
def test_seeds(text: str, seeds: list[int]) -> None:
    assert list(parse_seeds(text)) == seeds


@pytest.mark.parametrize("text", ["", "1..", "..3", "0-3", "3..1", "-1", "1,1", "0..1..2"])
def test_seeds_that_are_none(text: str) -> None:
    with pytest.raises(ConfigError, match="seeds"):
        parse_seeds(text)


def start(file: str, workdir: Path) -> subprocess.Popen:
    command = [sys.executable, "-m", "msa_jax.sweep", file, "--seeds", "0,1", "--arms", "baseline,slow", "--workdir", str(workdir)]
    environment = os.environ | {"PYTHONPATH": str(ROOT), "JAX_COMPILATION_CACHE_DIR": str(workdir.parent / "programs")}
    return subprocess.Popen(command, env=environment, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True)


def results(workdir: Path) -> dict[str, Any]:
    summary = json.loads((workdir / "summary.json").read_text())
    return {"means": summary["means"], "differences": summary["differences"]}


@pytest.mark.slow
def test_a_killed_sweep_continues_to_the_same_summary(file: str, tmp_path: Path) -> None:
    undisturbed = start(file, tmp_path / "undisturbed")
    assert undisturbed.communicate(timeout=400)[1] is not None
    assert undisturbed.returncode == 0
    metrics = tmp_path / "killed" / "slow" / "seed_1" / "metrics.jsonl"
    process = start(file, tmp_path / "killed")
    while not (metrics.exists() and len(metrics.read_bytes().splitlines()) > 50):
        assert process.poll() is None, process.communicate()[1]
        time.sleep(0.01)
    process.kill()
    process.communicate()
    process = start(file, tmp_path / "killed")
    output, errors = process.communicate(timeout=400)
    assert process.returncode == 0, errors
    assert "baseline seed 0: kept" in output
    assert "slow seed 1: trained" in output
    assert results(tmp_path / "killed") == results(tmp_path / "undisturbed")
