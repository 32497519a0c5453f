"""Optimisers by group, on trees small enough to follow by hand; the names are those of the real model."""

import dataclasses
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest

from msa_jax.config import ConfigError, Experiment, GroupConfig, OptimConfig
from msa_jax.model.groups import decays, matrix_axes, path_names
from msa_jax.train.optim import group_labels, group_norms, make_optimizer, weight_average
from msa_jax.train.state import abstract_model
from msa_jax.train.step import parameter_names

PARAMS = {  # norms and biases of stacked layers are matrices too
    "embedding": jnp.full((3, 2), 0.5),
    "layers": {"attention": {"index": {"kernel": jnp.ones((2, 2))}, "main": {"kernel": jnp.ones((2, 2)), "norm": {"w": jnp.ones((2, 1))}}}},
    "vision": {"up": {"kernel": jnp.ones((2, 2)), "bias": jnp.ones((2, 1))}},
}
PLAIN = OptimConfig(learning_rate=0.1, warmup_steps=0, decay_fraction=0.0)


def step(config: OptimConfig, gradients: Any, params: Any = PARAMS) -> Any:
    tx = make_optimizer(config, 10, params)
    updates, _ = jax.jit(tx.update)(gradients, tx.init(params), params)
    return jax.device_get(updates)


def scaled(factor: float, tree: Any = PARAMS) -> Any:
    return jax.tree.map(lambda leaf: jnp.full_like(leaf, factor), tree)


def test_every_parameter_of_the_model_has_its_group(experiment: Experiment) -> None:
    params = abstract_model(experiment.model)[1]
    labels = dict(zip(parameter_names(params), jax.tree.leaves(group_labels(params)), strict=True))
    assert labels["embedding"] == labels["norm.w"] == labels["layers.0.0.mlp.up.kernel"] == labels["layers.0.0.attention.main.q.norm.w"]
    assert {name for name, label in labels.items() if label == "index"} == {
        f"layers.0.0.attention.index.{side}.{part}" for side in "qk" for part in ("linear.kernel", "norm.w")
    }
    assert {label for name, label in labels.items() if name.startswith("vision")} == {"vision"}


def test_only_projections_decay(experiment: Experiment) -> None:
    paths = [path for path, _ in jax.tree_util.tree_flatten_with_path(abstract_model(experiment.model)[1])[0]]
    names = parameter_names(abstract_model(experiment.model)[1])
    assert {name for name, path in zip(names, paths, strict=True) if decays(path)} == {name for name in names if name.endswith("kernel")}
    updates = step(PLAIN, scaled(0.0))  # with zero gradients only what decays moves
    moved = {".".join(path_names(path)) for path, leaf in jax.tree_util.tree_flatten_with_path(updates)[0] if leaf.any()}
    assert moved == {"layers.attention.index.kernel", "layers.attention.main.kernel", "vision.up.kernel"}
    np.testing.assert_allclose(updates["vision"]["up"]["kernel"], -0.1 * 0.1 * np.ones((2, 2)), rtol=1e-6)


def test_groups_have_their_own_weight_decay_and_rate() -> None:
    config = OptimConfig(
        learning_rate=0.1, warmup_steps=0, decay_fraction=0.0, trunk=GroupConfig(weight_decay=0.0),
        index=GroupConfig(weight_decay=0.2), vision=GroupConfig(weight_decay=0.2, learning_rate_scale=3.0),
    )  # fmt: skip
    updates = step(config, scaled(0.0))
    assert not updates["layers"]["attention"]["main"]["kernel"].any()
    np.testing.assert_allclose(updates["layers"]["attention"]["index"]["kernel"], -0.02 * np.ones((2, 2)), rtol=1e-6)
    np.testing.assert_allclose(updates["vision"]["up"]["kernel"], -0.06 * np.ones((2, 2)), rtol=1e-6)


