"""sparse_attention: the definition against loops and finite differences, xla against the definition, dense attention as oracle."""

import functools
from collections.abc import Callable

import brute_force
import jax
import jax.numpy as jnp
import numpy as np
import pytest
from quick_jit import quick_jit
from slopes import slopes

from pallas_kernels.sparse_attention import xla
from pallas_kernels.sparse_attention.api import sparse_attention
from pallas_kernels.sparse_attention.cases import CASES, inputs
from pallas_kernels.testing import Case, assert_close

SMALL = [case for case in CASES if case.S < 100]
# The reference and both views of the xla form, on a size that selects the view: S is at most 4 R C, or more.
FORMS = {
    "reference": ("reference", Case("masked", T=37, S=37, C=4, R=3)),
    "xla, masked": ("xla", Case("masked", T=37, S=37, C=4, R=3)),
    "xla, gathered": ("xla", Case("gathered", T=37, S=37, C=4, R=2)),
}
NO_SEGMENTS = np.ones((2, 37), np.int32)
every_form = pytest.mark.parametrize("form", FORMS)


def split(case: Case) -> tuple[tuple, jax.Array, dict]:
    """(q, k, v), ids and the other arguments."""
    given = inputs(case)
    return tuple(given.pop(name) for name in ("q_BTNH", "k_BSKH", "v_BSKH")), given.pop("ids_BKTR"), given


def wave(x: jax.Array) -> jax.Array:
    """A cotangent that differs everywhere."""
    return jnp.cos(jnp.arange(x.size).reshape(x.shape)).astype(x.dtype)


@functools.partial(quick_jit, static_argnames=("block_size", "implementation"))
def with_gradients(qkv: tuple, ids: jax.Array, **arguments: object) -> dict[str, jax.Array]:
    """Outputs and all gradients, with cotangents for out and lse."""
    (out, lse), pull = jax.vjp(lambda *qkv: sparse_attention(*qkv, ids, **arguments), *qkv)
    return {"out": out, "lse": lse} | dict(zip(("dq", "dk", "dv"), pull((wave(out), wave(lse))), strict=True))


def start(form: str) -> tuple[tuple, jax.Array, Callable]:
    """(q, k, v), ids and `with_gradients` of a form; all calls of one form share a compiled program."""
    implementation, case = FORMS[form]
    qkv, ids, _ = split(case)

    def run(qkv: tuple, ids: jax.Array, segments: np.ndarray = NO_SEGMENTS) -> dict[str, np.ndarray]:
        ids = jnp.broadcast_to(ids, (2, 2, 37, case.R)).astype(jnp.int32)
        result = with_gradients(qkv, ids, block_size=case.C, segments=segments, implementation=implementation)
        return {name: np.asarray(x) for name, x in result.items()}

    return qkv, ids, run


@pytest.mark.parametrize("case", SMALL, ids=lambda case: case.name)
def test_reference_is_the_definition(case: Case) -> None:
    qkv, ids, layout = split(case)
    result = with_gradients(qkv, ids, block_size=case.C, implementation="reference", **layout)
    doubles = (np.asarray(x, np.float64) for x in qkv)
    out, lse = brute_force.sparse_attention(*doubles, np.asarray(ids), block_size=case.C, **layout)
    assert_close({"out": result["out"], "lse": result["lse"]}, {"out": out, "lse": lse}, 1e-6)


@pytest.mark.parametrize("case", CASES, ids=lambda case: case.name)
def test_xla_equals_the_reference(case: Case) -> None:
    qkv, ids, layout = split(case)
    got, want = (with_gradients(qkv, ids, block_size=case.C, implementation=name, **layout) for name in ("xla", "reference"))
    assert_close(got, want, 3e-6)


