"""Kernel blocks and inverse lists against a plain walk over tokens: what a query sees through them is what the definition says."""

import jax.numpy as jnp
import numpy as np
import pytest

from pallas_kernels.block_table import block_table
from pallas_kernels.blocks import make_layout
from pallas_kernels.inverse_index import BLOCK, COUNT, ENTRY, LIST, ROWS, START, invert, slot_bits


def random_ids(rng: np.random.Generator, B: int, K: int, T: int, R: int, high: int) -> np.ndarray:
    """Ids from -1 to `high` (beyond the valid ones), none twice in a query except -1."""
    order = np.argsort(rng.random((B, K, T, high + 1)), axis=-1)[..., :R]
    ids = np.full((B, K, T, R), -1, np.int32)
    ids[..., : order.shape[-1]] = order
    return np.where(rng.random(ids.shape) < 0.2, -1, ids)


def packed_rows(rng: np.random.Generator, B: int, S: int, lengths: list[int]) -> np.ndarray:
    """Segment ids of documents with random lengths, with padding before, between and after them."""
    segments = np.zeros((B, S), np.int32)
    for b in range(B):
        row, document = int(rng.integers(0, 3)), 0
        while row < S:
            length = int(rng.choice(lengths))
            document += 1
            segments[b, row : row + length] = document
            row += length + (int(rng.integers(0, 9)) if rng.random() < 0.2 else 0)
    return segments


def document_starts(segments_S: np.ndarray) -> np.ndarray:
    change = np.flatnonzero(np.r_[True, segments_S[1:] != segments_S[:-1]])
    return change[np.searchsorted(change, np.arange(len(segments_S)), side="right") - 1]


