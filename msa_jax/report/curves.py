"""Losses over the run: LM loss, index KL and, small below them, the learning rates."""

import numpy as np
from matplotlib.axes import Axes
from matplotlib.figure import Figure
from matplotlib.ticker import FuncFormatter, LogLocator, NullLocator

from msa_jax.report.run import Run
from msa_jax.report.style import BLUE, GREEN, GREY, INK, ORANGE, PURPLE, light_grid, new_figure

_RATE_LINES = ((BLUE, "-"), (ORANGE, "--"), (GREEN, ":"))


def loss_curves(run: Run) -> Figure:
    """Three panels over the same steps. The dashed line is the end of the index warm-up, where selection starts."""
    figure = new_figure(7.5, 6.2)
    loss, kl, rate = figure.subplots(3, 1, sharex=True, height_ratios=(3.2, 2, 1))
    figure.suptitle(f"Training losses: {run.name}", x=0.01, ha="left", fontsize=11, fontweight="bold")
    _curve(loss, run, "loss/lm", BLUE)
    loss.set(title="Language-model loss (text and captions)", ylabel="nats / token")
    _curve(kl, run, "loss/kl", ORANGE)
    kl.set(title="Index KL, mean over MSA layers", ylabel="nats / token")
    _positive_log(kl)
    for groups, (steps, values), (colour, dashes) in zip(*_distinct_rates(run), _RATE_LINES, strict=False):
        rate.plot(steps, values, color=colour, linestyle=dashes, linewidth=1.4, label=groups)
    rate.set(title="Learning rate", xlabel="step", ylabel="rate")
    rate.ticklabel_format(axis="y", style="sci", scilimits=(-3, -3), useMathText=True)
    rate.set_ylim(bottom=0)
    if rate.lines:
        rate.legend(ncols=3, loc="lower right", bbox_to_anchor=(1.0, 0.98), borderaxespad=0.0)
    for axes in (loss, kl, rate):
        light_grid(axes)
    _mark_phase(run, loss, kl, rate)
    return figure


def _distinct_rates(run: Run) -> tuple[list[str], list[tuple[np.ndarray, np.ndarray]]]:
    """Labels and curves of the groups' learning rates; groups with the same curve share a label."""
    curves = {group: run.curve(f"lr/{group}") for group in ("trunk", "index", "vision")}
    shared: dict[bytes, list[str]] = {}
    for group, (steps, values) in curves.items():
        if len(steps):
            shared.setdefault(values.tobytes(), []).append(group)
    return [", ".join(groups) for groups in shared.values()], [curves[groups[0]] for groups in shared.values()]


def _curve(axes: Axes, run: Run, name: str, colour: str) -> None:
    """Every logged value, faint, under its running mean."""
    steps, values = run.curve(name)
    if not len(steps):
        axes.text(0.5, 0.5, f"{name} was not logged", transform=axes.transAxes, ha="center", va="center", color=GREY)
        return
    window = max(1, len(steps) // 25)
    axes.plot(steps, values, color=colour, alpha=0.3, linewidth=0.9, label="logged")
    axes.plot(steps, running_mean(values, window), color=colour, linewidth=1.8, label=f"mean of {window} logged values")
    axes.legend(loc="upper right")


def running_mean(values: np.ndarray, window: int) -> np.ndarray:
    """Mean of the `window` values around each (fewer at both ends), the same length as `values`."""
    starts = np.arange(len(values)) - window // 2
    return np.array([values[max(0, start) : start + window].mean() for start in starts])


def _positive_log(axes: Axes) -> None:
    """A log scale where the data allow one: KL falls over decades."""
    values = np.concatenate([line.get_ydata() for line in axes.lines] or [np.zeros(1)])
    if len(values) and np.nanmin(values) > 0:
        axes.set_yscale("log")
        axes.yaxis.set_major_locator(LogLocator(subs=(1, 2, 5)))
        axes.yaxis.set_minor_locator(NullLocator())
        axes.yaxis.set_major_formatter(FuncFormatter(lambda value, _: f"{value:g}"))


def _mark_phase(run: Run, top: Axes, *others: Axes) -> None:
    step = run.experiment["train"]["index_warmup_steps"]
    last = run.metrics[-1]["step"] if run.metrics else 0
    if not 0 < step < last:
        return
    for axes in (top, *others):
        axes.axvline(step, color=PURPLE, linestyle="--", linewidth=1.2)
    top.annotate(
        f"selection starts\n(step {step})", (step, 0.96), xycoords=("data", "axes fraction"), xytext=(6, 0), textcoords="offset points",
        va="top", fontsize=8, color=INK, bbox={"facecolor": "white", "edgecolor": "none", "alpha": 0.8, "pad": 1.0},
    )  # fmt: skip
