"""python -m msa_jax.report runs/a [runs/b ...]: tables on the screen, figures in each run folder."""

import argparse
import sys

from msa_jax.report.publish import write
from msa_jax.report.run import RunFolderError


def main(arguments: list[str] | None = None) -> int:
    parser = argparse.ArgumentParser(prog="python -m msa_jax.report", description=__doc__)
    parser.add_argument("runs", nargs="+", metavar="RUN", help="run folder (the --workdir of train.py); several give a comparison")
    try:
        write(*parser.parse_args(arguments).runs)
    except RunFolderError as error:
        print(f"report: {error}", file=sys.stderr)
        return 2
    return 0


if __name__ == "__main__":
    sys.exit(main())
