"""Shared test setup: GPU tests fail (not skip) under --require-gpu; everything else runs on the CPU."""

import jax
import pytest


def pytest_addoption(parser: pytest.Parser) -> None:
    parser.addoption("--require-gpu", action="store_true", help="fail GPU tests, instead of leaving them out, where there is no GPU")


def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    """Without `-m`, tests of these kinds are left out; each is asked for by name (make test-slow, make test-kernels, pytest -m gpu)."""
    if not config.getoption("-m"):
        left_out = [item for item in items if any(item.get_closest_marker(kind) for kind in ("slow", "kernels", "gpu"))]
        config.hook.pytest_deselected(items=left_out)
        items[:] = [item for item in items if item not in left_out]
    has_gpu = any(device.platform == "gpu" for device in jax.devices())
    if config.getoption("--require-gpu") and not has_gpu:
        raise pytest.UsageError("--require-gpu: jax finds no GPU")
