"""How implementations are compared with the reference, and the cases on which: for tests and benchmarks of every op."""

import itertools
import zlib
from collections.abc import Mapping
from typing import NamedTuple

import numpy as np
from jax.typing import ArrayLike


def error_ratio(value: ArrayLike, reference: ArrayLike) -> float:
    """RMS(value - reference) / RMS(reference), in float64; 0 where both are all zero.

    Infinities (the lse of an empty row) must stand at the same places with the same sign, and are left out.

    Raises:
      AssertionError: the shapes differ, either side holds NaN, or an infinity has no partner.
    """
    value, reference = np.asarray(value, np.float64), np.asarray(reference, np.float64)
    assert value.shape == reference.shape, f"shape {value.shape}, expected {reference.shape}"
    for side, array in (("value", value), ("reference", reference)):
        assert not np.isnan(array).any(), f"the {side} holds {np.isnan(array).sum()} NaN"
    infinite = np.isinf(value) | np.isinf(reference)
    assert (value[infinite] == reference[infinite]).all(), "infinities differ"
    value, reference = value[~infinite], reference[~infinite]
    error, size = np.linalg.norm(value - reference), np.linalg.norm(reference)
    return float(error / size) if size else float(np.inf if error else 0.0)


def assert_close(values: Mapping[str, ArrayLike], references: Mapping[str, ArrayLike], limit: float) -> None:
    """Prints the error ratio of every entry, also when all pass; raises AssertionError where one exceeds `limit`."""
    assert values.keys() == references.keys(), f"{sorted(values)} against {sorted(references)}"
    ratios = {}
    for name, value in values.items():
        try:
            ratios[name] = error_ratio(value, references[name])
        except AssertionError as problem:
            raise AssertionError(f"{name}: {problem}") from problem
    text = ", ".join(f"{name} {ratio:.1e}" for name, ratio in ratios.items())
    print(f"error ratios (limit {limit:.0e}): {text}")
    assert max(ratios.values()) <= limit, f"above {limit:.0e}: {text}"


class Case(NamedTuple):
    """Sizes of one call (letters as everywhere), how its documents lie, and what is odd about it."""

    name: str
    T: int
    S: int
    K: int = 2
    G: int = 2
    H: int = 8
    width: int = 8  # of the values
    I: int = 4
    C: int = 4
    R: int = 2
    B: int = 2
    layout: str = "one"  # a key of LAYOUTS
    dtype: str = "float32"
    integers: bool = False  # small whole numbers: exact scores, many ties

    def random(self) -> np.random.Generator:
        return np.random.default_rng(zlib.crc32(self.name.encode()))

    def normal(self, random: np.random.Generator, *shape: int) -> np.ndarray:
        values = random.integers(-2, 3, shape) if self.integers else random.standard_normal(shape)
        return values.astype(np.float32)


def layout_arguments(case: Case) -> dict[str, np.ndarray]:
    """`segments`, `positions` and `q_offset` of a call, where its layout has them."""
    return LAYOUTS[case.layout](case)


def _segments(case: Case, lengths: tuple[float, ...], before: int = 0, after: int = 0) -> np.ndarray:
    """[B, S]: documents of these shares of the row between padding; row b is turned by one key for each b."""
    edges = np.floor(np.cumsum((0, *lengths)) / sum(lengths) * (case.S - before - after)).astype(int) + before
    row = np.zeros(case.S, np.int32)
    for document, (start, end) in enumerate(itertools.pairwise(edges), start=1):
        row[start:end] = document
    rows = [np.concatenate([np.zeros(b, np.int32), row[: case.S - b]]) for b in range(case.B)]
    return np.stack(rows)


def _with_positions(segments_BS: np.ndarray) -> dict[str, np.ndarray]:
    positions_BS = np.zeros_like(segments_BS)
    for row, segments in zip(positions_BS, segments_BS, strict=True):
        for document in np.unique(segments):
            row[segments == document] = np.arange((segments == document).sum())
    return {"segments": segments_BS, "positions": positions_BS}


def _continued(case: Case) -> dict[str, np.ndarray]:
    """Two documents, the first of which goes on from a part that is not in the row: it starts at position C + 1."""
    segments_BS = _segments(case, (1, 3), before=1)
    positions_BS = _with_positions(segments_BS)["positions"]
    return {"segments": segments_BS, "positions": np.where(segments_BS == 1, positions_BS + case.C + 1, positions_BS)}


LAYOUTS = {
    "one": lambda case: {},
    "packed": lambda case: {"segments": _segments(case, (5, 1, 7, 3))},
    "packed with positions": lambda case: _with_positions(_segments(case, (2, 9, 4), before=1, after=2)),
    "continued": _continued,
    "left padding": lambda case: {"segments": _segments(case, (1,), before=3)},
    "right padding": lambda case: {"segments": _segments(case, (1,), after=3)},
    "offset": lambda case: {"q_offset": np.linspace(0, case.S - case.T, case.B).astype(np.int32)},
    "packed, offset": lambda case: {
        "segments": _segments(case, (3, 8, 5), after=1),
        "q_offset": np.linspace(case.S - case.T, (case.S - case.T) // 2, case.B).astype(np.int32),
    },
}
