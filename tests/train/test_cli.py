"""train.py as a user meets it: what it refuses, in one line; and what a kill or Ctrl-C leaves behind."""

import importlib.util
import json
import os
import re
import shlex
import shutil
import signal
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path
from types import ModuleType
from unittest.mock import Mock

import numpy as np
import pytest

from msa_jax.config import ConfigError, Experiment, load, override, smoke, to_dict
from msa_jax.eval import suite
from msa_jax.train.checkpoint import Checkpoints
from msa_jax.train.guard import NonFiniteError
from msa_jax.train.records import NotLearned
from msa_jax.train.workdir import open_workdir

ROOT = Path(__file__).resolve().parents[2]
NATIVE = str(ROOT / "configs" / "native.py")
TINY = """
from msa_jax.config import DataConfig, EvalConfig, Experiment, ModelConfig, MsaConfig, OptimConfig, StreamConfig, TrainConfig

def config():
    attention = MsaConfig(d_model=32, num_heads=2, num_kv_heads=1, head_dim=16, index_dim=16, block_size=8, num_blocks=2)
    return Experiment(
        "tiny", ModelConfig(attention, num_layers=1, mlp_dim=32),
        data=DataConfig(pack="synthetic", sequence_length=64, streams=(StreamConfig("text", rows=((0, 2),)),)),
        optim=OptimConfig(learning_rate=1e-2, warmup_steps=10),
        train=TrainConfig(steps=400, index_warmup_steps=40, checkpoint_every=30, keep_checkpoints=2),
        eval=EvalConfig(text_rows=2),
    )
"""


@pytest.fixture(scope="session")
def train_py() -> ModuleType:
    spec = importlib.util.spec_from_file_location("train_py", ROOT / "train.py")
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


@pytest.fixture
def refused(train_py: ModuleType, capfd: pytest.CaptureFixture[str]) -> Callable[..., str]:
    """Runs the command line, expects exit code 2 and returns what it said."""

    def run(*arguments: str) -> str:
        assert train_py.main([*arguments]) == 2
        captured = capfd.readouterr()
        assert "Traceback" not in captured.err
        assert captured.err.startswith("train.py: ")
        return captured.err

    return run


def test_help_shows_examples(train_py: ModuleType, capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit) as stopped:
        train_py.main(["--help"])
    assert stopped.value.code == 0
    text = capsys.readouterr().out
    for line in ("examples:", "--variant s", "--seeds 0..7", "--set optim.learning_rate=1e-3 --workdir runs/x", "--smoke", "--force-new"):
        assert line in text


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["--config", "configs/nativ.py"], "no config file 'configs/nativ.py'; nearest: configs/native.py"),
        (["--variant", "xl"], "has no variant 'xl'; choose from: s, m"),
        (["--set", "optim.learning_rte=1"], "unknown config key 'optim.learning_rte'; nearest: optim.learning_rate"),
        (["--set", "optim.learning_rate"], "'optim.learning_rate' changes nothing: give path=value"),
        (["--set", "train.steps=many"], "train.steps='many' is not of type int"),
        (["--set", "model.attention.num_heads=5"], "num_heads=5 is not divisible by num_kv_heads=2"),
        (["--set", "model.attention.block_size=0"], "block_size=0; it must be >= 1"),
        (["--set", "data.pack=data/none"], "data/none"),
        (["--seeds", "0..x"], "seeds '0..x': give a range as 0..7, or a list as 0,3,5"),
        (["--seeds", ""], "seeds '': give a range"),
        (
            ["--config", "configs/text_only.py", "--smoke", "--set", "model.attention.implementation=mosaic_gpu"],
            "implementation='mosaic_gpu'",
        ),
    ],
)
def test_a_wrong_configuration_is_one_clear_line(
    refused: Callable[..., str], monkeypatch: pytest.MonkeyPatch, tmp_path: Path, arguments: list[str], message: str
) -> None:
    monkeypatch.chdir(ROOT)
    said = refused(*arguments, "--workdir", str(tmp_path / "run"))
    assert message in said


@pytest.mark.parametrize(
    ("arguments", "folders"),
    [
        ([], {0: "run"}),
        (["--set", "seed=3"], {3: "run"}),
        (["--seeds", "1..3"], {seed: f"run/seed_{seed}" for seed in (1, 2, 3)}),
    ],
)
def test_a_seed_trains_in_the_run_folder_and_several_in_folders_of_their_own(
    train_py: ModuleType, monkeypatch: pytest.MonkeyPatch, tmp_path: Path, arguments: list[str], folders: dict[int, str]
) -> None:
    launch, write = Mock(), Mock()
    monkeypatch.setattr(train_py, "launch", launch)
    monkeypatch.setattr(train_py.report, "write", write)
    assert train_py.main(["--config", NATIVE, "--workdir", str(tmp_path / "run"), *arguments]) == 0
    expected = {seed: tmp_path / folder for seed, folder in folders.items()}
    launch.assert_called_once_with(load(NATIVE, None, {"seed": 3 if "seed=3" in arguments else 0}), expected, force_new=False)
    write.assert_called_once_with(*expected.values())