def test_each_group_is_clipped_by_its_own_norm() -> None:
    """Adam forgets the scale of its first gradient; two gradients, the second unclipped, show what the clip left of the first."""
    config = OptimConfig(
        learning_rate=1.0, warmup_steps=0, decay_fraction=0.0, b1=0.5, b2=0.0, trunk=GroupConfig(clip_norm=1.0, weight_decay=0.0)
    )
    tx = make_optimizer(config, 10, PARAMS)
    update = jax.jit(tx.update)

    def second_update(index_scale: float) -> Any:
        first = scaled(0.25)  # trunk: 12 entries, norm 0.25 * sqrt(12) < 1, so not clipped
        first["layers"]["attention"]["index"] = scaled(index_scale, first["layers"]["attention"]["index"])
        _, state = update(first, tx.init(PARAMS), PARAMS)
        return jax.device_get(update(scaled(0.25), state, PARAMS)[0]["layers"]["attention"])

    small, large = second_update(0.1), second_update(1e6)
    np.testing.assert_array_equal(small["main"]["kernel"], large["main"]["kernel"])
    # b1 = 0.5: after g1 and g2 the mean is (g1 / 4 + g2 / 2) / (3 / 4); b2 = 0: the divisor is |g2|
    np.testing.assert_allclose(large["main"]["kernel"], -np.ones((2, 2)), rtol=1e-5)
    clipped = 1e6 / (1e6 * 2)  # four entries: norm 2e6, clipped to 1
    expected = -(clipped / 4 + 0.25 / 2) / 0.75 / 0.25 - 0.1
    np.testing.assert_allclose(large["index"]["kernel"], expected * np.ones((2, 2)), rtol=1e-5)


def test_the_clip_can_be_off() -> None:
    config = OptimConfig(
        learning_rate=1.0, warmup_steps=0, decay_fraction=0.0, b1=0.5, b2=0.0, index=GroupConfig(clip_norm=0.0, weight_decay=0.0)
    )
    tx = make_optimizer(config, 10, PARAMS)
    update = jax.jit(tx.update)
    _, state = update(scaled(100.0), tx.init(PARAMS), PARAMS)
    second = jax.device_get(update(scaled(1.0), state, PARAMS)[0])
    np.testing.assert_allclose(second["layers"]["attention"]["index"]["kernel"], -(100 / 4 + 1 / 2) / 0.75 * np.ones((2, 2)), rtol=1e-5)


def test_equals_adamw_written_out() -> None:
    config = OptimConfig(learning_rate=0.1, warmup_steps=1, decay_fraction=0.0, trunk=GroupConfig(clip_norm=0.0))
    tx = make_optimizer(config, 10, PARAMS)
    update = jax.jit(tx.update)
    w = np.ones((2, 2))
    mean = square = np.zeros((2, 2))
    params, state = PARAMS, tx.init(PARAMS)
    for n, rate in enumerate([0.05, 0.1, 0.1], start=1):
        g = np.array([[1.0, -2.0], [0.5, 3.0]]) * n
        mean, square = config.b1 * mean + (1 - config.b1) * g, config.b2 * square + (1 - config.b2) * g**2
        adam = mean / (1 - config.b1**n) / (np.sqrt(square / (1 - config.b2**n)) + config.eps)
        w = w - rate * (adam + 0.1 * w)
        gradients = scaled(0.0)
        gradients["layers"]["attention"]["main"]["kernel"] = jnp.asarray(g)
        updates, state = update(gradients, state, params)
        params = optax.apply_updates(params, updates)
    np.testing.assert_allclose(params["layers"]["attention"]["main"]["kernel"], w, rtol=1e-5)


def test_a_frozen_group_stays_in_the_state_and_stands_still() -> None:
    frozen = OptimConfig(learning_rate=0.1, index=GroupConfig(learning_rate_scale=0.0))
    assert not step(frozen, scaled(1.0))["layers"]["attention"]["index"]["kernel"].any()
    shapes = [jax.tree.structure(make_optimizer(config, 10, PARAMS).init(PARAMS)) for config in (frozen, PLAIN)]
    assert shapes[0] == shapes[1]


def test_a_group_with_a_late_start_begins_there_as_if_it_were_its_first_step() -> None:
    """Not even weight decay acts before, and afterwards the moments are those of a fresh Adam."""
    late = GroupConfig(start_step=2, warmup_steps=0)
    config = OptimConfig(learning_rate=0.1, warmup_steps=0, decay_fraction=0.0, vision=late)
    tx, fresh = make_optimizer(config, 10, PARAMS), make_optimizer(PLAIN, 10, PARAMS)
    update = jax.jit(tx.update)
    state, moved = tx.init(PARAMS), []
    for gradient in (5.0, -3.0, 1.0, 2.0):
        updates, state = update(scaled(gradient), state, PARAMS)
        moved.append(jax.device_get(updates))
    assert not any(leaf.any() for leaf in jax.tree.leaves([updates["vision"] for updates in moved[:2]]))
    assert all(leaf.all() for leaf in jax.tree.leaves([updates["layers"] for updates in moved])), "the others do not wait"
    state = fresh.init(PARAMS)
    for gradient, found in zip((1.0, 2.0), moved[2:], strict=True):
        updates, state = jax.jit(fresh.update)(scaled(gradient), state, PARAMS)
        for ours, theirs in zip(jax.tree.leaves(found["vision"]), jax.tree.leaves(updates["vision"]), strict=True):
            np.testing.assert_allclose(ours, theirs, rtol=1e-6)


