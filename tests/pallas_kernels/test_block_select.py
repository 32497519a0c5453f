"""block_select: the definition against loops, xla against the definition, and the rules that users rely on."""

import functools

import brute_force
import jax
import jax.numpy as jnp
import numpy as np
import pytest
from quick_jit import quick_jit

from pallas_kernels.block_select import xla
from pallas_kernels.block_select.api import block_select
from pallas_kernels.block_select.cases import CASES, inputs
from pallas_kernels.testing import Case, assert_close

BOTH = ("reference", "xla")
SMALL = [case for case in CASES if case.S < 100]
STATIC = ("block_size", "num_blocks", "local_blocks", "init_blocks", "implementation")
select = quick_jit(block_select, static_argnames=STATIC)


def arrays(case: Case) -> tuple[np.ndarray, np.ndarray, dict]:
    given = inputs(case)
    return given.pop("iq_BTKI"), given.pop("ik_BSI"), given


def expect(iq: jax.Array, ik: jax.Array, ids: object, **arguments: object) -> None:
    """Both implementations give these ids."""
    for implementation in BOTH:
        np.testing.assert_array_equal(select(iq, ik, **arguments, implementation=implementation).ids, ids, err_msg=implementation)


@pytest.mark.parametrize("case", SMALL, ids=lambda case: case.name)
def test_reference_is_the_definition(case: Case) -> None:
    iq, ik, layout = arrays(case)
    sizes = {"block_size": case.C, "num_blocks": case.R}
    ids, lse = brute_force.block_select(np.asarray(iq, np.float64), np.asarray(ik, np.float64), **sizes, **layout)
    sel = select(iq, ik, **sizes, **layout, implementation="reference")
    np.testing.assert_array_equal(sel.ids, ids)
    assert_close({"lse": sel.lse}, {"lse": lse}, 1e-6)


@pytest.mark.parametrize("case", CASES, ids=lambda case: case.name)
def test_xla_equals_the_reference(case: Case) -> None:
    iq, ik, layout = arrays(case)
    got, want = (select(iq, ik, block_size=case.C, num_blocks=case.R, **layout, implementation=name) for name in ("xla", "reference"))
    np.testing.assert_array_equal(got.ids, want.ids)
    assert_close({"lse": got.lse}, {"lse": want.lse}, 1e-6)
    assert got.ids.dtype == jnp.int32
    assert got.lse.dtype == jnp.float32


@pytest.mark.parametrize(("local_blocks", "init_blocks"), [(0, 0), (2, 0), (1, 1), (2, 2), (0, 3)])
def test_local_and_initial_blocks_are_always_kept(local_blocks: int, init_blocks: int) -> None:
    case = Case("options", T=43, S=43, R=4, layout="packed")
    iq, ik, layout = arrays(case)
    options = {"block_size": 4, "num_blocks": 4, "local_blocks": local_blocks, "init_blocks": init_blocks}
    expect(iq, ik, brute_force.block_select(np.asarray(iq), np.asarray(ik), **options, **layout)[0], **options, **layout)


