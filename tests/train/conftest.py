"""Fixtures of the training tests. What they are made of lies in tiny_experiment.py, whose name no other folder uses."""

from collections.abc import Iterator

import jax
import pytest
from tiny_experiment import EXPERIMENT, TEXT_EXPERIMENT

from msa_jax.config import Experiment


@pytest.fixture(scope="session", autouse=True)
def compiled_programs(tmp_path_factory: pytest.TempPathFactory) -> Iterator[None]:
    """Runs of one experiment compile the same programs over and over; here each is compiled once, on any machine."""
    before = jax.config.jax_compilation_cache_dir
    if not before:
        jax.config.update("jax_compilation_cache_dir", str(tmp_path_factory.mktemp("programs")))
    yield
    jax.config.update("jax_compilation_cache_dir", before)


@pytest.fixture(scope="session")
def experiment() -> Experiment:
    return EXPERIMENT


@pytest.fixture(scope="session")
def text_experiment() -> Experiment:
    return TEXT_EXPERIMENT
