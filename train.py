"""Trains a config: builds data, model and evaluators, fits, prints what was learned. Everything of substance is in msa_jax."""

import argparse
import contextlib
import sys
import tempfile
from pathlib import Path

from msa_jax import config, report
from msa_jax.launch import FAILURES, launch, parse_seeds, run_command
from msa_jax.train.records import NotLearned, check_learning

EXAMPLES = """examples:
  python train.py                                                  the CPU size of configs/native.py, into runs/native
  python train.py --config configs/native.py --variant s           a larger size of it, into runs/native-s
  python train.py --set optim.learning_rate=1e-3 --workdir runs/x  change any value; repeat --set for more
  python train.py --config configs/ablations/index_recipe.py --variant no_warmup --smoke
  python train.py --variant s --seeds 0..7                         eight seeds in one program, into runs/native-s/seed_0, ...

The same command continues a run that was stopped; Ctrl-C saves first. Results: RUN/evaluation.jsonl, RUN/figures/*.png."""


def main(arguments: list[str]) -> int:
    parser = argparse.ArgumentParser(description=__doc__, epilog=EXAMPLES, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--config", default="configs/native.py", metavar="FILE", help="a Python file with config() (%(default)s)")
    parser.add_argument("--variant", metavar="NAME", help="one of the file's variants(): a dictionary of differences")
    parser.add_argument("--set", action="append", default=[], metavar="PATH=VALUE", help="change one value by its dotted path")
    parser.add_argument("--workdir", type=Path, metavar="RUN", help="run folder (runs/ and the experiment's name)")
    parser.add_argument("--seeds", metavar="A..B", help="train these seeds side by side, each into RUN/seed_N; 0..7 or 0,3,5")
    parser.add_argument("--force-new", action="store_true", help="move a run that is in the folder aside and start anew")
    parser.add_argument("--smoke", action="store_true", help="under a minute on a CPU, made-up data; fails unless the loss fell")
    options, again = parser.parse_args(arguments), [sys.executable, __file__, *arguments]
    return run_command("train.py", lambda: train(options), again, failures=(NotLearned, *FAILURES))


def train(options: argparse.Namespace) -> None:
    experiment = config.load(options.config, options.variant, config.parse_changes(options.set))
    folder = options.workdir or Path("runs") / experiment.name
    with contextlib.ExitStack() as stack:
        if options.smoke:
            experiment = config.smoke(experiment)
            folder = options.workdir or Path(stack.enter_context(tempfile.TemporaryDirectory())) / "smoke"
        seeds = parse_seeds(options.seeds) if options.seeds is not None else None
        folders = {seed: folder / f"seed_{seed}" for seed in seeds} if seeds else {experiment.seed: folder}
        launch(experiment, folders, force_new=options.force_new)
        report.write(*folders.values())
        if options.smoke:
            for run in folders.values():
                print(f"smoke: {check_learning(run)}" + ("" if options.workdir else "; its folder is gone (--workdir keeps it)"))


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
