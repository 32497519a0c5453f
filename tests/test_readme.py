"""README's map, commands and code are true."""

import re
import runpy
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[1]
README = (ROOT / "README.md").read_text()
BLOCKS = re.findall(r"```(\w+)\n(.*?)```", README, flags=re.DOTALL)
COMMANDS = [line.split("#")[0].strip() for language, text in BLOCKS if language == "bash" for line in text.splitlines() if line.strip()]


def test_every_link_leads_somewhere() -> None:
    links = [link for link in re.findall(r"\]\(([^)#]+)\)", README) if not link.startswith("http")]
    assert len(links) > 20
    missing = [link for link in links if not (ROOT / link).exists()]
    assert not missing, f"README links to {missing}"


@pytest.mark.parametrize("command", COMMANDS)
def test_every_command_names_what_exists(command: str) -> None:
    words = command.split()
    if words[0] == "make":
        assert re.search(rf"^{words[1]}:", (ROOT / "Makefile").read_text(), flags=re.MULTILINE), f"no target {words[1]}"
        return
    assert words[0] in (".venv/bin/python", ".ci/run", "git", "cd"), f"{words[0]}: neither make nor the project's interpreter"
    for word in words[1:]:
        if word.endswith(".py"):
            assert (ROOT / word).exists(), f"{word} does not exist"
    if "-m" in words:
        module = ROOT / words[words.index("-m") + 1].replace(".", "/")
        assert module.with_suffix(".py").exists() or (module / "__main__.py").exists(), f"{module} cannot be run"


def test_the_layer_example_runs(tmp_path: Path) -> None:
    (example,) = [text for language, text in BLOCKS if language == "python"]
    (tmp_path / "example.py").write_text(example)
    scope = runpy.run_path(str(tmp_path / "example.py"))
    assert scope["y_BTD"].shape == scope["x_BTD"].shape
    assert scope["aux"].kl > 0
