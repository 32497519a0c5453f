"""index_kl: the definition against loops and finite differences, xla against the definition, weights and what is constant."""

import functools
from collections.abc import Callable

import brute_force
import jax
import jax.numpy as jnp
import numpy as np
import pytest
from quick_jit import quick_jit
from slopes import slopes

from pallas_kernels.index_kl.api import index_kl
from pallas_kernels.index_kl.cases import CASES, inputs
from pallas_kernels.testing import Case, assert_close

SMALL = [case for case in CASES if case.S < 100]
WARM_UP = [case for case in CASES if case.name in ("one token", "R * C tokens", "gathered, packed", "chunks of queries, masked")]
# The reference and both views of the xla form, on a size that selects the view: S is at most 4 R C, or more.
FORMS = {
    "reference": ("reference", Case("masked", T=37, S=37, C=4, R=3)),
    "xla, masked": ("xla", Case("masked", T=37, S=37, C=4, R=3)),
    "xla, gathered": ("xla", Case("gathered", T=37, S=37, C=4, R=2)),
}
every_form = pytest.mark.parametrize("form", FORMS)
VECTORS = ("iq_BTKI", "ik_BSI", "q_BTNH", "k_BSKH")


def split(case: Case) -> tuple[tuple, jax.Array, dict]:
    """(iq, ik, q, k), ids and the other arguments."""
    given = inputs(case)
    return tuple(given.pop(name) for name in VECTORS), given.pop("ids_BKTR"), given


@functools.partial(quick_jit, static_argnames=("block_size", "implementation"))
def with_gradients(vectors: tuple, ids: jax.Array | None, **arguments: object) -> dict[str, jax.Array]:
    loss, gradients = jax.value_and_grad(lambda *vectors: index_kl(*vectors, ids, **arguments), argnums=(0, 1))(*vectors)
    return {"loss": loss} | dict(zip(("diq", "dik"), gradients, strict=True))


def start(form: str) -> tuple[tuple, jax.Array, Callable]:
    """(iq, ik, q, k), ids and `with_gradients` of a form; all calls of one form share a compiled program."""
    implementation, case = FORMS[form]
    vectors, ids, _ = split(case)

    def run(vectors: tuple, ids: jax.Array, weights: object = None, denominator: object = None, segments: object = None) -> dict:
        segments = np.ones((2, 37), np.int32) if segments is None else segments
        weights = (segments > 0).astype(np.float32) if weights is None else weights
        denominator = jnp.float32(weights.sum() if denominator is None else denominator)
        ids = jnp.broadcast_to(ids, (2, 2, 37, case.R)).astype(jnp.int32)
        options = {"block_size": case.C, "implementation": implementation}
        result = with_gradients(vectors, ids, weights_BT=weights, denominator=denominator, segments=segments, **options)
        return {name: np.asarray(x) for name, x in result.items()}

    return vectors, ids, run


@pytest.mark.parametrize("case", SMALL, ids=lambda case: case.name)
def test_reference_is_the_definition(case: Case) -> None:
    """The loss, and the gradient by its formula: dS = w (student - teacher) / (denominator K) on the support."""
    vectors, ids, layout = split(case)
    result = with_gradients(vectors, ids, block_size=case.C, implementation="reference", **layout)
    doubles = (np.asarray(x, np.float64) for x in vectors)
    loss, diq, dik = brute_force.index_kl(*doubles, np.asarray(ids), block_size=case.C, **layout)
    assert_close(result, {"loss": loss, "diq": diq, "dik": dik}, 2e-6)


@pytest.mark.parametrize("case", CASES, ids=lambda case: case.name)
def test_xla_equals_the_reference(case: Case) -> None:
    vectors, ids, layout = split(case)
    got, want = (with_gradients(vectors, ids, block_size=case.C, implementation=name, **layout) for name in ("xla", "reference"))
    assert_close(got, want, 3e-6)


@pytest.mark.parametrize("case", WARM_UP, ids=lambda case: case.name)
def test_warm_up_covers_the_whole_prefix(case: Case) -> None:
    vectors, _, layout = split(case)
    got, want = (with_gradients(vectors, None, block_size=case.C, implementation=name, **layout) for name in ("xla", "reference"))
    assert_close(got, want, 3e-6)
    if case in SMALL:
        doubles = (np.asarray(x, np.float64) for x in vectors)
        loss, diq, dik = brute_force.index_kl(*doubles, None, block_size=case.C, **layout)
        assert_close(got, {"loss": loss, "diq": diq, "dik": dik}, 3e-6)


