"""The mixture of experts against a loop over its experts, token choices that are worked out by hand, and every transformation."""

import dataclasses
import functools
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx

from msa_jax.config import ConfigError, ModelConfig, MoeConfig, MsaConfig
from msa_jax.model.groups import decays, path_names
from msa_jax.model.hybrid import HybridTransformer
from msa_jax.model.moe import MixtureOfExperts
from msa_jax.model.stack import scan_modules, stack_modules

QUICK = {"xla_backend_optimization_level": 0}  # compiles in half the time
CONFIG = MoeConfig(num_experts=5, experts_per_token=2, expert_dim=12, shared_dim=8, routed_scale=2.0)
SEGMENTS_BT = np.array([[1, 1, 1, 2, 2, 0, 0], [0, 1, 1, 1, 1, 1, 0]], np.int32)
X_BTD = np.random.default_rng(1).normal(size=(2, 7, 6)).astype(np.float32)


def described(config: MoeConfig = CONFIG, **options: Any) -> Callable[[], MixtureOfExperts]:
    return lambda: MixtureOfExperts(6, config, rngs=nnx.Rngs(0), **options)


def by_definition(
    moe: MixtureOfExperts, x_BTD: jax.Array, segments_BT: jax.Array, limit: float | None = None
) -> tuple[jax.Array, jax.Array]:
    """Every expert sees every token; the weight of those that were not chosen is zero."""
    config = moe.router.config
    affinity_BTO = 1 / (1 + jnp.exp(-jnp.einsum("btd,do->bto", x_BTD, moe.router.kernel[...])))
    rank_BTO = jnp.argsort(jnp.argsort(-(affinity_BTO + moe.router.bias[...]), axis=-1), axis=-1)
    chosen_BTO = rank_BTO < config.experts_per_token
    weight_BTO = jnp.where(chosen_BTO, affinity_BTO, 0)
    weight_BTO = config.routed_scale * weight_BTO / weight_BTO.sum(-1, keepdims=True)

    def swiglu(gate: jax.Array, up: jax.Array, down: jax.Array) -> jax.Array:
        g, u = x_BTD @ gate, x_BTD @ up
        if limit is not None:
            g, u = jnp.minimum(g, limit), jnp.clip(u, -limit, limit) + 1
        return (g / (1 + jnp.exp(-(1 if limit is None else 1.702) * g)) * u) @ down

    y_BTD = jnp.zeros_like(x_BTD)
    for o in range(config.num_experts):
        matrices = (getattr(moe.experts, name).kernel[...][o] for name in ("gate", "up", "down"))
        y_BTD += weight_BTO[..., o, None] * swiglu(*matrices)
    if moe.shared is not None:
        y_BTD += swiglu(*(getattr(moe.shared, name).kernel[...] for name in ("gate", "up", "down")))
    return y_BTD, (chosen_BTO & (segments_BT > 0)[..., None]).sum((0, 1))


def results(call: Callable, moe: MixtureOfExperts, x_BTD: np.ndarray = X_BTD) -> dict[str, Any]:
    """Output, load, and the gradients of a weighted sum of the output with respect to everything."""
    graphdef, params = nnx.split(moe)
    cotangent = jnp.cos(jnp.arange(x_BTD.size, dtype=jnp.float32)).reshape(x_BTD.shape)

    @functools.partial(jax.jit, compiler_options=QUICK)
    def compute(params: nnx.State, x_BTD: jax.Array) -> Any:
        def loss(params: nnx.State, x_BTD: jax.Array) -> tuple[jax.Array, Any]:
            y_BTD, load_O = call(nnx.merge(graphdef, params), x_BTD, SEGMENTS_BT)
            return (y_BTD * cotangent).sum(), (y_BTD, load_O)

        return jax.value_and_grad(loss, (0, 1), has_aux=True)(params, x_BTD)

    (_, (y_BTD, load_O)), (params_gradient, x_gradient) = compute(params, x_BTD)
    return {"y": y_BTD, "load": load_O, "params": params_gradient, "x": x_gradient}


def call_directly(moe: MixtureOfExperts, x_BTD: jax.Array, segments_BT: jax.Array) -> tuple[jax.Array, jax.Array]:
    return moe(x_BTD, segments_BT)


@pytest.mark.parametrize(
    "config",
    [
        CONFIG,
        dataclasses.replace(CONFIG, shared_dim=0, routed_scale=1.0, experts_per_token=3),
        dataclasses.replace(CONFIG, experts_per_token=5),
    ],
    ids=["two of five and shared", "three of five", "all"],
)
def test_equals_a_loop_over_the_experts(filled: Callable, assert_close: Callable, config: MoeConfig) -> None:
    """Output, load and every gradient, among them exact zeros for the selection bias."""
    moe = filled(described(config))
    ours, theirs = results(call_directly, moe), results(by_definition, moe)
    assert_close(ours, theirs)
    assert not ours["params"]["router"]["bias"][...].any()
    assert ours["load"].dtype == jnp.int32
    assert ours["load"].sum() == (SEGMENTS_BT > 0).sum() * config.experts_per_token


