"""Plots of plans. matplotlib is imported only when a plot is drawn."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np
import numpy.typing as npt

from distca.report import units
from distca.report.figures import AFTER, BEFORE, BOUND, new_figure, style_axes

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure

MOST_BARS = 32  # ranks drawn as separate bars; more become one outline
MOST_CELLS = 128  # of the traffic matrix along one side; more ranks share cells
MOST_NUMBERS = 8  # ranks up to which each cell shows its number

Floats = npt.NDArray[np.float64]
Ints = npt.NDArray[np.int64]


def draw_plan(record: dict[str, Any], traffic: Ints, path: str | Path) -> None:
    """Draws the load of each rank before and after, and the traffic between ranks.

    record: ``load_before`` and ``load_after`` [2, ranks] over the mean, ``bound`` and ``summary``.
    traffic: [sender, receiver] bytes of one layer's forward.
    """
    figure = new_figure(13, 6)
    grid = figure.add_gridspec(2, 2, width_ratios=(1.25, 1))
    top = 1.08 * max(record["load_before"].max(), record["load_after"].max(), record["bound"])
    for way, name in enumerate(("forward", "backward")):
        axes = figure.add_subplot(grid[way, 0])
        drawn = _draw_load(
            axes, record["load_before"][way], record["load_after"][way], record["bound"]
        )
        style_axes(axes, "" if way else "Attention per rank", grid="y")
        axes.set_ylim(0, top)
        axes.set_ylabel(f"{name}, load / mean")
        if way == 0:
            axes.legend(
                handles=drawn,
                loc="lower right",
                bbox_to_anchor=(1, 1),
                ncols=3,
                frameon=False,
                borderaxespad=0.1,
            )
        else:
            axes.set_xlabel("rank")
    _draw_traffic(figure, figure.add_subplot(grid[:, 1]), traffic)
    figure.suptitle(_title(record["summary"]), x=0.01, ha="left", fontsize=11)
    figure.savefig(path)


def _title(summary: dict[str, Any]) -> str:
    return (
        f"{summary['policy']}: {summary['tokens']:,} tokens in {summary['documents']:,} documents"
        f" on {summary['ranks']:,} ranks; imbalance {summary['imbalance_before']:.2f}x before,"
        f" {summary['imbalance']:.2f}x after; cost {summary['cost']}"
    )


def _draw_load(axes: Axes, before: Floats, after: Floats, bound: float) -> list[Any]:
    """Draws one direction; returns the entries of the legend in order."""
    ranks = np.arange(len(after))
    drawn: list[Any]
    if len(ranks) <= MOST_BARS:
        drawn = [
            axes.bar(ranks - 0.2, before, 0.4, color=BEFORE, label="before"),
            axes.bar(ranks + 0.2, after, 0.4, color=AFTER, label="after"),
        ]
    else:
        edges = np.arange(len(ranks) + 1) - 0.5
        drawn = [
            axes.stairs(before, edges, fill=True, color=BEFORE, label="before"),
            axes.stairs(after, edges, baseline=None, color=AFTER, linewidth=1.4, label="after"),
        ]
    limit = axes.axhline(bound, color=BOUND, linestyle="--", linewidth=1, label=f"bound {bound:g}")
    drawn.append(limit)
    axes.set_xlim(-0.6, len(ranks) - 0.4)
    axes.set_xticks(_ticks(len(ranks)))
    return drawn


def _draw_traffic(figure: Figure, axes: Axes, traffic: Ints) -> None:
    from matplotlib import colormaps
    from matplotlib.colors import ListedColormap

    ranks = len(traffic)
    per_cell = -(-ranks // MOST_CELLS)
    cells = merge(traffic, per_cell)
    unit, name = units.scale(float(cells.max()))
    shown, top = cells / unit, float(cells.max()) / unit
    side = len(cells) * per_cell - 0.5
    image = axes.imshow(
        np.ma.masked_equal(shown, 0),  # no traffic stays white, so the colors start darker
        cmap=ListedColormap(colormaps["Blues"](np.linspace(0.2, 1.0, 256))),
        vmin=0,
        vmax=top or 1.0,
        extent=(-0.5, side, side, -0.5),
        interpolation="nearest",
    )
    axes.set_xlim(-0.5, ranks - 0.5)
    axes.set_ylim(ranks - 0.5, -0.5)
    axes.set_xticks(_ticks(ranks))
    axes.set_yticks(_ticks(ranks))
    axes.set_xlabel("receiver")
    axes.set_ylabel("sender")
    title = "Traffic of one layer, forward"
    if per_cell > 1:
        title += f" ({per_cell} x {per_cell} ranks a cell)"
    axes.set_title(title, loc="left", fontweight="bold")
    if ranks <= MOST_NUMBERS:
        for sender, receiver in np.argwhere(cells > 0).tolist():
            value = float(shown[sender, receiver])
            color = "white" if value > top / 2 else "black"
            axes.text(receiver, sender, f"{value:.2g}", ha="center", va="center", color=color)
    if top:
        figure.colorbar(image, ax=axes, label=name, shrink=0.8)
    else:
        axes.text(0.5, 0.5, "no traffic", ha="center", transform=axes.transAxes, color="gray")


def _ticks(ranks: int) -> list[int]:
    """Returns at most 16 ticks, or 8 with three digits, at multiples of a power of two."""
    most, step = 16 if ranks <= 128 else 8, 1
    while ranks > most * step:
        step *= 2
    return list(range(0, ranks, step))


def merge(matrix: Ints, size: int) -> Ints:
    """Sums blocks of ``size`` x ``size``; the last ones may be smaller."""
    starts = np.arange(0, len(matrix), size)
    return np.add.reduceat(np.add.reduceat(matrix, starts, axis=0), starts, axis=1)
