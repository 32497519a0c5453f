"""Question: which parts of the index branch's recipe does the index need, and which does the model need?

Baseline: native.py. Each variant changes one thing.

    no_warmup          selection from the first step. Expected: block recall ends lower, since a random ranking trains on
                       its own choice; language loss slightly higher.
    long_warmup        full attention for half of the run. Expected: recall as the baseline's or higher.
    kl_0, kl_01, kl_10 weight of the index loss. Expected: at 0 recall stays at that of random blocks plus the local one;
                       between 0.1 and 10 little changes, because AdamW divides scale out and only the index branch sees it.
    no_stop_gradient   the index loss also reaches the trunk. Expected: the language loss rises or the run diverges.

    python train.py --config configs/ablations/index_recipe.py --variant no_warmup    8 minutes a variant on 2 CPU cores,
                                                                                      1 hour for all six
"""

from msa_jax.config import Experiment, load, override


def config() -> Experiment:
    return override(load("../native.py", beside=__file__), {"name": "index_recipe"})


def variants() -> dict[str, dict]:
    return {
        "no_warmup": {"train.index_warmup_steps": 0},
        "long_warmup": {"train.index_warmup_steps": config().train.steps // 2},
        "kl_0": {"train.kl_weight": 0.0},
        "kl_01": {"train.kl_weight": 0.1},
        "kl_10": {"train.kl_weight": 10.0},
        "no_stop_gradient": {"model.attention.index_stop_gradient": False},
    }
