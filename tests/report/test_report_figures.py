"""What the figures show, read from the Figure objects."""

import dataclasses
from collections.abc import Iterator
from pathlib import Path

import numpy as np
import pytest
from matplotlib.backends.backend_agg import FigureCanvasAgg
from matplotlib.colors import to_hex
from matplotlib.figure import Figure
from matplotlib.patches import Rectangle

from msa_jax.report.curves import loss_curves, running_mean
from msa_jax.report.lift import lift_figure, lift_limit
from msa_jax.report.run import Run, load_run
from msa_jax.report.selection import INVISIBLE, LOCAL, SELECTED, VISIBLE, block_states, picture_spans, selection_map
from msa_jax.report.style import BLUE, ORANGE, styled


@pytest.fixture
def run(run_folder: Path) -> Iterator[Run]:
    with styled():
        yield load_run(run_folder)


def overlapping_texts(figure: Figure) -> list[tuple[str, str]]:
    """Pairs of tick labels, titles, axis labels and headings whose drawn boxes overlap."""
    FigureCanvasAgg(figure).draw()
    texts = list(figure.texts)
    for axes in figure.axes:
        texts += [axes.xaxis.label, axes.yaxis.label, axes._left_title]
        for axis in (axes.xaxis, axes.yaxis):
            low, high = sorted(axis.get_view_interval())
            texts += [tick.label1 for tick in axis.get_major_ticks() if low <= tick.get_loc() <= high and tick.label1.get_visible()]
            texts += [tick.label2 for tick in axis.get_major_ticks() if low <= tick.get_loc() <= high and tick.label2.get_visible()]
    boxes = [(text.get_text(), text.get_window_extent().padded(-1)) for text in texts if text.get_text()]
    return [(a, b) for i, (a, box) in enumerate(boxes) for b, other in boxes[i + 1 :] if box.overlaps(other)]


def test_loss_curves(run: Run) -> None:
    figure = loss_curves(run)
    assert [axes.get_title(loc="left") for axes in figure.axes] == [
        "Language-model loss (text and captions)", "Index KL, mean over MSA layers", "Learning rate",
    ]  # fmt: skip
    assert [axes.get_ylabel() for axes in figure.axes] == ["nats / token", "nats / token", "rate"]
    assert figure.axes[-1].get_xlabel() == "step"
    for axes in figure.axes:
        marks = [line for line in axes.lines if len(line.get_xdata()) == 2 and set(line.get_xdata()) == {40}]
        assert len(marks) == 1, "the phase change is marked in every panel"
    assert [text.get_text() for text in figure.axes[2].get_legend().get_texts()] == ["trunk", "index", "vision"]
    np.testing.assert_array_equal(figure.axes[0].lines[0].get_ydata(), run.curve("loss/lm")[1])
    assert overlapping_texts(figure) == []


def test_groups_with_the_same_learning_rate_share_a_line(run: Run) -> None:
    rows = [row | {"lr/index": row["lr/trunk"]} for row in run.metrics]
    rate = loss_curves(dataclasses.replace(run, metrics=rows)).axes[2]
    assert [text.get_text() for text in rate.get_legend().get_texts()] == ["trunk, index", "vision"]


def test_loss_curves_of_a_run_without_msa_layers_or_metrics(run: Run) -> None:
    rows = [{"step": row["step"], "loss/lm": row["loss/lm"], "loss/kl": 0.0} for row in run.metrics]
    assert loss_curves(dataclasses.replace(run, metrics=rows)).axes[1].get_yscale() == "linear"
    empty = loss_curves(dataclasses.replace(run, metrics=[]))
    assert any("not logged" in text.get_text() for text in empty.axes[0].texts)


def test_running_mean_by_hand() -> None:
    np.testing.assert_allclose(running_mean(np.array([1.0, 3.0, 5.0, 1.0]), 3), [2, 3, 3, 3])
    np.testing.assert_allclose(running_mean(np.array([1.0, 3.0]), 1), [1, 3])


def test_block_states_by_hand() -> None:
    """Six blocks of 2; the query at 7 stands in block 3: kept 0, 2 and its own; block 5 lies ahead and is ignored."""
    ids_XKTR = np.full((1, 1, 12, 4), -1)
    ids_XKTR[0, 0, 7] = [0, 2, 5, 3]
    ids_XKTR[0, 0, 1] = [0, -1, -1, -1]
    data = {"ids_XKTR": ids_XKTR, "queries_Q": np.array([7, 1]), "block_size": np.array(2), "visual_T": np.zeros(12, bool)}
    assert block_states(data, 0, 0).tolist() == [
        [SELECTED, VISIBLE, SELECTED, LOCAL, INVISIBLE, INVISIBLE], [LOCAL] + [INVISIBLE] * 5,
    ]  # fmt: skip


def test_picture_spans_by_hand() -> None:
    assert picture_spans(np.array([1, 1, 0, 0, 1, 0, 1], bool)) == [(0, 2), (4, 5), (6, 7)]
    assert picture_spans(np.zeros(3, bool)) == []


def test_selection_map(run: Run) -> None:
    figure = selection_map(run)
    titles = [axes.get_title(loc="left") for axes in figure.axes]
    assert titles == ["layer 0, KV head 0", "layer 3, KV head 0", "layer 0, KV head 1", "layer 3, KV head 1"]
    assert figure.axes[2].get_xlabel() == "key block (16 tokens each)"
    data = run.arrays["selection_map"]
    labels = [label.get_text() for label in figure.axes[0].get_yticklabels()]
    words = ["fox", "fox", "waving ha…", "⏎", r"\$tree", "fox"]
    assert labels == [f"{word}  {query}" for word, query in zip(words, data["queries_Q"], strict=True)]
    for axes, (x, head) in zip(figure.axes, [(0, 0), (3, 0), (0, 1), (3, 1)], strict=True):
        colours = [to_hex(patch.get_facecolor()).upper() for patch in axes.patches if isinstance(patch, Rectangle)]
        states = block_states(data, x, head)
        assert colours.count(BLUE) == (states == SELECTED).sum()
        assert colours.count(ORANGE) == (states == LOCAL).sum() == len(data["queries_Q"])
    assert [text.get_text() for text in figure.legends[0].get_texts()][-1] == "picture"
    assert overlapping_texts(figure) == []


def test_lift(run: Run) -> None:
    limit = lift_limit([run])
    figure = lift_figure(run, limit)
    single, many, curve, bar = figure.axes
    assert single.images[0].get_clim() == many.images[0].get_clim() == pytest.approx((1 / limit, limit)), "shared limits"
    assert (single.get_xlabel(), single.get_ylabel()) == ("query head", "layer")
    assert curve.get_yscale() == "log"
    np.testing.assert_allclose(curve.lines[0].get_ydata(), np.exp(np.log(run.arrays["lift"]["lift_XN"]).mean(1)))
    assert bar.get_ylabel() == "lift (log scale)"
    assert overlapping_texts(figure) == []


def test_the_limit_covers_all_runs_and_stays_finite(run: Run) -> None:
    wide = np.ones((4, 4))
    wide[0, 0], wide[1, 1] = 0.05, 0.0  # a head that never looks at a picture
    run = dataclasses.replace(run, arrays={"lift": {**run.arrays["lift"], "lift_XN": wide}})
    assert lift_limit([run]) == pytest.approx(20.0)
    assert lift_limit([]) == 2.0
    figure = lift_figure(run, lift_limit([run]))
    FigureCanvasAgg(figure).draw()
    assert np.isfinite(figure.axes[2].lines[0].get_ydata()).all()
