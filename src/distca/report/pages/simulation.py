"""The page of a simulation: policies side by side, how they scale, and the verdict in words."""

from collections.abc import Callable, Sequence
from typing import Any

from distca.report import units
from distca.report.pages.page import (
    BLUE,
    COLORS,
    DASHES,
    GREEN,
    ORANGE,
    PINK,
    Figure,
    Page,
    Section,
    Table,
)
from distca.report.simulation import CAPTION, COLUMNS, heading
from distca.report.simulation_plots import UNFIT
from distca.report.tables import NOTHING, Record

ROW, EDGE = 46, 110  # pixels of a policy, and around all of them


def simulation_page(name: str, record: Record, timeline: Record | None = None) -> Page:
    """Returns the page of a simulation.

    record: that of ``distca simulate --json``.
    timeline: the events of a step, if one was written (see ``distca.cli.report_inputs``).
    """
    runs = record["runs"]
    last = runs[-1]
    known = [one for one in last["strategies"] if "error" not in one]
    where = f" on {units.count(last['gpus'])} GPUs" if len(runs) > 1 else ""
    sections = [
        _half("step", f"Step{where}", "Blue: disaggregated. Gray: does not fit.", _steps(known)),
        _half("idle", f"Idle and exposed{where}", _SHARES, _shares(known)),
        _half("sent", f"Sent by a GPU in a step{where}", "", _sent(known)),
        _half("memory", f"Memory of a GPU{where}", "Dashed: the limit.", _memory(known, last)),
    ]
    if len(runs) > 1:
        sections += [
            _half(
                "scaling",
                "Tokens per second and GPU",
                "Perfect scaling is flat.",
                _scaling(runs, _rate),
            ),
            _half("speed-ups", "Speed-up", _OVER, _scaling(runs, lambda one, _: one["speed_up"])),
        ]
    if timeline is not None:
        words = "One step of the best strategies, by rank and stream; drag to zoom."
        sections.append(Section("timeline", "Timeline", words, draws="timeline", view=timeline))
    sections.append(Section("all", "All strategies", CAPTION + ".", table=_table(runs)))
    return Page(name, _words(record), _facts(last), sections)


_SHARES = "Idle: share of all GPUs' time. Exposed: share of the step that faster links would save."
_OVER = "Over the best strategy without disaggregation."


def _half(name: str, title: str, note: str, figure: Figure) -> Section:
    return Section(name, title, note, figure, half=True)


def _words(record: Record) -> list[str]:
    runs = record["runs"]
    verdicts = [
        (f"{units.count(run['gpus'])} GPUs: " if len(runs) > 1 else "") + run["verdict"]["text"]
        for run in runs
        if run["verdict"]["text"]
    ]
    words = [*reversed(verdicts), *heading(record)]
    if trace := record.get("trace"):
        words.append(f"The timeline is in {trace}, too: open it at ui.perfetto.dev.")
    return words


def _facts(run: Record) -> dict[str, str]:
    verdict = run["verdict"]
    facts = {"GPUs": units.count(run["gpus"]), "tokens of a step": units.count(run["tokens"])}
    if verdict["speed_up"]:
        facts["speed-up"] = units.ratio(verdict["speed_up"])
    for side, name in (("ours", "disaggregated"), ("other", "best of the others")):
        if verdict[side]:
            facts[name] = f"{verdict[side]['policy']}, {verdict[side]['sizes']}"
    return facts


def _color(one: Record) -> str:
    if not one["fits"]:
        return UNFIT
    return BLUE if one["disaggregated"] else ORANGE


def _bars(
    known: Sequence[Record], title: str, bars: Sequence[dict[str, Any]], **layout: Any
) -> Figure:
    """Returns horizontal bars, the first strategy on top."""
    names = [f"{one['policy']}<br><i>{one['sizes_text']}</i>" for one in known]
    places = list(range(len(known)))
    return {
        "data": [{"type": "bar", "orientation": "h", "y": places, **bar} for bar in bars],
        "layout": {
            "height": ROW * len(known) + EDGE,
            "xaxis": {"title": {"text": title}, "rangemode": "tozero"},
            "yaxis": {"tickvals": places, "ticktext": names, "autorange": "reversed"},
            "showlegend": len(bars) > 1,
            "legend": {"orientation": "h", "x": 1, "xanchor": "right", "y": 1, "yanchor": "bottom"},
            "bargap": 0.35,
            **layout,
        },
    }


