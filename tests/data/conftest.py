"""The synthetic pack, a tiny configuration over it, and wheels made by hand; no network and no built pack."""

import zipfile
from collections.abc import Callable
from pathlib import Path

import jax
import numpy as np
import pytest

from msa_jax.config import DataConfig, ModelConfig, MsaConfig, StreamConfig, VisionConfig
from msa_jax.data import tokenizer as tokenizers
from msa_jax.data.batch import Batch
from msa_jax.data.pack import Pack
from msa_jax.data.tokenizer import Tokenizer


@pytest.fixture(scope="session")
def pack() -> Pack:
    return Pack.synthetic(0)


@pytest.fixture(scope="session")
def tokenizer() -> Tokenizer:
    return tokenizers.load("bpe4096")


@pytest.fixture(scope="session")
def model() -> ModelConfig:
    attention = MsaConfig(d_model=32, num_heads=2, num_kv_heads=1, head_dim=16, index_dim=16, block_size=8, num_blocks=4)
    return ModelConfig(attention, vision=VisionConfig())


@pytest.fixture(scope="session")
def data() -> DataConfig:
    streams = (StreamConfig("text", rows=((0, 2),)), StreamConfig("captions", kind="captions", rows=((0, 2),)))
    return DataConfig(pack="synthetic", sequence_length=96, streams=streams)


@pytest.fixture(scope="session")
def assert_same() -> Callable[[Batch, Batch], None]:
    """Two batches are equal, bit for bit."""
    return lambda a, b: jax.tree.map(np.testing.assert_array_equal, a, b)


@pytest.fixture
def wheel(tmp_path: Path) -> Callable[[str, dict[str, bytes]], Path]:
    """wheel("a.whl", {"a/b.py": b"..."}) -> the path of such an archive."""

    def make(name: str, content: dict[str, bytes]) -> Path:
        path = tmp_path / name
        with zipfile.ZipFile(path, "w") as archive:
            for member, data in content.items():
                archive.writestr(member, data)
        return path

    return make
