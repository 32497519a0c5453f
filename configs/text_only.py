"""Text alone: the control of native.py. The same text rows in the same order, row for row, and no vision tower.

python train.py --config configs/text_only.py              5 minutes on 2 CPU cores
python train.py --config configs/text_only.py --variant s  under a minute on an H200
"""

from msa_jax.config import Experiment, load, override


def config() -> Experiment:
    native = load("native.py", beside=__file__)
    return override(native, {"name": "text_only", "model.vision": None, "data.streams": native.data.streams[:1]})


def variants() -> dict[str, dict]:
    return {
        "s": {
            "model.attention.d_model": 256, "model.attention.num_heads": 8, "model.mlp_dim": 704, "train.steps": 1100,
            "data.streams.0.rows": [[0, 72]], "optim.warmup_steps": 50, "train.index_warmup_steps": 110, "train.checkpoint_every": 550,
        },
    }  # fmt: skip
