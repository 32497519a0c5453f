"""Limits that keep every file readable at a glance; an exemption names its reason."""

import ast
import json
import subprocess
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[1]
MOST_LINES = 400
MOST_FUNCTION_LINES = 60
LONG_FUNCTIONS: dict[str, str] = {}  # "path::function": reason
SOURCES = sorted(path for top in ("msa_jax", "pallas_kernels", "configs", "benchmarks", "tests") for path in (ROOT / top).rglob("*.py"))


def docstring_lines(node: ast.FunctionDef) -> int:
    """A long contract is no reason to split a function."""
    first = node.body[0]
    return first.end_lineno - first.lineno + 1 if ast.get_docstring(node) is not None else 0


@pytest.mark.parametrize("path", [*SOURCES, ROOT / "train.py"], ids=lambda path: str(path.relative_to(ROOT)))
def test_file_and_function_lengths(path: Path) -> None:
    text = path.read_text()
    limit = {"train.py": 80}.get(str(path.relative_to(ROOT)), 100 if path.is_relative_to(ROOT / "configs") else MOST_LINES)
    assert text.count("\n") <= limit, f"{text.count(chr(10))} lines; split it by idea (at most {limit})"
    for node in ast.walk(ast.parse(text)):
        if isinstance(node, ast.FunctionDef):
            lines = node.end_lineno - node.lineno + 1 - docstring_lines(node)
            key = f"{path.relative_to(ROOT)}::{node.name}"
            assert lines <= MOST_FUNCTION_LINES or key in LONG_FUNCTIONS, f"{key} has {lines} lines (at most {MOST_FUNCTION_LINES})"


def test_no_utils_no_pickle_no_eval() -> None:
    for path in SOURCES:
        assert path.stem not in ("utils", "helpers", "misc"), f"{path}: name it by what it does"
        for node in ast.walk(ast.parse(path.read_text())):
            if isinstance(node, ast.Call) and isinstance(node.func, ast.Name):
                assert node.func.id not in ("eval", "exec"), f"{path}:{node.lineno} evaluates text"
            if isinstance(node, ast.Import | ast.ImportFrom):
                names = [alias.name for alias in node.names] + [getattr(node, "module", "") or ""]
                assert "pickle" not in names, f"{path}:{node.lineno} uses pickle"


def test_notebooks_are_stripped_of_outputs() -> None:
    for path in (ROOT / "notebooks").glob("*.ipynb"):
        for cell in json.loads(path.read_text())["cells"]:
            assert not cell.get("outputs"), f"{path.name} holds outputs; strip them before committing"


def test_nothing_that_is_ignored_is_tracked() -> None:
    listing = subprocess.run(["git", "ls-files", "-ci", "--exclude-standard"], cwd=ROOT, capture_output=True, text=True, check=True)
    assert listing.stdout == "", "tracked files that .gitignore names"