def test_a_model_without_a_group_is_fine() -> None:
    text_only = {name: PARAMS[name] for name in ("embedding", "layers")}
    assert set(step(PLAIN, scaled(1.0, text_only), text_only)) == {"embedding", "layers"}
    assert set(group_norms(text_only)) == {"trunk", "index"}


def test_group_norms() -> None:
    norms = group_norms(PARAMS)
    assert {name: float(norm) for name, norm in norms.items()} == pytest.approx(
        {"trunk": np.sqrt(6 * 0.25 + 4 + 2), "index": 2.0, "vision": np.sqrt(6)}, rel=1e-6
    )


# --- average of the weights -------------------------------------------------------------------------------------------


def test_the_average_written_out() -> None:
    """Beside unchanged updates; decay 0.25 holds from the third update on, (1 + n) / (10 + n) before."""
    plain, averaged = (make_optimizer(dataclasses.replace(PLAIN, ema_decay=decay), 10, PARAMS) for decay in (0.0, 0.25))
    update, states = jax.jit(averaged.update), (plain.init(PARAMS), averaged.init(PARAMS))
    params, expected = PARAMS, PARAMS
    for n in range(1, 5):
        gradients = scaled(float(n))
        theirs, states = plain.update(gradients, states[0], params), update(gradients, states[1], params)
        for a, b in zip(jax.tree.leaves(theirs[0]), jax.tree.leaves(states[0]), strict=True):
            np.testing.assert_allclose(a, b, rtol=1e-6)
        params = optax.apply_updates(params, states[0])
        decay = min(0.25, (1 + n) / (10 + n))
        expected = jax.tree.map(lambda old, new, d=decay: d * old + (1 - d) * new, expected, params)
        states = theirs[1], states[1]
    for a, b in zip(jax.tree.leaves(weight_average(states[1])), jax.tree.leaves(expected), strict=True):
        np.testing.assert_allclose(a, b, rtol=1e-5)
    assert weight_average(states[0]) is None


# --- Muon -------------------------------------------------------------------------------------------------------------

MUON = OptimConfig(
    learning_rate=0.1, warmup_steps=0, decay_fraction=0.0, optimizer="muon", muon_beta=0.9,
    trunk=GroupConfig(clip_norm=0.0), vision=GroupConfig(clip_norm=0.0),
)  # fmt: skip
RANDOM = np.random.default_rng(0)
SHAPES = {  # layers, experts, model 6, heads 2 of width 4, MLP 10
    "embedding": (5, 6),
    "layers": {
        "attention": {"main": {"q": {"linear": {"kernel": (3, 6, 2, 4)}, "norm": {"w": (3, 4)}}, "out": {"kernel": (3, 2, 4, 6)}}},
        "mlp": {"experts": {"down": {"kernel": (3, 2, 10, 6)}}, "router": {"kernel": (3, 6, 2), "bias": (3, 2)}},
    },
    "vision": {"patch_embedding": {"kernel": (7, 6)}, "v": {"kernel": (3, 6, 2, 4), "bias": (3, 2, 4)}},
}
STACKED = jax.tree.map(
    lambda shape: jnp.asarray(RANDOM.normal(size=shape), jnp.float32), SHAPES, is_leaf=lambda node: isinstance(node, tuple)
)
MATRICES = {  # how the stack of each is seen as matrices [.., in, out]
    "layers.attention.main.q.linear.kernel": (3, 6, 8), "layers.attention.main.out.kernel": (3, 8, 6),
    "layers.mlp.experts.down.kernel": (6, 10, 6), "vision.v.kernel": (3, 6, 8),
}  # fmt: skip


def named(tree: Any) -> dict[str, np.ndarray]:
    return dict(zip(parameter_names(tree), map(np.asarray, jax.tree.leaves(tree)), strict=True))


def newton_schulz(matrix: np.ndarray) -> np.ndarray:
    """Five steps of the quintic iteration of Jordan (2024), in float64."""
    x = matrix / np.linalg.norm(matrix)
    for _ in range(5):
        gram = x @ x.T
        x = 3.4445 * x + (-4.775 * gram + 2.0315 * gram @ gram) @ x
    return x


