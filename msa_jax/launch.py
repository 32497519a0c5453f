"""Everything behind one training command: data, model, evaluators and loop, for one seed or for several side by side."""

import contextlib
import shlex
import sys
from collections.abc import Callable, Sequence
from pathlib import Path

from msa_jax.config import ConfigError, Experiment, override
from msa_jax.data.batch import BatchError
from msa_jax.data.pack import Pack, PackError
from msa_jax.data.pipeline import StateError, train_batches
from msa_jax.data.tokenizer import TokenizerError
from msa_jax.eval import suite
from msa_jax.train.checkpoint import CheckpointError
from msa_jax.train.guard import NonFiniteError
from msa_jax.train.interrupt import Interrupted
from msa_jax.train.loop import Run, fit_side_by_side
from msa_jax.train.state import build
from msa_jax.train.tokens import TokenCountError, count_run
from msa_jax.train.workdir import WorkdirError, open_workdir, provenance, record
from pallas_kernels.dispatch import Unsupported, device_kind, implementations_used

USER_ERRORS = (ConfigError, PackError, TokenizerError, StateError, BatchError, WorkdirError, CheckpointError, Unsupported, OSError)
FAILURES = (NonFiniteError, TokenCountError)


def run_command(
    name: str,
    run: Callable[[], int | None],
    again: Sequence[str],
    *,
    refusals: tuple[type[Exception], ...] = USER_ERRORS,
    failures: tuple[type[Exception], ...] = FAILURES,
) -> int:
    """The exit code of `run`, in which None is 0. What ends it early becomes one line on stderr and a code of its own.

    `refusals` are 2 and `failures` are 1, Ctrl-C is 130; a training run that was stopped names `again`, the command that continues it.
    """
    try:
        return run() or 0
    except Interrupted as stopped:
        print(f"{stopped}; continue with: {shlex.join(again)}", file=sys.stderr)
        return stopped.exit_code
    except KeyboardInterrupt:
        print("interrupted; the same command continues from the last checkpoint, if there is one", file=sys.stderr)
        return 130
    except (*refusals, *failures) as error:
        print(f"{name}: {error}", file=sys.stderr)
        return 2 if isinstance(error, refusals) else 1


def launch(experiment: Experiment, folders: dict[int, Path], *, force_new: bool = False) -> None:
    """Trains `experiment` once for each seed, in one program, each into its own run folder.

    Every folder ends as a run of that seed alone would have left it. A finished run is left as it is. Raises what its parts
    raise: USER_ERRORS, Interrupted, NonFiniteError.
    """
    graphdef, tx = build(experiment)
    runs = []
    with contextlib.ExitStack() as stack:
        for seed, folder in folders.items():
            seeded = override(experiment, {"seed": seed})
            pack = Pack.open(seeded.data.pack, seed)
            batches = train_batches(seeded.data, seeded.model, pack, seed, seeded.train.microbatches)
            stack.enter_context(contextlib.closing(batches))
            runs.append(Run(seeded, batches, folder, suite.build(seeded, pack, graphdef, folder)))
        facts = provenance(Path(__file__).parents[1]) | {"device": device_kind()}
        for run in runs:
            stack.enter_context(open_workdir(run.folder, run.experiment, facts, force_new=force_new))
        fit_side_by_side(runs, graphdef, tx, sources=pack.sources)
        ran = implementations_used()  # nothing runs where a finished run is repeated
        for run in runs:
            tokens = count_run(run.folder, run.experiment, run.batches.counts)
            record(run.folder, {"tokens": tokens} | ({"implementations": ran} if ran else {}))


def parse_seeds(text: str) -> Sequence[int]:
    """ "0..7" -> 0, 1, ..., 7; "0,3,5" -> those; "4" -> 4. Raises ConfigError for anything else."""
    first, dots, last = text.partition("..")
    try:
        seeds = range(int(first), int(last) + 1) if dots else [int(part) for part in text.split(",")]
    except ValueError:
        raise ConfigError(f"seeds {text!r}: give a range as 0..7, or a list as 0,3,5") from None
    if not seeds or min(seeds) < 0 or len(set(seeds)) < len(seeds):
        raise ConfigError(f"seeds {text!r} name no seed, a negative one or one twice")
    return seeds