def check(B, K, T, S, R, C, *, segments=None, q_offset=None, pad=4, per=64, seed=0):
    rng = np.random.default_rng(seed)
    ids = random_ids(rng, B, K, T, R, S // C + 1)
    offset = np.full(B, S - T) if q_offset is None else np.asarray(q_offset)
    layout = make_layout(
        T, S, B, None if segments is None else jnp.asarray(segments), None, None if q_offset is None else jnp.asarray(q_offset)
    )
    table = block_table(layout, C)
    number = table.number(jnp.asarray(ids))
    index = invert(number, table, pad=pad, per=per)
    number, start, rows, first = (np.asarray(x) for x in (number, table.start_BJ, table.rows_BJ, table.first_BT))
    assert number.max() < start.shape[1] <= 2 * -(-S // C)
    for b in range(B):
        documents = np.zeros(S, int) if segments is None else document_starts(segments[b])
        for t in range(T):
            p = offset[b] + t
            real = segments is None or segments[b, p] > 0
            for k, r in np.ndindex(K, R):
                n, begin = number[b, k, t, r], documents[p] + ids[b, k, t, r] * C
                assert (n >= 0) == (real and ids[b, k, t, r] >= 0 and begin <= p)
                if n >= 0:
                    low = start[b, n] if rows[b, n] == C else max(start[b, n], first[b, t])
                    assert (low, min(start[b, n] + rows[b, n], p + 1)) == (begin, min(begin + C, p + 1))
    check_lists(index, number, start, rows, pad=pad, per=per)
    check_slots(table, layout, rows, C)


def check_slots(table, layout, rows, C):
    """Every key of a document that counts stands once in the slots, in its block's rows; all other rows are 0."""
    B, S = layout.segments_BS.shape
    x = jnp.arange(1, B * S + 1, dtype=jnp.float32).reshape(B, S, 1, 1)
    slots = table.to_slots(jnp.where(layout.segments_BS[..., None, None] > 0, x, jnp.nan), C)
    counted = layout.segments_BS > 0
    if layout.aligned is not None:
        counted &= jnp.arange(S) <= layout.reach.index_BT[:, -1:]
    values = np.asarray(slots).reshape(B, -1, C)
    assert (np.sort(values[values > 0]) == np.asarray(x[..., 0, 0])[np.asarray(counted)]).all()
    assert ((values > 0).sum(axis=2) <= rows).all()
    assert (np.asarray(table.from_slots(slots, S))[..., 0, 0] == np.where(counted, np.asarray(x)[..., 0, 0], 0)).all()


def check_lists(index, number, start, rows, *, pad, per):
    """Every entry stands once in the item of its block, in order, and is found again through its place."""
    B, K, _, R = number.shape
    entry, item, place, first_item, items = (np.asarray(x) for x in index)
    seen = 0
    for w, x in enumerate(item):
        if x[COUNT] == 0:
            continue
        b, k = divmod(x[LIST], K)
        run = entry[x[LIST], x[ENTRY] : x[ENTRY] + x[COUNT]]
        t, r = run >> slot_bits(R), run & ((1 << slot_bits(R)) - 1)
        assert x[LIST] == w // (len(item) // (B * K))
        assert x[ENTRY] % pad == 0
        assert x[COUNT] <= per
        assert (np.diff(t) > 0).all()
        n = number[b, k, t, r]
        assert (b * start.shape[1] + n == x[BLOCK]).all()
        assert (start[b, n] == x[START]).all()
        assert (rows[b, n] == x[ROWS]).all()
        assert (entry[x[LIST], place[b, k, t, r]] == run).all()
        assert (first_item[x[LIST], n] <= w).all()
        assert (w < first_item[x[LIST], n] + items[x[LIST], n]).all()
        assert (entry[x[LIST], x[ENTRY] + x[COUNT] : x[ENTRY] - (-x[COUNT] // pad) * pad] == -1).all()
        seen += len(run)
    assert seen == (number >= 0).sum()
    assert items.sum() == (item[:, COUNT] > 0).sum()


@pytest.mark.parametrize(
    ("shape", "q_offset"),
    [((2, 2, 40, 40, 3, 8), None), ((1, 2, 13, 37, 3, 8), None), ((2, 1, 10, 30, 4, 8), [3, 20]), ((1, 1, 64, 64, 5, 64), None)],
)
def test_one_document(shape, q_offset):
    check(*shape, q_offset=q_offset)


@pytest.mark.parametrize("seed", range(8))
def test_packed_documents(seed):
    segments = packed_rows(np.random.default_rng(seed), 2, 60, [1, 2, 3, 5, 7, 8, 9, 17, 30])
    check(2, 2, 60, 60, 3, 8, segments=segments, seed=seed)
    check(2, 1, 17, 60, 3, 8, segments=segments, q_offset=[9, 30], seed=seed)


def test_documents_of_one_token_need_no_more_blocks_than_the_bound():
    check(1, 1, 60, 60, 2, 8, segments=np.arange(1, 61, dtype=np.int32)[None])


def test_hot_block_is_cut_into_pieces():
    table = block_table(make_layout(200, 200, 1, None, None, None), 8)
    index = invert(table.number(jnp.zeros((1, 1, 200, 1), jnp.int32)), table, pad=4, per=64)
    assert np.asarray(index.item_WX)[:4, COUNT].tolist() == [64, 64, 64, 8]
    assert int(index.num_items_LJ.sum()) == 4


def test_numbers_that_leave_no_room_in_one_word_sort_the_same():
    """1M keys and a chunk of 32K queries: block number and entry do not fit 32 bits together."""
    T, S, R = 1 << 15, 1 << 20, 16
    table = block_table(make_layout(T, S, 1, None, None, None), 128)
    ids = np.random.default_rng(0).integers(0, S // 128 - 256, (1, 1, T, R)).astype(np.int32)
    index = invert(table.number(jnp.asarray(ids)), table, pad=4, per=1024)
    entry, place = np.asarray(index.entry_LP), np.asarray(index.place_BKTR)
    found = entry[0, place[0, 0]]
    assert (found >> slot_bits(R) == np.arange(T)[:, None]).all()
    assert (found & 15 == np.arange(R)).all()
