"""Prints the tables of run folders and writes their figures."""

from collections.abc import Callable
from pathlib import Path

from matplotlib.figure import Figure
from rich.console import Console
from rich.markup import escape

from msa_jax.report.curves import loss_curves
from msa_jax.report.lift import lift_figure, lift_limit
from msa_jax.report.run import Run, load_run
from msa_jax.report.selection import selection_map
from msa_jax.report.style import styled
from msa_jax.report.tables import comparison_table, provenance_table, run_tables


def write(*workdirs: str | Path, console: Console | None = None) -> list[Path]:
    """Prints tables for the runs in `workdirs` and writes `figures/*.png` into each; returns the files written.

    Several runs get a comparison instead of one set of tables each, and share the colour limits of their figures.
    Raises RunFolderError for a folder that is not a run. What a run does not have (yet) is named and left out.
    """
    console = console or Console()
    runs = [load_run(workdir) for workdir in workdirs]
    tables = run_tables(runs[0]) if len(runs) == 1 else [provenance_table(runs), comparison_table(runs)]
    for table in tables:
        console.print(table)
    limit = lift_limit(runs)
    written = [file for run in runs for file in _write_figures(run, limit)]
    for run in runs:
        for problem in run.problems:
            console.print(f"[yellow]{escape(run.name)}: {escape(problem)}[/yellow]")
    for file in written:
        console.print(f"figure: {escape(str(file))}", soft_wrap=True)
    return written


def figures(run: Run, limit: float) -> dict[str, Callable[[], Figure]]:
    """{file stem: how to draw it} for what the run holds."""
    possible = {
        "loss_curves": (bool(run.metrics), lambda: loss_curves(run)),
        "selection_map": ("selection_map" in run.arrays, lambda: selection_map(run)),
        "lift": ("lift" in run.arrays, lambda: lift_figure(run, limit)),
    }
    return {name: draw for name, (present, draw) in possible.items() if present}


def _write_figures(run: Run, limit: float) -> list[Path]:
    folder = run.path / "figures"
    folder.mkdir(exist_ok=True)
    written = []
    with styled():
        for name, draw in figures(run, limit).items():
            file = folder / f"{name}.png"
            draw().savefig(file)
            written.append(file)
    return written
