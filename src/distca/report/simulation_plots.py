"""Plots of simulations, from the records of ``distca simulate --json``."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING

from distca.report import units
from distca.report.figures import AFTER, BEFORE, BOUND, new_figure, style_axes
from distca.report.tables import Record

if TYPE_CHECKING:
    from matplotlib.axes import Axes

# Colors by Okabe and Ito, and a marker for each line.
LINES = ("#E69F00", "#D55E00", "#CC79A7", "#56B4E9", "#0072B2", "#009E73", "#222222")
MARKS = ("o", "s", "^", "v", "D", "P", "X")
UNFIT = "#BBBBBB"  # for strategies that do not fit into memory


def draw_simulation(record: Record, path: str | Path) -> None:
    """Draws all strategies on the largest number of GPUs and, given several, how they scale."""
    runs = record["runs"]
    last, several = runs[-1], len(runs) > 1
    strategies = [one for one in last["strategies"] if "error" not in one]
    height = 1.9 + 0.62 * len(strategies) + (3.4 if several else 0)
    figure = new_figure(12, max(height, 4.6))
    grid = figure.add_gridspec(3 if several else 2, 2, height_ratios=(1, 1, 1.5)[: 2 + several])
    axes = [figure.add_subplot(grid[n // 2, n % 2]) for n in range(4)]
    _bars(axes[0], strategies, "Step, seconds", "step_s", labels=[_step(s) for s in strategies])
    idle = [f"{100 * one['idle']:.1f} %" for one in strategies]
    _bars(axes[1], strategies, "Idle, % of all GPUs' time", "idle", unit=0.01, labels=idle)
    _bytes(axes[2], strategies, "Sent by a GPU in a step", "bytes_per_gpu")
    unit = _bytes(axes[3], strategies, "Memory of a GPU", "memory_bytes")
    limit = last["limit_bytes"] / unit
    axes[3].axvline(limit, color=BOUND, linestyle="--", linewidth=1)
    axes[3].set_xlim(right=max(axes[3].get_xlim()[1], 1.12 * limit))
    axes[3].set_title(f"dashed: the limit, {units.size(last['limit_bytes'])}", loc="right", size=9)
    for number in (1, 3):
        axes[number].set_yticklabels([])
    if several:
        _scaling(figure.add_subplot(grid[2, :]), runs)
    figure.suptitle(_title(record, last), x=0.01, ha="left", fontsize=11)
    figure.savefig(path)


def _title(record: Record, run: Record) -> str:
    return (
        f"{record['model']['name']} on {run['gpus']:,} GPUs ({record['cluster']['name']}):"
        f" {run['sequences']:,} sequences of {record['context']:,} tokens a step,"
        f" {record['lengths']}"
    )


def _bars(
    axes: Axes,
    strategies: Sequence[Record],
    title: str,
    key: str,
    *,
    unit: float = 1.0,
    labels: Sequence[str],
) -> None:
    """Draws one bar for each strategy, the first on top."""
    places, values = range(len(strategies)), [one[key] / unit for one in strategies]
    bars = axes.barh(places, values, 0.62, color=[_color(one) for one in strategies])
    axes.bar_label(bars, labels, padding=4, fontsize=9)
    axes.set_yticks(
        places, [f"{one['policy']}\n{one['sizes_text']}" for one in strategies], fontsize=8
    )
    axes.invert_yaxis()
    axes.set_xlim(0, 1.3 * max(values, default=0.0) or 1.0)
    style_axes(axes, title, size=10, grid="x")


def _bytes(axes: Axes, strategies: Sequence[Record], title: str, key: str) -> float:
    """Draws bars in the unit that fits the largest value; returns the unit."""
    unit, name = units.scale(max((float(one[key]) for one in strategies), default=0.0))
    labels = [units.size(one[key]) for one in strategies]
    _bars(axes, strategies, f"{title}, {name}", key, unit=unit, labels=labels)
    return unit


def _scaling(axes: Axes, runs: Sequence[Record]) -> None:
    """Draws tokens per second and GPU over the number of GPUs; perfect scaling is flat."""
    names = list(dict.fromkeys(one["policy"] for run in runs for one in run["strategies"]))
    for number, name in enumerate(names):
        points = [
            (run["gpus"], one["tokens_per_s"] / run["gpus"])
            for run in runs
            for one in run["strategies"]
            if one["policy"] == name and one.get("fits")
        ]
        if points:
            axes.plot(
                *zip(*points, strict=True),
                color=LINES[number % len(LINES)],
                marker=MARKS[number % len(MARKS)],
                linewidth=1.4,
                label=name,
            )
    gpus = [run["gpus"] for run in runs]
    axes.set_xscale("log", base=2)
    axes.set_xticks(gpus, [f"{count:,}" for count in gpus])
    axes.minorticks_off()
    axes.set_ylim(bottom=0)
    axes.set_xlabel("GPUs, with a constant number of tokens per GPU")
    style_axes(axes, "Tokens per second and GPU", size=10)
    axes.legend(frameon=False, ncols=min(len(names), 5), loc="lower left", fontsize=9)


def _color(one: Record) -> str:
    if not one["fits"]:
        return UNFIT
    return AFTER if one["disaggregated"] else BEFORE


def _step(one: Record) -> str:
    gain = f" ({units.ratio(one['speed_up'])})" if one["speed_up"] else ""
    return f"{units.seconds(one['step_s'])}{gain}"
