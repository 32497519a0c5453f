"""The comparison that every test of an op rests on."""

import numpy as np
import pytest

from pallas_kernels.testing import LAYOUTS, Case, assert_close, error_ratio, layout_arguments


def test_error_ratio_is_relative_to_the_reference() -> None:
    assert error_ratio([1.1, 2.2], [1.0, 2.0]) == pytest.approx(0.1)
    assert error_ratio([0.0], [0.0]) == 0.0
    assert error_ratio([1e-30], [0.0]) == np.inf
    assert error_ratio([-np.inf, 1.0], [-np.inf, 1.0]) == 0.0


@pytest.mark.parametrize(("value", "reference", "message"), [
    ([np.nan], [np.nan], "the value holds 1 NaN"),
    ([0.0], [np.nan], "the reference holds 1 NaN"),
    ([np.inf], [-np.inf], "infinities differ"),
    ([0.0], [-np.inf], "infinities differ"),
    ([[0.0]], [0.0], r"shape \(1, 1\), expected \(1,\)"),
])  # fmt: skip
def test_what_cannot_be_compared_is_refused(value: list, reference: list, message: str) -> None:
    with pytest.raises(AssertionError, match=message):
        error_ratio(value, reference)


def test_every_ratio_is_printed_and_the_largest_decides(capsys: pytest.CaptureFixture[str]) -> None:
    references = {"a": np.ones(2), "b": np.ones(2)}
    assert_close({"a": np.ones(2), "b": np.ones(2) * 1.001}, references, 2e-3)
    assert capsys.readouterr().out == "error ratios (limit 2e-03): a 0.0e+00, b 1.0e-03\n"
    with pytest.raises(AssertionError, match=r"above 5e-04: a 0\.0e\+00, b 1\.0e-03"):
        assert_close({"a": np.ones(2), "b": np.ones(2) * 1.001}, references, 5e-4)
    with pytest.raises(AssertionError, match="b: the value holds 2 NaN"):
        assert_close({"a": np.ones(2), "b": np.full(2, np.nan)}, references, 1.0)
    with pytest.raises(AssertionError, match="against"):
        assert_close({"a": np.ones(2)}, references, 1.0)


@pytest.mark.parametrize("layout", LAYOUTS)
def test_layouts_are_what_the_ops_take(layout: str) -> None:
    case = Case("layout", T=5, S=20, B=3, layout=layout)
    given = layout_arguments(case)
    segments = given.get("segments", np.ones((3, 20), int))
    assert segments.shape == (3, 20)
    for row, segment in enumerate(segments):
        starts = np.flatnonzero(np.diff(segment, prepend=-1))
        documents = segment[starts][segment[starts] > 0]
        assert len(set(documents)) == len(documents) > 0, f"row {row} interrupts a document"
    assert (np.asarray(given.get("q_offset", 0)) <= 15).all()
