"""The ticks of a step: what each stage does, and the attention and waiting of each rank."""

from collections.abc import Sequence
from typing import Any

import numpy as np

from distca.report import units
from distca.report.pages.page import BLUE, ORANGE, Figure, Section, Table, whole_ticks
from distca.report.pages.run_events import Run
from distca.report.tables import NOTHING, Record

SERVES = "."
ROW, LEAST, MOST = 16, 90, 320  # pixels of a row, and of a map
HEAD, GAP, EDGE = 26, 40, 52  # pixels above all maps, between two, and below the last
MOST_CELLS = 48  # ticks up to which each cell of the schedule has its name
DIRECTIONS = {"F": "forward", "B": "backward"}

Grid = Sequence[Sequence[Any]]  # [rows][ticks]


def tick_sections(run: Run, number: int, suffix: str = "") -> list[Section]:
    """Returns the ticks of the newest and of the slowest step; none if steps have only two.

    number: that of the run on the page.
    suffix: words in the title that tell two runs apart.
    """
    newest = run.ticks.get("newest", {}).get("step")
    return [
        _section(f"ticks-{which}-{number}", f"the {which}{suffix}", record)
        for which, record in run.ticks.items()
        if which == "newest" or record["step"] != newest
    ]


def _section(name: str, which: str, record: Record) -> Section:
    seconds = units.seconds(record["seconds"])
    return Section(
        name,
        f"Ticks of step {record['step']}, {which}",
        f"The step took {seconds}. Above: the micro-batch of each stage in each tick; F is forward,"
        " B is backward, and a stage without one only computes attention for others. Below: seconds"
        " of attention, and of waiting for exchanges, of each rank.",
        _figure(record),
        _table(record),
    )


def _figure(record: Record) -> Figure:
    cells = _by_row(record["cells"])
    ranks = _rank_names(record)
    attention, waiting = _by_row(record["attention_s"]), _by_row(record["exposed_s"])
    heights = [_pixels(len(cells)), _pixels(len(ranks)), _pixels(len(ranks))]
    inner = sum(heights) + GAP * 2
    tops = [1.0]
    for height in heights[:-1]:
        tops.append(tops[-1] - (height + GAP) / inner)
    domains = [
        [max(top - height / inner, 0.0), top] for top, height in zip(tops, heights, strict=True)
    ]
    words = _words(record, ranks)
    return {
        "data": [
            _schedule(cells),
            _map(attention, words, "y2", domains[1]),
            _map(waiting, words, "y3", domains[2]),
        ],
        "layout": {
            "height": inner + HEAD + EDGE,
            "margin": {"l": 110, "r": 16, "t": HEAD, "b": EDGE},
            "xaxis": {"title": {"text": "tick"}, "anchor": "y3", "tick0": 0, "showgrid": False}
            | {"dtick": whole_ticks(len(record["cells"]), 24), "zeroline": False},
            "yaxis": _axis([f"stage {stage}" for stage in range(len(cells))], domains[0]),
            "yaxis2": _axis(ranks, domains[1]),
            "yaxis3": _axis(ranks, domains[2]) | {"matches": "y2"},
            "annotations": [
                _title(text, top)
                for text, top in zip(("Schedule", "Attention", "Waiting"), tops, strict=True)
            ],
        },
    }


def _by_row(table: Grid) -> list[list[Any]]:
    """Returns [rows][ticks] from [ticks][rows]."""
    return [list(row) for row in zip(*table, strict=True)]


def _rank_names(record: Record) -> list[str]:
    width, num_stages = record["workers_per_stage"], len(record["cells"][0])
    workers = [f"rank {rank}, stage {rank // width}" for rank in range(width * num_stages)]
    num_servers = len(record["planned_s"][0]) - len(workers)
    return workers + [f"server {number}" for number in range(num_servers)]