@every_form
def test_gradients_are_those_of_finite_differences(form: str) -> None:
    implementation, case = FORMS[form]
    qkv, ids, _ = split(case)
    ids = ids.at[..., 0].set(0)  # no row is empty: an lse of -inf has no differences
    with jax.enable_x64(True):
        doubles = [jnp.asarray(np.asarray(x), jnp.float64) for x in qkv]

        def mixed(*qkv: jax.Array) -> jax.Array:
            out, lse = sparse_attention(*qkv, ids, block_size=case.C, implementation=implementation)
            return (out * wave(out)).sum() + (lse * wave(lse)).sum()

        numeric, exact = slopes(mixed, *doubles)
    assert numeric == pytest.approx(exact, rel=1e-7)


@pytest.fixture(scope="module")
def dense() -> Callable:
    def dense_attention(q: jax.Array, k: jax.Array, v: jax.Array, segments: jax.Array) -> dict[str, jax.Array]:
        mask = (segments[:, None, :, None] == segments[:, None, None, :]) & np.tri(33, dtype=bool)
        out, pull = jax.vjp(lambda *qkv: jax.nn.dot_product_attention(*qkv, mask=mask), q, k, v)
        return {"out": out} | dict(zip(("dq", "dk", "dv"), pull(wave(out)), strict=True))

    return quick_jit(dense_attention)


@pytest.mark.parametrize("implementation", ["reference", "xla"])
def test_with_all_blocks_it_is_dense_attention(implementation: str, dense: Callable) -> None:
    case = Case("oracle", T=33, S=33, K=2, G=3, H=16, width=16, R=9)
    qkv, _, _ = split(case)
    ids = jnp.broadcast_to(jnp.arange(9, dtype=jnp.int32), (2, 2, 33, 9))

    @quick_jit
    def sparse(q: jax.Array, k: jax.Array, v: jax.Array, segments: jax.Array) -> dict[str, jax.Array]:
        def attend(*qkv: jax.Array) -> jax.Array:
            return sparse_attention(*qkv, ids, block_size=4, segments=segments, implementation=implementation)[0]

        out, pull = jax.vjp(attend, q, k, v)
        return {"out": out} | dict(zip(("dq", "dk", "dv"), pull(wave(out)), strict=True))

    for lengths in ((33,), (10, 1, 22)):
        segments = np.repeat(np.arange(1, len(lengths) + 1), lengths)[None].repeat(2, axis=0)
        assert_close(sparse(*qkv, segments), dense(*qkv, segments), 2e-6)


