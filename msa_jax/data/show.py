"""What is in a data pack: a table, samples of its text, and a sheet of its pictures for each split.

python -m msa_jax.data.show --pack data/small
"""

import argparse
from collections.abc import Sequence
from pathlib import Path

import numpy as np
from PIL import Image
from rich.console import Console
from rich.table import Table

from msa_jax.data import tokenizer as tokenizers
from msa_jax.data.pack import Pack
from msa_jax.data.records import PICTURE_SPLITS, TEXT_SPLITS
from msa_jax.data.text import tokenize
from msa_jax.data.tokenizer import Tokenizer

COLUMNS, ROWS, ZOOM, GAP = 16, 8, 3, 2
SAMPLE_CHARACTERS = 400


def text_table(pack: Pack, tokenizer: Tokenizer) -> Table:
    """Documents, bytes and tokens of each text source and split."""
    table = Table("source", "split", "documents", "bytes", "tokens", "bytes/token", title=f"Text of {pack.name!r} ({pack.digest[:12]})")
    sizes = np.diff(pack.document_ends, prepend=0)
    tokens = np.diff(tokenize(pack, tokenizer).ends, prepend=0)
    for source in pack.text_sources:
        for split in TEXT_SPLITS:
            chosen = pack.documents(split, [source])
            n_bytes, n_tokens = int(sizes[chosen].sum()), int(tokens[chosen].sum())
            per_token = f"{n_bytes / n_tokens:.2f}" if n_tokens else "-"
            table.add_row(source, split, f"{len(chosen):,}", f"{n_bytes:,}", f"{n_tokens:,}", per_token)
    return table


def picture_table(pack: Pack) -> Table:
    """Pictures of each group and split."""
    table = Table("group", *PICTURE_SPLITS, title=f"Pictures of {pack.name!r}, {pack.pictures.shape[2]} x {pack.pictures.shape[1]}")
    for number, group in enumerate((*pack.groups, "all")):
        chosen = np.ones(len(pack.captions), bool) if group == "all" else pack.picture_groups == number
        counts = [int((chosen & (pack.picture_splits == split)).sum()) for split in range(len(PICTURE_SPLITS))]
        table.add_row(group, *(f"{count:,}" for count in counts))
    return table


def contact_sheet(pack: Pack, split: str) -> Image.Image:
    """At most COLUMNS x ROWS pictures of a split, evenly chosen, on grey so that their own background shows."""
    ids = pack.picture_ids(split)
    ids = ids[np.unique(np.linspace(0, len(ids) - 1, min(len(ids), COLUMNS * ROWS)).astype(int))] if len(ids) else ids
    height, width = (size + GAP for size in pack.pictures.shape[1:3])
    sheet = np.full((max(1, -(-len(ids) // COLUMNS)) * height + GAP, COLUMNS * width + GAP, 3), 128, np.uint8)
    for place, index in enumerate(ids):
        top, left = place // COLUMNS * height + GAP, place % COLUMNS * width + GAP
        sheet[top : top + height - GAP, left : left + width - GAP] = pack.pictures[index]
    return Image.fromarray(sheet).resize((sheet.shape[1] * ZOOM, sheet.shape[0] * ZOOM), Image.Resampling.NEAREST)


def text_sample(pack: Pack, source: str, split: str) -> str:
    """The beginning of the middle document of a source and split."""
    chosen = pack.documents(split, [source])
    if not len(chosen):
        return "(nothing)"
    index = int(chosen[len(chosen) // 2])
    return f"{pack.document_names[index]}\n{pack.document(index)[:SAMPLE_CHARACTERS]}"


def main(arguments: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(prog="python -m msa_jax.data.show", description=__doc__.splitlines()[0])
    parser.add_argument("--pack", default="data/small", help="folder of a built pack, or 'synthetic' (default: %(default)s)")
    parser.add_argument("--tokenizer", default="bpe4096", help="a committed one by name, or a tokenizer.json (default: %(default)s)")
    parser.add_argument("--out", type=Path, help="folder for the picture sheets (default: <pack>/show)")
    options = parser.parse_args(arguments)
    console = Console()
    try:
        pack = Pack.open(options.pack)
        tables = [text_table(pack, tokenizers.load(options.tokenizer)), picture_table(pack)]
    except ValueError as error:
        console.print(f"error: {error}", style="red", markup=False, highlight=False, soft_wrap=True)
        return 1
    for table in tables:
        console.print(table)
    for source in pack.text_sources:
        for split in TEXT_SPLITS:
            console.rule(f"{source}, {split}")
            console.print(text_sample(pack, source, split), markup=False, highlight=False)
    out = options.out or (pack.folder or Path(pack.name)) / "show"
    out.mkdir(parents=True, exist_ok=True)
    for split in PICTURE_SPLITS:
        path = out / f"{split}.png"
        contact_sheet(pack, split).save(path)
        chosen = pack.picture_ids(split)
        console.print(f"{path}: {', '.join(pack.captions[i] for i in chosen[:: max(1, len(chosen) // 5)][:5])}, ...", markup=False)
    return 0


if __name__ == "__main__":
    raise SystemExit(main())