def test_a_run_that_fails_by_itself_has_exit_code_1(
    train_py: ModuleType, monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]
) -> None:
    for error in (NotLearned("it did not fall"), NonFiniteError("loss is nan")):
        monkeypatch.setattr(train_py, "train", Mock(side_effect=error))
        assert train_py.main([]) == 1
        assert capfd.readouterr().err == f"train.py: {error}\n"


def test_a_missing_pack_says_which_command_builds_it(refused: Callable[..., str], tmp_path: Path) -> None:
    said = refused("--config", NATIVE, "--set", f"data.pack={tmp_path / 'small'}", "--workdir", str(tmp_path / "run"))
    assert "python -m msa_jax.data.build" in said
    assert not (tmp_path / "run").exists(), "nothing is left behind"


def test_a_missing_tokenizer_is_named(refused: Callable[..., str], tmp_path: Path) -> None:
    (tmp_path / "tiny.py").write_text(TINY)
    said = refused("--config", str(tmp_path / "tiny.py"), "--set", "data.tokenizer=bpe4097", "--workdir", str(tmp_path / "run"))
    assert "no tokenizer 'bpe4097'" in said
    assert "bpe4096" in said


def test_a_run_that_cannot_be_evaluated_moves_no_other_aside(
    refused: Callable[..., str], monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    (tmp_path / "tiny.py").write_text(TINY)
    with open_workdir(tmp_path / "run", load(tmp_path / "tiny.py"), {}) as folder:
        (folder / "metrics.jsonl").write_text("{}")
    monkeypatch.setattr(suite, "build", Mock(side_effect=ConfigError("eval.candidates=500 are too many")))
    assert "too many" in refused("--config", str(tmp_path / "tiny.py"), "--workdir", str(tmp_path / "run"), "--force-new")
    assert (tmp_path / "run" / "metrics.jsonl").exists()
    assert not (tmp_path / "run.old-1").exists()


def test_a_run_folder_of_another_configuration(refused: Callable[..., str], tmp_path: Path) -> None:
    (tmp_path / "tiny.py").write_text(TINY)
    with open_workdir(tmp_path / "run", load(tmp_path / "tiny.py"), {}) as folder:
        (folder / "metrics.jsonl").write_text("{}")
    said = refused("--config", str(tmp_path / "tiny.py"), "--set", "train.steps=300", "--workdir", str(tmp_path / "run"))
    assert "train.steps: 400 there, 300 now" in said
    assert "--force-new" in said


def test_a_run_folder_that_cannot_be_made(refused: Callable[..., str], tmp_path: Path) -> None:
    (tmp_path / "tiny.py").write_text(TINY)
    said = refused("--config", str(tmp_path / "tiny.py"), "--workdir", str(tmp_path / "tiny.py" / "run"))
    assert "tiny.py" in said


def start(folder: Path, workdir: str, *arguments: str) -> subprocess.Popen:
    """train.py in a process of its own, in the run folder `folder / workdir`; compiled programs are shared by all of `folder`."""
    (folder / "tiny.py").write_text(TINY)
    command = [sys.executable, str(ROOT / "train.py"), "--config", str(folder / "tiny.py"), "--workdir", str(folder / workdir), *arguments]
    environment = os.environ | {"PYTHONPATH": str(ROOT), "JAX_COMPILATION_CACHE_DIR": str(folder / "programs")}
    environment |= {"JAX_PERSISTENT_CACHE_MIN_COMPILE_TIME_SECS": "0"}
    return subprocess.Popen(command, env=environment, stdout=subprocess.DEVNULL, stderr=subprocess.PIPE, text=True)


def finish(process: subprocess.Popen) -> str:
    """Waits for success and returns stderr."""
    _, errors = process.communicate(timeout=300)
    assert process.returncode == 0, errors
    return errors


def steps_written(workdir: Path) -> int:
    file = workdir / "metrics.jsonl"
    return len(file.read_bytes().splitlines()) if file.exists() else 0


def wait_for_step(process: subprocess.Popen, workdir: Path, step: int) -> None:
    while steps_written(workdir) < step:
        assert process.poll() is None, process.communicate()[1]
        time.sleep(0.002)


def losses(workdir: Path) -> list[tuple[int, float]]:
    rows = [json.loads(line) for line in (workdir / "metrics.jsonl").read_text().splitlines()]
    return [(row["step"], row["loss"], row["gradient_norm/trunk"]) for row in rows]


def evaluation(workdir: Path) -> list[dict]:
    return [json.loads(line) for line in (workdir / "evaluation.jsonl").read_text().splitlines()]


def assert_same_runs(ours: Path, theirs: Path) -> None:
    assert losses(ours) == losses(theirs)
    assert [step for step, *_ in losses(ours)] == list(range(1, 401))
    assert evaluation(ours) == evaluation(theirs)
    assert Checkpoints(ours / "checkpoints").steps() == Checkpoints(theirs / "checkpoints").steps() == [390, 400]


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Holds `reference`, a run that nobody disturbed."""
    folder = tmp_path_factory.mktemp("runs")
    finish(start(folder, "reference"))
    return folder


@pytest.mark.slow
def test_killed_at_any_moment_a_run_continues_to_the_bit(folder: Path) -> None:
    """SIGKILL at five moments, some of them in the middle of a save, then one run to the end."""
    random = np.random.default_rng(0)
    for step in (2, 31, 60, 270, 399):
        process = start(folder, "killed")
        wait_for_step(process, folder / "killed", step)
        time.sleep(float(random.uniform(0, 0.05)))
        process.kill()
        process.communicate()
        assert process.returncode == -signal.SIGKILL
    finish(start(folder, "killed"))
    assert_same_runs(folder / "killed", folder / "reference")


@pytest.mark.slow
@pytest.mark.parametrize(("number", "code"), [(signal.SIGINT, 130), (signal.SIGTERM, 143)], ids=["ctrl-c", "terminated"])
def test_a_signal_saves_says_how_to_continue_and_is_continued_to_the_bit(folder: Path, number: int, code: int) -> None:
    stopped = folder / f"stopped-{number}"
    process = start(folder, stopped.name)
    wait_for_step(process, stopped, 100)
    process.send_signal(number)
    errors = process.communicate(timeout=120)[1]
    assert process.returncode == code, errors
    again = re.search("continue with: (.*)", errors)[1]
    assert again == shlex.join([sys.executable, str(ROOT / "train.py"), "--config", str(folder / "tiny.py"), "--workdir", str(stopped)])
    assert "Traceback" not in errors
    saved = Checkpoints(stopped / "checkpoints").steps()[-1]
    assert f"interrupted at step {saved}, which is saved" in errors
    assert saved == losses(stopped)[-1][0], "every step that was written is in the checkpoint"
    finish(start(folder, stopped.name))
    assert_same_runs(stopped, folder / "reference")


@pytest.mark.slow
def test_a_finished_run_can_be_repeated_and_force_new_keeps_it(folder: Path) -> None:
    workdir = folder / "again"
    shutil.copytree(folder / "reference", workdir)
    before = (workdir / "metrics.jsonl").read_bytes()
    finish(start(folder, "again"))
    assert (workdir / "metrics.jsonl").read_bytes() == before
    assert "resumed_with" not in json.loads((workdir / "config.json").read_text()), "nothing was trained by other means"
    refusal = start(folder, "again", "--set", "train.steps=60")
    assert "train.steps: 400 there, 60 now" in refusal.communicate(timeout=120)[1]
    assert refusal.returncode == 2
    finish(start(folder, "again", "--set", "train.steps=60", "--force-new"))
    assert (folder / "again.old-1" / "metrics.jsonl").read_bytes() == before
    assert steps_written(workdir) == 60
    content = json.loads((workdir / "config.json").read_text())
    ops = ("block_select", "sparse_attention", "index_kl", "sparse_attention_and_index_kl")
    assert content["implementations"] == dict.fromkeys(ops, "xla")
    assert {"commit", "versions", "device"} <= set(content)


@pytest.mark.slow
def test_two_processes_cannot_train_in_one_folder(folder: Path) -> None:
    first = start(folder, "shared")
    wait_for_step(first, folder / "shared", 1)
    second = start(folder, "shared")
    errors = second.communicate(timeout=120)[1]
    assert second.returncode == 2
    assert f"is in use by process {first.pid}" in errors
    finish(first)


def distinct_smoke_runs() -> list[tuple[str, str | None]]:
    """Every config and variant, once for each different smoke experiment."""
    seen: dict[str, tuple[str, str | None]] = {}
    for path in sorted((ROOT / "configs").rglob("*.py")):
        spec = importlib.util.spec_from_file_location(path.stem, path)
        module = importlib.util.module_from_spec(spec)
        spec.loader.exec_module(module)
        for variant in (None, *(module.variants() if hasattr(module, "variants") else ())):
            experiment: Experiment = override(smoke(load(path, variant)), {"name": "x"})
            seen.setdefault(json.dumps(to_dict(experiment)), (str(path.relative_to(ROOT)), variant))
    return list(seen.values())


@pytest.mark.slow
@pytest.mark.parametrize(("path", "variant"), distinct_smoke_runs(), ids=str)
def test_every_config_learns_in_smoke_size(
    train_py: ModuleType, monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str], path: str, variant: str | None
) -> None:
    monkeypatch.chdir(ROOT)
    code = train_py.main(["--config", path, "--smoke", *(["--variant", variant] if variant else [])])
    captured = capfd.readouterr()
    assert code == 0, captured.err
    assert "smoke: language loss" in captured.out
