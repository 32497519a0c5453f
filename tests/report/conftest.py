"""A hand-made run folder with every file that a run leaves behind."""

import json
from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest

LAYERS, HEADS, KV_HEADS, LENGTH, BLOCK, KEPT = 4, 4, 2, 512, 16, 8


def write_run(path: Path, seed: int = 0, steps: int = 400) -> Path:
    """Writes `path` as a finished run: metrics every 5 steps, one evaluation at the end, arrays for all figures."""
    path.mkdir(parents=True)
    experiment = {"name": "native", "seed": seed, "train": {"steps": steps, "index_warmup_steps": steps // 10}}
    config = {
        "format": 1, "hash": "0123456789ab", "commit": "deadbeefcafe0123", "versions": {}, "device": "cpu",
        "implementations": {"block_select": "xla", "sparse_attention": "xla", "index_kl": "xla"}, "experiment": experiment,
    }  # fmt: skip
    (path / "config.json").write_text(json.dumps(config))
    rng = np.random.default_rng(seed)
    write_lines(path / "metrics.jsonl", [metrics_row(step, steps, rng) for step in range(0, steps, 5)])
    write_lines(path / "evaluation.jsonl", [{"step": steps, "name": name, "value": value} for name, value in evaluation(rng).items()])
    (path / "arrays").mkdir()
    np.savez(path / "arrays" / "selection_map.npz", **selection_arrays(rng))
    lift = np.exp(rng.normal(0.3, 0.8, (2, LAYERS, HEADS)) + np.linspace(-0.3, 0.9, LAYERS)[:, None])
    np.savez(path / "arrays" / "lift.npz", layers_X=np.arange(LAYERS), lift_XN=lift[0], lift_long_XN=lift[1])
    return path


def write_lines(file: Path, rows: list[dict]) -> None:
    file.write_text("".join(json.dumps(row) + "\n" for row in rows))


def metrics_row(step: int, steps: int, rng: np.random.Generator) -> dict:
    rate = 3e-3 * min(1, (step + 1) / 20, (steps - step) / (0.2 * steps))
    return {
        "step": step, "loss": 0.0, "loss/lm": 2.6 + 5.7 * np.exp(-step / 60) + 0.1 * rng.normal(),
        "loss/kl": (0.05 + 0.5 * np.exp(-step / 40)) * np.exp(0.15 * rng.normal()),
        "lr/trunk": rate, "lr/index": 2 * rate, "lr/vision": 0.5 * rate, "tokens_per_second": 7000.0,
    }  # fmt: skip


def evaluation(rng: np.random.Generator) -> dict[str, float]:
    values = {}
    for source, bits in (("plays", 2.41), ("code", 2.13)):
        values |= {
            f"text/nats_per_token/{source}": bits * 2.0, f"text/bits_per_byte/{source}": bits, f"text/bytes/{source}": 48_213.0,
            f"text/unigram_bits_per_byte/{source}": 4.74, f"text/bigram_bits_per_byte/{source}": 3.61,
        }  # fmt: skip
    for split, gain in (("train", 1.2), ("comp", 0.8), ("concept", 0.2)):
        values |= {
            f"caption/right/{split}": 3.0, f"caption/wrong/{split}": 3.0 + gain, f"caption/image_gain/{split}": gain,
            f"retrieval/accuracy/{split}": gain / 4, f"retrieval/chance/{split}": 0.02, f"retrieval/captions/{split}": 200.0,
        }  # fmt: skip
    for layer in range(LAYERS):
        for name, value, random in (("block_recall", 0.7, 0.31), ("captured_mass", 0.8, 0.5), ("relative_mass", 0.93, 0.55)):
            for local in ("", "_without_local"):
                values[f"index/{name}{local}/layer_{layer}"] = value + 0.05 * rng.random()
                values[f"index/{name}{local}_random/layer_{layer}"] = random
        values |= {f"index/kl_selected/layer_{layer}": 0.06, f"index/kl_full_prefix/layer_{layer}": 0.09}
        for name, value in (("lift", 1.7), ("lift_long", 1.3), ("separation", 0.2)):
            values[f"attention/{name}/layer_{layer}"] = value
        for name, value in (("visible", 0.35), ("index", 0.4), ("selected", 0.45), ("attention", 0.5)):
            values[f"attention/visual_{name}/layer_{layer}"] = value
    return values


def selection_arrays(rng: np.random.Generator) -> dict[str, np.ndarray]:
    """A picture of 16 tokens every 70 with text between them; random blocks plus the local one."""
    visual_T = (np.arange(LENGTH) - 3) % 70 < 16
    ids_XKTR = np.full((LAYERS, KV_HEADS, LENGTH, KEPT), -1, np.int32)
    for x, k, t in np.ndindex(LAYERS, KV_HEADS, LENGTH):
        local = t // BLOCK
        earlier = rng.permutation(local)[: KEPT - 1]
        ids_XKTR[x, k, t, : len(earlier)] = earlier
        ids_XKTR[x, k, t, len(earlier)] = local
    return {
        "ids_XKTR": ids_XKTR, "layers_X": np.arange(LAYERS), "visual_T": visual_T, "block_size": np.array(BLOCK),
        "tokens_T": np.array([" waving hand", " fox", " $tree", "\n"])[np.arange(LENGTH) % 4],
        "queries_Q": np.array([145, 221, 296, 371, 446, 497]),
    }  # fmt: skip


@pytest.fixture(name="make_run")
def make_run_fixture(tmp_path: Path) -> Callable[..., Path]:
    """make_run(name, seed=0, steps=400) -> path of a new run folder."""
    return lambda name, **kwargs: write_run(tmp_path / name, **kwargs)


@pytest.fixture
def run_folder(make_run: Callable[..., Path]) -> Path:
    return make_run("native")
