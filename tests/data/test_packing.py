"""Rows: every token once, documents never mixed, nothing cut that must stay whole."""

import numpy as np
import pytest

from msa_jax.data.packing import Rows, aligned, plan_cut, plan_whole


@pytest.mark.parametrize("align", [1, 8])
@pytest.mark.parametrize("row_length", [16, 30])
@pytest.mark.parametrize("seed", range(5))
def test_cut_rows_hold_every_token_once(seed: int, row_length: int, align: int) -> None:
    random = np.random.default_rng(seed)
    lengths = random.integers(1, 100, 30).tolist()
    rows = plan_cut(lengths, row_length, random, align=align)
    seen = [np.zeros(length, int) for length in lengths]
    for row in rows:
        used = 0
        for document, start, length in row:
            assert length >= 1
            used = aligned(used, align) + length
            seen[document][start : start + length] += 1
            assert used == row_length or start + length == lengths[document], "cut only where the row ends"
        assert used <= row_length
    for document, length in enumerate(lengths):
        for start in range(0, length - row_length + 1, row_length):
            assert [(document, start, row_length)] in rows, "what fills a row is not cut"
    assert all((count == 1).all() for count in seen)
    if align == 1:
        assert len(rows) == -(-sum(lengths) // row_length), "only the last row may have room"


def test_tails_are_shuffled_by_the_seed() -> None:
    plans = [plan_cut([5] * 40, 16, np.random.default_rng(seed)) for seed in (0, 0, 1)]
    assert plans[0] == plans[1] != plans[2]


@pytest.mark.parametrize(("lengths", "most", "align", "expected"), [
    ([5, 5, 6, 1], 9, 1, [[0, 1, 2], [3]]),
    ([5, 5, 6, 1], 2, 1, [[0, 1], [2, 3]]),
    ([5, 5, 6, 1], 9, 8, [[0, 1], [2, 3]]),
    ([16, 16], 9, 1, [[0], [1]]),
    ([], 9, 1, []),
])  # fmt: skip
def test_whole_documents_start_the_next_row_where_they_do_not_fit(lengths, most, align, expected) -> None:
    assert plan_whole(lengths, 16, most, align=align) == expected


def test_rows_count_documents_and_positions() -> None:
    rows = Rows(2, 8, pad=9, align=4)
    rows.add(0, np.array([1, 2]), np.array([1, 0]), source=3)
    assert rows.add(0, np.array([5, 6, 7]), np.array([1, 1, 0]), source=1, visual_index=np.array([-1, 4, -1])) == slice(4, 7)
    assert rows.tokens_BT.tolist() == [[1, 2, 9, 9, 5, 6, 7, 9], [9] * 8]
    assert rows.segments_BT.tolist() == [[1, 1, 0, 0, 2, 2, 2, 0], [0] * 8]
    assert rows.positions_BT[0].tolist() == [0, 1, 0, 0, 0, 1, 2, 0]
    assert rows.loss_weights_BT[0].tolist() == [1, 0, 0, 0, 1, 1, 0, 0]
    assert rows.sources_BT[0].tolist() == [3, 3, -1, -1, 1, 1, 1, -1]
    assert rows.visual_index_BT[0].tolist() == [-1, -1, -1, -1, -1, 4, -1, -1]
