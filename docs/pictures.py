"""Draws the pictures of docs/idea.md and docs/ping-pong.md: python docs/pictures.py

The batch, its plan and the ticks of the pipeline are computed; the timelines are schematic.
"""

from pathlib import Path
from typing import Any

import matplotlib
from matplotlib.figure import Figure

import distca
from distca.pipeline.pool import pool_placements
from distca.planning.placement import Placement
from distca.planning.plan import Plan

IMAGES = Path(__file__).parent / "images"
COLORS = ["#0072B2", "#E69F00", "#009E73", "#CC79A7"]  # of Okabe and Ito
GRAY = "#666666"
K = 1024
RANKS = [[128 * K], [16 * K] * 8, [4 * K] * 32, [64 * K] * 2]
TICK = [[[64 * K] * 2], None, [[128 * K]], [[16 * K] * 8]]  # of each stage; None: no micro-batch

Box = tuple[float, float, str, str]  # start, length, color, text


def batch() -> Figure:
    """Tokens and attention of four ranks, and where a plan computes that attention."""
    planned = distca.plan(RANKS, model="llama3-8b")
    stayed = distca.plan(RANKS, model="llama3-8b", scheduler="home")
    figure = Figure(figsize=(10, 2.9), layout="constrained")
    axes = figure.subplots(1, 3, sharey=True)
    titles = [
        "tokens: 128K on every rank",
        f"attention at home: worst / mean {stayed.imbalance:.2f}",
        f"attention as planned: worst / mean {planned.imbalance:.2f}",
    ]
    tokens = [[(n / K, rank) for n in lengths] for rank, lengths in enumerate(RANKS)]
    for ax, title, rows in zip(
        axes, titles, (tokens, _pieces(stayed), _pieces(planned)), strict=True
    ):
        for rank, pieces in enumerate(rows):
            start = 0.0
            for length, home in pieces:
                edge = "white" if length > 0.1 else COLORS[home]  # else nothing is left of it
                ax.barh(rank, length, left=start, color=COLORS[home], edgecolor=edge, lw=0.4)
                start += length
        ax.set_title(title, fontsize=10)
        ax.set_yticks(range(4), [f"rank {rank}" for rank in range(4)])
        ax.invert_yaxis()
        ax.spines[["top", "right"]].set_visible(False)
    axes[0].set_xlabel("thousand tokens")
    for ax in axes[1:]:
        ax.set_xlim(0, 9)
        ax.set_xlabel("billion query-key pairs")
    return figure


def _pieces(plan: Plan) -> list[list[tuple[float, int]]]:
    """Returns the pieces that each rank computes: their pairs, and the rank that holds them."""
    rows: list[list[tuple[float, int]]] = [[] for _ in RANKS]
    homes = [rank for rank, lengths in enumerate(RANKS) for _ in lengths]
    for task in plan.to_json()["tasks"]:
        first, stop = task["q"]
        pairs = (stop * (stop + 1) - first * (first + 1)) / 2
        rows[task["server"]].append((pairs / 1e9, homes[task["document"]]))
    return [sorted(row, key=lambda piece: piece[1] != rank) for rank, row in enumerate(rows)]


def exchange() -> Figure:
    """One layer on two ranks, of which rank 1 computes a task of rank 0."""
    own, moved, other = COLORS[0], COLORS[1], COLORS[2]
    lanes: dict[str, list[Box]] = {
        "rank 0 computes": [
            (0, 2, GRAY, "linear"), (2.2, 4, own, "own tasks"), (7.2, 2, GRAY, "linear"),
        ],
        "network": [(2.2, 1.4, moved, "q, k, v"), (6.0, 0.9, moved, "o")],
        "rank 1 computes": [
            (0, 2, GRAY, "linear"), (2.2, 1.6, other, "own tasks"),
            (3.9, 2.0, moved, "task of rank 0"), (7.2, 2, GRAY, "linear"),
        ],
    }  # fmt: skip
    figure = Figure(figsize=(10, 2.3), layout="constrained")
    _timeline(figure.subplots(), lanes)
    return figure


def ping_pong() -> Figure:
    """Two layers with and without two halves that overlap."""
    whole = _layers([(GRAY, 1.0)], waits=True)
    halves = _layers([(COLORS[0], 0.5), (COLORS[1], 0.5)], waits=False)
    figure = Figure(figsize=(10, 3.4), layout="constrained")
    above, below = figure.subplots(2, 1, sharex=True)
    _timeline(above, whole, "without ping-pong: the GPU waits for the network")
    _timeline(
        below, halves, "with ping (blue) and pong (orange): one computes, the other is in transit"
    )
    return figure


def _layers(parts: list[tuple[str, float]], *, waits: bool) -> dict[str, list[Box]]:
    """Returns two layers of a batch in parts of a color and a share."""
    compute: list[Box] = []
    network: list[Box] = []
    now = 0.0
    for work, work_s, sent, sent_s in (("linear", 2, "q, k, v", 1.5), ("attention", 3, "o", 1)) * 2:
        for color, share in parts:
            compute.append((now, work_s * share, color, work))
            now += work_s * share
            network.append((now, sent_s * share, color, sent))
        now += sent_s if waits else 0
    return {"compute": compute, "network": network}


def _timeline(ax: Any, lanes: dict[str, list[Box]], title: str = "") -> None:
    for row, boxes in enumerate(lanes.values()):
        for start, length, color, text in boxes:
            ax.barh(row, length, left=start, color=color, edgecolor="white", height=0.72)
            ink = "black" if color == COLORS[1] else "white"
            ax.text(start + length / 2, row, text, ha="center", va="center", fontsize=8, color=ink)
    ax.set_yticks(range(len(lanes)), list(lanes))
    ax.invert_yaxis()
    ax.set_xticks([])
    ax.set_title(title, fontsize=10)
    ax.spines[["top", "right", "bottom"]].set_visible(False)


def pool() -> Figure:
    """The attention of four pipeline stages in one tick, before and after it is pooled."""
    stages = [one if one is None else Placement.from_ranks(one) for one in TICK]
    placements = pool_placements(stages, workers=1)
    plans = [distca.plan(placements, model="llama3-8b", scheduler=s) for s in ("home", "distca")]
    figure = Figure(figsize=(10, 2.5), layout="constrained")
    titles = ("each stage for itself", "pooled")
    names = [f"stage {s}" + (" (idle)" if one is None else "") for s, one in enumerate(TICK)]
    axes = figure.subplots(1, 2, sharex=True, sharey=True)
    for ax, plan, title in zip(axes, plans, titles, strict=True):
        ms = [load / 1e9 for load in plan.forward_load_ps.tolist()]
        ax.barh(range(4), ms, color=COLORS[0])
        ax.axvline(sum(ms) / 4, color=COLORS[1], linestyle="--", lw=1.5)
        ax.set_title(f"{title}: a layer takes {max(ms):.0f} ms", fontsize=10)
        ax.set_yticks(range(4), names)
        ax.set_xlabel("ms of attention in a layer, forward (dashed: mean)")
        ax.spines[["top", "right"]].set_visible(False)
    ax.invert_yaxis()
    return figure


if __name__ == "__main__":
    matplotlib.rcParams["svg.hashsalt"] = "distca"  # the same bytes at every run
    for draw in (batch, exchange, ping_pong, pool):
        path = IMAGES / f"{draw.__name__.replace('_', '-')}.svg"
        draw().savefig(path, metadata={"Date": None})
