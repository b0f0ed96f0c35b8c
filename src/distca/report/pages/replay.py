"""The page of a replay: the measured seconds of ranks beside the simulated ones."""

from collections.abc import Sequence

from distca.report.pages.page import BLUE, GREEN, ORANGE, Figure, Page, Section, Table
from distca.report.replay import CAPTION, COLUMNS, heading, replay_facts
from distca.report.tables import Record

SIDES = (
    ("measured", "measured", BLUE),
    ("simulated", "simulated", ORANGE),
    ("fitted", "calibrated", GREEN),
)


def replay_page(name: str, cases: Sequence[Record]) -> Page:
    """Returns the page of a replay, with a part for each case.

    cases: those of ``distca bench replay --json``.
    """
    sections = [
        section
        for number, case in enumerate(cases)
        for section in (
            _section(f"steps-{number}", f"Step: {heading(case)}", case, "step"),
            _section(f"exposed-{number}", "Exposed communication", case, "exposed"),
            Section(
                f"ranks-{number}",
                "Replayed ranks",
                CAPTION + ".",
                table=Table(
                    [title.replace("\n", " ").strip() for title in COLUMNS],
                    [[show(row) for show in COLUMNS.values()] for row in case["rows"]],
                ),
            ),
            Section(
                f"facts-{number}",
                "Figures",
                table=Table(["", "value"], [[*pair] for pair in replay_facts(case).items()]),
            ),
        )
    ]
    errors = [
        f"{heading(case)}: the fitted simulator is off by {case['calibrated']['mean']:.1%} in the"
        f" mean and by {case['calibrated']['worst']:.1%} at worst."
        for case in cases
    ]
    return Page(name, errors, {}, sections)


def _section(name: str, title: str, case: Record, key: str) -> Section:
    return Section(name, title, "Milliseconds of all layers.", _bars(case, key), half=True)


def _bars(case: Record, key: str) -> Figure:
    ranks = [f"{row['rank']}{'*' if row['calibrates'] else ''}" for row in case["rows"]]
    return {
        "data": [
            {
                "type": "bar",
                "name": name,
                "x": ranks,
                "y": [round(row[side][key] * 1e3, 4) for row in case["rows"]],
                "marker": {"color": color},
                "hovertemplate": f"rank %{{x}}, {name}: %{{y:.4g}} ms<extra></extra>",
            }
            for name, side, color in SIDES
        ],
        "layout": {
            "height": 360,
            "barmode": "group",
            "xaxis": {"title": {"text": "rank (*: calibrates)"}, "type": "category"},
            "yaxis": {"title": {"text": "ms"}, "rangemode": "tozero"},
            "legend": {"orientation": "h", "x": 1, "xanchor": "right", "y": 1, "yanchor": "bottom"},
        },
    }
