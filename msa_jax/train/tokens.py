"""The exact number of tokens that a finished run has seen, by kind, checked against its configuration and its own log."""

import json
from collections.abc import Mapping
from pathlib import Path

from msa_jax.config import Experiment
from msa_jax.data.mixture import rows_before
from msa_jax.train.records import METRICS


class TokenCountError(RuntimeError):
    """A run whose counts contradict each other: some batch was lost, repeated or of another size."""


def count_run(folder: Path, experiment: Experiment, counts: Mapping[str, int]) -> dict[str, int]:
    """{"text": ..., "caption": ..., "visual": ..., "padding": ..., ..., "text_slots": ..., "captions_slots": ...}

    `counts` are the data pipeline's, of all batches handed out (`msa_jax.data.mixture.count_tokens`); slots are rows times
    their length. Raises TokenCountError unless they are what the configured rows of every step hold and what the steps of
    metrics.jsonl have counted on the device.
    """
    slots = {
        f"{stream.name}_slots": rows_before(stream, experiment.train.steps) * experiment.data.sequence_length
        for stream in experiment.data.streams
    }
    steps = [json.loads(line) for line in (folder / METRICS).read_text(encoding="utf-8").splitlines()]
    pairs = {
        "slots": (sum(counts[kind] for kind in ("text", "caption", "visual", "padding")), sum(slots.values())),
        "text and caption tokens": (counts["text"] + counts["caption"], sum(step["tokens/text"] for step in steps)),
        "visual tokens": (counts["visual"], sum(step["tokens/visual"] for step in steps)),
        "steps": (len(steps), experiment.train.steps),
    }
    for name, (found, expected) in pairs.items():
        if found != expected:
            raise TokenCountError(f"{folder}: {found} {name} were handed out, {expected} expected; the run is not comparable")
    return {**counts, **slots}
