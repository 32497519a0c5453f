"""Dense GQA attention in every layer: the control of native.py, equal in everything else.

An index branch is missing, so it has somewhat fewer parameters. Where a query sees at most 128 keys both attend alike.

    python train.py --config configs/dense.py    7 minutes on 2 CPU cores
"""

from msa_jax.config import Experiment, load, override


def config() -> Experiment:
    return override(load("native.py", beside=__file__), {"name": "dense", "model.pattern": "D"})
