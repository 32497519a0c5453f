"""Which key blocks a few queries of one text+picture document selected: one panel a KV head.

    query      block 0  1  2  3  4  5
    "fox"            .  S  .  S  L          S selected, L local (always kept), . visible but not selected
    "tree"           S  .  .  S  .  L

The document is longer than R blocks, so that the index must choose.
"""

from collections.abc import Mapping

import numpy as np
from matplotlib.axes import Axes
from matplotlib.figure import Figure
from matplotlib.patches import Patch, Rectangle

from msa_jax.report.run import Run
from msa_jax.report.style import BLUE, FAINT, GREY, ORANGE, PURPLE, new_figure

INVISIBLE, VISIBLE, SELECTED, LOCAL = range(4)
_STRIP = 0.45  # height, in query rows, of the bar above the rows that shows where the pictures are
_FILL = {VISIBLE: FAINT, SELECTED: BLUE, LOCAL: ORANGE}


def selection_map(run: Run) -> Figure:
    """Rows are queries, columns blocks of the document, panels KV heads; the left column is the first MSA layer, the right the last."""
    data = run.arrays["selection_map"]
    layers_X = data["layers_X"]
    shown = sorted({0, len(layers_X) - 1})
    heads, queries = data["ids_XKTR"].shape[1], len(data["queries_Q"])
    figure = new_figure(1.6 + 5.2 * len(shown), 1.5 + heads * (0.55 + 0.24 * queries))
    panels = figure.subplots(heads, len(shown), sharex=True, sharey=True, squeeze=False)
    for column, x in enumerate(shown):
        for head in range(heads):
            axes = panels[head, column]
            _panel(axes, block_states(data, x, head), data)
            axes.set_title(f"layer {layers_X[x]}, KV head {head}")
    for axes in panels[:, 0]:
        axes.set_ylabel("query token")
    for axes in panels[-1]:
        axes.set_xlabel(f"key block ({int(data['block_size'])} tokens each)")
    figure.suptitle(f"Blocks selected in one document of text and pictures: {run.name}", x=0.01, ha="left", fontsize=11, fontweight="bold")
    figure.legend(handles=_legend(), loc="outside lower center", ncols=4)
    return figure


def block_states(data: Mapping[str, np.ndarray], x: int, head: int) -> np.ndarray:
    """int [Q, J]: INVISIBLE, VISIBLE, SELECTED or LOCAL for each shown query and block of MSA layer number `x`."""
    queries_Q, block_size = data["queries_Q"], int(data["block_size"])
    blocks_J = np.arange(-(-len(data["visual_T"]) // block_size))
    local_Q1 = queries_Q[:, None] // block_size
    chosen_QJ = (data["ids_XKTR"][x, head, queries_Q][:, :, None] == blocks_J).any(1)
    states = np.where(blocks_J <= local_Q1, VISIBLE, INVISIBLE)
    states = np.where(chosen_QJ & (blocks_J <= local_Q1), SELECTED, states)
    return np.where(chosen_QJ & (blocks_J == local_Q1), LOCAL, states)


def picture_spans(visual_T: np.ndarray) -> list[tuple[int, int]]:
    """[start, end) of each run of visual tokens."""
    edges = np.flatnonzero(np.diff(np.concatenate([[0], visual_T.astype(int), [0]])))
    return list(zip(edges[::2].tolist(), edges[1::2].tolist(), strict=True))


def _panel(axes: Axes, states: np.ndarray, data: Mapping[str, np.ndarray]) -> None:
    queries, blocks = states.shape
    block_size = int(data["block_size"])
    for start, end in picture_spans(data["visual_T"]):
        left, width = start / block_size, (end - start) / block_size
        axes.add_patch(Rectangle((left, -_STRIP), width, queries + _STRIP, facecolor=PURPLE, alpha=0.25, linewidth=0))
        axes.add_patch(Rectangle((left, -_STRIP), width, _STRIP * 0.7, facecolor=PURPLE, linewidth=0))
    for row in range(queries):
        for block in range(blocks):
            if states[row, block] != INVISIBLE:
                axes.add_patch(
                    Rectangle((block + 0.12, row + 0.16), 0.76, 0.68, facecolor=_FILL[states[row, block]], edgecolor="white", linewidth=0.5)
                )
    axes.set(xlim=(0, blocks), ylim=(queries, -_STRIP))
    step = max(1, blocks // 8)
    axes.set_xticks(np.arange(0, blocks, step) + 0.5, [str(block) for block in range(0, blocks, step)])
    axes.set_yticks(np.arange(queries) + 0.5, [f"{_word(data, query)}  {query}" for query in data["queries_Q"]])
    axes.tick_params(length=0)
    for spine in axes.spines.values():
        spine.set_visible(False)


def _word(data: Mapping[str, np.ndarray], query: int) -> str:
    """The query's token as a label: white space and unprintable bytes made visible, long ones cut."""
    token = str(data["tokens_T"][query]).replace("\n", "⏎").replace("\t", "⇥")
    word = "".join(letter if letter.isprintable() else "\N{REPLACEMENT CHARACTER}" for letter in token.strip(" ") or "␣")
    return (word if len(word) <= 10 else word[:9] + "…").replace("$", r"\$")


def _legend() -> list[Patch]:
    return [
        Patch(facecolor=BLUE, label="selected"),
        Patch(facecolor=ORANGE, label="local block (always kept)"),
        Patch(facecolor=FAINT, edgecolor=GREY, linewidth=0.5, label="visible, not selected"),
        Patch(facecolor=PURPLE, label="picture"),
    ]
