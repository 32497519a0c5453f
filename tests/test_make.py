"""make and its scripts: which interpreters they find, and what they pass on."""

import os
import shutil
import subprocess
import sys
from pathlib import Path

ROOT = Path(__file__).resolve().parents[1]
NAME = f"python{sys.version_info.major}.{sys.version_info.minor}"


def test_names_that_do_not_run_are_skipped_and_pyenv_is_searched(tmp_path: Path) -> None:
    """As where pyenv's shims stand on PATH and the version is not active: they exist and fail."""
    shims, version = tmp_path / "shims", tmp_path / "pyenv" / "versions" / f"{NAME.removeprefix('python')}.9" / "bin"
    for folder in (shims, version):
        folder.mkdir(parents=True)
    for name in ("python3", "python3.11", "python3.12", "python3.13"):
        (shims / name).write_text("#!/bin/sh\nexit 127\n")
        (shims / name).chmod(0o755)
    (version / NAME).symlink_to(sys._base_executable)
    environment = {"PATH": str(shims), "PYENV_ROOT": str(tmp_path / "pyenv"), "HOME": str(tmp_path)}
    command = [shutil.which("bash"), str(ROOT / "scripts" / "find_python.sh")]
    found = subprocess.run(command, env=environment, capture_output=True, text=True, check=True, timeout=60).stdout.splitlines()
    assert str(version / NAME) in found
    assert not any(str(shims) in line for line in found)
    versions = [int(Path(line).name.removeprefix("python3.") or 0) for line in found if Path(line).name.startswith("python3.")]
    assert versions == sorted(versions, reverse=True), "newest first"


def test_a_run_folder_may_have_spaces() -> None:
    command = ["make", "--dry-run", "train", "WORKDIR=runs/my run"]
    environment = {name: value for name, value in os.environ.items() if not name.startswith("MAKE")}
    lines = subprocess.run(command, cwd=ROOT, env=environment, capture_output=True, text=True, check=True, timeout=60).stdout
    assert '--workdir "runs/my run"' in lines


def test_a_folder_that_is_no_environment_is_never_removed(tmp_path: Path) -> None:
    (tmp_path / "thesis.tex").write_text("")
    command = [str(ROOT / "scripts" / "setup.sh"), str(tmp_path), sys.executable]
    done = subprocess.run(command, capture_output=True, text=True, check=False, timeout=300)
    assert done.returncode == 1
    assert f"{tmp_path} is no virtual environment and not empty" in done.stderr
    assert (tmp_path / "thesis.tex").exists()
