"""The summary of a sweep: what each arm reached and how it differs from its controls, on the screen and in summary.json.

runs/x/native/seed_0, runs/x/native/seed_1, runs/x/text_only/seed_0, ...    run folders
runs/x/summary.json    {"runs": [who made each run], "means": [...], "differences": [...]}
"""

import json
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from rich.box import SIMPLE_HEAD
from rich.console import Console
from rich.markup import escape
from rich.table import Table

from msa_jax.report.paired import paired_difference
from msa_jax.report.run import Run, load_run

SUMMARY = "summary.json"
CONFIG = "config.json"

Arms = Mapping[str, Mapping[int, Run]]  # finished runs by arm and seed


def seed_folder(workdir: Path, arm: str, seed: int) -> Path:
    return workdir / arm / f"seed_{seed}"


def finished_run(folder: Path) -> Run | None:
    """The run in `folder` if it is finished."""
    run = load_run(folder) if (folder / CONFIG).is_file() else None
    return run if run and run.finished else None


def finished_runs(workdir: Path, arms: Sequence[str], seeds: Sequence[int]) -> Arms:
    folders = {arm: {seed: seed_folder(workdir, arm, seed) for seed in seeds} for arm in arms}
    return {arm: {seed: run for seed, folder in one.items() if (run := finished_run(folder))} for arm, one in folders.items()}


def write_summary(
    workdir: Path, found: Arms, controls: Mapping[str, Sequence[str]], metrics: Sequence[str], console: Console
) -> dict[str, Any]:
    """Prints the summary of finished runs and writes all of it, every evaluated value included, into summary.json.

    `controls` names the arms that an arm is compared with. `metrics` are names of evaluated values, or what several of them
    begin with ("text/nats_per_token"), which means their mean.
    """
    runs = [(arm, run) for arm, one in found.items() for run in one.values()]
    names = list(dict.fromkeys([*metrics, *(name for _, run in runs for name in run.evaluation)]))
    summary = {
        "runs": [{"arm": arm, **run.provenance(), "tokens": run.config.get("tokens")} for arm, run in runs],
        "means": [row for name in names for row in _means(found, name)],
        "differences": [row for name in names for row in _differences(found, controls, name)],
    }
    (workdir / SUMMARY).write_text(json.dumps(summary, indent=1) + "\n", encoding="utf-8")
    for name in metrics:
        console.print(_table(name, summary))
    console.print(f"summary: {workdir / SUMMARY}", markup=False, soft_wrap=True)
    return summary


def _values(runs: Mapping[int, Run], name: str) -> dict[int, float]:
    return {seed: value for seed, run in runs.items() if (value := run.mean(name)) is not None}


def _means(found: Arms, name: str) -> list[dict[str, Any]]:
    values = {arm: _values(runs, name) for arm, runs in found.items()}
    return [{"metric": name, "arm": arm, "seeds": sorted(one), "mean": sum(one.values()) / len(one)} for arm, one in values.items() if one]


def _differences(found: Arms, controls: Mapping[str, Sequence[str]], name: str) -> list[dict[str, Any]]:
    rows = []
    for arm, runs in found.items():
        for control in controls.get(arm, ()):
            paired = paired_difference(_values(runs, name), _values(found.get(control, {}), name))
            if paired:
                rows.append({"metric": name, "arm": arm, "control": control, **paired._asdict()})
    return rows


def _table(name: str, summary: Mapping[str, Any]) -> Table:
    """One block of rows an arm: its mean, then its difference to each control."""
    table = Table(title=f"\n{escape(name)}", title_justify="left", title_style="bold", box=SIMPLE_HEAD, padding=(0, 1, 0, 0))
    for heading in ("arm", "seeds", "mean", "minus", "difference", "95% interval"):
        table.add_column(heading, justify="left" if heading in ("arm", "minus") else "right", overflow="fold")
    for mean in (row for row in summary["means"] if row["metric"] == name):
        same = [row for row in summary["differences"] if (row["metric"], row["arm"]) == (name, mean["arm"])]
        first = escape(mean["arm"]), str(len(mean["seeds"])), f"{mean['mean']:.4f}"
        for row in same or [None]:
            table.add_row(*first, *(_difference_cells(row) if row else ("", "", "")))
            first = "", "", ""
    return table


def _difference_cells(row: Mapping[str, Any]) -> tuple[str, str, str]:
    interval = "one pair" if row["low"] is None else f"{row['low']:+.4f} .. {row['high']:+.4f}"
    return escape(row["control"]), f"{row['difference']:+.4f}", interval
