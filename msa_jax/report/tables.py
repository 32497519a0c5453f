"""The tables of one run, and the comparison of several.

Every value is printed beside what it must be compared with: text beside byte-unigram and byte-bigram models of the same
training text, captions beside the wrong picture, retrieval and the index beside chance.
"""

from collections.abc import Iterable, Sequence

from rich.box import SIMPLE_HEAD
from rich.markup import escape
from rich.table import Table

from msa_jax.report.run import Run

_SPLIT_LABELS = {"train": "train (seen)", "comp": "comp (held out)", "concept": "concept (held out)"}
_INDEX = {"block_recall": "block recall", "captured_mass": "captured mass", "relative_mass": "relative mass"}
_LOCAL = {"": "", "_without_local": "w/o local"}


def run_tables(run: Run) -> list[Table]:
    """Tables for one run; a table whose numbers the run does not have is left out."""
    tables = [provenance_table([run]), text_table(run), caption_table(run), index_table(run), attention_table(run)]
    return [table for table in tables if table.row_count]


def provenance_table(runs: Sequence[Run]) -> Table:
    """One row a run: what makes its numbers quotable."""
    table = _table("Runs" if len(runs) > 1 else f"Run {escape(runs[0].name)}")
    for heading in ("run", "commit", "config", "seed", "device", "implementation", "step"):
        table.add_column(heading, justify="right" if heading in ("seed", "step") else "left", overflow="fold")
    for run in runs:
        step = run.evaluated_at if run.evaluated_at is not None else (run.metrics[-1]["step"] if run.metrics else None)
        table.add_row(escape(run.name), *run.provenance().values(), "none" if step is None else str(step))
    return table


def text_table(run: Run) -> Table:
    table = _table("Held-out text", "unigram and bigram: byte models of the same training text, on the same held-out bytes")
    for heading in ("source", "nats/token", "bits/byte", "unigram", "bigram", "held-out bytes"):
        table.add_column(heading, justify="left" if heading == "source" else "right")
    for source in run.keys("text/bits_per_byte"):
        names = ("nats_per_token", "bits_per_byte", "unigram_bits_per_byte", "bigram_bits_per_byte")
        values = [_number(run, f"text/{name}/{source}") for name in names]
        values[1] = f"[bold]{values[1]}[/bold]"
        table.add_row(escape(source), *values, _number(run, f"text/bytes/{source}", ",.0f"))
    return table


def caption_table(run: Run) -> Table:
    table = _table(
        "Captions of pictures, nats/token",
        "right, wrong: caption loss given its own picture or another one of the same group; gain = wrong - right; "
        "retrieval: share of captions whose own picture, among n, makes them most probable",
    )
    splits = run.keys("caption/right")
    candidates = {f"1-of-{1 / run.evaluation[name]:.0f}" for name in (f"retrieval/chance/{s}" for s in splits) if name in run.evaluation}
    retrieval = f"{' / '.join(sorted(candidates))}\nretrieval"
    for heading in ("split", "right", "wrong", "gain", retrieval, "chance", "captions"):
        table.add_column(heading, justify="left" if heading == "split" else "right")
    for split in splits:
        gain = f"[bold]{_number(run, f'caption/image_gain/{split}')}[/bold]"
        table.add_row(
            _SPLIT_LABELS.get(split, escape(split)), _number(run, f"caption/right/{split}"), _number(run, f"caption/wrong/{split}"), gain,
            f"[bold]{_number(run, f'retrieval/accuracy/{split}')}[/bold]", _number(run, f"retrieval/chance/{split}"),
            _number(run, f"retrieval/captions/{split}", ".0f"),
        )  # fmt: skip
    return table


def index_table(run: Run) -> Table:
    """Index quality by MSA layer, the value of random blocks (plus the local one) in parentheses."""
    table = _table(
        "Blocks chosen by the index (in parentheses: random blocks + local)",
        "queries with more than R visible blocks only; oracle: the R blocks of most dense attention; "
        "KL in nats/token over all tokens, on the selected support and on the full prefix",
    )
    table.add_column("layer")
    for label in ("block\nrecall", "recall\nw/o local", "captured\nmass", "relative\nmass", "KL,\nselected", "KL,\nprefix"):
        table.add_column(label, justify="right")
    for layer in run.layers("index/kl_selected"):
        cells = [
            _with_chance(run, name, layer) for name in ("block_recall", "block_recall_without_local", "captured_mass", "relative_mass")
        ]
        table.add_row(
            layer.removeprefix("layer_"), *cells, *(_number(run, f"index/{name}/{layer}") for name in ("kl_selected", "kl_full_prefix"))
        )
    return table