def test_muon_written_out_on_every_matrix_of_every_stack() -> None:
    """Two updates with Nesterov momentum; each layer, expert and projection of all heads together is one matrix."""
    tx = make_optimizer(MUON, 10, STACKED)
    update, state = jax.jit(tx.update), tx.init(STACKED)
    gradients = [jax.tree.map(lambda leaf, n=n: jnp.cos(leaf * n), STACKED) for n in (1, 2)]
    first, state = update(gradients[0], state, STACKED)
    second, _ = update(gradients[1], state, STACKED)
    for name, shape in MATRICES.items():
        weights, (g1, g2) = named(STACKED)[name], (named(gradient)[name].astype(np.float64) for gradient in gradients)
        momentum = 0.9 * 0.1 * g1 + 0.1 * g2
        for update_, direction in (
            (first, 0.9 * (0.1 * g1) / (1 - 0.9**2) + 0.1 * g1 / (1 - 0.9)),
            (second, 0.9 * momentum / (1 - 0.9**3) + 0.1 * g2 / (1 - 0.9**2)),
        ):
            orthogonal = np.stack([newton_schulz(matrix) for matrix in direction.reshape(shape)]).reshape(weights.shape)
            expected = -0.1 * (0.2 * np.sqrt(max(shape[1:])) * orthogonal + 0.1 * weights)
            np.testing.assert_allclose(named(update_)[name], expected, rtol=1e-3, atol=1e-5)


def test_what_is_no_matrix_inside_the_network_stays_with_adam() -> None:
    gradient = jax.tree.map(jnp.cos, STACKED)
    muon, adamw = (named(step(config, gradient, STACKED)) for config in (MUON, dataclasses.replace(MUON, optimizer="adamw")))
    same = {name for name in muon if np.array_equal(muon[name], adamw[name])}
    assert same == set(muon) - set(MATRICES)
    for name in MATRICES:  # of the size of Adam's: rates carry over
        assert 0.5 < np.linalg.norm(muon[name]) / (0.2 * np.linalg.norm(adamw[name])) < 1.5


def test_the_heads_of_the_model_are_seen(experiment: Experiment) -> None:
    """Every matrix of the real model, by the sizes of its input and output."""
    shapes = {}
    for path, leaf in jax.tree_util.tree_flatten_with_path(abstract_model(experiment.model)[1])[0]:
        if axes := matrix_axes(path):
            shapes[".".join(path_names(path))] = tuple(int(np.prod([leaf.shape[axis] for axis in side])) for side in axes)
    layer = {name.removeprefix("layers.0.0."): shape for name, shape in shapes.items() if name.startswith("layers")}
    assert layer == {
        "attention.main.q.linear.kernel": (32, 32), "attention.main.k.linear.kernel": (32, 16), "attention.main.v.linear.kernel": (32, 16),
        "attention.main.out.kernel": (32, 32), "attention.index.q.linear.kernel": (32, 16), "attention.index.k.linear.kernel": (32, 8),
        "mlp.gate.kernel": (32, 48), "mlp.up.kernel": (32, 48), "mlp.down.kernel": (48, 32),
    }  # fmt: skip
    assert shapes["vision.layers.out.kernel"] == shapes["vision.layers.q.kernel"] == (16, 16)
    assert shapes["vision.merge_projector.up.kernel"] == (128, 32)
    assert not {"embedding", "vision.patch_embedding.kernel"} & set(shapes)


def test_muon_takes_clip_warmup_and_groups_like_adamw() -> None:
    frozen = dataclasses.replace(MUON, vision=GroupConfig(learning_rate_scale=0.0), trunk=GroupConfig(weight_decay=0.0, clip_norm=1.0))
    gradient = jax.tree.map(jnp.cos, STACKED)
    small, large = (step(frozen, jax.tree.map(lambda leaf: factor * leaf, gradient), STACKED) for factor in (1.0, 1e3))
    assert not any(leaf.any() for leaf in jax.tree.leaves(small["vision"]))
    for a, b in zip(jax.tree.leaves(small), jax.tree.leaves(large), strict=True):
        np.testing.assert_allclose(a, b, rtol=1e-3, atol=1e-6)


def test_an_unknown_optimizer_is_refused() -> None:
    with pytest.raises(ConfigError, match=r"OptimConfig\.optimizer='sgd'; choose adamw or muon"):
        OptimConfig(optimizer="sgd")
