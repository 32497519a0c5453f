"""The builder's pieces on small wheels made by hand, with a stand-in for pip; and the real pack, where it is built (slow)."""

import errno
import hashlib
import importlib
import io
import json
import shlex
import sys
import zipfile
from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest
from rich.console import Console

from msa_jax.data import archives, build, records, small
from msa_jax.data import tokenizer as tokenizers
from msa_jax.data.archives import Archive, BuildError, member, members, obtain
from msa_jax.data.pack import Pack, build_command
from msa_jax.data.small import Drawing

WheelMaker = Callable[[str, dict[str, bytes]], Path]
SVG = '<svg viewBox="0 0 72 72" xmlns="http://www.w3.org/2000/svg"><rect x="9" y="18" width="54" height="36" fill="{}"/></svg>'
NAMES = {
    "\U0001f98a": "fox",
    "\U0001f44b": "waving_hand",
    "\U0001f44b\U0001f3ff": "waving_hand_dark_skin_tone",
    "\U0001f44b\U0001f3fb": "waving_hand_light_skin_tone",
    "\U0001f1eb\U0001f1f7": "France",
    "\u2764\ufe0f": "red_heart",
    "\U0001f600": "grinning_face",
    "\U0001f9ff": "nazar_amulet",
}
COLOURS = {"1F98A": "#f80", "1F44B": "#fe0", "1F44B-1F3FF": "#641", "1F44B-1F3FB": "#fe0", "1F1EB-1F1F7": "#00f", "2764": "#f00",
           "1F600": "#ff0", "E000": "#000"}  # fmt: skip


@pytest.fixture
def wheels(wheel: WheelMaker, monkeypatch: pytest.MonkeyPatch) -> dict[Archive, Path]:
    """The sources of `small` in miniature."""
    monkeypatch.setattr(records, "LEAST_HELD_OUT", (0.01, 500))
    content = {
        small.NAMES: {small.NAMES.prefix: json.dumps({text: {"en": f":{name}:"} for text, name in NAMES.items()}).encode()},
        small.DRAWINGS: {f"{small.DRAWINGS.prefix}{codes}.svg": SVG.format(colour).encode() for codes, colour in COLOURS.items()},
        small.PLAYS: {f"{small.PLAYS.prefix}x/play-{i}.md": f"# Play {i}\n\nLine.  \nLine.".encode() + b" word" * 60 for i in range(200)},
    }
    for archive in small.CODE:
        content[archive] = {f"{archive.prefix}m{i}.py": f"# {archive.name} {i}\n".encode() + b"x = 1\n" * 60 for i in range(60)}
    paths = {archive: wheel(archive.file_name, entries) for archive, entries in content.items()}
    pinned = {archive: archive._replace(sha256=hashlib.sha256(path.read_bytes()).hexdigest()) for archive, path in paths.items()}
    for name in ("DRAWINGS", "NAMES", "PLAYS"):
        monkeypatch.setattr(small, name, pinned[getattr(small, name)])
    monkeypatch.setattr(small, "CODE", tuple(pinned[archive] for archive in small.CODE))
    monkeypatch.setattr(small, "ARCHIVES", tuple(pinned.values()))
    return {pinned[archive]: path for archive, path in paths.items()}


