"""The training loop: `fit` reads top to bottom on one page. Save, evaluate, fetch, step, write the previous step's metrics."""

import contextlib
import time
from collections.abc import Callable, Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any, NamedTuple, Protocol

import jax
import jax.numpy as jnp
import numpy as np
import optax
from flax import nnx
from jax.typing import ArrayLike

from msa_jax.config import Experiment
from msa_jax.data.batch import Batch
from msa_jax.train.checkpoint import CHECKPOINTS, Checkpoints, default_sharding
from msa_jax.train.guard import check_finite
from msa_jax.train.init_from import init_from
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


class Run(NamedTuple):
    """One of the runs that are trained side by side: they differ in nothing but their seed, and each has its own folder."""

    experiment: Experiment
    batches: BatchIterator
    folder: Path
    evaluators: Sequence[Evaluator] = ()


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
    return fit_side_by_side([Run(experiment, batches, folder, evaluators)], graphdef, tx, sources=sources)[0]


def fit_side_by_side(
    runs: Sequence[Run], graphdef: nnx.GraphDef, tx: optax.GradientTransformation, *, sources: Sequence[str] = ()
) -> list[TrainState]:
    """`fit` of several runs in one program a step, from the latest step that all of them have saved; their states at the end.

    Each folder holds what the run alone would have written there. One run that loses its numbers stops them all.
    """
    experiment = runs[0].experiment
    steps = experiment.train.steps
    with contextlib.ExitStack() as stack:
        checkpoints = [stack.enter_context(Checkpoints(run.folder / CHECKPOINTS, experiment.train.keep_checkpoints)) for run in runs]
        states = start(runs, tx, checkpoints)
        step = int(jax.device_get(states[0].step))
        records = [stack.enter_context(Records(run.folder, step, run.experiment.seed)) for run in runs]
        progress = stack.enter_context(Progress(steps, step))
        watch = stack.enter_context(InterruptWatch())
        log = StepLog(records, progress, checkpoints, parameter_names(states[0].params))
        programs: dict[tuple, Callable] = {}  # one a phase and row schedule; a batch of another shape is refused
        while True:
            if is_due(step, experiment.train.checkpoint_every, steps) or watch.received:
                log.flush()
                for run, state, folder in zip(runs, states, checkpoints, strict=True):
                    folder.save(state, run.batches.get_state())
                log.restart()
            if watch.received:
                raise Interrupted(step, watch.received)
            if is_due(step, experiment.train.evaluate_every, steps) and not all(record.has_evaluation(step) for record in records):
                log.flush()
                if not all(evaluate(*one, step, progress, watch) for one in zip(runs, states, records, strict=True)):
                    continue
                log.restart()
            if step == steps:
                return states
            with jax.transfer_guard("disallow"):
                batches = jax.device_put([next(run.batches) for run in runs])
                phase = phase_at(experiment, step)
                key = phase, *(stream.rows_at(step) for stream in experiment.data.streams)
                if key not in programs:
                    log.flush()
                    train_step = side_by_side(make_train_step(experiment, graphdef, tx, phase, sources))
                    programs[key] = jax.jit(train_step, donate_argnums=0).lower(states, batches).compile()
                    log.restart()
                states, metrics = programs[key](states, batches)
                step += 1
                log.push(step, metrics)


def side_by_side(train_step: TrainStep) -> Callable[[list[TrainState], list[Batch]], tuple[list[TrainState], list[Metrics]]]:
    """The same step of several runs at once: states and batches are stacked, mapped over, and taken apart again."""

    def step(states: list[TrainState], batches: list[Batch]) -> tuple[list[TrainState], list[Metrics]]:
        if len(states) == 1:
            state, metrics = train_step(states[0], batches[0])
            return [state], [metrics]
        stacked = (jax.tree.map(lambda *leaves: jnp.stack(leaves), *trees) for trees in (states, batches))
        results = jax.vmap(train_step)(*stacked)
        return tuple([jax.tree.map(lambda leaf: leaf[i], result) for i in range(len(states))] for result in results)

    return step


