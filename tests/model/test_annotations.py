"""The jaxtyping annotations of the model hold: a fresh copy of its modules is traced under a run-time type checker."""

import importlib
import sys
from collections.abc import Iterator
from types import ModuleType

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx
from jaxtyping import TypeCheckError, install_import_hook

import msa_jax.model
from msa_jax.config import ModelConfig, MoeConfig, MsaConfig, VisionConfig
from msa_jax.data.batch import Batch, VisionBatch

ATTENTION = MsaConfig(d_model=32, num_heads=4, num_kv_heads=2, head_dim=8, index_dim=12, block_size=4, num_blocks=3)
VISION = VisionConfig(width=24, num_layers=2, mlp_dim=32, patch_size=2, sequence_length=16, temporal_pool=2)


@pytest.fixture(scope="module")
def hybrid() -> Iterator[ModuleType]:
    """msa_jax.model.hybrid, imported anew under the checker; the ordinary modules return after these tests.

    Once only: beartype remembers classes by their names.
    """
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(msa_jax, "model", msa_jax.model)
        for name in [name for name in sys.modules if name.startswith("msa_jax.model.")]:
            patch.delitem(sys.modules, name)
        with install_import_hook("msa_jax.model", "beartype.beartype"):
            yield importlib.import_module("msa_jax.model.hybrid")


def batch() -> Batch:
    row = jnp.ones((3, 20), jnp.int32)
    vision = VisionBatch(np.zeros((2, 16, 12), np.float32), np.ones((2, 16), np.int32), np.zeros((2, 16, 3), np.int32))
    return Batch(row, row, row, row.astype(jnp.float32), row, row, vision)


@pytest.mark.filterwarnings("ignore::beartype.roar.BeartypeDecorHintPep585DeprecationWarning")  # flax's own annotations
@pytest.mark.parametrize("phase", ["sparse", "warmup"])
def test_annotations_hold(hybrid: ModuleType, phase: str) -> None:
    moe = MoeConfig(num_experts=5, experts_per_token=2, expert_dim=7, shared_dim=9, dense_layers=1)
    config = ModelConfig(ATTENTION, vocab_size=64, num_layers=3, pattern="DM", mlp_dim=48, vision=VISION, remat=True, moe=moe)
    model = nnx.eval_shape(lambda: hybrid.HybridTransformer(config, rngs=nnx.Rngs(0)))
    graphdef, params = nnx.split(model)
    output = jax.eval_shape(lambda params: nnx.merge(graphdef, params)(batch(), phase, trace=True), params)
    assert output.logits_BTE.shape == (3, 20, 64)
    assert output.load_XO.shape == (3, 5)
    assert output.trace.ids_XBKTR.shape == (3, 3, 2, 20, 3)


def test_a_wrong_shape_is_caught(hybrid: ModuleType) -> None:
    """The checker is really on."""
    with pytest.raises(TypeCheckError):
        hybrid.place_visual_tokens(jnp.zeros((2, 3, 4)), jnp.zeros((5, 6)), jnp.zeros((2, 3), jnp.int32))
