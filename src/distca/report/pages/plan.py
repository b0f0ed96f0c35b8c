"""The page of a plan: the pieces of documents, the load of ranks and the traffic between them."""

from collections.abc import Sequence
from typing import Any

import numpy as np
import numpy.typing as npt

from distca.report import units
from distca.report.pages.page import BLUE, ORANGE, Figure, Page, Section, Table, whole_ticks
from distca.report.plan_plots import MOST_BARS, merge
from distca.report.plans import heading
from distca.report.tables import Record

MOST_CELLS = 128  # of a traffic matrix along one side; more ranks share cells
MOST_ROWS = 64  # of a table of ranks: the heaviest ones
DIRECTIONS = ("forward", "backward")

Ints = npt.NDArray[np.int64]


def plan_page(name: str, record: Record) -> Page:
    """Returns the page of a plan.

    record: see ``distca.cli.plan_pieces``.
    """
    summary, traffic, nodes = record["summary"], record["traffic"], record["nodes"]
    several_nodes = bool(nodes.max() > 0)
    sections = [
        Section(
            "pieces",
            "Documents on the ranks that hold them, and on the ranks that compute them",
            "Point at a piece to see what it is, click it to follow its document, drag to zoom,"
            " double-click to see all. Dashed: the bound.",
            draws="pieces",
            view=record["pieces"],
        ),
        Section(
            "load",
            "Attention of each rank",
            "Time over the mean of all ranks that serve; before: every rank computes the attention"
            " of its own tokens.",
            draw_load(record),
            _load_table(record),
        ),
        _traffic_section("traffic", traffic, "rank", half=several_nodes),
    ]
    if several_nodes:
        between = np.zeros((nodes.max() + 1, nodes.max() + 1), np.int64)
        np.add.at(between, (nodes[:, None], nodes[None, :]), traffic)
        sections.append(_traffic_section("nodes", between, "node", half=True))
    return Page(name, _words(record), _facts(summary), sections)


def _words(record: Record) -> list[str]:
    summary = record["summary"]
    bound = f"{record['bound']:g} x mean"
    met = f"the bound of {bound} is met"
    if summary["shortfall"]:
        met = f"the bound of {bound} is not met: {summary['shortfall']}"
    before, after = (units.ratio(summary[key]) for key in ("imbalance_before", "imbalance"))
    return [
        f"The slowest rank has {before} the mean attention before and {after} after; {met}.",
        f"{heading(summary)}; model {record['model']}, cost {summary['cost']}, policy"
        f" {summary['policy']}.",
    ]


def _facts(summary: Record) -> dict[str, str]:
    bytes_of = {
        "bytes, forward": "bytes_total",
        "lower bound": "bytes_lower_bound",
        "most sent by a rank": "bytes_send_max",
        "between nodes": "bytes_cross_node",
        "bytes, backward": "bytes_backward",
    }
    moved = f"{units.count(summary['tasks_moved'])} of {units.count(summary['tasks'])}"
    return {
        "imbalance before": units.ratio(summary["imbalance_before"]),
        "imbalance after": units.ratio(summary["imbalance"]),
        "tasks moved": moved,
        **{name: units.size(summary[key]) for name, key in bytes_of.items()},
        "time to plan": units.seconds(summary["plan_s"]),
    }


def draw_load(record: Record) -> Figure:
    """Returns the loads before and after in both directions, with the bound."""
    num_ranks, workers = len(record["load_after"][0]), record["pieces"]["num_workers"]
    traffic = record["traffic"]
    sums = zip(traffic.sum(axis=1).tolist(), traffic.sum(axis=0).tolist(), strict=True)
    moved = [f"sends {units.size(sent)}, receives {units.size(got)} forward" for sent, got in sums]
    data = []
    for way, name in enumerate(DIRECTIONS):
        axis = "y" if way == 0 else "y2"
        for key, color in (("before", ORANGE), ("after", BLUE)):
            values = [float(f"{value:.4g}") for value in record[f"load_{key}"][way]]
            data.append(
                {
                    **_shape(key, color, num_ranks),
                    "y": values,
                    "yaxis": axis,
                    "name": key,
                    "legendgroup": key,
                    "showlegend": way == 0,
                    "text": moved,
                    "textposition": "none",
                    "hovertemplate": f"rank %{{x}}, {name}, {key}: %{{y:.3f}} x<br>%{{text}}"
                    "<extra></extra>",
                }
            )
    bound = record["bound"]
    shapes = [
        {"type": "line", "xref": "paper", "x0": 0, "x1": 1, "yref": axis, "y0": bound, "y1": bound}
        for axis in ("y", "y2")
    ]
    return {
        "data": data,
        "layout": {
            "height": 460,
            "barmode": "group",
            "legend": {
                "orientation": "h",
                "x": 1,
                "xanchor": "right",
                "y": 1.02,
                "yanchor": "bottom",
            },
            "xaxis": {
                "title": {"text": "rank"},
                "anchor": "y2",
                "tick0": 0,
                "dtick": whole_ticks(num_ranks, 24),
            },
            "yaxis": {"title": {"text": "forward"}, "domain": [0.54, 1], "rangemode": "tozero"},
            "yaxis2": {"title": {"text": "backward"}, "domain": [0, 0.46], "rangemode": "tozero"},
            "shapes": shapes + _servers_apart(workers, num_ranks),
            "annotations": _server_words(workers, num_ranks),
        },
    }


