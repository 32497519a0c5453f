"""Rule-made text and coloured shapes: what smoke runs and tests learn from, without files or network.

Three sources of text, each with a rule that a small model picks up within tens of steps, and 32 x 32 pictures of coloured shapes
whose captions name size, colour and shape. Nothing here imitates real data; it only has the same structure.
"""

from collections.abc import Iterator

import numpy as np

from msa_jax.data.records import Document, Picture

SIZE = 32
COLOURS = {
    "red": (214, 48, 49), "green": (46, 160, 67), "blue": (40, 90, 220), "yellow": (245, 205, 40),
    "purple": (140, 60, 190), "black": (30, 30, 30), "orange": (240, 130, 30), "pink": (250, 150, 190),
}  # fmt: skip
SHAPES = (
    "circle", "square", "triangle", "diamond", "cross", "ring", "bar", "pole", "arch", "corner", "frame", "hill",
    "bowl", "arrow", "window", "stairs", "slash", "dots", "moon", "lens",
)  # fmt: skip
SIZES = {"small": 0.5, "large": 0.9}
NUMBERS = ("zero", "one", "two", "three", "four", "five", "six", "seven", "eight", "nine", "ten", "eleven", "twelve")
ANIMALS = ("fox", "dog", "cat", "bird", "horse", "mouse", "sheep", "duck")
LIKES = {"fox": "grapes", "dog": "bones", "cat": "fish", "bird": "seeds", "horse": "apples", "mouse": "cheese", "sheep": "grass",
         "duck": "bread"}  # fmt: skip
SENTENCES = 24  # a document


def documents(seed: int) -> Iterator[Document]:
    """Sixty short documents a source; every sentence follows its source's rule."""
    for kind, (source, sentence) in enumerate((("counting", _counting), ("sums", _sum), ("animals", _animal))):
        for index in range(60):
            random = np.random.default_rng([seed, kind, index])
            text = "\n".join(sentence(random) for _ in range(SENTENCES)) + "\n"
            yield Document(source, f"{index:03d}", text)


def _counting(random: np.random.Generator) -> str:
    start = int(random.integers(0, len(NUMBERS) - 4))
    return ", ".join(NUMBERS[start : start + 5]) + "."


def _sum(random: np.random.Generator) -> str:
    a, b = (int(n) for n in random.integers(0, 7, 2))
    return f"{NUMBERS[a]} and {NUMBERS[b]} make {NUMBERS[a + b]}."


def _animal(random: np.random.Generator) -> str:
    colour, animal = random.choice(list(COLOURS)), random.choice(ANIMALS)
    return f"The {colour} {animal} likes {LIKES[str(animal)]}."


def pictures(seed: int) -> Iterator[Picture]:
    """Every size, colour and shape once, at a place that depends on the seed. The shape is the concept and the group is the size."""
    random = np.random.default_rng([seed, SIZE])
    for shape in SHAPES:
        for colour, rgb in COLOURS.items():
            for size, scale in SIZES.items():
                centre = SIZE / 2 - 0.5 + random.integers(-1, 2, 2)
                pixels = np.full((SIZE, SIZE, 3), 255, np.uint8)
                pixels[_mask(shape, scale * SIZE / 2 - 1, centre)] = rgb
                yield Picture("shapes", f"{size} {colour} {shape}", shape, size, True, pixels)


def _mask(shape: str, radius: float, centre: np.ndarray) -> np.ndarray:
    """Which of the SIZE x SIZE pixels belong to the shape; x and y run over [-1, 1] inside its radius, y downwards."""
    rows, columns = np.mgrid[:SIZE, :SIZE]
    y, x = (rows - centre[0]) / radius, (columns - centre[1]) / radius
    far, away = np.hypot(x, y), np.maximum(abs(x), abs(y))
    inside = away <= 1
    rules = {
        "circle": far <= 1, "square": away <= 0.8, "triangle": (2 * abs(x) <= y + 1), "diamond": abs(x) + abs(y) <= 1,
        "cross": (abs(x) <= 0.3) | (abs(y) <= 0.3), "ring": (far <= 1) & (far >= 0.55), "bar": abs(y) <= 0.35, "pole": abs(x) <= 0.35,
        "arch": (far <= 1) & (far >= 0.5) & (y <= 0.1), "corner": (x <= -0.4) | (y >= 0.4), "frame": away >= 0.65,
        "hill": y >= x**2 * 1.6 - 0.6, "bowl": (y >= 0) & (far <= 1), "arrow": (abs(x) <= y + 1) & (abs(x) >= y),
        "window": (away <= 0.9) & (abs(x) >= 0.2) & (abs(y) >= 0.2), "stairs": np.floor(x * 2) <= np.floor(y * 2),
        "slash": abs(x - y) <= 0.4, "dots": np.hypot(abs(x) - 0.55, abs(y) - 0.55) <= 0.4,
        "moon": (far <= 1) & (np.hypot(x - 0.5, y) >= 0.75), "lens": (np.hypot(x - 0.5, y) <= 1) & (np.hypot(x + 0.5, y) <= 1),
    }  # fmt: skip
    return inside & rules[shape]