def test_the_local_block_stands_last_and_no_block_twice() -> None:
    case = Case("order", T=43, S=43, R=3)
    iq, ik, _ = arrays(case)
    ids = np.asarray(select(iq, ik, block_size=4, num_blocks=3).ids)
    for t in range(43):
        rows = ids[:, :, t].reshape(-1, 3)
        kept = min(3, t // 4 + 1)
        assert (rows[:, kept - 1] == t // 4).all()
        assert (rows[:, kept:] == -1).all()
        assert all(len(set(row[:kept])) == kept and max(row) <= t // 4 for row in rows.tolist())


def test_equal_scores_go_to_the_lower_block() -> None:
    iq, ik = jnp.ones((1, 24, 1, 2)), jnp.ones((1, 24, 2))
    want = [[*range(min(t // 4, 2)), t // 4, -1, -1][:3] for t in range(24)]
    expect(iq, ik, [[want]], block_size=4, num_blocks=3)


def test_minus_zero_equals_zero() -> None:
    ik = jnp.repeat(jnp.array([-0.0, 0.0, -0.0, 0.0, -0.0, 0.0]), 2)[None, :, None]
    for sign in (1.0, -1.0):
        expect(jnp.full((1, 1, 1, 1), sign), ik, [[[[0, 1, 5]]]], block_size=2, num_blocks=3)


def test_infinite_scores_rank_by_their_sign() -> None:
    ik = jnp.array([1.0, 5.0, jnp.inf, 3.0, -jnp.inf, 2.0, 0.0])[None, :, None]
    expect(jnp.ones((1, 1, 1, 1)), ik, [[[[1, 2, 6]]]], block_size=1, num_blocks=3)
    expect(-jnp.ones((1, 1, 1, 1)), ik, [[[[0, 4, 6]]]], block_size=1, num_blocks=3)


def test_nan_scores_count_as_minus_infinity() -> None:
    nan = jnp.nan
    ik = jnp.array([nan, nan, nan, 1.0, -9.0, -9.0, 2.0, nan, 0.0, 0.0])[None, :, None]
    expect(jnp.ones((1, 1, 1, 1)), ik, [[[[1, 3, 4]]]], block_size=2, num_blocks=3)
    expect(jnp.ones((1, 1, 1, 1)), ik, [[[[0, 1, 2, 3, 4, -1]]]], block_size=2, num_blocks=6)
    for implementation in BOTH:
        all_kept = select(jnp.ones((1, 1, 1, 1)), ik, block_size=2, num_blocks=6, implementation=implementation)
        assert np.isnan(all_kept.lse).all(), "a kept NaN must be seen in lse"
        clean = select(jnp.ones((1, 1, 1, 1)), ik, block_size=2, num_blocks=2, implementation=implementation)
        assert np.isnan(clean.lse).all() == bool(np.isin(3, clean.ids))


@pytest.mark.parametrize("implementation", BOTH)
def test_nan_behind_padding_or_in_other_documents_does_not_matter(implementation: str) -> None:
    case = Case("poison", T=43, S=43, R=3, layout="packed with positions")
    iq, ik, layout = arrays(case)
    run = functools.partial(select, block_size=4, num_blocks=3, **layout, implementation=implementation)
    hidden_BS = layout["segments"] != 2
    poisoned = run(jnp.where(hidden_BS[..., None, None], jnp.nan, iq), jnp.where(hidden_BS[..., None], jnp.nan, ik))
    clean = run(iq, ik)
    shown = ~np.broadcast_to(hidden_BS[:, None], clean.lse.shape)
    np.testing.assert_array_equal(np.asarray(poisoned.ids)[shown], np.asarray(clean.ids)[shown])
    np.testing.assert_array_equal(np.asarray(poisoned.lse)[shown], np.asarray(clean.lse)[shown])


@pytest.mark.parametrize("implementation", BOTH)
def test_packed_documents_equal_separate_ones(implementation: str) -> None:
    case = Case("separate", T=39, S=39, B=1)
    iq, ik, _ = arrays(case)
    segments = np.repeat([1, 2, 3], 13)[None]
    packed = select(iq, ik, block_size=4, num_blocks=2, segments=segments, implementation=implementation)
    for start in (0, 13, 26):
        part = slice(start, start + 13)
        alone = select(iq[:, part], ik[:, part], block_size=4, num_blocks=2, implementation=implementation)
        np.testing.assert_array_equal(packed.ids[:, :, part], alone.ids)
        assert_close({"lse": packed.lse[:, :, part]}, {"lse": alone.lse}, 1e-6)


@pytest.mark.parametrize("implementation", BOTH)
@pytest.mark.parametrize("before", [1, 6])
def test_padding_changes_nothing(implementation: str, before: int) -> None:
    case = Case("padding", T=29, S=29, R=3)
    iq, ik, _ = arrays(case)
    padding = (before, 7 - before)
    segments = np.pad(np.ones((2, 29), np.int32), ((0, 0), padding))
    iq_padded, ik_padded = (jnp.pad(x, ((0, 0), padding) + ((0, 0),) * (x.ndim - 2), constant_values=9.0) for x in (iq, ik))
    padded = select(iq_padded, ik_padded, block_size=4, num_blocks=3, segments=segments, implementation=implementation)
    plain = select(iq, ik, block_size=4, num_blocks=3, implementation=implementation)
    inside = slice(before, before + 29)
    np.testing.assert_array_equal(padded.ids[:, :, inside], plain.ids)
    assert_close({"lse": padded.lse[:, :, inside]}, {"lse": plain.lse}, 1e-6)
    outside = np.delete(np.asarray(padded.ids), np.r_[inside], axis=2)
    assert (outside == -1).all()
    assert np.isneginf(np.delete(np.asarray(padded.lse), np.r_[inside], axis=2)).all()


@pytest.mark.parametrize("implementation", BOTH)
def test_future_keys_leave_the_result_bit_equal(implementation: str) -> None:
    case = Case("future", T=43, S=43, R=3)
    iq, ik, _ = arrays(case)
    before, after = (select(iq, x, block_size=4, num_blocks=3, implementation=implementation) for x in (ik, ik.at[:, 20:].add(100.0)))
    np.testing.assert_array_equal(before.ids[:, :, :20], after.ids[:, :, :20])
    np.testing.assert_array_equal(before.lse[:, :, :20], after.lse[:, :, :20])
    assert not np.array_equal(before.lse[:, :, 20:], after.lse[:, :, 20:])


def test_positions_count_blocks_where_they_say() -> None:
    """A document that continues an earlier one: its first key stands at position 6, the middle of block 1."""
    iq, ik = jnp.ones((1, 8, 1, 1)), jnp.arange(8.0)[None, :, None]
    positions = np.arange(6, 14)[None] % 8  # known blocks stay below ceil(S / C)
    want = [[1, -1], [1, -1], [0, -1], [0, -1], [0, -1], [0, -1], [0, 1], [0, 1]]
    sel = select(iq, ik, block_size=4, num_blocks=2, segments=np.repeat([1, 2], (2, 6))[None], positions=positions)
    np.testing.assert_array_equal(sel.ids[0, 0], want)


@pytest.mark.parametrize("scale", [-0.3, 0.0, 7.0])
def test_scale_may_be_any_number(scale: float) -> None:
    case = Case("scale", T=43, S=43, R=3, I=16)
    iq, ik, _ = arrays(case)
    sel = {name: block_select(iq, ik, block_size=4, num_blocks=3, scale=scale, implementation=name) for name in BOTH}
    np.testing.assert_array_equal(sel["xla"].ids, sel["reference"].ids)
    assert_close({"lse": sel["xla"].lse}, {"lse": sel["reference"].lse}, 1e-6)


def test_gradient_is_zero() -> None:
    case = Case("gradient", T=9, S=9)
    iq, ik, _ = arrays(case)
    for implementation in BOTH:
        run = functools.partial(block_select, block_size=4, num_blocks=2, implementation=implementation)
        gradients = quick_jit(jax.grad(lambda iq, ik: run(iq, ik).lse.sum(), argnums=(0, 1)))(iq, ik)
        assert all((gradient == 0).all() for gradient in gradients)


def test_half_precision_inputs_are_scored_in_float32() -> None:
    case = Case("half", T=43, S=43, R=3, I=16)
    for dtype in ("bfloat16", "float16"):
        iq, ik = (x.astype(dtype) for x in arrays(case)[:2])
        half = select(iq, ik, block_size=4, num_blocks=3, implementation="xla")
        full = select(iq.astype("float32"), ik.astype("float32"), block_size=4, num_blocks=3, implementation="xla")
        np.testing.assert_array_equal(half.ids, full.ids)
        assert_close({"lse": half.lse}, {"lse": full.lse}, 1e-6)


def test_one_program_serves_every_layout_of_a_shape() -> None:
    iq, ik = jnp.ones((1, 4, 1, 2)), jnp.ones((1, 31, 2))
    xla.block_select.clear_cache()
    for q_offset in (0, 5, 27):
        for last in (1, 2):
            segments = np.full((1, 31), last)
            block_select(iq, ik, block_size=4, num_blocks=2, q_offset=q_offset, segments=segments, implementation="xla")
    assert xla.block_select._cache_size() == 1


def test_memory_is_that_of_a_chunk() -> None:
    def extra(num_tokens: int) -> int:
        shapes = (jax.ShapeDtypeStruct((1, num_tokens, 2, 32), "float32"), jax.ShapeDtypeStruct((1, num_tokens, 32), "float32"))
        lowered = select.lower(*shapes, block_size=32, num_blocks=4, implementation="xla")
        return lowered.compile().memory_analysis().temp_size_in_bytes

    short, long = extra(2048), extra(8192)
    scores = 2 * 8192 * 8192 * 4
    print(f"extra memory {short / 2**20:.1f} MiB at T=2048, {long / 2**20:.1f} MiB at T=8192, all scores {scores / 2**20:.0f} MiB")
    assert long < 0.05 * scores
    assert long < 2 * short


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"block_size": 0}, r"block_select: S=8 with block_size=0; block_size must be >= 1"),
        ({"num_blocks": 0}, r"block_select: num_blocks=0; num_blocks must be an integer >= 1"),
        ({"local_blocks": 2, "init_blocks": 1}, r"local_blocks=2 \+ init_blocks=1 with num_blocks=2"),
        ({"positions": np.zeros((1, 8), int)}, r"positions without segments; pass segments too"),
        ({"segments": np.zeros((1, 7), int)}, r"segments has shape \(1, 7\).*\[B, S\] = \(1, 8\)"),
        ({"segments": np.zeros((1, 8))}, r"segments has .* float.* must be integers"),
        ({"q_offset": 1}, r"q_offset=1 with T=8, S=8; it must lie in 0\.\.S-T=0"),
        ({"q_offset": np.zeros(3, int)}, r"q_offset has shape \(3,\)"),
        ({"ik_BSI": jnp.ones((1, 8, 3))}, r"I=2 in iq_BTKI but I=3 in ik_BSI"),
        ({"ik_BSI": jnp.ones((1, 7, 2))}, r"T=8 queries with S=7 keys; T must lie in 1\.\.S"),
        ({"ik_BSI": jnp.ones((8, 2))}, r"ik_BSI has shape \(8, 2\); it must be \[B, S, I\]"),
        ({"iq_BTKI": jnp.ones((0, 8, 1, 2)), "ik_BSI": jnp.ones((0, 8, 2))}, r"B=0 in iq_BTKI of shape .*; every axis needs at least one"),
        ({"ik_BSI": jnp.ones((1, 8, 2), int)}, r"ik_BSI has dtype int32; it must be a floating type"),
        ({"implementation": "fast"}, r"implementation='fast'; choose one of auto, reference, xla, mosaic_gpu, triton"),
    ],
)
def test_errors_name_op_value_and_remedy(changes: dict, message: str) -> None:
    arguments = {"iq_BTKI": jnp.ones((1, 8, 1, 2)), "ik_BSI": jnp.ones((1, 8, 2)), "block_size": 4, "num_blocks": 2} | changes
    with pytest.raises(ValueError, match=message):
        block_select(**arguments)
