"""The page of one training run, or of two over each other."""

from collections.abc import Callable, Iterable, Sequence
from typing import Any

from distca.report import units
from distca.report.pages.page import COLORS, DASHES, Page, Section, Table
from distca.report.pages.panels import Line, Mark, Panel, draw_panels, numbers
from distca.report.pages.run_events import Event, Run, events_of
from distca.report.pages.run_ranks import heat_map
from distca.report.pages.run_ticks import tick_sections
from distca.report.tables import NOTHING, Record
from distca.report.training import summary

GIB = 1 << 30
MOST_SPEEDS = 8  # ranks whose learned speeds are drawn: those that deviate most
MOST_ROWS = 200  # of the table of steps: the last ones


def run_page(runs: Sequence[Run]) -> Page:
    """Returns the page of a run, or of two runs that are compared."""
    title = " and ".join(run.name for run in runs)
    events = [(run, event) for run in runs for event in events_of(run)]
    sections = [_curves(runs)]
    if len(runs) > 1:
        sections.insert(0, _comparison(runs))
    sections += [section for section in (_events(events, len(runs)), _evaluation(runs)) if section]
    for number, run in enumerate(runs):
        figure = heat_map(run.records)
        if figure is not None:
            sections.append(
                Section(
                    f"ranks-{number}",
                    "Attention and waiting of each rank" + _of(run, runs),
                    "Above: seconds of attention over the mean of the ranks in that step. Below:"
                    " seconds in which a rank waited, for exchanges and for its next batch.",
                    figure,
                )
            )
        sections += tick_sections(run, number, _of(run, runs))
    return Page(title, _words(runs), _facts(runs[0]) if len(runs) == 1 else {}, sections)


def _curves(runs: Sequence[Run]) -> Section:
    panels = [
        Panel("Loss", [("training", "loss"), ("evaluation", "eval_loss")]),
        Panel("Tokens per second", [("", "tokens_per_s")], zero=True),
        _utilization(runs),
        Panel(
            "Imbalance: worst / mean attention",
            [
                ("measured", "imbalance_measured"),
                ("planned", "imbalance_planned"),
                ("at home", "imbalance_before"),
            ],
        ),
        Panel(
            "Waiting of the slowest rank, seconds",
            [("exposed communication", "exposed_s"), ("planning", "planning_waited_s")],
            zero=True,
        ),
        Panel("Step, seconds", [("", "seconds")], zero=True),
        Panel("Memory of the fullest rank, GiB", [("", "memory_bytes")], zero=True, unit=GIB),
        Panel("Gradient norm", [("", "grad_norm")]),
    ]
    drawn = [(panel.title, _lines(panel, runs), panel.zero) for panel in panels if panel]
    drawn.append(("Speed of ranks, as planned", _speeds(runs), False))
    marks = [
        Mark(step, kind, f"{words}{_of(run, runs)}")
        for run in runs
        for step, kind, words in events_of(run)
    ]
    shown = [one for one in drawn if one[1]]
    return Section(
        "curves",
        "Over the steps",
        "Steps are numbered as in metrics.jsonl. Drag to zoom, double-click to see all.",
        draw_panels(shown, marks),
        _steps_table(runs[0]) if len(runs) == 1 else None,
    )


def _utilization(runs: Sequence[Run]) -> Panel:
    known = any(record.get("mfu") for run in runs for record in run.records)
    if known:
        return Panel("MFU, %", [("", "mfu")], zero=True, unit=0.01)
    return Panel("TFLOP/s of a rank", [("", "tflops_per_rank")], zero=True)


def _lines(panel: Panel, runs: Sequence[Run]) -> list[Line]:
    lines = []
    for number, run in enumerate(runs):
        for index, (what, key) in enumerate(panel.keys):
            points = numbers(run.records, key, panel.unit)
            if any(value for _, value in points):
                color = COLORS[index if len(runs) == 1 else number]
                name = ", ".join(word for word in (run.name if len(runs) > 1 else "", what) if word)
                lines.append(Line(name or panel.title, points, color, DASHES[index % len(DASHES)]))
    return lines


