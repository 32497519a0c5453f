"""What a pack is made of, and the rule that decides which part is held out.

A split is a function of the document's or concept's own name, never of its row, so that a document keeps its split when others
are added and no near-copy of it (another skin tone, another page) slips into training.
"""

import hashlib
from collections.abc import Iterable
from typing import NamedTuple

import numpy as np

TEXT_SPLITS = ("train", "heldout")
PICTURE_SPLITS = ("train", "concept", "comp")  # comp: known concept and known attribute in a combination never trained on
HELD_OUT = {"heldout": 0.05, "concept": 0.05, "comp": 0.10}
LEAST_HELD_OUT = (0.01, 50_000)  # of a text source: share of its bytes, and bytes


class Document(NamedTuple):
    """One whole unit of text: a play, a file. `name` is unique within its source and decides the split."""

    source: str
    name: str
    text: str


class Picture(NamedTuple):
    """A drawing with its caption. Pictures of one concept differ only in an attribute (skin tone, colour)."""

    source: str
    caption: str
    concept: str
    group: str  # a wrong-image control is drawn from the same group
    varied: bool  # has an attribute beyond its concept: may be held out as `comp`
    pixels_HW3: np.ndarray  # uint8


def fraction(key: str) -> float:
    """A number in [0, 1) that depends on the text of `key` only."""
    return int.from_bytes(hashlib.sha256(key.encode()).digest()[:8], "big") / 2**64


def text_split(document: Document) -> str:
    return "heldout" if fraction(f"document:{document.source}/{document.name}") < HELD_OUT["heldout"] else "train"


def picture_split(picture: Picture) -> str:
    if fraction(f"concept:{picture.concept}") < HELD_OUT["concept"]:
        return "concept"
    return "comp" if picture.varied and fraction(f"caption:{picture.caption}") < HELD_OUT["comp"] else "train"


def split_pictures(pictures: Iterable[Picture]) -> list[tuple[Picture, str]]:
    """Each picture with its split; held-out pictures whose pixels occur in training are left out."""
    with_split = [(picture, picture_split(picture)) for picture in pictures]
    trained = {picture.pixels_HW3.tobytes() for picture, split in with_split if split == "train"}
    return [(picture, split) for picture, split in with_split if split == "train" or picture.pixels_HW3.tobytes() not in trained]


def check_held_out(documents: Iterable[Document]) -> None:
    """Raises ValueError for a source of which less is held out than LEAST_HELD_OUT asks for."""
    total: dict[str, int] = {}
    held: dict[str, int] = {}
    for document in documents:
        size = len(document.text.encode())
        total[document.source] = total.get(document.source, 0) + size
        held[document.source] = held.get(document.source, 0) + size * (text_split(document) == "heldout")
    share, least = LEAST_HELD_OUT
    for source, size in total.items():
        if held[source] < max(share * size, least):
            raise ValueError(
                f"source {source!r}: {held[source]} of {size} bytes are held out; at least {share:.0%} and {least} bytes are needed"
            )
