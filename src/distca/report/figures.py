"""What all plots have in common. matplotlib is imported only when a plot is drawn."""

from __future__ import annotations

from typing import TYPE_CHECKING, Literal

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure

# Colors by Okabe and Ito, which color-blind people can tell apart, also in grayscale.
BEFORE, AFTER, BOUND = "#E69F00", "#0072B2", "#222222"


def new_figure(width: float, height: float) -> Figure:
    """Returns a figure of this size in inches, which needs no display and no state of pyplot."""
    from matplotlib.backends.backend_agg import FigureCanvasAgg
    from matplotlib.figure import Figure

    figure = Figure(figsize=(width, height), dpi=120, layout="constrained")
    FigureCanvasAgg(figure)
    return figure


def style_axes(
    axes: Axes, title: str = "", *, size: float = 12, grid: Literal["both", "x", "y"] = "both"
) -> None:
    """Sets the title and what looks alike in all plots."""
    axes.set_title(title, loc="left", fontweight="bold", fontsize=size)
    axes.spines[["top", "right"]].set_visible(False)
    axes.grid(axis=grid, alpha=0.25)
    axes.set_axisbelow(True)
