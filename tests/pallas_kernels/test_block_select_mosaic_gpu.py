"""block_select's Hopper kernel: lowers for every shape it serves, agrees with the reference in the simulator and on the GPU."""

import functools
import sys
from typing import NamedTuple

import jax
import jax.numpy as jnp
import mosaic_tools
import numpy as np
import pytest
from mosaic_tools import needs_mosaic, needs_ptxas, pack

from pallas_kernels.block_select import mosaic_gpu, reference
from pallas_kernels.block_select.api import block_select
from pallas_kernels.blocks import Layout, make_layout
from pallas_kernels.dispatch import Unsupported


class Case(NamedTuple):
    """A call; small integers make every score exact, so that ids must be equal, ties included."""

    B: int = 1
    T: int = 320
    K: int = 4
    I: int = 64
    C: int = 64
    R: int = 4
    local: int = 1
    init: int = 0
    S: int | None = None
    segments: tuple[tuple[int, int], ...] | None = None
    offsets: tuple[int, ...] | None = None
    dtype: str = "bfloat16"
    poison: bool = False

    def options(self) -> dict:
        return {"block_size": self.C, "num_blocks": self.R, "local_blocks": self.local, "init_blocks": self.init}

    def arrays(self) -> tuple[jax.Array, jax.Array, Layout]:
        S = self.S or self.T
        iq_key, ik_key = jax.random.split(jax.random.key(0))
        iq_BTKI = jax.random.randint(iq_key, (self.B, self.T, self.K, self.I), -2, 3).astype(self.dtype)
        ik_BSI = jax.random.randint(ik_key, (self.B, S, self.I), -2, 3).astype(self.dtype)
        segments_BS = None
        if self.segments:
            segments_BS = jnp.concatenate([pack(*self.segments)] + [jnp.ones((1, S), jnp.int32)] * (self.B - 1))
        if self.poison:  # one token, a whole block, one query, and the padding
            ik_BSI = ik_BSI.at[:, 5].set(jnp.nan).at[:, self.C : 2 * self.C].set(jnp.nan)
            iq_BTKI = iq_BTKI.at[0, self.T // 2].set(jnp.nan)
            ik_BSI = ik_BSI if segments_BS is None else jnp.where((segments_BS == 0)[..., None], jnp.nan, ik_BSI)
        offset = None if self.offsets is None else jnp.asarray(self.offsets, jnp.int32)
        return iq_BTKI, ik_BSI, make_layout(self.T, S, self.B, segments_BS, None, offset)


SMALL = {
    "plain": Case(),
    "padded_tile": Case(T=300, K=3, local=2),
    "one_head": Case(T=256, K=1, C=64),
    "poison": Case(T=384, K=2, R=4, poison=True),
    "documents": Case(T=400, K=2, R=3, segments=((0, 7), (1, 30), (2, 200), (3, 3), (4, 150), (0, 10)), poison=True),
    "offsets": Case(B=2, T=70, K=2, R=3, S=333, offsets=(100, 263), init=1),
    "all_always_kept": Case(T=256, R=3, local=2, init=1),
    "shorter_than_a_block": Case(T=50, R=2),
}
SERVED = {
    "paper": Case(T=4096, I=128, C=128, R=16),
    "many_blocks": Case(T=4096, I=128, C=64, R=32),
    "wide_heads": Case(T=1024, K=16, I=64, C=128, R=8),
    "odd_heads": Case(T=1000, K=6, I=128, C=128, R=4),
    "one_head_small_block": Case(T=1024, K=1, I=64, C=64, R=16),
    "half": Case(T=1024, I=128, C=128, R=4, dtype="float16"),
    "documents": Case(B=2, T=1000, I=128, C=128, R=4, segments=((1, 300), (0, 7), (2, 500), (3, 1), (4, 192))),
    "decode": Case(B=2, T=3, S=1000, I=128, C=128, R=4, offsets=(5, 997)),
    "init_and_local": Case(T=2048, I=128, C=128, R=8, local=2, init=2),
}


def run(case: Case, interpret=None) -> np.ndarray:
    select = jax.jit(functools.partial(mosaic_gpu.select_ids, **case.options(), interpret=interpret))
    return np.asarray(select(*case.arrays()))


def assert_selection(ids: np.ndarray, case: Case) -> None:
    """The same sets as the reference, valid ids first, the own block last of them."""
    expected, _ = reference.block_select(*case.arrays(), **case.options(), scale=1.0)
    expected = np.asarray(expected)
    np.testing.assert_array_equal(np.sort(ids, -1), np.sort(expected, -1))
    valid = (expected >= 0).sum(-1, keepdims=True)
    np.testing.assert_array_equal(ids >= 0, np.arange(case.R) < valid)
    last = np.maximum(valid - 1, 0)
    np.testing.assert_array_equal(np.take_along_axis(ids, last, -1), np.take_along_axis(expected, last, -1))


@needs_mosaic
@pytest.mark.parametrize("case", [*SMALL.values(), *SERVED.values()], ids=[*SMALL, *(f"served_{name}" for name in SERVED)])
def test_lowers_for_an_h200(case):
    mosaic_tools.lower(functools.partial(mosaic_gpu.select_ids, **case.options()), *case.arrays())


@needs_mosaic
@pytest.mark.kernels
@pytest.mark.parametrize("name", SMALL)
def test_equals_the_reference_in_the_simulator(name):
    mosaic_tools.simulate(__file__, name)


@needs_mosaic
@needs_ptxas
@pytest.mark.kernels
@pytest.mark.parametrize("name", ["paper", "many_blocks", "one_head_small_block"])
def test_ptxas_spills_little(name):
    assert all(kernel.spill_bytes <= 128 for kernel in mosaic_tools.assemble(__file__, f"compile:{name}"))


@pytest.mark.gpu
@pytest.mark.parametrize("case", [*SMALL.values(), *SERVED.values()], ids=[*SMALL, *(f"served_{name}" for name in SERVED)])
def test_equals_the_reference_on_the_gpu(case):
    ids = run(case)
    assert_selection(ids, case)
    np.testing.assert_array_equal(ids, run(case))


@pytest.mark.gpu
def test_packed_documents_equal_separate_runs_on_the_gpu():
    lengths = [170, 999, 128, 1, 40, 2048, 710]
    case = Case(T=sum(lengths), I=128, C=128, R=6, segments=tuple((i + 1, n) for i, n in enumerate(lengths)))
    ids, (iq_BTKI, ik_BSI, _) = run(case), case.arrays()
    for start, length in zip(np.cumsum([0, *lengths]), lengths, strict=False):
        part = slice(start, start + length)
        alone = mosaic_gpu.select_ids(iq_BTKI[:, part], ik_BSI[:, part], make_layout(length, length, 1, None, None, None), **case.options())
        np.testing.assert_array_equal(ids[:, :, part], alone)


@pytest.mark.gpu
def test_a_million_tokens_on_the_gpu():
    """Rows past 2^31 bytes of iq: the keys that the last queries must find stand at both ends."""
    T, K, I, C, R = 1 << 20, 4, 128, 128, 4
    mark_I = jnp.zeros(I, jnp.bfloat16).at[0].set(1)
    iq_BTKI = jnp.broadcast_to(mark_I, (1, T, K, I))
    found = [0, 4095, T // C - 2]
    ik_BSI = jnp.zeros((1, T, I), jnp.bfloat16).at[0, jnp.asarray(found) * C + 77].set(mark_I)
    ids = mosaic_gpu.select_ids(
        iq_BTKI, ik_BSI, make_layout(T, T, 1, None, None, None), block_size=C, num_blocks=R, local_blocks=1, init_blocks=0
    )
    np.testing.assert_array_equal(ids[0, :, -1], np.broadcast_to([*found, T // C - 1], (K, R)))
    np.testing.assert_array_equal(ids[0, :, T // 2 + 5], np.broadcast_to([0, 4095, 1, T // C // 2], (K, R)))


REFUSED = {
    "float32": ({"dtype": "float32"}, {}),
    "width": ({"I": 32}, {}),
    "block_size": ({"C": 32}, {}),
    "num_blocks": ({"R": 40}, {}),
    "local_blocks": ({"local": 0}, {}),
    "scale": ({}, {"scale": -1.0}),
}


@needs_mosaic
@pytest.mark.parametrize("name", REFUSED)
def test_refuses_what_it_does_not_serve(name):
    fields, options = REFUSED[name]
    case = Case(**fields)
    iq_BTKI, ik_BSI, _ = case.arrays()
    with mosaic_tools.h200(), pytest.raises(Unsupported, match="block_select: implementation='mosaic_gpu'"):
        jax.eval_shape(functools.partial(block_select, **case.options(), **options, implementation="mosaic_gpu"), iq_BTKI, ik_BSI)


if __name__ == "__main__":
    name = sys.argv[1]
    if name.startswith("compile:"):
        case = SERVED[name.removeprefix("compile:")]
        mosaic_tools.compile_for_h200(functools.partial(mosaic_gpu.select_ids, **case.options()), *case.arrays())
    else:
        from jax.experimental.pallas import mosaic_gpu as plgpu

        assert_selection(run(SMALL[name], plgpu.InterpretGPUParams(detect_races=True)), SMALL[name])
