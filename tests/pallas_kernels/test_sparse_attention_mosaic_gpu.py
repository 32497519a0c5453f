"""sparse_attention's Hopper kernels: lower for every shape they serve; outputs and gradients agree with the float32 reference."""

import sys
from typing import NamedTuple
from unittest import mock

import jax
import jax.numpy as jnp
import mosaic_tools
import numpy as np
import pytest
from mosaic_tools import needs_mosaic, needs_ptxas, pack

from pallas_kernels import testing
from pallas_kernels.blocks import make_layout
from pallas_kernels.dispatch import Unsupported
from pallas_kernels.sparse_attention import mosaic_gpu, tuning
from pallas_kernels.sparse_attention.api import sparse_attention

LIMIT = 5e-3  # error ratio of out, lse and of every gradient


class Case(NamedTuple):
    """A call. ids: "random" with unused and invalid slots anywhere, "shared" by 8 neighbours, or "same" for every query."""

    B: int = 1
    T: int = 128
    K: int = 1
    G: int = 16
    H: int = 64
    C: int = 64
    R: int = 2
    S: int | None = None
    offsets: tuple[int, ...] | None = None
    segments: tuple[tuple[int, int], ...] | None = None
    dtype: str = "bfloat16"
    ids: str = "random"

    def ids_BKTR(self) -> jax.Array:
        rng, blocks = np.random.default_rng(0), -(-(self.S or self.T) // self.C) + 1
        if self.ids == "same":
            return jnp.full((self.B, self.K, self.T, self.R), -1, jnp.int32).at[..., -1].set(0)
        score = rng.random((self.B, self.K, self.T, max(blocks, self.R)))
        if self.ids == "shared":
            score += 2 * np.repeat(rng.random(score[:, :, ::8].shape) < self.R / blocks, 8, axis=2)[:, :, : self.T]
        ids = np.argsort(-score, axis=-1)[..., : self.R].astype(np.int32)
        return jnp.asarray(np.where(rng.random(ids.shape) < 0.1, -1, ids))

    def arrays(self) -> tuple:
        """q, k, v, ids, segments, offsets, dout, dlse; where there are documents, keys that are padding are NaN."""
        S = self.S or self.T
        sizes = (self.T, self.K * self.G, self.H), (S, self.K, self.H), (S, self.K, self.H), (self.T, self.K * self.G, self.H)
        keys = jax.random.split(jax.random.key(0), 5)
        q, k, v, dout = (jax.random.normal(key, (self.B, *size), self.dtype) for key, size in zip(keys[:4], sizes, strict=True))
        segments_BS = None
        if self.segments:
            segments_BS = jnp.concatenate([pack(*self.segments)] + [jnp.ones((1, S), jnp.int32)] * (self.B - 1))
            k, v = (jnp.where((segments_BS == 0)[..., None, None], jnp.nan, x) for x in (k, v))
        offsets = None if self.offsets is None else jnp.asarray(self.offsets, jnp.int32)
        return q, k, v, self.ids_BKTR(), segments_BS, offsets, dout, jax.random.normal(keys[4], q.shape[:3])

    def layout(self, segments_BS, offsets):
        return make_layout(self.T, self.S or self.T, self.B, segments_BS, None, offsets)


DOCUMENTS = ((0, 3), (1, 87), (2, 10), (3, 50), (0, 10))
# Lengths of one pack of real documents, an eighth of them.
PACKED = tuple(
    (i + 1, n) for i, n in enumerate((2978, 2818, 1397, 1173, 844, 847, 1972, 531, 623, 614, 989, 3958, 1093, 4027, 436, 179, 91))
)
SIMULATED = {
    "plain": Case(),
    "few_documents": Case(T=160, R=3, segments=DOCUMENTS),
    "offset": Case(T=64, S=150, offsets=(70,)),
    "groups_of_8": Case(G=8),
    "groups_of_2": Case(G=2),
    "wide_blocks": Case(T=160, C=128),
    "wide_heads": Case(H=128),
    "wide": Case(T=160, H=128, C=128),
}
SERVED = {
    "paper": Case(T=1024, K=4, H=128, C=128, R=16, ids="shared"),
    "same": Case(T=2048, K=2, H=128, C=128, R=4, ids="same"),
    "documents": Case(
        B=2, T=1010, K=2, H=128, C=64, R=4, segments=(*((i + 1, n) for i, n in enumerate([1, 2, 300, 64, 65, 63, 5, 500])), (0, 10))
    ),
    "half": Case(B=2, T=1000, K=2, G=8, R=8, dtype="float16"),
    "chunk_of_prefill": Case(B=2, T=300, S=1100, K=2, H=128, C=128, R=6, offsets=(100, 800)),
    "groups_of_32": Case(T=1024, K=2, G=32, H=128, R=8, ids="shared"),
    "groups_of_4": Case(T=1024, K=2, G=4, C=128, R=8),
    "one_head_a_group": Case(T=1024, K=4, G=1, H=128, R=32),
    "narrow_heads": Case(T=1024, K=2, C=128, R=4, ids="shared"),
    "one_token": Case(B=3, T=1, S=200, C=128, R=4, H=128),
}
FAST = {"paper", "documents", "half", "one_head_a_group"}  # lowered in the fast tests


def with_gradients(case: Case, segments_BS, offsets, implementation: str):
    """out, lse, dq, dk, dv of a call; no cotangent where lse is -inf."""

    def run(q, k, v, ids, dout, dlse):
        options = {"block_size": case.C, "segments": segments_BS, "q_offset": offsets, "implementation": implementation}
        (out, lse), pullback = jax.vjp(lambda q, k, v: sparse_attention(q, k, v, ids, **options), q, k, v)
        return out, lse, *pullback((dout, jnp.where(jnp.isinf(lse), 0, dlse)))

    return jax.jit(run)


def expected(case: Case) -> tuple:
    q, k, v, ids, segments_BS, offsets, dout, dlse = case.arrays()
    q, k, v, dout = (x.astype(jnp.float32) for x in (q, k, v, dout))
    return with_gradients(case, segments_BS, offsets, "reference")(q, k, v, ids, dout, dlse)


def assert_close(actual: tuple, wanted: tuple) -> None:
    names = "out", "lse", "dq", "dk", "dv"
    testing.assert_close(dict(zip(names, actual, strict=True)), dict(zip(names, wanted, strict=True)), LIMIT)


@needs_mosaic
@pytest.mark.parametrize(
    "case",
    [pytest.param(case, marks=() if name in FAST else pytest.mark.kernels) for name, case in {**SIMULATED, **SERVED}.items()],
    ids=[*SIMULATED, *(f"served_{name}" for name in SERVED)],
)
def test_outputs_and_gradients_lower_for_an_h200(case):
    q, k, v, ids, segments_BS, offsets, dout, dlse = jax.eval_shape(case.arrays)

    def run(q, k, v, ids, segments_BS, offsets, dout, dlse):
        return with_gradients(case, segments_BS, offsets, "mosaic_gpu")(q, k, v, ids, dout, dlse)

    mosaic_tools.lower(run, q, k, v, ids, segments_BS, offsets, dout, dlse)


@needs_mosaic
@pytest.mark.parametrize("transform", ["vmap", *(pytest.param(name, marks=pytest.mark.kernels) for name in ("remat", "scan"))])
def test_transformations_lower_for_an_h200(transform):
    q, k, v, ids, *_ = SIMULATED["plain"].arrays()

    def loss(q, k, v):
        out, lse = sparse_attention(q, k, v, ids, block_size=64, implementation="mosaic_gpu")
        return out.astype(jnp.float32).sum() + lse.sum()

    if transform == "remat":
        mosaic_tools.lower(jax.grad(jax.checkpoint(loss), argnums=(0, 1, 2)), q, k, v)
    else:
        f = jax.grad(loss, argnums=(0, 1, 2))
        several = [jnp.stack([x, x]) for x in (q, k, v)]
        mosaic_tools.lower(jax.vmap(f) if transform == "vmap" else lambda *xs: jax.lax.map(lambda x: f(*x), xs), *several)


@needs_mosaic
@pytest.mark.kernels
def test_a_million_tokens_lower_for_an_h200():
    case = Case(T=1 << 20, K=4, H=128, C=128, R=16)
    q, k = (jax.ShapeDtypeStruct((1, case.T, heads, case.H), jnp.bfloat16) for heads in (case.K * case.G, case.K))
    ids = jax.ShapeDtypeStruct((1, case.K, case.T, case.R), jnp.int32)
    run = with_gradients(case, None, None, "mosaic_gpu")
    mosaic_tools.lower(run, q, k, k, ids, q, jax.ShapeDtypeStruct(q.shape[:3], jnp.float32))


REFUSED = {
    "float32": ({"dtype": "float32"}, {}),
    "width": ({"H": 32}, {}),
    "block_size": ({"C": 32}, {}),
    "group": ({"G": 3}, {}),
    "slots": ({"R": 40}, {}),
    "scale": ({}, {"scale": -1.0}),
}


@needs_mosaic
@pytest.mark.parametrize("name", REFUSED)
def test_refuses_what_it_does_not_serve(name):
    fields, options = REFUSED[name]
    case = Case(**fields)
    q, k, v, ids, *_ = jax.eval_shape(case.arrays)
    with mosaic_tools.h200(), pytest.raises(Unsupported, match="sparse_attention: implementation='mosaic_gpu'"):
        jax.eval_shape(lambda *x: sparse_attention(*x, block_size=case.C, **options, implementation="mosaic_gpu"), q, k, v, ids)


@needs_mosaic
@pytest.mark.kernels
@pytest.mark.parametrize("name", SIMULATED)
def test_equals_the_reference_in_the_simulator(name):
    mosaic_tools.simulate(__file__, name)


@needs_mosaic
@needs_ptxas
@pytest.mark.kernels
@pytest.mark.parametrize("name", ["paper", "documents", "half"])
def test_ptxas_spills_little(name):
    assert all(kernel.spill_bytes <= 128 for kernel in mosaic_tools.assemble(__file__, f"compile:{name}"))


def on_the_gpu(case: Case) -> tuple:
    """A call's results, after checking that a second run gives the same bits."""
    q, k, v, ids, segments_BS, offsets, dout, dlse = case.arrays()
    run = with_gradients(case, segments_BS, offsets, "mosaic_gpu")
    results, again = run(q, k, v, ids, dout, dlse), run(q, k, v, ids, dout, dlse)
    for first, second in zip(results, again, strict=True):
        np.testing.assert_array_equal(first, second)
    return results


@pytest.mark.gpu
@pytest.mark.parametrize("case", [*SIMULATED.values(), *SERVED.values()], ids=[*SIMULATED, *(f"served_{name}" for name in SERVED)])
def test_equals_the_reference_on_the_gpu(case):
    assert_close(on_the_gpu(case), expected(case))


@pytest.mark.gpu
def test_a_pack_of_real_lengths_equals_its_documents_one_by_one_on_the_gpu():
    case = Case(T=sum(n for _, n in PACKED), K=1, H=128, C=128, R=8, segments=PACKED)
    q, k, v, ids, *_ = arrays = case.arrays()
    packed, start = on_the_gpu(case), 0
    for _, length in PACKED:
        part = slice(start, start + length)
        alone = with_gradients(case._replace(T=length), None, None, "mosaic_gpu")
        assert_close(
            tuple(x[:, part] for x in packed), alone(q[:, part], k[:, part], v[:, part], ids[:, :, part], *(x[:, part] for x in arrays[6:]))
        )
        start += length


@pytest.mark.gpu
def test_chunks_of_queries_change_nothing_on_the_gpu():
    case = Case(T=1000, K=2, H=128, C=128, R=6)
    whole = on_the_gpu(case)
    jax.clear_caches()
    with mock.patch.object(tuning, "BUDGET_BYTES", 1 << 25):
        parts = on_the_gpu(case)
    assert_close(parts, whole)


@pytest.mark.gpu
def test_nan_in_keys_that_nobody_chose_on_the_gpu():
    case = Case(T=1024, K=2, H=128, C=128, R=2)
    q, k, v, _, _, _, dout, dlse = case.arrays()
    own = jnp.arange(case.T, dtype=jnp.int32) // case.C
    ids = jnp.broadcast_to(jnp.stack([jnp.where(own == 3, 0, own), jnp.where(own > 0, 0, -1)], axis=-1), (1, 2, case.T, 2))
    ids = jnp.where((own == 3)[:, None] & jnp.array([False, True]), -1, ids)

    def poison(x):
        return x.at[:, 3 * case.C : 4 * case.C].set(jnp.nan)

    run = with_gradients(case, None, None, "mosaic_gpu")
    for got, want in zip(run(q, poison(k), poison(v), ids, dout, dlse), run(q, k, v, ids, dout, dlse), strict=True):
        np.testing.assert_array_equal(got, want)


@pytest.mark.gpu
def test_a_million_tokens_on_the_gpu():
    """Offsets past 2^31: only the last queries get a cotangent, and the reference runs for them alone."""
    case, last = Case(T=1 << 20, K=1, H=128, C=128, R=4), 8
    keys = jax.random.split(jax.random.key(0), 4)
    q, k, v = (jax.random.normal(key, (1, case.T, heads, 128), jnp.bfloat16) for key, heads in zip(keys[:3], (16, 1, 1), strict=True))
    dout = jax.random.normal(keys[3], (1, last, 16, 128), jnp.bfloat16)
    own = jnp.arange(case.T, dtype=jnp.int32) // case.C
    ids = jnp.stack([jnp.where(own > 3, x, -1) for x in (own * 0, own // 2, own - 1)] + [own], axis=-1)[None, None]
    run = with_gradients(case, None, None, "mosaic_gpu")
    late = jnp.zeros_like(q).at[:, -last:].set(dout)
    out, lse, dq, dk, dv = run(q, k, v, ids, late, jnp.zeros(q.shape[:3]))
    wanted = with_gradients(case, None, jnp.array([case.T - last]), "reference")(
        *(x.astype(jnp.float32) for x in (q[:, -last:], k, v)), ids[:, :, -last:], dout.astype(jnp.float32), jnp.zeros((1, last, 16))
    )
    assert_close((out[:, -last:], lse[:, -last:], dq[:, -last:], dk, dv), wanted)


def simulated(case: Case) -> tuple:
    """Results from the simulator: kernel by kernel, since two in one program hang it."""
    from jax.experimental.pallas import mosaic_gpu as plgpu

    q, k, v, ids, segments_BS, offsets, dout, dlse = case.arrays()
    layout = case.layout(segments_BS, offsets)
    static = {"block_size": case.C, "scale": case.H**-0.5, "interpret": plgpu.InterpretGPUParams(detect_races=True)}
    out, lse = mosaic_gpu.forward.__wrapped__(q, k, v, ids, layout, **static)
    dlse = jnp.where(jnp.isinf(lse), 0, dlse)
    return out, lse, *mosaic_gpu.backward.__wrapped__(q, k, v, ids, layout, out, lse, dout, dlse, **static)


if __name__ == "__main__":
    name = sys.argv[1]
    if name.startswith("compile:"):
        case = SERVED[name.removeprefix("compile:")]
        q, k, v, ids, segments_BS, offsets, dout, dlse = case.arrays()
        mosaic_tools.compile_for_h200(with_gradients(case, segments_BS, offsets, "mosaic_gpu"), q, k, v, ids, dout, dlse)
    else:
        # Three thread blocks, so that each takes several tiles; short pieces, so that blocks are shared by work items.
        small = {"SMS": 3, "FORWARD_PER": 64, "BACKWARD_PER": 64}
        with mock.patch.multiple(tuning, **small):
            assert_close(simulated(SIMULATED[name]), expected(SIMULATED[name]))