@every_form
def test_nan_outside_the_support_never_leaks(form: str) -> None:
    """Keys that nobody keeps, padding keys and padding queries may hold NaN or infinity, forward and backward."""
    (q, k, v), ids, run = start(form)
    case = FORMS[form][1]
    segments = np.repeat([[0, 1, 0]], 2, axis=0).repeat((2, 33, 2), axis=1)
    ids = jnp.where(jnp.arange(37)[:, None] % 2, 1, 2 * jnp.arange(-1, case.R - 1))
    kept_blocks = np.unique(np.asarray(ids))
    unused = (segments == 0) | ~np.isin((np.arange(37) - 2) // case.C, kept_blocks)
    assert (unused & (segments > 0)).any()
    clean = run((q, k, v), ids, segments)
    for bad in (np.nan, np.inf):
        hidden_q = jnp.where((segments == 0)[..., None, None], bad, q)
        hidden_k, hidden_v = (jnp.where(unused[..., None, None], bad, x) for x in (k, v))
        for name, value in run((hidden_q, hidden_k, hidden_v), ids, segments).items():
            np.testing.assert_array_equal(value, clean[name], err_msg=name)


@every_form
def test_a_nan_in_the_support_reaches_its_rows_and_no_others(form: str) -> None:
    (q, k, v), _, run = start(form)
    size = FORMS[form][1].C
    ids = jnp.arange(37)[:, None] % 2
    clean, faulty = run((q, k, v), ids), run((q, k.at[:, size + 1].set(jnp.nan), v), ids)  # a key of block 1
    hit = (np.arange(37) % 2 == 1) & (np.arange(37) > size)
    assert np.isnan(faulty["out"][:, hit]).all()
    assert np.isnan(faulty["lse"][:, hit]).all()
    for name in ("out", "lse", "dq"):
        np.testing.assert_array_equal(faulty[name][:, ~hit], clean[name][:, ~hit], err_msg=name)
    for name in ("dk", "dv"):
        np.testing.assert_array_equal(faulty[name][:, 2 * size :], clean[name][:, 2 * size :], err_msg=name)


@every_form
def test_a_row_without_valid_ids_is_empty(form: str) -> None:
    qkv, _, run = start(form)
    ids = jnp.where(jnp.arange(37)[:, None] % 3 == 0, jnp.array([-1, 11, 2**30])[: FORMS[form][1].R], 0)
    result = run(qkv, ids)
    empty = np.arange(37) % 3 == 0
    assert all((result[name][:, empty] == 0).all() for name in ("out", "dq"))
    assert np.isneginf(result["lse"][:, empty]).all()
    assert np.isfinite(result["lse"][:, ~empty]).all()
    assert all(np.isfinite(result[name]).all() for name in ("out", "dq", "dk", "dv"))


@every_form
def test_invalid_and_repeated_ids_count_for_nothing(form: str) -> None:
    qkv, _, run = start(form)
    case = FORMS[form][1]
    own = jnp.arange(37, dtype=jnp.int32)[:, None] // case.C
    rest = [jnp.full_like(own, -1)] * (case.R - 2)
    clean = run(qkv, jnp.concatenate([own, jnp.full_like(own, -1), *rest], axis=-1))
    for junk in (own, own + 1, *(jnp.full_like(own, far) for far in (-5, 2**30, 2**31 - 1, -(2**31)))):  # 2^30 C is 0 in 32 bits
        assert_close(run(qkv, jnp.concatenate([junk, own, *rest], axis=-1)), clean, 1e-7)


@every_form
def test_future_keys_leave_the_result_bit_equal(form: str) -> None:
    (q, k, v), ids, run = start(form)
    before, after = run((q, k, v), ids), run((q, k.at[:, 10:].add(50.0), v.at[:, 10:].multiply(-2.0)), ids)
    for name in ("out", "lse", "dq"):
        np.testing.assert_array_equal(before[name][:, :10], after[name][:, :10], err_msg=name)
        assert not np.array_equal(before[name][:, 10:], after[name][:, 10:])


@every_form
def test_packed_documents_equal_separate_ones_and_padding_changes_nothing(form: str) -> None:
    """[pad, 7 tokens, 7 tokens, pad] in one row gives what 7 and 7 tokens give alone."""
    implementation, case = FORMS[form]
    qkv, ids, run = start(form)
    segments = np.repeat([[0, 3, 1, 0]], 2, axis=0).repeat((3, 7, 7, 20), axis=1)
    packed = run(qkv, ids, segments)
    for part in (slice(3, 10), slice(10, 17)):
        seven = tuple(x[:, part] for x in qkv)
        alone = with_gradients(seven, ids[:, :, part], block_size=case.C, implementation=implementation)
        names = ("out", "lse")
        assert_close({name: packed[name][:, part] for name in names}, {name: alone[name] for name in names}, 1e-6)


@pytest.mark.parametrize(("form", "dtype"), [("xla, masked", "bfloat16"), ("xla, gathered", "bfloat16"), ("xla, masked", "float16")])
def test_half_precision_accumulates_in_float32(form: str, dtype: str) -> None:
    qkv, ids, run = start(form)
    halves = tuple(x.astype(dtype) for x in qkv)
    half, full = run(halves, ids), run(tuple(x.astype("float32") for x in halves), ids)
    assert {name: value.dtype for name, value in half.items()} == dict.fromkeys(("out", "dq", "dk", "dv"), dtype) | {"lse": "float32"}
    assert_close(half, full, 5e-3)


def test_the_gradient_keeps_inputs_and_results_only() -> None:
    qkv, ids, _ = split(Case("kept", T=64, S=64, R=4))
    results, pull = jax.vjp(lambda *qkv: sparse_attention(*qkv, ids, block_size=4, implementation="xla"), *qkv)
    kept = sum(x.nbytes for x in jax.tree.leaves(pull))
    layout = 5 * 2 * 64 * 4  # five numbers for each token
    assert kept <= sum(x.nbytes for x in (*qkv, ids, *results)) + layout


def test_memory_is_that_of_a_chunk() -> None:
    def extra(num_tokens: int) -> tuple[int, int]:
        sizes = {"q": (1, num_tokens, 8, 32), "k": (1, num_tokens, 2, 32), "v": (1, num_tokens, 2, 32)}
        qkv = tuple(jax.ShapeDtypeStruct(shape, "float32") for shape in sizes.values())
        ids = jax.ShapeDtypeStruct((1, 2, num_tokens, 4), "int32")
        compiled = with_gradients.lower(qkv, ids, block_size=32, implementation="xla").compile()
        return compiled.memory_analysis().temp_size_in_bytes, sum(4 * x.size for x in (*qkv, ids))

    (short, short_inputs), (long, long_inputs) = extra(2048), extra(8192)
    scores = 8 * 8192 * 8192 * 4
    print(f"extra memory {short / 2**20:.1f} MiB at T=2048, {long / 2**20:.1f} MiB at T=8192, all scores {scores / 2**20:.0f} MiB")
    assert long < 0.05 * scores
    assert long - short < 4 * (long_inputs - short_inputs), "beyond one chunk, only arrays of the inputs' size may grow"


def test_one_program_serves_every_layout_of_a_shape() -> None:
    qkv = (jnp.ones((1, 3, 2, 4)), jnp.ones((1, 31, 1, 4)), jnp.ones((1, 31, 1, 4)))
    ids = jnp.zeros((1, 1, 3, 2), jnp.int32)
    xla.forward.clear_cache()
    for q_offset in (0, 5, 28):
        for last in (1, 2):
            segments = np.full((1, 31), last)
            sparse_attention(*qkv, ids, block_size=4, q_offset=q_offset, segments=segments, implementation="xla")
    assert xla.forward._cache_size() == 1


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"block_size": 0}, r"sparse_attention: S=8 with block_size=0; block_size must be >= 1"),
        ({"q_BTNH": jnp.ones((1, 8, 3, 4))}, r"N=3 query heads with K=2 KV heads; N must be a multiple of K"),
        ({"ids_BKTR": jnp.zeros((1, 1, 8, 2), int)}, r"K=2 in k_BSKH but K=1 in ids_BKTR"),
        ({"ids_BKTR": jnp.zeros((1, 2, 7, 2), int)}, r"T=8 in q_BTNH but T=7 in ids_BKTR"),
        ({"ids_BKTR": jnp.zeros((1, 2, 8, 2))}, r"ids_BKTR has dtype float32; block ids are integers"),
        ({"ids_BKTR": jnp.zeros((1, 2, 8, 0), int)}, r"R=0 in ids_BKTR of shape \(1, 2, 8, 0\); every axis needs at least one"),
        ({"v_BSKH": jnp.ones((1, 7, 2, 4))}, r"v_BSKH has shape \(1, 7, 2, 4\).*with \[B, S, K\] = \(1, 8, 2\)"),
        ({"v_BSKH": jnp.ones((1, 8, 4))}, r"v_BSKH has shape \(1, 8, 4\); it must be \[B, S, K, any width\]"),
        ({"k_BSKH": jnp.ones((1, 8, 2, 5))}, r"H=4 in q_BTNH but H=5 in k_BSKH"),
        ({"positions": np.zeros((1, 8), int)}, r"sparse_attention: positions without segments"),
    ],
)
def test_errors_name_op_value_and_remedy(changes: dict, message: str) -> None:
    arguments = {
        "q_BTNH": jnp.ones((1, 8, 4, 4)),
        "k_BSKH": jnp.ones((1, 8, 2, 4)),
        "v_BSKH": jnp.ones((1, 8, 2, 4)),
        "ids_BKTR": jnp.zeros((1, 2, 8, 2), int),
        "block_size": 4,
    }
    with pytest.raises(ValueError, match=message):
        sparse_attention(**(arguments | changes))