def _steps(known: Sequence[Record]) -> Figure:
    labels = [
        units.seconds(one["step_s"])
        + (f" ({units.ratio(one['speed_up'])})" if one["speed_up"] else "")
        for one in known
    ]
    bar = {"x": [one["step_s"] for one in known], "text": labels, "hovertemplate": "%{text}"}
    colors = {"marker": {"color": [_color(one) for one in known]}, "name": ""}
    return _bars(known, "seconds", [bar | colors])


def _shares(known: Sequence[Record]) -> Figure:
    bars = [
        {
            "name": key,
            "x": [round(100 * one[key], 3) for one in known],
            "marker": {"color": color},
            "hovertemplate": f"{key} %{{x:.3g}} %<extra></extra>",
        }
        for key, color in (("idle", PINK), ("exposed", GREEN))
    ]
    return _bars(known, "%", bars)


def _sent(known: Sequence[Record]) -> Figure:
    unit, name = units.scale(max((float(one["bytes_per_gpu"]) for one in known), default=0.0))
    labels = [units.size(one["bytes_per_gpu"]) for one in known]
    bar = {"x": [one["bytes_per_gpu"] / unit for one in known], "text": labels, "name": ""}
    colors = {"marker": {"color": [_color(one) for one in known]}, "hovertemplate": "%{text}"}
    return _bars(known, name, [bar | colors])


def _memory(known: Sequence[Record], run: Record) -> Figure:
    parts = dict.fromkeys(part for one in known for part in one["memory_gib"] if part != "total")
    bars = [
        {
            "name": part,
            "x": [round(one["memory_gib"].get(part, 0.0), 3) for one in known],
            "marker": {"color": COLORS[number % len(COLORS)]},
            "hovertemplate": f"{part} %{{x:.3g}} GiB<extra></extra>",
        }
        for number, part in enumerate(parts)
    ]
    limit = run["limit_bytes"] / (1 << 30)
    line = {"type": "line", "x0": limit, "x1": limit, "yref": "paper", "y0": 0, "y1": 1}
    return _bars(known, "GiB", bars, barmode="stack", shapes=[line])


def _rate(one: Record, run: Record) -> float:
    return one["tokens_per_s"] / run["gpus"]


def _scaling(runs: Sequence[Record], value: Callable[[Record, Record], float | None]) -> Figure:
    """Returns a line for each policy over the number of GPUs, where it fits."""
    names = dict.fromkeys(one["policy"] for run in runs for one in run["strategies"])
    data = []
    for number, name in enumerate(names):
        points = [
            (run["gpus"], value(one, run))
            for run in runs
            for one in run["strategies"]
            if one["policy"] == name and one.get("fits")
        ]
        data.append(
            {
                "type": "scatter",
                "mode": "lines+markers",
                "name": name,
                "x": [gpus for gpus, _ in points],
                "y": [shown for _, shown in points],
                "line": {
                    "color": COLORS[number % len(COLORS)],
                    "dash": DASHES[number // len(COLORS) % len(DASHES)],
                },
                "marker": {"symbol": number, "size": 8},  # a shape for each, besides its color
                "hovertemplate": f"{name}: %{{y:.4g}}<extra>%{{x}} GPUs</extra>",
            }
        )
    gpus = [run["gpus"] for run in runs]
    ticks = {"tickvals": gpus, "ticktext": [units.count(count) for count in gpus]}
    return {
        "data": data,
        "layout": {
            "height": 360,
            "hovermode": "x",
            "xaxis": {"type": "log", "title": {"text": "GPUs"}, **ticks},
            "yaxis": {"rangemode": "tozero"},
        },
    }


def _table(runs: Sequence[Record]) -> Table:
    titles = [title.replace("-\n", "-").replace("\n", " ").strip() for title in COLUMNS]
    rows = []
    for run in runs:
        for one in run["strategies"]:
            if "error" in one:
                cells = [units.count(run["gpus"]), one["policy"], one["error"]]
                rows.append(cells + [NOTHING] * (len(titles) - len(cells)))
            else:
                rows.append([show({**one, "gpus": run["gpus"]}) for show in COLUMNS.values()])
    return Table(titles, rows)
