"""Rows of fixed length T from documents of any length.

row 0   [a a a a a a a a]      document a is longer than a row: whole rows first,
row 1   [a a a b b c c c]      then its tail is packed with other tails; c is cut to fit
row 2   [c d d d d . . .]      and goes on as a document of its own; only the last row is padded
segments 1 1 1 2 2 3 3 3       every token stands in exactly one row of an epoch
"""

from collections.abc import Sequence

import numpy as np


class Rows:
    """B rows of T tokens being filled from left to right: the [B, T] arrays of a `Batch`."""

    def __init__(self, count: int, length: int, *, pad: int, align: int = 1) -> None:
        shape = (count, length)
        self.tokens_BT = np.full(shape, pad, np.int32)
        self.segments_BT = np.zeros(shape, np.int32)
        self.positions_BT = np.zeros(shape, np.int32)
        self.loss_weights_BT = np.zeros(shape, np.float32)
        self.sources_BT = np.full(shape, -1, np.int32)
        self.visual_index_BT = np.full(shape, -1, np.int32)
        self._align = align
        self._used = [0] * count
        self._documents = [0] * count

    def add(self, row: int, tokens: np.ndarray, weights: np.ndarray, source: int, visual_index: np.ndarray | None = None) -> slice:
        """Appends a document and returns its place. All arrays have one entry a token; the document must fit."""
        start = aligned(self._used[row], self._align)
        place = slice(start, start + len(tokens))
        assert place.stop <= self.tokens_BT.shape[1], f"row {row}: {len(tokens)} tokens do not fit behind {start}"
        self._documents[row] += 1
        self._used[row] = place.stop
        self.tokens_BT[row, place] = tokens
        self.segments_BT[row, place] = self._documents[row]
        self.positions_BT[row, place] = np.arange(len(tokens))
        self.loss_weights_BT[row, place] = weights
        self.sources_BT[row, place] = source
        if visual_index is not None:
            self.visual_index_BT[row, place] = visual_index
        return place


def aligned(position: int, align: int) -> int:
    """The first multiple of `align` from `position` on."""
    return -(-position // align) * align


def plan_cut(lengths: Sequence[int], row_length: int, random: np.random.Generator, *, align: int = 1) -> list[list[tuple[int, int, int]]]:
    """Rows of (document, first token, tokens) that hold every token of every document once; documents are cut to fit.

    Tails are shuffled, so that a row holds pieces from anywhere.
    """
    rows, tails = [], []
    for document, length in enumerate(lengths):
        whole = length // row_length * row_length
        rows += [[(document, start, row_length)] for start in range(0, whole, row_length)]
        if whole < length:
            tails.append((document, whole, length - whole))
    row: list[tuple[int, int, int]] = []
    used = 0
    for index in random.permutation(len(tails)):
        document, start, left = tails[index]
        while left:
            used = aligned(used, align)
            if used >= row_length:
                rows.append(row)
                row, used = [], 0
            taken = min(left, row_length - used)
            row.append((document, start, taken))
            start, left, used = start + taken, left - taken, used + taken
    return [*rows, row] if row else rows


def plan_whole(lengths: Sequence[int], row_length: int, most: int, *, align: int = 1) -> list[list[int]]:
    """Rows of documents in the given order, none of them cut: the next row starts where one does not fit or `most` are reached."""
    rows: list[list[int]] = []
    used = row_length
    for document, length in enumerate(lengths):
        start = aligned(used, align)
        if start + length > row_length or len(rows[-1]) == most:
            rows.append([])
            start = 0
        rows[-1].append(document)
        used = start + length
    return rows
