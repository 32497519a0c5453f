"""Losses of five smoke steps of configs/native.py, one file a jaxlib minor version, against which every change is checked.

    PYTHONPATH=. JAX_PLATFORMS=cpu python tests/golden/regenerate.py    writes the file of the installed jaxlib

Run it only for a change that is meant to alter the losses, on every interpreter, and explain the difference in the commit.
"""

import json
from importlib.metadata import version
from pathlib import Path

import jax

from msa_jax.config import load, smoke
from msa_jax.data.pack import Pack
from msa_jax.data.pipeline import train_batches
from msa_jax.train.state import build, init_state
from msa_jax.train.step import make_train_step, phase_at

ROOT = Path(__file__).resolve().parents[2]
NAMES = ("loss/lm", "loss/kl", "gradient_norm/trunk", "gradient_norm/index", "gradient_norm/vision")
STEPS = 5


def golden_file() -> Path:
    return Path(__file__).with_name(".".join(version("jaxlib").split(".")[:2]) + ".json")


def losses() -> dict[str, list[float]]:
    """{name: one value a step}, over one step of index warm-up and four with selection."""
    experiment = smoke(load(ROOT / "configs" / "native.py"), STEPS)
    pack = Pack.open(experiment.data.pack, experiment.seed)
    batches = train_batches(experiment.data, experiment.model, pack, experiment.seed)
    graphdef, tx = build(experiment)
    state = jax.jit(lambda: init_state(experiment, tx))()
    steps = {phase: jax.jit(make_train_step(experiment, graphdef, tx, phase, pack.sources)) for phase in ("warmup", "sparse")}
    found: dict[str, list[float]] = {name: [] for name in NAMES}
    for step in range(STEPS):
        state, metrics = steps[phase_at(experiment, step)](state, next(batches))
        for name in NAMES:
            found[name].append(float(metrics.scalars[name]))
    batches.close()
    return found


if __name__ == "__main__":
    golden_file().write_text(json.dumps(losses(), indent=1) + "\n")
    print(f"wrote {golden_file()}")
