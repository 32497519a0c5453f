"""Tables on the screen and figures on disk, from run folders alone."""

import io
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import pytest
from rich.console import Console

from msa_jax.report.__main__ import main
from msa_jax.report.publish import write

FIGURES = {"loss_curves.png", "selection_map.png", "lift.png"}


def printed(*runs: Path, width: int = 80) -> tuple[str, list[Path]]:
    stream = io.StringIO()
    files = write(*runs, console=Console(file=stream, width=width))
    return stream.getvalue(), files


def test_one_run_prints_every_number_beside_its_yardstick(run_folder: Path) -> None:
    text, files = printed(run_folder)
    rows = [line.split() for line in text.splitlines()]
    assert ["native", "deadbeefcafe", "0123456789ab", "0", "cpu", "xla", "400"] in rows
    assert ["plays", "4.820", "2.410", "4.740", "3.610", "48,213"] in rows
    assert ["train", "(seen)", "3.000", "4.200", "1.200", "0.300", "0.020", "200"] in rows
    assert ["concept", "(held", "out)", "3.000", "3.200", "0.200", "0.050", "0.020", "200"] in rows
    index = next(row for row in rows if row[:1] == ["3"] and "(0.31)" in row)
    assert index[2::2][:4] == ["(0.31)", "(0.31)", "(0.50)", "(0.55)"]
    assert index[-2:] == ["0.060", "0.090"]
    assert ["0", "1.70", "1.30", "0.20", "0.35", "0.40", "0.45", "0.50"] in rows
    assert {file.name for file in files} == FIGURES
    assert all(file.parent == run_folder / "figures" and file.stat().st_size > 5000 for file in files)


def test_eighty_columns_hold_every_table(run_folder: Path) -> None:
    text, _ = printed(run_folder)
    assert max(map(len, text.splitlines())) <= max(80, len(f"figure: {run_folder}/figures/selection_map.png"))
    assert "…" not in text


def test_several_runs_are_compared_and_each_keeps_its_figures(run_folder: Path, make_run: Callable[..., Path]) -> None:
    other = make_run("text_only", seed=1, steps=200)
    (other / "evaluation.jsonl").write_text('{"step": 200, "name": "text/bits_per_byte/plays", "value": 2.3}\n')
    text, files = printed(run_folder, other)
    rows = [line.split() for line in text.splitlines()]
    assert ["text_only", "deadbeefcafe", "0123456789ab", "1", "cpu", "xla", "200"] in rows
    assert ["plays", "bits/byte", "2.410", "2.300"] in rows
    assert ["plays", "bits/byte", "(bigram)", "3.610", "-"] in rows
    assert ["train:", "image", "gain", "1.200", "-"] in rows
    assert ["index", "relative", "mass", "(random)", "0.550", "-"] in rows
    assert ["index", "KL,", "full", "prefix", "0.090", "-"] in rows
    assert {file.parent.parent.name for file in files} == {"native", "text_only"}
    assert len(files) == 6


def test_a_run_that_has_only_begun(run_folder: Path) -> None:
    (run_folder / "evaluation.jsonl").unlink()
    for file in (run_folder / "arrays").iterdir():
        file.unlink()
    text, files = printed(run_folder)
    assert "native: evaluation.jsonl is missing" in text
    assert [file.name for file in files] == ["loss_curves.png"]


def test_names_with_brackets_are_printed_as_they_are(make_run: Callable[..., Path]) -> None:
    text, _ = printed(make_run("lr[red]3e-3"), width=160)
    assert "lr[red]3e-3" in text


def test_command_line(run_folder: Path, capsys: pytest.CaptureFixture) -> None:
    assert main([str(run_folder)]) == 0
    assert "bits/byte" in capsys.readouterr().out
    assert main([str(run_folder / "absent")]) == 2
    assert "no such folder" in capsys.readouterr().err


def test_the_report_needs_no_jax() -> None:
    code = "import sys, msa_jax.report.__main__; sys.exit('jax' in sys.modules)"
    assert subprocess.run([sys.executable, "-c", code], timeout=60, check=False).returncode == 0
