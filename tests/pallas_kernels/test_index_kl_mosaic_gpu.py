"""index_kl's Hopper kernels: lower for every shape they serve; value and gradients agree with the float32 reference."""

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
from pallas_kernels.block_select.api import block_select
from pallas_kernels.blocks import make_layout, support
from pallas_kernels.index_kl import mosaic_gpu, tuning
from pallas_kernels.index_kl.api import index_kl
from pallas_kernels.index_kl.mosaic_gpu_student import kept_log_sum_exp
from pallas_kernels.sparse_attention import reference as attention
from pallas_kernels.testing import error_ratio

LIMIT = 5e-3  # error ratio of value and of every gradient


class Case(NamedTuple):
    """A call; R = None is the full prefix."""

    B: int = 1
    T: int = 256
    K: int = 1
    G: int = 8
    H: int = 64
    I: int = 64
    C: int = 64
    R: int | None = 2
    S: int | None = None
    offset: int | None = None
    segments: tuple[tuple[int, int], ...] | None = None
    dtype: str = "bfloat16"
    ids: str = "selected"

    def arrays(self) -> tuple[jax.Array, ...]:
        """iq, ik, q, k, ids, segments; where there are documents, keys that are padding are NaN."""
        S = self.S or self.T
        sizes = ((self.T, self.K, self.I), (S, self.I), (self.T, self.K * self.G, self.H), (S, self.K, self.H))
        keys = jax.random.split(jax.random.key(0), 4)
        iq, ik, q, k = (jax.random.normal(key, (self.B, *size), self.dtype) for key, size in zip(keys, sizes, strict=True))
        segments_BS = None
        if self.segments:
            segments_BS = jnp.concatenate([pack(*self.segments)] + [jnp.ones((1, S), jnp.int32)] * (self.B - 1))
        ids_BKTR = None
        if self.R is not None and self.ids == "selected":
            options = {"block_size": self.C, "num_blocks": self.R, "segments": segments_BS, "q_offset": self.offset}
            ids_BKTR = block_select(iq, ik, **options, implementation="reference").ids
        elif self.R is not None:  # every query keeps the first blocks; some slots, a leading one too, are unused or never valid
            ids_BKTR = jnp.broadcast_to(jnp.arange(self.R, dtype=jnp.int32) - 1, (self.B, self.K, self.T, self.R)).at[..., -1].set(1 << 20)
        if segments_BS is not None:
            padding = (segments_BS == 0)[..., None]
            ik, k = jnp.where(padding, jnp.nan, ik), jnp.where(padding[..., None], jnp.nan, k)
        return iq, ik, q, k, ids_BKTR, segments_BS

    def options(self, segments_BS) -> dict:
        weights_BT = jnp.broadcast_to(1.0 + jnp.arange(self.T) % 3, (self.B, self.T))
        weights_BT = weights_BT if segments_BS is None else jnp.where(segments_BS > 0, weights_BT, 0)
        return {"block_size": self.C, "segments": segments_BS, "q_offset": self.offset, "weights_BT": weights_BT}


SIMULATED = {
    "kept": Case(),
    "kept_documents": Case(segments=((0, 5), (1, 100), (2, 3), (3, 148))),
    "kept_wide_blocks": Case(T=384, H=128, I=64, C=128, G=2),
    "kept_wide_index": Case(T=256, I=128, C=128, R=4, ids="first"),
    "prefix": Case(T=192, G=2, R=None),
    "prefix_documents": Case(T=192, G=2, R=None, segments=((0, 5), (1, 100), (2, 3), (3, 84))),
    "prefix_offset": Case(T=70, S=192, offset=50, G=1, K=2, R=None),
}
SERVED = {
    "paper": Case(T=2048, K=4, G=16, H=128, I=128, C=128, R=16),
    "groups_of_2": Case(T=777, K=2, G=2, H=64, I=128, C=64, R=4),
    "groups_of_32": Case(T=600, G=32, H=128, I=128, C=128, R=3),
    "documents": Case(B=2, T=1000, K=2, H=128, I=128, C=128, R=4, segments=((1, 300), (0, 7), (2, 500), (3, 1), (4, 192))),
    "half": Case(T=1024, K=2, G=16, H=128, I=128, C=128, R=4, dtype="float16"),
    "hot_block": Case(T=2048, K=2, G=16, H=128, I=128, C=128, R=4, ids="first"),
    "chunk_of_prefill": Case(B=2, T=300, S=1333, offset=700, K=2, H=128, I=128, C=128, R=4),
    "prefix_paper": Case(T=1024, K=4, G=16, H=128, I=128, C=128, R=None),
    "prefix_half": Case(T=700, K=3, G=1, H=64, I=128, R=None, dtype="float16"),
    "prefix_documents": Case(B=2, T=1000, K=2, G=4, H=128, I=64, R=None, segments=((1, 300), (0, 7), (2, 500), (3, 1), (4, 192))),
}


