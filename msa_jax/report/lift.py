"""Do text tokens look at pictures? Lift of text-to-picture attention by layer and head.

Lift = share of the attention mass on visual keys / share of visual keys among the visible keys, sinks removed. 1 is what
attention that ignores the kind of token gives; colours are symmetric around 1 on a log scale.
"""

from collections.abc import Sequence

import numpy as np
from matplotlib.axes import Axes
from matplotlib.colors import LogNorm
from matplotlib.figure import Figure
from matplotlib.ticker import FixedLocator, FuncFormatter, NullLocator

from msa_jax.report.run import Run
from msa_jax.report.style import BLUE, GREY, ORANGE, light_grid, new_figure

_SETTINGS = (("lift_XN", "one picture a document", BLUE, "o", "-"), ("lift_long_XN", "many pictures in one document", ORANGE, "s", "--"))


def lift_limit(runs: Sequence[Run]) -> float:
    """The largest factor away from 1, over all `runs`: the colour limits are (1 / limit, limit) in each of their figures."""
    values = [run.arrays["lift"][name].ravel() for run in runs if "lift" in run.arrays for name, *_ in _SETTINGS]
    lifts = np.concatenate(values) if values else np.ones(1)
    logs = np.abs(np.log(lifts[np.isfinite(lifts) & (lifts > 0)]))
    return float(np.exp(np.clip(logs.max(initial=0.0), np.log(2.0), np.log(100.0))))


def lift_figure(run: Run, limit: float) -> Figure:
    """Two heat maps (layer x head) with shared colour limits, and the layer curve: geometric mean and range over heads."""
    data = run.arrays["lift"]
    figure = new_figure(10.0, 3.9)
    *maps, curve = figure.subplots(1, 3, width_ratios=(1, 1, 1.25))
    figure.suptitle(
        f"Attention from text to pictures, lift = share of attention / share of keys: {run.name}",
        x=0.01,
        ha="left",
        fontsize=11,
        fontweight="bold",
    )
    for axes, (name, title, *_) in zip(maps, _SETTINGS, strict=True):
        image = _heat_map(axes, data[name], data["layers_X"], limit)
        axes.set_title(title)
    maps[0].set_ylabel("layer")
    bar = figure.colorbar(image, ax=maps, location="right", shrink=0.9, aspect=22, label="lift (log scale)")
    ticks = _ticks(limit)
    bar.ax.yaxis.set_major_locator(FixedLocator(ticks))
    bar.ax.yaxis.set_minor_locator(NullLocator())
    bar.ax.yaxis.set_major_formatter(FuncFormatter(_plain))
    _layer_curve(curve, data)
    return figure


def _heat_map(axes: Axes, lift_XN: np.ndarray, layers_X: np.ndarray, limit: float):
    clipped = np.clip(lift_XN, 1 / limit, limit)
    image = axes.imshow(clipped, cmap="PuOr_r", norm=LogNorm(1 / limit, limit), aspect="auto", origin="lower")
    axes.set_xticks(range(lift_XN.shape[1]))
    axes.set_yticks(range(len(layers_X)), [str(layer) for layer in layers_X])
    axes.set_xlabel("query head")
    axes.tick_params(length=0)
    if lift_XN.size <= 64:
        for (row, column), value in np.ndenumerate(lift_XN):
            dark = abs(np.log(clipped[row, column])) > 0.6 * np.log(limit)
            axes.text(column, row, _two_digits(value), ha="center", va="center", fontsize=7.5, color="white" if dark else "black")
    return image


def _layer_curve(axes: Axes, data: dict[str, np.ndarray]) -> None:
    layers = np.arange(len(data["layers_X"]))
    for (name, label, colour, marker, dashes), shift in zip(_SETTINGS, (-0.1, 0.1), strict=True):
        lift_XN = np.maximum(data[name], 1e-3)
        axes.plot(layers, np.exp(np.log(lift_XN).mean(1)), color=colour, marker=marker, markersize=5, linestyle=dashes, label=label)
        heads = lift_XN.shape[1]
        axes.scatter(np.repeat(layers + shift, heads), lift_XN.ravel(), s=9, color=colour, alpha=0.45, marker=marker, linewidth=0)
    axes.axhline(1.0, color=GREY, linewidth=1.0, linestyle=":")
    axes.set_yscale("log")
    low, high = axes.get_ylim()
    axes.set_ylim(min(low, 0.5), max(high, 2.0) * 1.5)
    axes.yaxis.set_major_locator(FixedLocator(_ticks(max(axes.get_ylim()[1], 1 / axes.get_ylim()[0]))))
    axes.yaxis.set_minor_locator(NullLocator())
    axes.yaxis.set_major_formatter(FuncFormatter(_plain))
    axes.set_xticks(layers, [str(layer) for layer in data["layers_X"]])
    axes.set(title="mean over heads (dots: heads)", xlabel="layer", ylabel="lift (log scale)")
    axes.legend(loc="upper left")
    light_grid(axes)


def _ticks(limit: float) -> list[float]:
    """1, 2, 5, 10, ... and their inverses within the limit."""
    steps = [factor * 10.0**power for power in range(3) for factor in (1, 2, 5)]
    kept = [step for step in steps if step <= limit * 1.001]
    return sorted({*kept, *(1 / step for step in kept)})


def _plain(value: float, _position: int | None = None) -> str:
    """A tick without an exponent: 0.05, 0.5, 1, 20."""
    return f"{value:g}"


def _two_digits(value: float) -> str:
    """0.05, 0.50, 5.0, 12."""
    decimals = 0 if value >= 9.95 else 1 if value >= 0.995 else 2
    return f"{value:.{decimals}f}"
