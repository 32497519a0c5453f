"""Question: when should pictures enter the training of a language model, and what does their timing cost in text?

Baseline: native.py in its size S under WSD over 1,100 steps. Every step of every arm holds the same 72 text rows, row for row;
rows of captioned pictures are added to them, never swapped in. Both losses are divided by the tokens of 72 full rows, so that
pictures do not dilute the gradient of the text. Tower and projector start from the same weights, stand still until pictures come,
and then warm up to the same peak.

    arm                    learning rate                                                 picture rows a step
    native                 50 up, stable, from step 880 linear to 0.1 peak               8 from step 0
    pre_decay_50           the same                                                      16 from step 550
    pre_decay_80           the same                                                      40 from step 880, where the decay starts
    pre_decay_80_low       the same                                                      8 from step 880
    post_decay             fully decayed over 880 steps, 20 up to 0.3 peak, decay again  40 from step 880
    text_only              as native: control of native and of the pre_decay arms        none, and no tower
    text_only_post_decay   as post_decay: its control                                    none, and no tower

All arms but pre_decay_80_low see 8,800 picture rows, a tenth of all rows; after a late entry 18% or 36% of the rows are pictures.
Expected: what an arm loses in text against its control is what pictures cost; what text_only_post_decay loses against text_only is
what warming up again costs. Native costs almost no text; post_decay costs the most; pre_decay_80 lies between, by its share.

    python train.py --config configs/ablations/when_to_add_vision.py --variant post_decay    an arm and a seed: a minute on an H200
    python -m msa_jax.sweep configs/ablations/when_to_add_vision.py --seeds 0..7 --workdir runs/when_to_add_vision
"""

from msa_jax.config import Experiment, load, override

STEPS, TEXT_ROWS = 1100, 72
ENTRY = 880  # four fifths of the steps
NO_VISION = {"model.vision": None}
DECAYED_FIRST = {"optim.rewarms": [{"start_step": ENTRY, "warmup_steps": 20, "peak_fraction": 0.3}]}


def config() -> Experiment:
    return override(load("../native.py", "s", beside=__file__), {
        "name": "when_to_add_vision", "train.steps": STEPS, "train.loss_rows": TEXT_ROWS, "data.streams.0.rows": [[0, TEXT_ROWS]],
        "data.streams.1.rows": [[0, 8]], "data.streams.1.loss_weight": 1.0, "optim.decay_fraction": 0.2, "optim.final_fraction": 0.1,
        "optim.vision.warmup_steps": 50, "eval.text_rows": 64, "eval.pictures": 200,
    })  # fmt: skip


def variants() -> dict[str, dict]:
    text_only = NO_VISION | {"data.streams": config().data.streams[:1]}
    return {
        "native": {},
        "pre_decay_50": pictures(16, start=550),
        "pre_decay_80": pictures(40, start=ENTRY),
        "pre_decay_80_low": pictures(8, start=ENTRY),
        "post_decay": pictures(40, start=ENTRY) | DECAYED_FIRST,
        "text_only": text_only,
        "text_only_post_decay": text_only | DECAYED_FIRST,
    }


def controls() -> dict[str, tuple[str, ...]]:
    """First the arm with the same learning rates and the same text but without pictures, then text_only for all."""
    by_native = dict.fromkeys(("native", "pre_decay_50", "pre_decay_80", "pre_decay_80_low", "text_only_post_decay"), ("text_only",))
    return by_native | {"post_decay": ("text_only_post_decay", "text_only")}


def pictures(rows: int, *, start: int) -> dict:
    return {"data.streams.1.rows": [[0, 0], [start, rows]], "optim.vision.start_step": start}