def test_clamped_experts(filled: Callable, assert_close: Callable) -> None:
    moe = filled(described(limit=0.5))
    assert_close(results(call_directly, moe), results(functools.partial(by_definition, limit=0.5), moe))


def test_no_token_is_dropped_when_all_choose_the_same_experts(filled: Callable, assert_close: Callable) -> None:
    moe = filled(described())
    moe.router.bias[...] = jnp.array([0.0, 9.0, 0.0, 0.0, 9.0])
    ours = results(call_directly, moe)
    np.testing.assert_array_equal(ours["load"], (SEGMENTS_BT > 0).sum() * np.array([0, 1, 0, 0, 1]))
    assert_close(ours, results(by_definition, moe))
    gate_ODF = np.asarray(ours["params"]["experts"]["gate"]["kernel"][...])
    assert [bool(gate.any()) for gate in gate_ODF] == [False, True, False, False, True]


def test_the_bias_chooses_and_does_not_weigh(filled: Callable) -> None:
    """The same amount on every expert changes no bit; a preference changes who is chosen, and weights still add up to the scale."""
    moe = filled(described())
    moe.router.bias[...] = jnp.zeros(5)
    chosen_TQ, weight_TQ = moe.router(X_BTD[0])
    moe.router.bias[...] = jnp.full(5, 0.5)
    for before, after in zip((chosen_TQ, weight_TQ), moe.router(X_BTD[0]), strict=True):
        np.testing.assert_array_equal(before, after)
    moe.router.bias[...] = jnp.array([0.0, 0.0, 2.0, 0.0, 0.0])
    chosen_TQ, weight_TQ = moe.router(X_BTD[0])
    assert (chosen_TQ[:, 0] == 2).all()
    affinity_TO = jax.nn.sigmoid(X_BTD[0] @ moe.router.kernel[...])
    pair_TQ = np.take_along_axis(np.asarray(affinity_TO), np.asarray(chosen_TQ), 1)
    np.testing.assert_allclose(weight_TQ, 2 * pair_TQ / pair_TQ.sum(1, keepdims=True), rtol=1e-5)
    np.testing.assert_allclose(weight_TQ.sum(1), 2.0, rtol=1e-6)


def test_affinities_that_underflow_stay_finite(filled: Callable) -> None:
    moe = filled(described())
    moe.router.kernel[...] = jnp.full((6, 5), -100.0)
    for part in jax.tree.leaves(results(call_directly, moe, np.ones_like(X_BTD))):
        assert np.isfinite(part).all()


def test_padding_does_not_count_and_no_token_sees_another(filled: Callable) -> None:
    moe = filled(described())
    y_BTD, load_O = call_directly(moe, X_BTD, SEGMENTS_BT)
    disturbed = np.where((SEGMENTS_BT > 0)[..., None], X_BTD, 7.0).astype(np.float32)
    other_BTD, other_O = call_directly(moe, disturbed, SEGMENTS_BT)
    np.testing.assert_array_equal(load_O, other_O)
    np.testing.assert_allclose(y_BTD[SEGMENTS_BT > 0], other_BTD[SEGMENTS_BT > 0], rtol=1e-5, atol=1e-6)
    _, everything_O = moe(X_BTD)
    assert everything_O.sum() == 2 * SEGMENTS_BT.size > load_O.sum()


@pytest.mark.parametrize("remat", [False, True])
def test_scan_and_remat_keep_the_load_and_every_gradient(filled: Callable, assert_close: Callable, remat: bool) -> None:
    """Two layers in one scan against the same two one after the other, by definition."""
    stacked = filled(lambda: stack_modules(lambda rngs: MixtureOfExperts(6, CONFIG, rngs=rngs), jax.random.key(0), np.arange(2)))

    def scanned(module: Any, x_BTD: jax.Array, segments_BT: jax.Array) -> tuple[jax.Array, jax.Array]:
        return scan_modules(lambda layer, x_BTD: layer(x_BTD, segments_BT), module, x_BTD, remat=remat)

    def looped(module: Any, x_BTD: jax.Array, segments_BT: jax.Array) -> tuple[jax.Array, jax.Array]:
        graphdef, params = nnx.split(module)
        loads = []
        for i in range(2):
            x_BTD, load_O = by_definition(nnx.merge(graphdef, jax.tree.map(lambda leaf: leaf[i], params)), x_BTD, segments_BT)
            loads.append(load_O)
        return x_BTD, jnp.stack(loads)

    assert_close(results(scanned, stacked), results(looped, stacked))


def test_vmap_over_models_equals_each_alone(filled: Callable, assert_close: Callable) -> None:
    """Forward and gradient, as seeds side by side need them."""
    models = [filled(described(), seed) for seed in range(2)]
    graphdef = nnx.split(models[0])[0]

    def gradient(params: nnx.State) -> Any:
        def loss(params: nnx.State) -> tuple[jax.Array, jax.Array]:
            y_BTD, load_O = nnx.merge(graphdef, params)(X_BTD, SEGMENTS_BT)
            return jnp.square(y_BTD).sum(), load_O

        return jax.value_and_grad(loss, has_aux=True)(params)

    one, params = jax.jit(gradient, compiler_options=QUICK), [nnx.state(model) for model in models]
    together = jax.jit(jax.vmap(gradient), compiler_options=QUICK)(jax.tree.map(lambda *leaves: jnp.stack(leaves), *params))
    alone = jax.tree.map(lambda *leaves: jnp.stack(leaves), *(one(each) for each in params))
    assert_close(together, alone)


