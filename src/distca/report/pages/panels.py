"""Small multiples: panels of lines above each other, over the steps of a run."""

import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple

from distca.report.pages.page import COLORS, Figure
from distca.report.tables import Record

MOST_POINTS = 2000  # of a line; more are thinned, which keeps their extremes
FEW_POINTS = 60  # up to here, each point has a marker
HEIGHT, GAP, EDGE = 150, 46, 60  # pixels of a panel, between two, and below the last
SYMBOLS = {"fault": "x", "recovery": "circle", "lost server": "triangle-down", "skipped": "diamond"}


@dataclass(frozen=True)
class Panel:
    """Which values of the records make up a panel.

    keys: name of the line and key of the records.
    zero: whether the axis starts at zero.
    unit: by which values are divided.
    """

    title: str
    keys: Sequence[tuple[str, str]]
    zero: bool = False
    unit: float = 1.0


class Line(NamedTuple):
    name: str
    points: Sequence[tuple[int, float]]
    color: str
    dash: str


class Mark(NamedTuple):
    """Something that has happened at a step."""

    step: int
    kind: str
    words: str


def numbers(records: Sequence[Record], key: str, unit: float = 1.0) -> list[tuple[int, float]]:
    """Returns (step, value) wherever a record has a finite number."""
    return [
        (record["step"], record[key] / unit)
        for record in records
        if isinstance(record.get(key), int | float) and math.isfinite(record[key])
    ]


def thin(points: Sequence[tuple[int, float]], most: int = MOST_POINTS) -> list[tuple[int, float]]:
    """Returns at most ``most`` points: the lowest and the highest of equal parts, in order."""
    if len(points) <= most:
        return list(points)
    size = math.ceil(len(points) / (most // 2))
    kept: list[tuple[int, float]] = []
    for start in range(0, len(points), size):
        part = points[start : start + size]
        extremes = {min(part, key=lambda p: p[1]), max(part, key=lambda p: p[1])}
        kept += sorted(extremes)
    return kept


def draw_panels(
    panels: Sequence[tuple[str, Sequence[Line], bool]],
    marks: Sequence[Mark],
    height: int = HEIGHT,
) -> Figure:
    """Returns panels over one axis of steps, with a line through all of them for each mark.

    panels: title, lines, and whether the axis of values starts at zero.
    """
    inner = len(panels) * (height + GAP)
    layout: dict[str, Any] = {
        "height": inner + EDGE,
        "margin": {"l": 64, "r": 16, "t": 8, "b": EDGE - 8},
        "hovermode": "x unified",
        "hoverdistance": -1,  # the nearest step, however far
        "hoversubplots": "axis",
        "xaxis": {"title": {"text": "step"}, "anchor": f"y{len(panels)}", "tickformat": ",d"}
        | _whole_steps(panels),
        "annotations": [],
        "showlegend": True,
    }
    data: list[dict[str, Any]] = []
    for number, (title, lines, zero) in enumerate(panels, 1):
        top = 1 - ((number - 1) * (height + GAP) + GAP * 0.6) / inner
        suffix = "" if number == 1 else str(number)
        layout[f"yaxis{suffix}"] = {
            "domain": [max(top - height / inner, 0), top],
            "anchor": "x",
            "rangemode": "tozero" if zero else "normal",
            "nticks": 5,
        }
        layout[f"legend{suffix}"] = {
            "orientation": "h", "x": 1, "xanchor": "right", "y": top, "yanchor": "bottom",
        }  # fmt: skip
        layout["annotations"].append(_title(title, top))
        data += [_trace(line, suffix, len(lines) > 1) for line in lines]
    layout["shapes"] = [
        {"type": "line", "x0": step, "x1": step, "yref": "paper", "y0": 0, "y1": 1}
        for step in sorted({mark.step for mark in marks})
    ]
    data += _marks(panels, marks)
    return {"data": data, "layout": layout}


def _whole_steps(panels: Sequence[tuple[str, Sequence[Line], bool]]) -> dict[str, Any]:
    """Keeps ticks between two steps away, where there are few steps."""
    steps = {step for _, lines, _ in panels for line in lines for step, _ in line.points}
    return {"tick0": 0, "dtick": 1} if steps and max(steps) - min(steps) < 12 else {}


def _title(text: str, top: float) -> dict[str, Any]:
    place = {"xref": "paper", "yref": "paper", "x": 0, "y": top}
    anchors = {"xanchor": "left", "yanchor": "bottom", "showarrow": False}
    return {"text": f"<b>{text}</b>", **place, **anchors}


def _trace(line: Line, suffix: str, named: bool) -> dict[str, Any]:
    points = thin(line.points)
    return {
        "type": "scatter",
        "mode": "lines+markers" if len(points) <= FEW_POINTS else "lines",
        "name": line.name,
        "x": [step for step, _ in points],
        "y": [float(f"{value:.6g}") for _, value in points],
        "xaxis": "x",
        "yaxis": f"y{suffix}",
        "legend": f"legend{suffix}",
        "showlegend": named,
        "line": {"color": line.color, "dash": line.dash, "width": 1.6},
        "marker": {"size": 5},
    }


def _marks(
    panels: Sequence[tuple[str, Sequence[Line], bool]], marks: Sequence[Mark]
) -> list[dict[str, Any]]:
    """Returns what has happened as markers at the top of the first panel, one trace a kind."""
    if not marks:
        return []
    top = max(value for line in panels[0][1] for _, value in line.points) if panels else 1.0
    kinds = dict.fromkeys(mark.kind for mark in marks)
    return [
        {
            "type": "scatter",
            "mode": "markers",
            "name": kind,
            "x": [mark.step for mark in marks if mark.kind == kind],
            "y": [top for mark in marks if mark.kind == kind],
            "text": [mark.words for mark in marks if mark.kind == kind],
            "hovertemplate": "%{text}",
            "xaxis": "x",
            "yaxis": "y",
            "legend": "legend",
            "marker": {
                "size": 10,
                "symbol": SYMBOLS.get(kind, "square"),
                "color": COLORS[-1 - number % len(COLORS)],
            },
        }
        for number, kind in enumerate(kinds)
    ]
