"""Token counts of a finished run: exact, and refused where they contradict each other."""

import json
from pathlib import Path

import pytest
from tiny_experiment import EXPERIMENT, changed

from msa_jax.train.records import METRICS
from msa_jax.train.tokens import TokenCountError, count_run

SHORT = changed(EXPERIMENT, train__steps=2, train__index_warmup_steps=0, optim__warmup_steps=0, data__streams__1__rows=[[0, 0], [1, 3]])
COUNTS = {"text": 90, "caption": 20, "visual": 12, "padding": 46, "predicted": 100, "patches": 48, "patch_padding": 0}  # 7 rows of 24
STEPS = [{"step": 1, "tokens/text": 40, "tokens/visual": 0}, {"step": 2, "tokens/text": 70, "tokens/visual": 12}]


def write(folder: Path, steps: list[dict]) -> Path:
    (folder / METRICS).write_text("".join(json.dumps(step) + "\n" for step in steps))
    return folder


def test_counts_and_slots_of_a_run(tmp_path: Path) -> None:
    found = count_run(write(tmp_path, STEPS), SHORT, COUNTS)
    assert found == COUNTS | {"text_slots": 2 * 2 * 24, "captions_slots": 3 * 24}


@pytest.mark.parametrize(
    ("counts", "steps", "message"),
    [
        ({"padding": 22}, STEPS, "144 slots were handed out, 168 expected"),
        ({"padding": 47, "text": 89}, STEPS, "109 text and caption tokens were handed out, 110 expected"),
        ({"visual": 13, "padding": 45}, STEPS, "13 visual tokens were handed out, 12 expected"),
        ({}, [*STEPS, {"step": 3, "tokens/text": 0, "tokens/visual": 0}], "3 steps were handed out, 2 expected"),
    ],
)
def test_a_lost_or_repeated_batch_is_noticed(tmp_path: Path, counts: dict, steps: list[dict], message: str) -> None:
    with pytest.raises(TokenCountError, match=message):
        count_run(write(tmp_path, steps), SHORT, COUNTS | counts)