def test_compute_dtype_leaves_weights_and_routing_float32(filled: Callable) -> None:
    graphdef, params = nnx.split(filled(described(dtype=jnp.bfloat16)))
    x_BTD = jnp.asarray(X_BTD, jnp.bfloat16)
    y_BTD, load_O = jax.jit(lambda params: nnx.merge(graphdef, params)(x_BTD, SEGMENTS_BT))(params)
    assert y_BTD.dtype == jnp.bfloat16
    assert {leaf.dtype for leaf in jax.tree.leaves(params)} == {jnp.dtype("float32")}
    exact = filled(described())
    wide_BTD, wide_O = call_directly(exact, x_BTD.astype(jnp.float32), SEGMENTS_BT)
    np.testing.assert_array_equal(load_O, wide_O)
    assert np.linalg.norm(y_BTD - wide_BTD) < 0.02 * np.linalg.norm(wide_BTD)


def test_experts_start_apart_and_at_the_scale_of_a_dense_mlp() -> None:
    """Fan-in is an expert's own, not that of all experts together."""
    moe = MixtureOfExperts(64, MoeConfig(8, 2, 32, shared_dim=32), rngs=nnx.Rngs(0), output_scale=0.5)
    gate_ODF, down_OFD = moe.experts.gate.kernel[...], moe.experts.down.kernel[...]
    np.testing.assert_allclose(gate_ODF.std((1, 2)), 64**-0.5, rtol=0.1)
    np.testing.assert_allclose(down_OFD.std((1, 2)), 0.5 * 32**-0.5, rtol=0.1)
    assert len({float(gate[0, 0]) for gate in gate_ODF}) == 8
    assert not moe.router.bias[...].any()


# --- in the model -----------------------------------------------------------------------------------------------------

ATTENTION = MsaConfig(d_model=32, num_heads=4, num_kv_heads=2, head_dim=8, index_dim=8, block_size=4, num_blocks=2)
MODEL = ModelConfig(ATTENTION, vocab_size=64, num_layers=3, pattern="D", mlp_dim=48, moe=MoeConfig(4, 2, 16, shared_dim=16, dense_layers=1))


def test_layers_without_experts_have_a_load_of_zero(filled: Callable, pack: Callable, assert_close: Callable) -> None:
    """The first of three layers keeps its MLP: what each returns alone is what the model returns for it."""
    model = filled(lambda: HybridTransformer(MODEL, rngs=nnx.Rngs(0)))
    batch = pack([[np.arange(11), np.arange(9)], [np.arange(7)]], 24)
    output = nnx.jit(lambda model: model(batch, trace=True))(model)
    np.testing.assert_array_equal(output.load_XO.sum(1), np.array([0, 2, 2]) * 27)
    through = nnx.jit(lambda block, x: block(x, batch.segments_BT, batch.positions_BT))
    x_BTD = model.embed(batch)
    for depth in range(3):
        block = model.block(depth)
        assert isinstance(block.mlp, MixtureOfExperts) == (depth >= 1)
        x_BTD, _, load_O = through(block, x_BTD)
        assert (load_O is None) == (depth == 0)
        if depth:
            np.testing.assert_array_equal(load_O, output.load_XO[depth])
    assert_close(output.logits_BTE, model.logits(x_BTD))


def test_what_decays() -> None:
    params = nnx.state(nnx.eval_shape(lambda: HybridTransformer(MODEL, rngs=nnx.Rngs(0))))
    names = {
        ".".join(path_names(path)[4:]): decays(path) for path, _ in jax.tree_util.tree_leaves_with_path(params) if "mlp" in path_names(path)
    }
    assert names == dict.fromkeys(names, True) | {"router.bias": False}
    assert {"router.kernel", "experts.up.kernel", "shared.up.kernel", "up.kernel"} < set(names)


@pytest.mark.parametrize(
    ("make", "message"),
    [
        (lambda: MoeConfig(4, 5, 8), r"experts_per_token=5 must lie in \[2, num_experts=4\]"),
        (lambda: MoeConfig(4, 1, 8), "with a single expert the router would never learn"),
        (lambda: MoeConfig(4, 2, 8, shared_dim=-1), "MoeConfig.shared_dim=-1; it must be >= 0"),
        (lambda: MoeConfig(4, 2, 8, routed_scale=0.0), "MoeConfig.routed_scale=0.0; it must be > 0"),
        (lambda: dataclasses.replace(MODEL, moe=MoeConfig(4, 2, 8, dense_layers=3)), "dense_layers=3 leaves none of num_layers=3"),
    ],
)
def test_what_cannot_work_is_refused(make: Callable, message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        make()