def _schedule(cells: Grid) -> dict[str, Any]:
    """Returns a map of stages, colored by direction."""
    codes = {"F": 0.0, "B": 1.0}
    named = len(cells[0]) <= MOST_CELLS
    return {
        "type": "heatmap",
        "z": [[codes.get(cell[0]) for cell in row] for row in cells],
        "zmin": 0,
        "zmax": 1,
        "colorscale": [[0, BLUE], [0.5, BLUE], [0.5, ORANGE], [1, ORANGE]],
        "showscale": False,
        "xgap": 1,
        "ygap": 1,
        "text": [["" if cell == SERVES else cell for cell in row] for row in cells],
        "texttemplate": "%{text}" if named else "",
        "hoverongaps": False,
        "hovertemplate": "tick %{x}, stage %{y}: %{text}<extra></extra>",
    }


def _map(table: Grid, words: Grid, axis: str, domain: Sequence[float]) -> dict[str, Any]:
    return {
        "type": "heatmap",
        "z": table,
        "zmin": 0,
        "yaxis": axis,
        "text": words,
        "hovertemplate": "%{text}<extra></extra>",
        "colorbar": {
            "y": sum(domain) / 2,
            "len": domain[1] - domain[0],
            "ticksuffix": "s",
            "exponentformat": "SI",
            "nticks": 4,
        },
    }


def _words(record: Record, ranks: Sequence[str]) -> list[list[str]]:
    """Returns what is known of each rank in each tick."""
    width = record["workers_per_stage"]
    rows = []
    for rank, name in enumerate(ranks):
        row = []
        for tick, cells in enumerate(record["cells"]):
            cell = cells[rank // width] if rank // width < len(cells) else SERVES
            does = "only serves" if cell == SERVES else cell
            attention, planned, waiting, whole = (
                units.seconds(record[key][tick][rank])
                for key in ("attention_s", "planned_s", "exposed_s", "tick_s")
            )
            row.append(
                f"tick {tick}, {name}: {does}<br>attention {attention}, planned {planned}"
                f"<br>waiting {waiting}<br>whole tick {whole}"
            )
        rows.append(row)
    return rows


def _axis(names: Sequence[str], domain: Sequence[float]) -> dict[str, Any]:
    shown = range(0, len(names), whole_ticks(len(names), 16))
    return {
        "domain": list(domain),
        "autorange": "reversed",
        "tickvals": list(shown),
        "ticktext": [names[number] for number in shown],
        "showgrid": False,
        "zeroline": False,
    }


def _title(text: str, top: float) -> dict[str, Any]:
    place = {"xref": "paper", "yref": "paper", "x": 0, "y": top}
    anchors = {"xanchor": "left", "yanchor": "bottom", "showarrow": False}
    return {"text": f"<b>{text}</b>", **place, **anchors}


def _pixels(num_rows: int) -> int:
    return min(max(ROW * num_rows, LEAST), MOST)


def _table(record: Record) -> Table:
    columns = ["tick", "direction", "micro-batches", "tick", "attention, worst", "worst / mean"]
    columns += ["planned", "longest wait", "by"]
    ranks = _rank_names(record)
    serves = np.sum(record["planned_s"], axis=0) > 0  # a rank that idles in one tick does serve
    rows = []
    for number, (phase, cells) in enumerate(zip(record["phases"], record["cells"], strict=True)):
        attention, planned, waiting, whole = (
            np.array(record[key][number])
            for key in ("attention_s", "planned_s", "exposed_s", "tick_s")
        )
        rows.append(
            [
                str(number),
                DIRECTIONS[phase],
                " ".join(cells),
                units.seconds(whole.max()),
                units.seconds(attention.max()),
                _imbalance(attention[serves]),
                _imbalance(planned[serves]),
                units.seconds(waiting.max()),
                ranks[int(waiting.argmax())],
            ]
        )
    return Table(columns, rows)


def _imbalance(seconds: Any) -> str:
    """Returns worst over mean of the ranks that serve in the step."""
    return f"{seconds.max() / seconds.mean():.2f}" if seconds.any() else NOTHING
