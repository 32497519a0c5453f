"""Runs the arms of an ablation file over seeds, and compares them seed by seed.

    python -m msa_jax.sweep configs/ablations/when_to_add_vision.py --seeds 0..7 --workdir runs/when_to_add_vision

Every arm is one program that trains its missing seeds side by side. The same command continues a sweep that was stopped or killed:
finished runs are kept, others go on from their checkpoints. A run is RUNS/ARM/seed_N, a run folder like any other.
"""

import argparse
import sys
import time
from collections.abc import Mapping, Sequence
from pathlib import Path

from rich.console import Console

from msa_jax import config
from msa_jax.config import ConfigError, Experiment
from msa_jax.launch import USER_ERRORS, launch, parse_seeds, run_command
from msa_jax.report.run import RunFolderError
from msa_jax.report.sweep import finished_run, finished_runs, seed_folder, write_summary
from msa_jax.train.guard import NonFiniteError

BASELINE = "baseline"  # the arm that config() itself makes
METRICS = ("text/nats_per_token", "caption/right", "caption/image_gain")


def main(arguments: Sequence[str] | None = None) -> int:
    arguments = sys.argv[1:] if arguments is None else list(arguments)
    parser = argparse.ArgumentParser(
        prog="python -m msa_jax.sweep", description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("config", metavar="FILE", help="a Python file with config() and variants(): the arms")
    parser.add_argument("--seeds", default="0..4", help="a range as 0..7, or a list as 0,3,5 (%(default)s)")
    parser.add_argument("--workdir", type=Path, required=True, metavar="RUNS", help="folder of all runs of this sweep")
    parser.add_argument("--arms", metavar="A,B", help="only these arms")
    parser.add_argument("--set", action="append", default=[], metavar="PATH=VALUE", help="change one value in every arm")
    parser.add_argument("--metrics", default=",".join(METRICS), metavar="A,B", help="evaluated values to print (%(default)s)")
    parser.add_argument("--smoke", action="store_true", help="arms of a CPU minute on made-up data")
    options, again = parser.parse_args(arguments), [sys.executable, "-m", "msa_jax.sweep", *arguments]
    return run_command("sweep", lambda: sweep(options), again, refusals=(RunFolderError, *USER_ERRORS))


def sweep(options: argparse.Namespace) -> int:
    """Exit code: 1 if an arm lost its numbers (the others are run all the same), else 0."""
    console = Console(highlight=False, soft_wrap=True)
    seeds, arms = parse_seeds(options.seeds), load_arms(options)
    lost = [arm for arm, experiment in arms.items() if not run_arm(arm, experiment, seeds, options.workdir, console)]
    found = finished_runs(options.workdir, list(arms), seeds)
    write_summary(options.workdir, found, controls(options.config, arms), options.metrics.split(","), console)
    return 1 if lost else 0


def load_arms(options: argparse.Namespace) -> dict[str, Experiment]:
    """The variants of a config file by name, and before them the baseline unless one of them equals it."""
    module = config.load_module(options.config)
    variants = module.variants() if hasattr(module, "variants") else {}
    names = {name: name for name in variants} if {} in variants.values() else {BASELINE: None, **{name: name for name in variants}}
    chosen = options.arms.split(",") if options.arms else list(names)
    unknown = [name for name in chosen if name not in names]
    if unknown:
        raise ConfigError(f"config file {options.config!r} has no arms {unknown}; choose from: {', '.join(names)}")
    changes = config.parse_changes(options.set)
    experiments = {name: config.load(options.config, names[name], changes) for name in chosen}
    return {name: config.smoke(experiment) if options.smoke else experiment for name, experiment in experiments.items()}


def controls(path: str, arms: Mapping[str, Experiment]) -> dict[str, tuple[str, ...]]:
    """Arm -> the arms it is compared with: what controls() of the config file says, or the baseline."""
    module = config.load_module(path)
    if hasattr(module, "controls"):
        return module.controls()
    return {arm: (BASELINE,) for arm in arms if arm != BASELINE}


def run_arm(arm: str, experiment: Experiment, seeds: Sequence[int], workdir: Path, console: Console) -> bool:
    """Trains the seeds that are missing, side by side; one line a run. False if the arm lost its numbers."""
    folders = {seed: seed_folder(workdir, arm, seed) for seed in seeds}
    missing = {seed: folder for seed, folder in folders.items() if not is_kept(folder, experiment, seed)}
    began = time.monotonic()
    if missing:
        try:
            launch(experiment, missing)
        except NonFiniteError as error:
            console.print(f"{arm} seeds {', '.join(map(str, missing))}: lost, {error}", markup=False)
            return False
    minutes = (time.monotonic() - began) / 60
    for seed, folder in folders.items():
        how = f"trained in {minutes:.1f} min beside {len(missing) - 1} others" if seed in missing else "kept"
        loss = finished_run(folder).mean(METRICS[0])
        console.print(f"{arm} seed {seed}: {how}" + ("" if loss is None else f", {METRICS[0]} {loss:.4f}"), markup=False)
    return True


def is_kept(folder: Path, experiment: Experiment, seed: int) -> bool:
    """Whether the folder holds this very experiment, finished. Another one's folder is refused where it is opened."""
    run = finished_run(folder)
    return run is not None and run.config["hash"] == config.config_hash(config.override(experiment, {"seed": seed}))


if __name__ == "__main__":
    sys.exit(main())