@pytest.fixture
def pip(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Callable[[str], Path]:
    """pip(body) replaces `python -m pip` by a shell script; $dest is where it must put files. Returns the script's log."""

    def replace(body: str) -> Path:
        script, log = tmp_path / "python", tmp_path / "log"
        find_dest = 'dest=$(printf "%s\\n" "$@" | grep -A1 -x -e --dest | tail -n 1)'
        script.write_text(f'#!/bin/sh\necho "$@" >> {shlex.quote(str(log))}\n{find_dest}\n{body}\n')
        script.chmod(0o755)
        monkeypatch.setattr(sys, "executable", str(script))
        return log

    return replace


def archive_of(path: Path) -> Archive:
    return Archive("thing", "1.0", path.name, hashlib.sha256(path.read_bytes()).hexdigest(), "thing/", "MIT", "someone")


def test_archives_are_downloaded_once_and_checked(wheel: WheelMaker, pip: Callable, tmp_path: Path) -> None:
    source = wheel("thing-1.0-py3-none-any.whl", {"thing/a.py": b"a"})
    log = pip(f'cp {source} "$dest"')
    cache = tmp_path / "cache" / "deep"
    path = obtain(archive_of(source), cache)
    assert path.read_bytes() == source.read_bytes()
    assert [p.name for p in cache.iterdir()] == [source.name]
    assert obtain(archive_of(source), cache) == path
    assert len(log.read_text().splitlines()) == 1
    assert "--no-deps --only-binary=:all:" in log.read_text()
    assert log.read_text().rstrip().endswith("thing==1.0")
    path.write_bytes(b"damaged")  # a damaged download is fetched again
    assert obtain(archive_of(source), cache).read_bytes() == source.read_bytes()
    assert len(log.read_text().splitlines()) == 2


@pytest.mark.parametrize(("body", "message"), [
    ('echo "WARNING: x" >&2; echo "ERROR: No matching distribution" >&2; exit 1', r"download thing==1.0: ERROR: No match.*network"),
    ('echo "OSError: No space left on device" >&2; exit 1', r"disk is full"),
    ('echo "$0: No module named pip" >&2; exit 1', r"-m ensurepip"),
    ("exit 3", r"pip gave no reason"),
    ("true", r"pip brought nothing instead of thing-1.0"),
    ('touch "$dest/thing-1.0-cp39-linux.whl"', r"pip brought thing-1.0-cp39-linux.whl instead of"),
    ('echo other > "$dest/thing-1.0-py3-none-any.whl"', r"sha256 is [0-9a-f]{64}, pinned is [0-9a-f]{64}"),
])  # fmt: skip
def test_failed_downloads_say_why_and_leave_nothing(wheel: WheelMaker, pip: Callable, tmp_path: Path, body: str, message: str) -> None:
    archive = archive_of(wheel("thing-1.0-py3-none-any.whl", {"thing/a.py": b"a"}))
    pip(body)
    with pytest.raises(BuildError, match=message):
        obtain(archive, tmp_path / "cache")
    assert list((tmp_path / "cache").iterdir()) == []


def test_a_hanging_download_ends(wheel: WheelMaker, pip: Callable, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(archives, "PIP_SECONDS", 0.2)
    pip("exec sleep 30")
    with pytest.raises(BuildError, match=r"no download within 0.2 s"):
        obtain(archive_of(wheel("thing-1.0-py3-none-any.whl", {})), tmp_path / "cache")


def test_members_are_read_by_prefix_and_within_limits(wheel: WheelMaker, monkeypatch: pytest.MonkeyPatch) -> None:
    path = wheel("a.whl", {"a/z.py": b"z", "a/b/c.py": b"c", "a/d.txt": b"d", "ab/e.py": b"e", "../a/f.py": b"f", "/a/g.py": b"g"})
    assert list(members(path, "a/", ".py")) == [("b/c.py", b"c"), ("z.py", b"z")]
    assert member(path, "a/d.txt") == b"d"
    with pytest.raises(BuildError, match=r"has no member a/none"):
        member(path, "a/none")
    bomb = wheel("bomb.whl", {"a/zeros.py": bytes(10**6)})
    with pytest.raises(BuildError, match=r"a/zeros.py .*exceed 1000 bytes a member"):
        list(members(bomb, "a/", ".py", most=1000))
    monkeypatch.setattr(archives, "MOST_BYTES", 1)
    with pytest.raises(BuildError, match="or 1 in all"):
        list(members(path, "a/", ".py"))


def test_documents_are_clean_whole_and_never_copies(wheel: WheelMaker) -> None:
    code = b"import os\n" * 30
    paths = {archive: wheel(archive.file_name, {}) for archive in small.ARCHIVES}
    paths[small.PLAYS] = wheel("plays.whl", {f"{small.PLAYS.prefix}tragedies/hamlet.md": b"# Hamlet\r\n\nWho's there?  \nNay\n\n\n"})
    first, second = small.CODE[:2]
    paths[first] = wheel("first.whl", {
        f"{first.prefix}a.py": code,
        f"{first.prefix}tests/b.py": code + b"# test\n",
        f"{first.prefix}short.py": b"x = 1\n",
        f"{first.prefix}table.py": b"1, " * 40_000,
        f"{first.prefix}data.json": code,
        f"{first.prefix}tests.py": code + b"# a module called tests\n",
    })  # fmt: skip
    paths[second] = wheel("second.whl", {f"{second.prefix}copy.py": code.replace(b"\n", b"  \r\n")})
    found = {(d.source, d.name): d.text for d in small.documents(paths)}
    assert found == {
        ("shakespeare", "hamlet"): "# Hamlet\n\nWho's there?\nNay\n",
        ("python", f"{first.prefix}a.py"): code.decode(),
        ("python", f"{first.prefix}tests.py"): code.decode() + "# a module called tests\n",
    }


def test_captions_concepts_and_groups(wheels: dict[Archive, Path]) -> None:
    found = small.drawings(wheels)
    made = {p.caption: p for p in small.pictures(found)}
    assert {caption: (p.concept, p.group, p.varied) for caption, p in made.items()} == {
        "fox": ("fox", "things", False),
        "waving hand": ("waving_hand", "people", False),
        "waving hand dark skin tone": ("waving_hand", "skin tones", True),
        "flag of France": ("France", "flags", False),
        "red heart": ("red_heart", "signs", False),
        "grinning face": ("grinning_face", "faces", False),
    }, "a light tone that looks like none is mislabelled; a name without a drawing and a drawing without a name are left out"


@pytest.mark.parametrize(("name", "concept"), [
    ("man_running_facing_right_dark_skin_tone", "man_running"),
    ("kiss_woman_man_light_skin_tone_medium-dark_skin_tone", "kiss_woman_man"),
    ("light_skin_tone", "light_skin_tone"),
])  # fmt: skip
def test_concepts_are_names_without_tones_and_directions(name: str, concept: str) -> None:
    (made,) = small.pictures([Drawing("1F600", name, SVG.format("#123"))])
    assert made.concept == concept


def test_pictures_show_the_whole_drawing_on_white(wheels: dict[Archive, Path]) -> None:
    pixels = next(p.pixels_HW3 for p in small.pictures(small.drawings(wheels)) if p.caption == "red heart")
    assert pixels.shape == (32, 32, 3)
    assert pixels.dtype == np.uint8
    expected = np.full((32, 32, 3), 255, np.uint8)
    expected[8:24, 4:28] = (255, 0, 0)  # x 9..63 and y 18..54 of 72, in 32nds
    np.testing.assert_array_equal(pixels, expected)


def test_averaging_rounds_to_nearest() -> None:
    half = '<svg viewBox="0 0 72 72" xmlns="http://www.w3.org/2000/svg"><rect width="37.125" height="72" fill="#000"/></svg>'
    (made,) = small.pictures([Drawing("1F600", "half", half)])
    assert made.pixels_HW3[0, 15:18, 0].tolist() == [0, 128, 255]


def test_a_missing_renderer_names_its_extra(monkeypatch: pytest.MonkeyPatch) -> None:
    def absent(name: str) -> None:
        raise ModuleNotFoundError(f"No module named {name!r}")

    monkeypatch.setattr(importlib, "import_module", absent)
    with pytest.raises(BuildError, match=r'resvg-py, which is not installed: pip install -e "\.\[data\]"'):
        small.pictures([])


@pytest.fixture
def ready(wheels: dict[Archive, Path], tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A cache folder that holds the miniature wheels, with the pins of the pack they make."""
    cache = tmp_path / "cache"
    cache.mkdir()
    for archive, path in wheels.items():
        (cache / archive.file_name).write_bytes(path.read_bytes())
    made = Pack.from_records("small", small.documents(wheels), small.pictures(small.drawings(wheels)))
    monkeypatch.setattr(small, "PACK_SHA256", made.digest)
    monkeypatch.setattr(small, "PIXELS_SHA256", hashlib.sha256(made.pictures.tobytes()).hexdigest())
    return cache


def run(*arguments: str, capsys: pytest.CaptureFixture[str]) -> tuple[int, str]:
    code = build.main(["small", *arguments])
    return code, capsys.readouterr().out


def test_a_build_is_repeatable_and_finished_once(
    ready: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    out = tmp_path / "data" / "small"
    code, said = run("--out", str(out), "--cache", str(ready), capsys=capsys)
    assert (code, "is built" in said) == (0, True)
    pack = Pack.load(out)
    assert pack.text_sources == ("python", "shakespeare")
    assert len(list(out.glob("tokens-*"))) == 1
    first = (out / "pack.safetensors").read_bytes(), (out / "manifest.json").read_bytes()
    with monkeypatch.context() as patch:
        patch.setattr(build, "obtain", lambda *_: pytest.fail("a finished pack is not built again"))
        code, said = run("--out", str(out), "--cache", str(ready), capsys=capsys)
        assert (code, "is complete" in said) == (0, True)
    (out / "pack.safetensors").write_bytes(b"damaged")
    assert run("--out", str(out), "--cache", str(ready), capsys=capsys)[0] == 0
    assert first == ((out / "pack.safetensors").read_bytes(), (out / "manifest.json").read_bytes())


def test_other_bytes_are_refused_and_kept_on_request(
    ready: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(small, "PACK_SHA256", "0" * 64)
    out = tmp_path / "out"
    code, said = run("--out", str(out), "--cache", str(ready), capsys=capsys)
    assert code == 1
    assert "pinned is 000" in said
    assert "its pictures are the pinned ones" in said
    monkeypatch.setattr(small, "PIXELS_SHA256", "1" * 64)
    code, said = run("--out", str(out), "--cache", str(ready), capsys=capsys)
    assert code == 1
    assert "its pictures were drawn otherwise" in said
    assert not out.exists()
    assert run("--out", str(out), "--cache", str(ready), "--unpinned", capsys=capsys)[0] == 0
    code, said = run("--out", str(out), "--cache", str(ready), capsys=capsys)
    assert (code, "is complete" in said) == (0, True)
    monkeypatch.setattr(small, "PACK_SHA256", Pack.load(out).digest)
    code, said = run("--out", str(out), "--cache", str(ready), capsys=capsys)
    assert (code, "is built" in said) == (0, True), "a pack of another builder is built anew"


@pytest.mark.parametrize(("error", "code", "message"), [
    (OSError(errno.ENOSPC, "No space left on device", "out/file"), 1, "the disk is full (out/file)"),
    (KeyboardInterrupt(), 130, "finished downloads are kept"),
])  # fmt: skip
def test_interruptions_say_how_to_go_on(
    ready: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch,
    error: BaseException, code: int, message: str,
) -> None:  # fmt: skip
    def stop(*_: object, **__: object) -> None:
        raise error

    out = tmp_path / "out"
    with monkeypatch.context() as patch:
        patch.setattr(build, "save", stop)
        result, said = run("--out", str(out), "--cache", str(ready), capsys=capsys)
    assert result == code
    assert message in said
    assert run("--out", str(out), "--cache", str(ready), capsys=capsys)[0] == 0


def test_pins_are_complete_and_credited() -> None:
    attribution = (Path(__file__).parents[2] / "ATTRIBUTION.md").read_text()
    for archive in small.ARCHIVES:
        assert len(bytes.fromhex(archive.sha256)) == 32
        assert archive.file_name.endswith("-py3-none-any.whl"), "wheels for one platform would differ between machines"
        assert f"| {archive.name} | {archive.version} |" in attribution
        assert archive.licence.replace("CC-BY-SA-", "CC BY-SA ") in attribution
    assert len(small.PACK_SHA256) == len(small.PIXELS_SHA256) == 64


@pytest.mark.slow
def test_the_built_pack_has_the_pinned_bytes_and_its_tokenizer(tmp_path: Path) -> None:
    """Needs `make data`, which `make test-slow` runs first."""
    root = Path(__file__).parents[2]
    pack = Pack.load(root / "data/small")
    assert pack.digest == small.PACK_SHA256
    assert tokenizers.train(pack, 4096) == (tokenizers.COMMITTED / "bpe4096.json").read_bytes(), "retrain the committed tokenizer"
    again = build.build(tmp_path / "again", root / ".cache/downloads", Console(file=io.StringIO()))
    assert again.digest == pack.digest
    assert build_command(tmp_path) != "make data"
    assert all(zipfile.is_zipfile(root / ".cache/downloads" / archive.file_name) for archive in small.ARCHIVES)
