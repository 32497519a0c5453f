"""How every figure looks: one colour an idea, the same sizes everywhere, no global state.

Colours are Okabe and Ito's, which stay apart for all common kinds of colour blindness.
"""

from collections.abc import Iterator
from contextlib import contextmanager

import matplotlib
from matplotlib.axes import Axes
from matplotlib.figure import Figure

BLUE, ORANGE, GREEN, PURPLE, SKY, GREY = "#0072B2", "#D55E00", "#009E73", "#CC79A7", "#56B4E9", "#6E6E6E"
INK, FAINT = "#222222", "#E4E4E4"
DPI = 150

_SETTINGS = {
    "font.family": "DejaVu Sans",
    "font.size": 9.0,
    "axes.titlesize": 10.0,
    "axes.titlelocation": "left",
    "axes.titleweight": "bold",
    "axes.labelsize": 9.0,
    "axes.labelcolor": INK,
    "axes.edgecolor": GREY,
    "axes.linewidth": 0.8,
    "axes.spines.top": False,
    "axes.spines.right": False,
    "axes.axisbelow": True,
    "xtick.labelsize": 8.0,
    "ytick.labelsize": 8.0,
    "xtick.color": GREY,
    "ytick.color": GREY,
    "xtick.labelcolor": INK,
    "ytick.labelcolor": INK,
    "legend.fontsize": 8.0,
    "legend.frameon": False,
    "text.color": INK,
    "figure.facecolor": "white",
    "savefig.facecolor": "white",
}


@contextmanager
def styled() -> Iterator[None]:
    """Figures made inside look alike; the caller's own matplotlib settings come back afterwards."""
    with matplotlib.rc_context(_SETTINGS):
        yield


def new_figure(width: float, height: float) -> Figure:
    """An empty figure of the given size in inches whose parts never overlap."""
    return Figure(figsize=(width, height), layout="constrained", dpi=DPI)


def light_grid(axes: Axes, axis: str = "both") -> None:
    axes.grid(True, axis=axis, color=FAINT, linewidth=0.7)