def attention_table(run: Run) -> Table:
    table = _table(
        "Attention of text to pictures",
        "lift: share of attention / share of keys, without sinks; 1 = the picture is treated like any other key; long: several "
        "pictures in one document of more than R blocks, selected by MSA layers, with its separation index. Shares of pictures "
        "there: in the visible keys, in the index's probability, in the selected keys, in the attention",
    )
    table.add_column("layer")
    columns = ("lift", "lift_long", "separation", "visual_visible", "visual_index", "visual_selected", "visual_attention")
    for label in ("lift", "lift,\nlong", "separation", "share:\nvisible", "share:\nindex", "share:\nselected", "share:\nattention"):
        table.add_column(label, justify="right")
    for layer in run.layers("attention/lift"):
        table.add_row(layer.removeprefix("layer_"), *(_number(run, f"attention/{name}/{layer}", ".2f") for name in columns))
    return table


def comparison_table(runs: Sequence[Run]) -> Table:
    """Every number of every run: one column a run, layers averaged."""
    table = _table("Comparison", "layer values are means over layers; - : not measured in that run")
    table.add_column("")
    for run in runs:
        table.add_column(escape(run.name), justify="right", overflow="fold")
    for section in (_text_rows, _caption_rows, _index_rows):
        for label, values in section(runs):
            table.add_row(label, *("-" if value is None else f"{value:.3f}" for value in values))
        table.add_section()
    return table


def _text_rows(runs: Sequence[Run]) -> Iterable[tuple[str, list[float | None]]]:
    for source in _union(runs, "text/bits_per_byte"):
        for prefix, label in (("", ""), ("unigram_", " (unigram)"), ("bigram_", " (bigram)")):
            yield f"{source} bits/byte{label}", [run.evaluation.get(f"text/{prefix}bits_per_byte/{source}") for run in runs]


def _caption_rows(runs: Sequence[Run]) -> Iterable[tuple[str, list[float | None]]]:
    rows = (
        ("caption/right", "caption loss, right picture"), ("caption/wrong", "caption loss, wrong picture"),
        ("caption/image_gain", "image gain"), ("retrieval/accuracy", "retrieval"), ("retrieval/chance", "retrieval chance"),
    )  # fmt: skip
    for split in _union(runs, "caption/right"):
        for name, label in rows:
            yield f"{split}: {label}", [run.evaluation.get(f"{name}/{split}") for run in runs]


def _index_rows(runs: Sequence[Run]) -> Iterable[tuple[str, list[float | None]]]:
    for name, label in _INDEX.items():
        for suffix, local in _LOCAL.items():
            for chance, note in (("", ""), ("_random", " (random)")):
                values = [_layer_mean(run, f"index/{name}{suffix}{chance}") for run in runs]
                if any(value is not None for value in values):
                    yield f"index {label} {local}".rstrip() + note, values
    for name, label in (("kl_selected", "index KL, selected support"), ("kl_full_prefix", "index KL, full prefix")):
        yield label, [_layer_mean(run, f"index/{name}") for run in runs]
    for name, label in (("lift", "text-to-picture lift"), ("lift_long", "text-to-picture lift, long"), ("separation", "separation index")):
        yield label, [_layer_mean(run, f"attention/{name}") for run in runs]


def _union(runs: Sequence[Run], prefix: str) -> list[str]:
    return list(dict.fromkeys(key for run in runs for key in run.keys(prefix)))


def _layer_mean(run: Run, prefix: str) -> float | None:
    values = [run.evaluation[f"{prefix}/{layer}"] for layer in run.layers(prefix)]
    return sum(values) / len(values) if values else None


def _with_chance(run: Run, name: str, layer: str) -> str:
    value = _number(run, f"index/{name}/{layer}", ".2f")
    return value if value == "-" else f"[bold]{value}[/bold] ({_number(run, f'index/{name}_random/{layer}', '.2f')})"


def _number(run: Run, name: str, form: str = ".3f") -> str:
    value = run.evaluation.get(name)
    return "-" if value is None else format(value, form)


def _table(title: str, caption: str | None = None) -> Table:
    return Table(
        title=f"\n{title}",
        caption=caption,
        title_justify="left",
        caption_justify="left",
        title_style="bold",
        box=SIMPLE_HEAD,
        padding=(0, 1, 0, 0),
    )
