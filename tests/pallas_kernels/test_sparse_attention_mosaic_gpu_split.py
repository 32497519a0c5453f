"""The split of a selection into common blocks and stray entries against a plain walk over tiles, in the simulator."""

import sys
from unittest import mock

import jax.numpy as jnp
import mosaic_tools
import numpy as np
import pytest
from mosaic_tools import needs_mosaic, pack

from pallas_kernels.block_table import block_table
from pallas_kernels.blocks import make_layout
from pallas_kernels.sparse_attention import tuning
from pallas_kernels.sparse_attention.mosaic_gpu_split import CHOICES, NUMBER_BIT, SIZES, STARTS, split

C, X, R, THRESHOLD = 16, 8, 6, 5
SEGMENTS = {"one": None, "documents": ((0, 2), (1, 48), (2, 7), (0, 3), (3, 36))}


@needs_mosaic
@pytest.mark.kernels
@pytest.mark.parametrize("name", SEGMENTS)
def test_split_in_the_simulator(name):
    mosaic_tools.simulate(__file__, name)


def check(name: str) -> None:
    from jax.experimental.pallas import mosaic_gpu as plgpu

    T, K = 96, 2
    segments_BS = None if SEGMENTS[name] is None else pack(*SEGMENTS[name])
    table = block_table(make_layout(T, T, 1, segments_BS, None, None), C)
    ids = np.argsort(np.random.default_rng(0).random((1, K, T, R + 1)), axis=-1)[..., :R].astype(np.int32) - 1
    number_LTR = table.number(jnp.asarray(ids)).reshape(K, T, R)
    static = {"neighbours": X, "threshold": THRESHOLD, "block_size": C, "interpret": plgpu.InterpretGPUParams(detect_races=True)}
    walk_LnYU, stray_LTR = (np.asarray(x) for x in split(number_LTR, table, **static))
    number_LTR, start_J, rows_J = np.asarray(number_LTR), np.asarray(table.start_BJ)[0], np.asarray(table.rows_BJ)[0]
    own_T = np.where(np.asarray(table.local_BT) >= 0, np.asarray(table.base_BT + table.local_BT), -1)[0]
    for l, tile in np.ndindex(K, T // X):
        queries = slice(tile * X, (tile + 1) * X)
        count, parts = walk_LnYU[l, tile, SIZES, :2]
        words = walk_LnYU[l, tile, CHOICES, :count].view(np.uint32)
        common = {int(word >> NUMBER_BIT): int(word & (2**NUMBER_BIT - 1)) for word in words}
        assert len(common) == count
        assert [start_J[b] for b in common] == walk_LnYU[l, tile, STARTS, :count].tolist()
        chosen, strays = number_LTR[l, queries], stray_LTR[l, queries]
        assert parts == (strays >= 0).sum(axis=1).max()
        for x in range(X):
            found = [b for b, bits in common.items() if bits >> x & 1] + [b for b in strays[x] if b >= 0]
            assert sorted(found) == sorted(b for b in chosen[x] if b >= 0)
            assert (strays[x][: (strays[x] >= 0).sum()] >= 0).all()  # packed to the front
        for b in set(chosen[chosen >= 0].tolist()):
            by = (chosen == b).any(axis=1)
            assert (b in common) == (rows_J[b] == C and (by.sum() >= THRESHOLD or (by & (own_T[queries] == b)).any()))


if __name__ == "__main__":
    with mock.patch.object(tuning, "SMS", 1):  # several tiles a warpgroup
        check(sys.argv[1])