@every_form
def test_gradients_are_those_of_finite_differences(form: str) -> None:
    implementation, case = FORMS[form]
    vectors, ids, _ = split(case)
    with jax.enable_x64(True):
        iq, ik, q, k = (jnp.asarray(np.asarray(x), jnp.float64) for x in vectors)
        numeric, exact = slopes(lambda iq, ik: index_kl(iq, ik, q, k, ids, block_size=case.C, implementation=implementation), iq, ik)
    assert numeric == pytest.approx(exact, rel=1e-7)


@every_form
def test_a_perfect_student_has_no_loss(form: str) -> None:
    """One head a group, and index vectors that are the main ones: both distributions are the same."""
    implementation, case = FORMS[form]
    case = case._replace(K=1, G=1, I=8)
    (_, _, q, k), ids, _ = split(case)
    perfect = with_gradients((q, k[:, :, 0], q, k), ids, block_size=case.C, implementation=implementation)
    assert abs(perfect["loss"]) < 1e-6
    assert all(np.abs(perfect[name]).max() < 1e-7 for name in ("diq", "dik"))
    wrong = with_gradients((-q, k[:, :, 0], q, k), ids, block_size=case.C, implementation=implementation)
    assert wrong["loss"] > 0.1


@pytest.mark.parametrize("implementation", ["reference", "xla"])
def test_all_but_the_index_vectors_is_constant(implementation: str) -> None:
    (iq, ik, *constants), ids, _ = split(FORMS["xla, masked"][1])
    constants = (*constants, jnp.ones((2, 37)), jnp.float32(3))

    def loss(q: jax.Array, k: jax.Array, weights: jax.Array, denominator: jax.Array) -> jax.Array:
        options = {"block_size": 4, "implementation": implementation, "weights_BT": weights, "denominator": denominator}
        return index_kl(iq, ik, q, k, ids, **options)

    assert all((gradient == 0).all() for gradient in quick_jit(jax.grad(loss, argnums=(0, 1, 2, 3)))(*constants))


@every_form
def test_weights_and_denominator(form: str) -> None:
    vectors, ids, run = start(form)
    weights = np.random.default_rng(0).random((2, 37)).astype(np.float32)
    weights[:, 5:9] = 0
    each = [run(vectors, ids, weights=np.eye(74, dtype=np.float32)[row].reshape(2, 37), denominator=1) for row in (3, 6, 50)]
    some = np.zeros(74, np.float32)
    some[[3, 6, 50]] = 2, 3, 4
    together = run(vectors, ids, weights=some.reshape(2, 37), denominator=10)
    parts = {name: (2 * each[0][name] + 3 * each[1][name] + 4 * each[2][name]) / 10 for name in together}
    assert_close(together, parts, 1e-6)
    normal, halved = run(vectors, ids, weights=weights), run(vectors, ids, weights=weights, denominator=2 * weights.sum())
    assert_close(halved, {name: x / 2 for name, x in normal.items()}, 1e-6)
    assert (normal["diq"][:, 5:9] == 0).all()
    nothing = run(vectors, ids, weights=0 * weights)
    assert all((x == 0).all() for x in nothing.values()), "no weight at all gives exactly nothing"


def test_default_weights_count_real_tokens() -> None:
    vectors, ids, run = start("xla, masked")
    segments = np.repeat([[0, 1, 2, 0]], 2, axis=0).repeat((3, 7, 7, 20), axis=1)
    options = {"block_size": 4, "segments": segments, "implementation": "xla"}
    default = with_gradients(vectors, ids, **options)
    assert_close(default, run(vectors, ids, weights=(segments > 0).astype(np.float32), denominator=28, segments=segments), 1e-6)


@every_form
def test_a_row_without_support_contributes_nothing(form: str) -> None:
    vectors, _, run = start(form)
    rows = np.arange(37) % 3 == 0
    ids = jnp.where(rows[:, None], jnp.array([-1, 11, 2**30])[: FORMS[form][1].R], 0)
    ones = np.ones((2, 37), np.float32)
    empty, left_out = run(vectors, ids, weights=ones), run(vectors, ids, weights=ones * ~rows, denominator=74)
    for name, value in empty.items():
        np.testing.assert_array_equal(value, left_out[name], err_msg=name)
    assert (empty["diq"][:, rows] == 0).all()