FAST = {"paper", "documents", "prefix_documents"}  # lowered in the fast tests: one of each kind


def loss(case: Case, ids, segments, implementation: str):
    def value(iq, ik, q, k):
        return index_kl(iq, ik, q, k, ids, **case.options(segments), implementation=implementation)

    return jax.value_and_grad(value, argnums=(0, 1))


def expected(case: Case) -> tuple:
    *arrays, ids, segments = case.arrays()
    value, gradients = jax.jit(loss(case, ids, segments, "reference"))(*(x.astype(jnp.float32) for x in arrays))
    return value, *gradients


def assert_close(actual: tuple, case: Case) -> None:
    names = "value", "diq", "dik"
    testing.assert_close(dict(zip(names, actual, strict=True)), dict(zip(names, expected(case), strict=True)), LIMIT)


@needs_mosaic
@pytest.mark.parametrize(
    "case",
    [
        *(pytest.param(case, marks=pytest.mark.kernels) for case in SIMULATED.values()),
        *(pytest.param(case, marks=() if name in FAST else pytest.mark.kernels) for name, case in SERVED.items()),
    ],
    ids=[*SIMULATED, *(f"served_{name}" for name in SERVED)],
)
def test_value_and_gradient_lower_for_an_h200(case):
    *arrays, ids, segments = jax.eval_shape(case.arrays)

    def value_and_gradient(iq, ik, q, k, ids, segments):
        return loss(case, ids, segments, "mosaic_gpu")(iq, ik, q, k)

    mosaic_tools.lower(value_and_gradient, *arrays, ids, segments)


@needs_mosaic
@pytest.mark.parametrize("transform", ["vmap", *(pytest.param(name, marks=pytest.mark.kernels) for name in ("remat", "scan"))])
def test_transformations_lower_for_an_h200(transform):
    case = Case(T=512, C=128, R=2)
    *arrays, ids, segments = case.arrays()
    f = loss(case, ids, segments, "mosaic_gpu")
    if transform == "remat":
        value = jax.checkpoint(lambda iq, ik, q, k: index_kl(iq, ik, q, k, ids, block_size=128, implementation="mosaic_gpu"))
        mosaic_tools.lower(jax.grad(value, argnums=(0, 1)), *arrays)
    else:
        several = [jnp.stack([x, x]) for x in arrays]
        mosaic_tools.lower(jax.vmap(f) if transform == "vmap" else lambda *xs: jax.lax.map(lambda x: f(*x), xs), *several)


@needs_mosaic
@pytest.mark.kernels
@pytest.mark.parametrize("name", SIMULATED)
def test_equals_the_reference_in_the_simulator(name):
    mosaic_tools.simulate(__file__, name)


@needs_mosaic
@needs_ptxas
@pytest.mark.kernels
@pytest.mark.parametrize("name", ["paper", "prefix_paper", "groups_of_2"])
def test_ptxas_spills_little(name):
    assert all(kernel.spill_bytes <= 128 for kernel in mosaic_tools.assemble(__file__, f"compile:{name}"))


@pytest.mark.gpu
@pytest.mark.parametrize("case", [*SIMULATED.values(), *SERVED.values()], ids=[*SIMULATED, *(f"served_{name}" for name in SERVED)])
def test_equals_the_reference_on_the_gpu(case):
    *arrays, ids, segments = case.arrays()
    f = jax.jit(loss(case, ids, segments, "mosaic_gpu"))
    (value, gradients), again = f(*arrays), f(*arrays)
    assert_close((value, *gradients), case)
    for first, second in zip(jax.tree.leaves((value, gradients)), jax.tree.leaves(again), strict=True):
        np.testing.assert_array_equal(first, second)


@pytest.mark.gpu
@pytest.mark.parametrize("case", [Case(T=1024, K=2, R=4), Case(T=1024, K=2, R=None)], ids=["kept", "prefix"])
def test_chunks_of_queries_change_nothing_on_the_gpu(case):
    *arrays, ids, segments = case.arrays()
    whole = jax.jit(loss(case, ids, segments, "mosaic_gpu"))(*arrays)
    jax.clear_caches()
    with mock.patch.object(tuning, "DIFFERENCE_BYTES", 1 << 20), mock.patch.object(mosaic_gpu.attention.tuning, "BUDGET_BYTES", 1 << 21):
        parts = jax.jit(loss(case, ids, segments, "mosaic_gpu"))(*arrays)
    for one, many in zip(jax.tree.leaves(whole), jax.tree.leaves(parts), strict=True):
        assert error_ratio(many, one) <= 2e-3  # the gradients are bfloat16