def _speeds(runs: Sequence[Run]) -> list[Line]:
    """Returns the speeds of the ranks that differ most from the others, if any does."""
    lines = []
    for number, run in enumerate(runs):
        points = [
            (record["step"], record["speeds"]) for record in run.records if record.get("speeds")
        ]
        if not points or all(len(set(speeds)) == 1 for _, speeds in points):
            continue
        widest = max(len(speeds) for _, speeds in points)
        span = {
            rank: max(abs(speeds[rank] - 1) for _, speeds in points if rank < len(speeds))
            for rank in range(widest)
        }
        chosen = sorted(sorted(span, key=lambda rank: -span[rank])[:MOST_SPEEDS])
        for index, rank in enumerate(chosen):
            values = [(step, speeds[rank]) for step, speeds in points if rank < len(speeds)]
            name = f"plan rank {rank}{_of(run, runs)}"
            dash = DASHES[(index // len(COLORS) + number) % len(DASHES)]
            lines.append(Line(name, values, COLORS[index % len(COLORS)], dash))
    return lines


def _evaluation(runs: Sequence[Run]) -> Section | None:
    """Returns the losses of held-out documents by their length, over the steps."""
    lines, rows = [], []
    for number, run in enumerate(runs):
        names = dict.fromkeys(
            name for record in run.records for name in record if name.startswith("eval_loss")
        )
        for index, name in enumerate(names):
            points = numbers(run.records, name)
            length = name.removeprefix("eval_loss").strip("_").replace("_", " ") or "all"
            if points:
                label = f"{length}{_of(run, runs)}"
                dash = DASHES[(index // len(COLORS) + number) % len(DASHES)]
                lines.append(Line(label, points, COLORS[index % len(COLORS)], dash))
                rows.append([label, f"{points[0][1]:.4f}", f"{points[-1][1]:.4f}"])
    if not lines:
        return None
    return Section(
        "evaluation",
        "Evaluation by document length",
        "Mean loss of held-out documents, by their number of tokens.",
        draw_panels([("Loss", lines, False)], [], height=280),
        Table(["tokens", "first", "last"], rows),
    )


def _events(events: Sequence[tuple[Run, Event]], num_runs: int) -> Section | None:
    if not events:
        return None
    columns = ["step", "event", "", *(["run"] if num_runs > 1 else [])]
    rows = [
        [str(step), kind, words, *([run.name] if num_runs > 1 else [])]
        for run, (step, kind, words) in events
    ]
    return Section("events", "Faults and recoveries", table=Table(columns, rows))


def _comparison(runs: Sequence[Run]) -> Section:
    found = [summary(run.records) for run in runs]
    rows = [
        [name, *(_shown(one, key, show) for one in found), _ratio(found, key)]
        for name, key, show in _FIGURES
    ]
    columns = ["", *(run.name for run in runs), "second / first"]
    return Section("comparison", "Side by side", table=Table(columns, rows))


_FIGURES: Sequence[tuple[str, str, Callable[[Any], str]]] = (
    ("steps", "steps_taken", units.count),
    ("last loss", "loss", "{:.4f}".format),
    ("last evaluation", "eval_loss", "{:.4f}".format),
    ("tokens/s", "tokens_per_s", "{:,.0f}".format),
    ("imbalance, measured", "imbalance_measured", units.ratio),
    ("imbalance, planned", "imbalance_planned", units.ratio),
    ("imbalance at home", "imbalance_before", units.ratio),
    ("exposed communication", "exposed_s", units.seconds),
    ("bytes of a step", "bytes_per_step", units.size),
    ("time of all steps", "seconds", units.seconds),
)


def _shown(found: Record, key: str, show: Callable[[Any], str]) -> str:
    """Returns a figure as text; the loss of a skipped step is None."""
    return NOTHING if found.get(key) is None else show(found[key])


def _ratio(found: Sequence[Record], key: str) -> str:
    first, second = (one.get(key) for one in found)
    return units.ratio(second / first) if first and second else NOTHING


def _facts(run: Run) -> dict[str, str]:
    found = summary(run.records)
    return {name: _shown(found, key, show) for name, key, show in _FIGURES if key in found}


def _words(runs: Sequence[Run]) -> list[str]:
    return [line for run in runs for line in (_state(run), *_setup(run, runs)) if line]


def _state(run: Run) -> str:
    steps = run.config.get("train", {}).get("steps")
    if not run.records:
        return f"{run.name} has no finished step yet."
    done = run.records[-1]["step"] + 1
    words = units.several(done, "step") if steps is None else f"{done} of {steps} steps"
    if run.records[-1].get("stopped"):
        return f"{run.name} was stopped after {words}."
    return f"{run.name}: " + (f"all {steps} steps." if steps and done >= steps else f"{words}.")


def _setup(run: Run, runs: Sequence[Run]) -> Iterable[str]:
    if run.config:
        model, parallel, data = (run.config.get(key, {}) for key in ("model", "parallel", "data"))
        sizes = [
            f"{axis} {parallel[axis]}" for axis in ("pp", "dp", "cp", "tp") if parallel.get(axis)
        ]
        words = [str(model.get("name", "")), " x ".join(sizes)]
        if servers := parallel.get("servers"):
            words.append(units.several(servers, "dedicated server"))
        words.append(f"policy {parallel.get('policy')}, {parallel.get('placement')} placement")
        if context := data.get("context"):
            words.append(f"documents of up to {units.count(context)} tokens")
        yield "; ".join(word for word in words if word) + _of(run, runs)
    if run.trace:
        yield f"A timeline of one step is in {run.trace}: open it at ui.perfetto.dev."


_STEP_COLUMNS: Sequence[tuple[str, str, str]] = (
    ("step", "step", "{}"),
    ("loss", "loss", "{:.4f}"),
    ("tokens/s", "tokens_per_s", "{:,.0f}"),
    ("imbalance, planned", "imbalance_planned", "{:.2f}"),
    ("measured", "imbalance_measured", "{:.2f}"),
    ("exposed, s", "exposed_s", "{:.3g}"),
    ("planning, s", "planning_waited_s", "{:.3g}"),
)


def _steps_table(run: Run) -> Table:
    rows = [
        [
            NOTHING if record.get(key) is None else form.format(record[key])
            for _, key, form in _STEP_COLUMNS
        ]
        for record in run.records[-MOST_ROWS:]
    ]
    return Table([title for title, _, _ in _STEP_COLUMNS], rows)


def _of(run: Run, runs: Sequence[Run]) -> str:
    return f", {run.name}" if len(runs) > 1 else ""