@every_form
def test_nan_outside_the_support_never_leaks(form: str) -> None:
    vectors, _, run = start(form)
    case = FORMS[form][1]
    segments = np.repeat([[0, 1, 0]], 2, axis=0).repeat((2, 33, 2), axis=1)
    ids = jnp.where(jnp.arange(37)[:, None] % 2, 1, 2 * jnp.arange(-1, case.R - 1))
    unused = (segments == 0) | ~np.isin((np.arange(37) - 2) // case.C, np.unique(np.asarray(ids)))
    clean = run(vectors, ids, segments=segments)
    for bad in (np.nan, np.inf):
        hide = [segments == 0, unused, segments == 0, unused]
        poisoned = tuple(jnp.where(where.reshape(2, 37, *[1] * (x.ndim - 2)), bad, x) for x, where in zip(vectors, hide, strict=True))
        for name, value in run(poisoned, ids, segments=segments).items():
            np.testing.assert_array_equal(value, clean[name], err_msg=name)


@every_form
def test_peaked_distributions_stay_finite(form: str) -> None:
    """Teacher and student logits of +-40 and beyond, where most probabilities underflow."""
    (iq, ik, q, k), ids, run = start(form)
    for teacher, student in ((30.0, 1.0), (1.0, 30.0), (30.0, 30.0)):
        result = run((iq * student, ik, q * teacher, k), ids)
        assert all(np.isfinite(x).all() for x in result.values())
        assert result["loss"] >= 0
    logits = np.einsum("btnh,bsnh->bnts", 30 * np.asarray(q[:, :, :2]), np.asarray(k)) / np.sqrt(8)
    assert np.abs(logits).max() > 40


@pytest.mark.parametrize("dtype", ["bfloat16", "float16"])
def test_half_precision_inputs_are_compared_in_float32(dtype: str) -> None:
    vectors, ids, run = start("xla, gathered")
    halves = tuple(x.astype(dtype) for x in vectors)
    half, full = run(halves, ids), run(tuple(x.astype("float32") for x in halves), ids)
    assert half["loss"].dtype == np.float32
    assert {str(half[name].dtype) for name in ("diq", "dik")} == {dtype}
    assert_close({"loss": half["loss"]}, {"loss": full["loss"]}, 1e-6)
    assert_close(half, full, 5e-3)


def test_memory_is_that_of_a_chunk() -> None:
    def extra(num_tokens: int, warm_up: bool) -> int:
        shapes = ((1, num_tokens, 2, 32), (1, num_tokens, 32), (1, num_tokens, 8, 32), (1, num_tokens, 2, 32))
        vectors = tuple(jax.ShapeDtypeStruct(shape, "float32") for shape in shapes)
        ids = None if warm_up else jax.ShapeDtypeStruct((1, 2, num_tokens, 4), "int32")
        compiled = with_gradients.lower(vectors, ids, block_size=32, implementation="xla").compile()
        return compiled.memory_analysis().temp_size_in_bytes

    scores = 8 * 8192 * 8192 * 4
    for warm_up in (False, True):
        size = extra(8192, warm_up)
        print(f"extra memory {size / 2**20:.1f} MiB at T=8192, warm-up {warm_up}, all scores {scores / 2**20:.0f} MiB")
        assert size < 0.03 * scores


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"block_size": 0}, r"index_kl: S=8 with block_size=0; block_size must be >= 1"),
        ({"q_BTNH": jnp.ones((1, 8, 3, 4))}, r"N=3 query heads with K=2 KV heads; N must be a multiple of K"),
        ({"iq_BTKI": jnp.ones((1, 8, 1, 4))}, r"K=1 in iq_BTKI but K=2 in k_BSKH"),
        ({"ids_BKTR": jnp.zeros((1, 2, 7, 2), int)}, r"T=8 in iq_BTKI but T=7 in ids_BKTR"),
        ({"ids_BKTR": jnp.zeros((1, 2, 8, 2))}, r"ids_BKTR has dtype float32; block ids are integers"),
        ({"weights_BT": jnp.ones((1, 7))}, r"weights_BT has shape \(1, 7\); it must be \[B, T\] = \(1, 8\)"),
        ({"denominator": jnp.ones(2)}, r"denominator has shape \(2,\); it must be one number"),
        ({"segments": jnp.ones((1, 8), int), "positions": jnp.ones((1, 9), int)}, r"index_kl: positions has shape \(1, 9\)"),
    ],
)
def test_errors_name_op_value_and_remedy(changes: dict, message: str) -> None:
    arguments = {
        "iq_BTKI": jnp.ones((1, 8, 2, 4)),
        "ik_BSI": jnp.ones((1, 8, 4)),
        "q_BTNH": jnp.ones((1, 8, 4, 4)),
        "k_BSKH": jnp.ones((1, 8, 2, 4)),
        "ids_BKTR": None,
        "block_size": 4,
    }
    with pytest.raises(ValueError, match=message):
        index_kl(**(arguments | changes))