def _shape(key: str, color: str, num_ranks: int) -> dict[str, Any]:
    """Returns bars for few ranks, and an outline for many."""
    if num_ranks <= MOST_BARS:
        return {"type": "bar", "marker": {"color": color}}
    line = {"color": color, "shape": "hvh", "width": 0.5 if key == "before" else 2}
    return {"type": "scatter", "mode": "lines", "line": line} | (
        {"fill": "tozeroy"} if key == "before" else {}
    )


def _servers_apart(workers: int, num_ranks: int) -> list[dict[str, Any]]:
    if workers == num_ranks:
        return []
    edge = workers - 0.5
    return [{"type": "line", "x0": edge, "x1": edge, "yref": "paper", "y0": 0, "y1": 1}]


def _server_words(workers: int, num_ranks: int) -> list[dict[str, Any]]:
    if workers == num_ranks:
        return []
    place = {"x": workers - 0.5, "yref": "paper", "y": 1, "xanchor": "left", "yanchor": "bottom"}
    return [{"text": "dedicated servers", "showarrow": False, **place}]


def _load_table(record: Record) -> Table:
    before, after = (np.array(record[key]) for key in ("load_before", "load_after"))
    traffic = record["traffic"]
    order = np.argsort(-after.max(axis=0), kind="stable")[:MOST_ROWS].tolist()
    columns = ["rank", "forward before", "after", "backward before", "after", "sends", "receives"]
    rows = []
    for rank in order:
        loads = [units.ratio(float(side[way][rank])) for way in (0, 1) for side in (before, after)]
        sent, received = int(traffic[rank].sum()), int(traffic[:, rank].sum())
        rows.append([str(rank), *loads, units.size(sent), units.size(received)])
    return Table(columns, rows)


def _traffic_section(name: str, traffic: Ints, what: str, half: bool) -> Section:
    note = f"Bytes of one layer from {what} to {what}: queries, keys and values out, outputs back."
    if (size := _per_cell(traffic)) > 1:
        note += f" A cell stands for {size} x {size}."
    return Section(
        name, f"Traffic by {what}, forward", note, draw_traffic(traffic, what), half=half
    )


def _per_cell(traffic: Ints) -> int:
    return -(-len(traffic) // MOST_CELLS)


def draw_traffic(traffic: Ints, what: str) -> Figure:
    """Returns a matrix of bytes [sender, receiver] as a map, with gaps where nothing is sent."""
    per_cell = _per_cell(traffic)
    cells = merge(traffic, per_cell)
    unit, name = units.scale(float(cells.max()))
    ticks = {"tick0": 0, "dtick": whole_ticks(len(traffic)), "showgrid": False, "zeroline": False}
    return {
        "data": [
            {
                "type": "heatmap",
                "z": _rounded(cells / unit),
                "dx": per_cell,
                "dy": per_cell,
                "zmin": 0,
                "hoverongaps": False,
                "colorbar": {"title": {"text": name}},
                "hovertemplate": f"{what} %{{y}} to {what} %{{x}}: %{{z:.3g}} {name}"
                "<extra></extra>",
            }
        ],
        "layout": {
            "height": 520,
            "xaxis": {"title": {"text": f"receiver, {what}"}, "constrain": "domain", **ticks},
            "yaxis": {
                "title": {"text": f"sender, {what}"},
                "autorange": "reversed",
                "scaleanchor": "x",
                "constrain": "domain",
                **ticks,
            },
        },
    }


def _rounded(table: npt.NDArray[np.float64]) -> Sequence[Sequence[float | None]]:
    return [[float(f"{value:.3g}") if value else None for value in row] for row in table.tolist()]
