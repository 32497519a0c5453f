"""Every parameter has one group and one answer on decay, by paths of nnx and of jax alike."""

import jax
import pytest
from flax import nnx

from msa_jax.config import ModelConfig, MsaConfig, VisionConfig
from msa_jax.model.dense import DenseAttention
from msa_jax.model.groups import GROUPS, decays, parameter_group, path_names
from msa_jax.model.hybrid import HybridTransformer
from msa_jax.model.msa import MsaAttention

ATTENTION = MsaConfig(d_model=32, num_heads=4, num_kv_heads=2, head_dim=8, index_dim=8)


@pytest.fixture(scope="module")
def state() -> nnx.State:
    config = ModelConfig(attention=ATTENTION, num_layers=3, pattern="DM", tie_embeddings=False, vision=VisionConfig(num_layers=2))
    return nnx.state(nnx.eval_shape(lambda: HybridTransformer(config, rngs=nnx.Rngs(0))))


def test_groups_are_what_they_say(state: nnx.State) -> None:
    groups: dict[str, set[tuple[str, ...]]] = {name: set() for name in GROUPS}
    for path, _ in nnx.to_flat_state(state):
        groups[parameter_group(path)].add(path_names(path))
    assert {path[:3] for path in groups["index"]} == {("layers", "0", "1")}, "D M D: the second layer has an index branch"
    assert {path[3:] for path in groups["index"]} == {
        ("attention", "index", branch, *leaf) for branch in "qk" for leaf in (("linear", "kernel"), ("norm", "w"))
    }
    assert {path[1] for path in groups["vision"]} == {
        "patch_embedding", "input_norm", "layers", "patch_projector", "merge_projector",
    }  # fmt: skip
    assert {path[0] for path in groups["trunk"]} == {"embedding", "unembedding", "layers", "norm"}
    assert sum(map(len, groups.values())) == len(jax.tree.leaves(state))


def test_both_kinds_of_path_agree(state: nnx.State) -> None:
    by_jax = [path_names(path) for path, _ in jax.tree_util.tree_leaves_with_path(state)]
    assert by_jax == [path_names(path) for path, _ in nnx.to_flat_state(state)]


def test_matrices_decay_and_stacked_vectors_do_not(state: nnx.State) -> None:
    """A stacked norm weight is two-dimensional: the number of axes says nothing."""
    answers: dict[str, set[bool]] = {}
    for path, _ in nnx.to_flat_state(state):
        answers.setdefault(path_names(path)[-1], set()).add(decays(path))
    assert answers == {
        "kernel": {True}, "embedding": {False}, "unembedding": {True}, "w": {False}, "scale": {False}, "bias": {False},
    }  # fmt: skip


@pytest.mark.parametrize(("kind", "expected"), [(MsaAttention, {"trunk", "index"}), (DenseAttention, {"trunk"})])
def test_a_layer_alone_has_groups_too(kind: type, expected: set[str]) -> None:
    layer = nnx.eval_shape(lambda: kind(ATTENTION, rngs=nnx.Rngs(0)))
    assert {parameter_group(path) for path, _ in nnx.to_flat_state(nnx.state(layer))} == expected
