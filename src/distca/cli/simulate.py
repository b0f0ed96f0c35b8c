"""``distca simulate``: a model, machines and data in; the time of a step, by policy, out."""

# What simulates is imported inside the functions: `distca --help` must not wait for numpy.
import json
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from itertools import count
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer
from typer import Argument, Option

from distca.cli.settings import Settings, with_settings

if TYPE_CHECKING:
    from rich.console import Console

    from distca.cli.scenarios import Asked
    from distca.sim.scenario import Scenario
    from distca.sim.sweep import Show, SweepResult
    from distca.sim.verdict import Verdict

_SHOW = "What to show"
PICTURES = (".png", ".svg", ".pdf")


@with_settings
def simulate(
    config: Annotated[
        Path | None,
        Argument(metavar="CONFIG.toml", help="The same settings in a file; options go over it."),
    ] = None,
    *,
    as_json: Annotated[
        bool, Option("--json", help="One JSON object, for machines.", rich_help_panel=_SHOW)
    ] = False,
    trace: Annotated[
        Path | None,
        Option(
            metavar="FILE",
            help="Write a timeline of one step for ui.perfetto.dev: the best disaggregated way, and"
            " the best of the others.",
            rich_help_panel=_SHOW,
        ),
    ] = None,
    plot: Annotated[
        Path | None,
        Option(
            metavar="FILE",
            help="Draw times, idle shares, traffic and memory into this .png, .svg or .pdf.",
            rich_help_panel=_SHOW,
        ),
    ] = None,
    **given: Any,
) -> None:
    """Predicts a training step on a cluster, by policy, and says whether disaggregation pays.

    For a first look: distca simulate --gpus 64 --context 256K
    """
    from distca.cli.outcomes import run_record, scenario_record
    from distca.cli.scenarios import Asked
    from distca.report.simulation import verdict

    _check_paths(trace, plot)
    asked = Asked.of(Settings.read(config, given))
    console = _console()
    runs = _simulate(asked, console, quiet=as_json)
    record = scenario_record(asked.scenarios[0], asked.batches)
    record["runs"] = [run_record(run.scenario, run.found, run.verdict) for run in runs]
    for run in record["runs"]:
        run["verdict"]["text"] = verdict(run)
    written = []
    if trace is not None:
        written += _write_trace(runs[-1], trace)
    if plot is not None:
        from distca.report.simulation_plots import draw_simulation

        draw_simulation(record, plot)
        written.append(str(plot))
    if as_json:
        typer.echo(json.dumps(record))
    else:
        _show(record, console, written)


def _check_paths(trace: Path | None, plot: Path | None) -> None:
    """Before minutes of work."""
    for path in (trace, plot):
        if path is not None and not path.parent.is_dir():
            raise ValueError(f"{path} cannot be written: there is no folder {path.parent}; make it")
    if plot is not None and plot.suffix not in PICTURES:
        raise ValueError(f"--plot {plot}: give a file that ends in {', '.join(PICTURES)}")


@dataclass(frozen=True)
class _Run:
    """One number of GPUs."""

    scenario: "Scenario"
    found: "list[SweepResult]"
    verdict: "Verdict"


def _simulate(asked: "Asked", console: "Console", quiet: bool) -> list[_Run]:
    from distca.cli.outcomes import limit_bytes
    from distca.sim.sweep import best, candidates
    from distca.sim.verdict import verdict

    tries = [
        (scenario, like, asked.sizes_of(scenario))
        for scenario in asked.scenarios
        for like in asked.likes
    ]
    runs = []
    with _watching(console, sum(len(candidates(*one)) for one in tries), quiet) as show:
        for scenario in asked.scenarios:
            batches, sizes = list(scenario.batches(asked.batches)), asked.sizes_of(scenario)
            limit = limit_bytes(scenario)
            found = [
                best(scenario, like, sizes, batches, limit_bytes=limit, show=show)
                for like in asked.likes
            ]
            runs.append(_Run(scenario, found, verdict(scenario, found, batches[0])))
    known = [one for run in runs for one in run.found]
    if all(one.summary is None for one in known):
        raise ValueError(known[0].refused)
    return runs


@contextmanager
def _watching(console: "Console", total: int, quiet: bool) -> "Iterator[Show]":
    """A bar where there is a terminal; in files, only results."""
    if quiet or not console.is_terminal:
        yield lambda strategy: None
        return
    from distca.report.watch import Watch

    done = count(1)
    with Watch(console, "simulated", total) as watch:
        yield lambda one: watch(next(done), f"{one.name}, {one.sizes}")


def _write_trace(run: _Run, path: Path) -> list[str]:
    """The first batch; says which ranks are left out."""
    from distca.sim.simulate import simulate as step
    from distca.sim.trace import MAX_RANKS, trace

    (batch,) = run.scenario.batches(1)
    chosen = [one.strategy for one in (run.verdict.ours, run.verdict.other) if one is not None]
    chosen = chosen or [one.summary.strategy for one in run.found if one.summary is not None][:1]
    steps = {one: step(run.scenario, one, batch, record=True).events for one in chosen}
    path.write_text(json.dumps(trace(steps)))
    ranks = max(one.parallel.num_plan_ranks for one in chosen)
    return [f"{path} (the first {MAX_RANKS} of {ranks} ranks)" if ranks > MAX_RANKS else str(path)]


def _show(record: dict[str, Any], console: "Console", written: list[str]) -> None:
    from distca.report.simulation import CAPTION, heading, simulation_table

    first, *others = heading(record)
    console.print(first, style="bold")
    console.print("\n".join(others))
    console.print()
    console.print(simulation_table(record["runs"], console.width))
    console.print(f"\n{CAPTION}", style="dim")
    several = len(record["runs"]) > 1
    console.print()
    for run in record["runs"]:
        if text := run["verdict"]["text"]:
            where = f"{run['gpus']:,} GPUs: " if several else ""
            style = "bold green" if run["verdict"]["pays"] else "bold"
            console.print(f"{where}{text}", style=style)
    if written:
        console.print(f"\nwritten: {', '.join(written)}", soft_wrap=True)


def _console() -> "Console":
    from rich.console import Console

    return Console(highlight=False, markup=False)
