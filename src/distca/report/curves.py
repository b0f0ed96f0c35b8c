"""Plots of training runs. matplotlib is imported only when a plot is drawn."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING

from distca.report import units
from distca.report.figures import AFTER, BEFORE, new_figure, style_axes
from distca.report.tables import Record

if TYPE_CHECKING:
    from matplotlib.axes import Axes

Records = Sequence[Record]


def draw_comparison(
    colocated: Records, disaggregated: Records, compared: Record, path: Path
) -> None:
    """Draws the losses and the tokens per second of both runs over the steps.

    compared: the result of ``report.training.comparison``.
    """
    figure = new_figure(11, 4.2)
    losses, speeds = figure.subplots(1, 2)
    sides = (("colocated", colocated, BEFORE), ("disaggregated", disaggregated, AFTER))
    for name, records, color in sides:
        steps = [record["step"] for record in records]
        below = name == "colocated"  # a wide line, so that both are visible where they are equal
        losses.plot(
            steps,
            [record["loss"] for record in records],
            color=color,
            linewidth=5 if below else 1.6,
            alpha=0.7 if below else 1,
            solid_capstyle="round",
            label=name,
        )
        speeds.plot(
            steps,
            [record["tokens_per_s"] for record in records],
            color=color,
            marker="o",
            markersize=4,
            linewidth=1,
            label=name,
        )
        speeds.axhline(compared[name]["tokens_per_s"], color=color, linestyle="--", linewidth=1)
    difference = f"largest difference {compared['loss_difference']:.0e}"
    _finish(losses, "Loss", difference)
    losses.legend(frameon=False, loc="upper right")
    gain = f"{units.ratio(compared['speed_up'])} over all steps (dashed)"
    _finish(speeds, "Tokens per second", gain)
    speeds.set_ylim(bottom=0)
    speeds.legend(frameon=False, loc="lower right")
    figure.savefig(path)


def _finish(axes: Axes, title: str, note: str) -> None:
    from matplotlib.ticker import MaxNLocator

    style_axes(axes, title)
    axes.set_title(note, loc="right", fontsize=10)
    axes.set_xlabel("step")
    axes.xaxis.set_major_locator(MaxNLocator(integer=True))
