"""The summary of a sweep, from run folders on disk."""

import json
from collections.abc import Callable
from pathlib import Path

import pytest
from rich.console import Console

from msa_jax.report.sweep import finished_run, finished_runs, write_summary

TEXT = "text/nats_per_token"
CONTROLS = {"arm": ("control", "missing")}


@pytest.fixture
def workdir(tmp_path: Path, make_run: Callable[..., Path]) -> Path:
    """Two arms of three seeds; the arm's text is worse by 0.2, 0.3 and 0.4 in the mean of its two sources. Seed 2 of the control runs."""
    for seed in range(3):
        for arm, shift in (("arm", 0.2 + 0.1 * seed), ("control", 0.0)):
            folder = make_run(f"study/{arm}/seed_{seed}", seed=seed)
            rows = [{"step": 400, "name": f"{TEXT}/{name}", "value": 4.0 + seed + shift + side} for name, side in (("a", 1.0), ("b", -1.0))]
            (folder / "evaluation.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    (tmp_path / "study" / "control" / "seed_2" / "evaluation.jsonl").write_text("")
    return tmp_path / "study"


def test_only_finished_runs_count(workdir: Path) -> None:
    found = finished_runs(workdir, ["arm", "control", "missing"], range(4))
    assert {arm: list(runs) for arm, runs in found.items()} == {"arm": [0, 1, 2], "control": [0, 1], "missing": []}
    assert finished_run(workdir / "control" / "seed_2") is None


def test_means_and_paired_differences(workdir: Path) -> None:
    console = Console(record=True, width=120)
    found = finished_runs(workdir, ["arm", "control", "missing"], range(3))
    summary = write_summary(workdir, found, CONTROLS, [TEXT], console)
    assert json.loads((workdir / "summary.json").read_text()) == json.loads(json.dumps(summary))
    means = {(row["metric"], row["arm"]): (row["mean"], row["seeds"]) for row in summary["means"]}
    assert means[TEXT, "arm"] == (pytest.approx(5.3), [0, 1, 2])
    assert means[TEXT, "control"] == (pytest.approx(4.5), [0, 1])
    assert means[f"{TEXT}/a", "control"] == (pytest.approx(5.5), [0, 1])
    (row,) = (row for row in summary["differences"] if row["metric"] == TEXT)
    half = 12.7062 * 0.1 / 2**0.5 / 2**0.5  # differences 0.2 and 0.3
    assert (row["arm"], row["control"], row["seeds"]) == ("arm", "control", (0, 1))
    assert (row["difference"], row["low"], row["high"]) == pytest.approx((0.25, 0.25 - half, 0.25 + half))
    text = console.export_text()
    assert "+0.2500" in text
    assert f"{0.25 - half:+.4f} .. {0.25 + half:+.4f}" in text


def test_every_number_can_be_traced(workdir: Path) -> None:
    summary = write_summary(workdir, finished_runs(workdir, ["arm"], [0]), {}, [TEXT], Console(quiet=True))
    (run,) = summary["runs"]
    assert (run["arm"], run["seed"], run["commit"], run["config"]) == ("arm", "0", "deadbeefcafe", "0123456789ab")
    assert (run["device"], run["implementation"], run["tokens"]) == ("cpu", "xla", None)


def test_a_single_pair_has_no_interval(workdir: Path) -> None:
    console = Console(record=True, width=120)
    write_summary(workdir, finished_runs(workdir, ["arm", "control"], [0]), CONTROLS, [TEXT], console)
    assert "one pair" in console.export_text()