def is_due(step: int, every: int, steps: int) -> bool:
    """At the end, and every `every` steps before it (0 = only at the end)."""
    return step == steps or (every > 0 and step > 0 and step % every == 0)


def start(runs: Sequence[Run], tx: optax.GradientTransformation, checkpoints: Sequence[Checkpoints]) -> list[TrainState]:
    """New states, or the latest checkpoints that all runs have, with their batches set to the positions saved beside them.

    New runs may take their weights and moments from others (train.init_from).
    """

    def initial(seed: ArrayLike) -> TrainState:
        return init_state(runs[0].experiment, tx, seed)

    saved = set.intersection(*(set(folder.steps()) for folder in checkpoints))
    states = []
    if not saved:
        create = jax.jit(initial, out_shardings=default_sharding())  # placed as a restored state is, so that programs are the same
        for experiment, *_ in runs:
            state = create(np.uint32(experiment.seed))
            source = experiment.train.init_from
            states.append(init_from(Path(source.replace("{seed}", str(experiment.seed))), state) if source else state)
        return states
    for run, folder in zip(runs, checkpoints, strict=True):
        state, position = folder.restore(jax.eval_shape(initial, np.uint32(0)), max(saved))
        run.batches.set_state(position)
        states.append(state)
    return states


def evaluate(run: Run, state: TrainState, records: Records, step: int, progress: Progress, watch: InterruptWatch) -> bool:
    """Writes down what the run's evaluators measure, once; False, with nothing written, if a signal came in between."""
    if records.has_evaluation(step):
        return True
    values: list[tuple[str, float]] = []
    for evaluator in run.evaluators:
        if watch.received:
            return False
        progress.say(f"step {step}: evaluating {evaluator.name}")
        values += evaluator.run(for_evaluation(state))
    records.write_evaluation(step, values)
    return True


class StepLog:
    """Writes each step's metrics one step late, so that the device is never waited for while it has nothing to do.

    Of several runs each has its own records; progress shows their mean loss and their tokens together.
    """

    def __init__(
        self, records: Sequence[Records], progress: Progress, checkpoints: Sequence[Checkpoints], parameters: Sequence[str]
    ) -> None:
        self._records, self._progress, self._checkpoints, self._parameters = records, progress, checkpoints, parameters
        self._pending: tuple[int, list[Metrics]] | None = None
        self.restart()

    def restart(self) -> None:
        """Starts the clock anew after something that is no step."""
        self._since = time.monotonic()

    def push(self, step: int, metrics: list[Metrics]) -> None:
        previous, self._pending = self._pending, (step, metrics)
        self._write(previous)

    def flush(self) -> None:
        """Waits for the last step. A state may only be saved after this: the step that made it is then known to be finite."""
        previous, self._pending = self._pending, None
        self._write(previous)

    def _write(self, pending: tuple[int, list[Metrics]] | None) -> None:
        if pending is None:
            return
        step, metrics = jax.device_get(pending)
        now = time.monotonic()
        seconds, self._since = now - self._since, now
        rows = [_row(scalars, seconds) for scalars, _ in metrics]
        for records, row in zip(self._records, rows, strict=True):
            records.write(step, row)
        for row, (_, finite), records, checkpoints in zip(rows, metrics, self._records, self._checkpoints, strict=True):
            run = f"seed {records.seed}, " if len(rows) > 1 else ""
            check_finite(step, row, finite, self._parameters, kept=checkpoints.steps(), run=run)
        loss, speed = (sum(row[name] for row in rows) for name in ("loss", "tokens_per_second"))
        self._progress.step(step, loss / len(rows), speed)


def _row(scalars: Mapping[str, Any], seconds: float) -> dict[str, float]:
    """One line of metrics.jsonl."""
    row = {name: value.item() for name, value in scalars.items() if not is_absent(name, scalars)}
    return row | {"seconds": seconds, "tokens_per_second": row["tokens"] / seconds}


def is_absent(name: str, scalars: Mapping[str, Any]) -> bool:
    """Whether `name` is the mean loss of a source of which the batch held nothing."""
    kind, _, source = name.rpartition("source/")
    return kind == "loss/" and scalars[f"tokens/source/{source}"] == 0
