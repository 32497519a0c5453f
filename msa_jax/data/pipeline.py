"""Training batches as an endless iterator: prepared by threads ahead of time, with a position that can be saved.

batches = train_batches(experiment.data, experiment.model, pack, seed=0)
batch = next(batches)
position = batches.get_state()     # of the batches handed out, not of those prepared
batches.set_state(position)        # goes on with exactly the next one
"""

import json
from collections.abc import Iterator

import grain

from msa_jax.config import DataConfig, ModelConfig
from msa_jax.data.batch import Batch
from msa_jax.data.mixture import Counts, Mixture
from msa_jax.data.pack import Pack

STATE_FORMAT = 1
THREADS = 2
MOST_STEPS = 2**40


class StateError(ValueError):
    """A saved position that does not belong to these data."""


class TrainBatches(Iterator[Batch]):
    """Batch n is `mixture.batch(n)`; the position is n, so the order survives restarts, threads and prefetching alike."""

    def __init__(self, mixture: Mixture, pack: Pack) -> None:
        prefetch = mixture.data.prefetch
        options = grain.ReadOptions(num_threads=min(THREADS, prefetch), prefetch_buffer_size=prefetch)
        self.mixture = mixture
        self.step = 0  # batches handed out
        self.counts: Counts = {}  # their tokens by kind, see `count_tokens`
        self._data = {"pack": pack.digest, "tokenizer": mixture.tokenizer.digest}
        self._batches = iter(grain.MapDataset.range(MOST_STEPS).map(mixture.batch).to_iter_dataset(options))

    def __next__(self) -> Batch:
        batch, counts = next(self._batches)
        self.step += 1
        self.counts = {name: self.counts.get(name, 0) + count for name, count in counts.items()}
        return batch

    def get_state(self) -> bytes:
        """The position as JSON: steps and token counts so far, and which data they belong to."""
        return json.dumps({"format": STATE_FORMAT, "step": self.step, "counts": self.counts, **self._data}).encode()

    def set_state(self, state: bytes) -> None:
        """Continues behind a saved position. Raises StateError where it is unreadable or belongs to other data."""
        try:
            saved = json.loads(state)
            step, counts = saved["step"], dict(saved["counts"])
        except (UnicodeDecodeError, json.JSONDecodeError, KeyError, TypeError) as error:
            raise StateError(f"not a saved data position: {state[:80]!r}") from error
        for name, value in {"format": STATE_FORMAT, **self._data}.items():
            if saved.get(name) != value:
                raise StateError(
                    f"the saved data position has {name} {saved.get(name)}, this run {value}; the order of rows would differ. "
                    f"Continue with the {name} that the run began with, or start anew in another --workdir"
                )
        self._batches.set_state({"next_index": step})
        self.step, self.counts = step, counts

    def close(self) -> None:
        """Ends the threads."""
        self._batches.close()


def train_batches(data: DataConfig, model: ModelConfig, pack: Pack, seed: int, microbatches: int = 1) -> TrainBatches:
    """All training batches from step 0 on. Raises ConfigError where data, model and pack do not fit together."""
    return TrainBatches(Mixture(data, model, pack, seed, microbatches), pack)


def fill(counts: Counts) -> dict[str, float]:
    """Share of token slots and of patch slots that hold something: 1 minus the waste of packing."""
    tokens = counts["text"] + counts["caption"] + counts["visual"]
    slots = {"tokens": (tokens, counts["padding"]), "patches": (counts["patches"], counts["patch_padding"])}
    return {name: used / (used + empty) for name, (used, empty) in slots.items() if used + empty}
