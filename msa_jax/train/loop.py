"""The training loop: `fit` reads top to bottom on one page. Save, evaluate, fetch, step, write the previous step's metrics."""

import contextlib
import time
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any, Protocol

import jax
import optax
from flax import nnx

from msa_jax.config import Experiment
from msa_jax.data.batch import Batch
from msa_jax.train.checkpoint import CHECKPOINTS, Checkpoints, default_sharding
from msa_jax.train.guard import check_finite
from msa_jax.train.interrupt import Interrupted, InterruptWatch
from msa_jax.train.progress import Progress
from msa_jax.train.records import Records
from msa_jax.train.state import TrainState, for_evaluation, init_state
from msa_jax.train.step import Metrics, TrainStep, make_train_step, parameter_names, phase_at


class Evaluator(Protocol):
    name: str

    def run(self, state: TrainState) -> Iterable[tuple[str, float]]: ...


class BatchIterator(Protocol):
    """Endless batches; the state is text that says which batch comes next."""

    def __next__(self) -> Batch: ...
    def get_state(self) -> bytes: ...
    def set_state(self, state: bytes) -> None: ...


def fit(
    experiment: Experiment,
    graphdef: nnx.GraphDef,
    tx: optax.GradientTransformation,
    batches: BatchIterator,
    folder: Path,
    *,
    evaluators: Sequence[Evaluator] = (),
    sources: Sequence[str] = (),
) -> TrainState:
    """Trains to the end, or continues from the latest checkpoint in `folder`, which gives the same losses to the bit.

    Raises Interrupted on a signal (saved first), NonFiniteError (the last good checkpoint is kept) and CheckpointError.
    """
    steps = experiment.train.steps
    with contextlib.ExitStack() as stack:
        checkpoints = stack.enter_context(Checkpoints(folder / CHECKPOINTS, experiment.train.keep_checkpoints))
        state = start(experiment, tx, checkpoints, batches)
        step = int(jax.device_get(state.step))
        records = stack.enter_context(Records(folder, step))
        progress = stack.enter_context(Progress(steps, step))
        watch = stack.enter_context(InterruptWatch())
        log = StepLog(records, progress, checkpoints, parameter_names(state.params))
        programs: dict[tuple, TrainStep] = {}  # one a phase and row schedule; a batch of another shape is refused
        while True:
            if is_due(step, experiment.train.checkpoint_every, steps) or watch.received:
                log.flush()
                checkpoints.save(state, batches.get_state())
                log.restart()
            if watch.received:
                raise Interrupted(step, watch.received)
            if is_due(step, experiment.train.evaluate_every, steps) and not records.has_evaluation(step):
                log.flush()
                if not evaluate(state, step, evaluators, records, progress, watch):
                    continue
                log.restart()
            if step == steps:
                return state
            with jax.transfer_guard("disallow"):
                batch = jax.device_put(next(batches))
                phase = phase_at(experiment, step)
                key = phase, *(stream.rows_at(step) for stream in experiment.data.streams)
                if key not in programs:
                    log.flush()
                    train_step = make_train_step(experiment, graphdef, tx, phase, sources)
                    programs[key] = jax.jit(train_step, donate_argnums=0).lower(state, batch).compile()
                    log.restart()
                state, metrics = programs[key](state, batch)
                step += 1
                log.push(step, metrics)


def is_due(step: int, every: int, steps: int) -> bool:
    """At the end, and every `every` steps before it (0 = only at the end)."""
    return step == steps or (every > 0 and step > 0 and step % every == 0)


def start(experiment: Experiment, tx: optax.GradientTransformation, checkpoints: Checkpoints, batches: BatchIterator) -> TrainState:
    """A new state, or the latest checkpoint's with `batches` set to the position saved beside it."""

    def initial() -> TrainState:
        return init_state(experiment, tx)

    if not checkpoints.steps():
        return jax.jit(initial, out_shardings=default_sharding())()  # placed as a restored state is, so that programs are the same
    state, position = checkpoints.restore(jax.eval_shape(initial))
    batches.set_state(position)
    return state


def evaluate(
    state: TrainState, step: int, evaluators: Sequence[Evaluator], records: Records, progress: Progress, watch: InterruptWatch
) -> bool:
    """Writes down what the evaluators measure; False, with nothing written, if a signal came in between."""
    values: list[tuple[str, float]] = []
    for evaluator in evaluators:
        if watch.received:
            return False
        progress.say(f"step {step}: evaluating {evaluator.name}")
        values += evaluator.run(for_evaluation(state))
    records.write_evaluation(step, values)
    return True


class StepLog:
    """Writes each step's metrics one step late, so that the device is never waited for while it has nothing to do."""

    def __init__(self, records: Records, progress: Progress, checkpoints: Checkpoints, parameters: Sequence[str]) -> None:
        self._records, self._progress, self._checkpoints, self._parameters = records, progress, checkpoints, parameters
        self._pending: tuple[int, Metrics] | None = None
        self.restart()

    def restart(self) -> None:
        """Starts the clock anew after something that is no step."""
        self._since = time.monotonic()

    def push(self, step: int, metrics: Metrics) -> None:
        previous, self._pending = self._pending, (step, metrics)
        self._write(previous)

    def flush(self) -> None:
        """Waits for the last step. A state may only be saved after this: the step that made it is then known to be finite."""
        previous, self._pending = self._pending, None
        self._write(previous)

    def _write(self, pending: tuple[int, Metrics] | None) -> None:
        if pending is None:
            return
        step, metrics = jax.device_get(pending)
        now = time.monotonic()
        seconds, self._since = now - self._since, now
        scalars = {name: value.item() for name, value in metrics.scalars.items() if not is_absent(name, metrics.scalars)}
        scalars |= {"seconds": seconds, "tokens_per_second": scalars["tokens"] / seconds}
        self._records.write(step, scalars)
        check_finite(step, scalars, metrics.finite, self._parameters, kept=self._checkpoints.steps())
        self._progress.step(step, scalars["loss"], scalars["tokens_per_second"])


def is_absent(name: str, scalars: Mapping[str, Any]) -> bool:
    """Whether `name` is the mean loss of a source of which the batch held nothing."""
    kind, _, source = name.rpartition("source/")
    return kind == "loss/" and scalars[f"tokens/source/{source}"] == 0
