"""Who may import whom (CONTRIBUTING.md shows the same table); read with ast, so that nothing has to be imported."""

import ast
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[1]
OURS = ("msa_jax", "pallas_kernels", "configs")

# package -> prefixes of our own modules it may import, besides itself
ALLOWED = {
    "pallas_kernels": (),
    "msa_jax.dims": (),
    "msa_jax.config_tree": (),
    "msa_jax.config_checks": ("msa_jax.config_tree",),
    "msa_jax.config_model": ("msa_jax.config_tree", "msa_jax.config_checks"),
    "msa_jax.config": ("msa_jax.config_tree", "msa_jax.config_checks", "msa_jax.config_model"),
    "msa_jax.data": ("msa_jax.config",),
    "msa_jax.model": ("msa_jax.config", "msa_jax.data.batch", "pallas_kernels"),
    "msa_jax.train": ("msa_jax.config", "msa_jax.data", "msa_jax.model"),
    "msa_jax.eval": (
        "msa_jax.config",
        "msa_jax.data",
        "msa_jax.model",
        "msa_jax.train.state",
        "msa_jax.train.checkpoint",
    ),
    "msa_jax.report": (),
    "msa_jax.launch": ("msa_jax.config", "msa_jax.data", "msa_jax.eval", "msa_jax.train", "pallas_kernels"),
    "msa_jax.sweep": ("msa_jax.config", "msa_jax.launch", "msa_jax.report", "msa_jax.train"),
    "msa_jax.infer": ("msa_jax.config", "msa_jax.data.batch", "msa_jax.model"),
    "msa_jax.costs": ("msa_jax.config", "msa_jax.model"),
    "configs": ("msa_jax.config",),
}
# packages that must not reach these outside libraries, even by way of another module of theirs
FORBIDDEN_OUTSIDE = {
    "pallas_kernels": ("flax", "optax", "orbax", "grain", "matplotlib", "rich"),
    "msa_jax.report": ("jax", "flax", "optax", "orbax", "grain"),
    "msa_jax.data": ("jax.numpy", "flax", "optax", "orbax"),
}
TRITON_FILES = "triton.py"
SOURCES = sorted(path for top in OURS for path in (ROOT / top).rglob("*.py"))


def module_name(path: Path) -> str:
    parts = path.relative_to(ROOT).with_suffix("").parts
    return ".".join(parts[:-1] if parts[-1] == "__init__" else parts)


def imported(tree: ast.AST) -> list[tuple[str, ast.stmt]]:
    found = []
    for node in ast.walk(tree):
        if isinstance(node, ast.Import):
            found += [(alias.name, node) for alias in node.names]
        elif isinstance(node, ast.ImportFrom):
            assert node.level == 0, f"line {node.lineno}: relative import; imports are absolute"
            found += [(f"{node.module}.{alias.name}", node) for alias in node.names]
    return found


def rule_of(module: str) -> str:
    matches = [name for name in ALLOWED if module == name or module.startswith(name + ".")]
    assert matches or module == "msa_jax", f"{module} belongs to no package of the table; add it to ALLOWED"
    return max(matches, key=len, default="msa_jax")


def under(name: str, prefix: str) -> bool:
    return name == prefix or name.startswith(prefix + ".")


@pytest.mark.parametrize("path", SOURCES, ids=lambda path: str(path.relative_to(ROOT)))
def test_imports_follow_the_table(path: Path) -> None:
    module = module_name(path)
    home = rule_of(module)
    tree = ast.parse(path.read_text())
    for name, node in imported(tree):
        where = f"{path.relative_to(ROOT)}:{node.lineno} imports {name}"
        if name.split(".")[0] in OURS:
            allowed = (home, *ALLOWED.get(home, ()))
            assert any(under(name, prefix) for prefix in allowed), f"{where}; {home} may import {allowed}"
            if under(name, "pallas_kernels") and home != "pallas_kernels":
                api = name.split(".")[2:3] == ["api"] or under(name, "pallas_kernels.dispatch")
                assert api, f"{where}; from outside only <op>.api and dispatch are imported"
        else:
            for forbidden in FORBIDDEN_OUTSIDE.get(home, ()):
                assert not under(name, forbidden), f"{where}; {home} stays free of {forbidden}"
            if name.split(".")[0] in ("triton", "jax_triton"):
                assert path.name == TRITON_FILES, f"{where}; only {TRITON_FILES} files may"
        assert node in tree.body or home == "configs", f"{where} inside a function; imports stand at the top"


def test_the_table_covers_every_package() -> None:
    assert len(SOURCES) > 5
    assert {rule_of(module_name(path)) for path in SOURCES} <= set(ALLOWED) | {"msa_jax"}


@pytest.mark.parametrize(
    ("source", "culprit"),
    [("import flax", "flax"), ("from msa_jax.model import msa", "msa_jax"), ("def f():\n    import numpy", "numpy")],
)
def test_a_violation_is_seen(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, source: str, culprit: str) -> None:
    monkeypatch.setattr("test_import_rules.ROOT", tmp_path)
    path = tmp_path / "pallas_kernels" / "bad.py"
    path.parent.mkdir()
    path.write_text(source)
    with pytest.raises(AssertionError, match=culprit):
        test_imports_follow_the_table(path)