@pytest.mark.gpu
@pytest.mark.parametrize("name", ["kept", "kept_documents", "kept_wide_index"])
def test_student_log_sum_exp_on_the_gpu(name):
    case = SIMULATED[name]
    iq, ik, _, _, ids, segments = case.arrays()
    layout = layout_of(case, segments)
    got = np.asarray(kept_log_sum_exp(iq, ik, ids, layout, block_size=case.C, scale=0.125))
    want = np.asarray(student_reference(iq, ik, ids, layout, case))
    np.testing.assert_array_equal(np.isinf(got), np.isinf(want))
    np.testing.assert_allclose(got, want, atol=2e-5)


def far_end(T: int, implementation: str) -> tuple[list, list]:
    """Value and gradients where only the last 64 of T queries count, and those of the 256 keys that these keep: they must be equal."""
    K, G, H, C = 2, 16, 128, 128
    dtype = jnp.bfloat16 if implementation == "mosaic_gpu" else jnp.float32
    keys = jax.random.split(jax.random.key(1), 4)
    sizes = ((T, K, H), (T, H), (T, K * G, H), (T, K, H))
    iq, ik, q, k = (jax.random.normal(key, (1, *size), dtype) for key, size in zip(keys, sizes, strict=True))
    own_T = jnp.arange(T, dtype=jnp.int32) // C
    ids = jnp.broadcast_to(jnp.stack([jnp.where(own_T > 0, 0, -1), own_T], axis=-1), (1, K, T, 2))
    weights = (jnp.arange(T) >= T - 64)[None].astype(jnp.float32)

    def run(iq, ik, q, k, ids, weights, implementation):
        def value(iq, ik):
            return index_kl(iq, ik, q, k, ids, block_size=C, weights_BT=weights, implementation=implementation)

        value, (diq, dik) = jax.jit(jax.value_and_grad(value, argnums=(0, 1)))(iq, ik)
        return [value, diq[:, -64:], dik[:, :C], dik[:, -C:]]

    got = run(iq, ik, q, k, ids, weights, implementation)
    ends = (jnp.concatenate([x[:, :C], x[:, -C:]], axis=1).astype(jnp.float32) for x in (ik, k))
    ik, k = ends
    last = (x[:, -64:].astype(jnp.float32) for x in (iq, q))
    iq, q = last
    ids = jnp.broadcast_to(jnp.arange(2, dtype=jnp.int32), (1, K, 64, 2))
    return got, run(iq, ik, q, k, ids, weights[:, -64:], "reference")


def test_far_end_of_a_thousand_tokens():
    for got, want in zip(*far_end(1024, "xla"), strict=True):
        assert error_ratio(got, want) < 1e-5


@pytest.mark.gpu
def test_far_end_of_a_million_tokens_on_the_gpu():
    """q has 2^32 elements: an offset of 32 bits would read other queries."""
    for got, want in zip(*far_end(1 << 20, "mosaic_gpu"), strict=True):
        assert error_ratio(got, want) <= LIMIT


def layout_of(case: Case, segments):
    return make_layout(case.T, case.S or case.T, case.B, segments, None, case.offset)


def student_reference(iq, ik, ids, layout, case: Case) -> jax.Array:
    s_BKTS = jnp.einsum("btki,bsi->bkts", iq.astype(jnp.float32), ik.astype(jnp.float32), precision="highest") * 0.125
    return jax.nn.logsumexp(jnp.where(support(ids, layout, case.C, case.K), s_BKTS, -jnp.inf), axis=-1)


def simulated(case: Case) -> tuple:
    """Value and gradients from the simulator: kernel by kernel, since two in one program hang it."""
    from jax.experimental.pallas import mosaic_gpu as plgpu

    iq, ik, q, k, ids, segments = case.arrays()
    layout, options = layout_of(case, segments), case.options(segments)
    weights_BT = options["weights_BT"] / options["weights_BT"].sum()
    static = {"scale": case.H**-0.5, "index_scale": case.I**-0.5, "interpret": plgpu.InterpretGPUParams(detect_races=True)}
    if ids is None:
        return mosaic_gpu.full.__wrapped__(iq, ik, q, k, weights_BT, layout, **static)
    clean_k = jnp.nan_to_num(k).astype(jnp.float32)
    _, lse = attention.sparse_attention(q.astype(jnp.float32), clean_k, clean_k, ids, layout, block_size=case.C, scale=case.H**-0.5)
    return mosaic_gpu.sparse.__wrapped__(iq, ik, q, k, ids, lse, weights_BT, layout, block_size=case.C, **static)


if __name__ == "__main__":
    name = sys.argv[1]
    if name.startswith("compile:"):
        case = SERVED[name.removeprefix("compile:")]
        *arrays, ids, segments = case.arrays()
        mosaic_tools.compile_for_h200(loss(case, ids, segments, "mosaic_gpu"), *arrays)
    else:
        assert_close(simulated(SIMULATED[name]), SIMULATED[name])
