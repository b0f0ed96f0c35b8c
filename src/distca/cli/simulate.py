"""``distca simulate``: predicts the time of a training step on a cluster, by policy."""

import json
from dataclasses import asdict, dataclass
from functools import partial
from itertools import count
from pathlib import Path
from typing import TYPE_CHECKING, Any

import typer
from rich.console import Console

from distca.cli.command import (
    OUTPUT,
    argument,
    check_output,
    console,
    json_switch,
    option,
    showing_progress,
)
from distca.cli.settings import Settings, read_settings
from distca.report.simulation import heading, simulation_table, verdict_text
from distca.report.simulation_plots import draw_simulation
from distca.runtime.disk import writing

if TYPE_CHECKING:
    from distca.cli.scenarios import Study
    from distca.sim.scenario import Scenario, Strategy
    from distca.sim.simulate import Summary
    from distca.sim.sweep import SweepResult
    from distca.sim.verdict import Verdict

FIGURES = (  # of a Summary, in the record of a strategy
    "step_s", "tokens_per_s", "tflops_per_gpu", "idle", "exposed", "bytes_per_gpu", "plan_s",
)  # fmt: skip
REASONS = ("gain", "speed_up", "noise", "because", "attention", "busiest", "needed_bytes_per_s")
_output = partial(option, panel=OUTPUT)


def _use_file(context: typer.Context, path: Path | None) -> Path | None:
    """Makes the values of a TOML file the defaults of the options."""
    if path is not None:
        context.default_map = read_settings(path)
    return path


@dataclass(frozen=True, kw_only=True)
class SimulateCommand(Settings):
    """Predicts the training step of each policy on a cluster, and whether disaggregation helps.

    For example: distca simulate --gpus 64 --context 256K
    """

    config: Path | None = argument(
        "CONFIG.toml",
        "File with the same settings; options override it.",
        default=None,
        callback=_use_file,
        is_eager=True,
    )
    as_json: bool = json_switch()
    trace: Path | None = _output(
        "FILE",
        "Write a timeline of one step for ui.perfetto.dev: the best disaggregated"
        " strategy and the best of the others.",
    )
    plot: Path | None = _output(
        "FILE", "Draw times, idle shares, traffic and memory into this .png, .svg or .pdf file."
    )

    def run(self) -> None:
        from distca.cli.scenarios import Study

        self._check_paths()
        study, screen = Study.of(self), console()
        runs = _simulate(study, quiet=self.as_json)
        record = _study_record(study) | {"runs": [run.record() for run in runs]}
        written = []
        if self.trace is not None:
            written.append(_write_trace(runs[-1], self.trace))
            record["trace"] = str(self.trace)
        if self.plot is not None:
            with writing(self.plot):
                draw_simulation(record, self.plot)
            written.append(str(self.plot))
        if self.as_json:
            typer.echo(json.dumps(record))
        else:
            _show(record, screen, written)

    def _check_paths(self) -> None:
        """Reports wrong paths before minutes of work."""
        for flag, path in (("--trace", self.trace), ("--plot", self.plot)):
            check_output(flag, path, self.lengths, self.config)


@dataclass(frozen=True)
class _Run:
    """The results for one number of GPUs."""

    scenario: "Scenario"
    found: "list[SweepResult]"
    verdict: "Verdict"

    def record(self) -> dict[str, Any]:
        scenario, other = self.scenario, self.verdict.other
        record: dict[str, Any] = {
            "gpus": scenario.cluster.gpus,
            "sequences": scenario.sequences,
            "tokens": scenario.tokens,
            "limit_bytes": scenario.cluster.usable_bytes,
            "strategies": [_strategy_record(one, other) for one in self.found],
            "verdict": _verdict_record(self.verdict) | {"known": scenario.cluster.known},
        }
        record["verdict"]["text"] = verdict_text(record)
        return record


def _study_record(study: "Study") -> dict[str, Any]:
    """Returns what is the same for all numbers of GPUs."""
    record = asdict(study.scenarios[0]) | {"batches": study.batches, "seeds": study.seeds}
    del record["sequences"], record["seed"]
    if not isinstance(record["lengths"], str):
        record["lengths"] = f"{len(record['lengths'])} documents"
    return record


def _strategy_record(result: "SweepResult", other: "Summary | None") -> dict[str, Any]:
    """Returns the figures of a strategy.

    other: the strategy over which its speed-up is stated.
    """
    from distca.sim.verdict import batch_speed_ups

    if result.summary is None:
        return {"policy": result.name, "error": result.refused}
    found, strategy = result.summary, result.summary.strategy
    return {
        "policy": result.name,
        "disaggregated": strategy.disaggregated,
        "sizes": asdict(strategy.parallel) | {"micro_batches": strategy.micro_batches},
        "sizes_text": strategy.sizes,
        "tried": result.tried,
        "speed_up": None if other is None else other.step_s / found.step_s,
        "batch_speed_ups": [] if other is None else batch_speed_ups(other, found),
        "memory_bytes": found.memory.total,
        "memory_gib": found.memory.table(),
        "fits": result.fits,
        **{name: getattr(found, name) for name in FIGURES},
    }


def _verdict_record(verdict: "Verdict") -> dict[str, Any]:
    record: dict[str, Any] = {name: getattr(verdict, name) for name in REASONS}
    record["enough"] = verdict.enough and {
        "policy": verdict.enough.strategy.policy,
        "busiest": verdict.enough.busiest,
    }
    for side in ("ours", "other"):
        one = getattr(verdict, side)
        record[side] = one and {
            "policy": one.strategy.name,
            "sizes": one.strategy.sizes,
            "idle": one.idle,
            "exposed": one.exposed,
        }
    return record


def _simulate(study: "Study", quiet: bool) -> list[_Run]:
    from distca.sim.sweep import best, candidates
    from distca.sim.verdict import verdict

    total = sum(
        len(candidates(scenario, strategy, study.sizes_of(scenario)))
        for scenario in study.scenarios
        for strategy in study.strategies
    )
    runs = []
    done = count(1)
    with showing_progress("simulated", total, quiet=quiet) as update:

        def show(strategy: "Strategy") -> None:
            update(next(done), f"{strategy.name}, {strategy.sizes}")

        for scenario in study.scenarios:
            batches, sizes = study.batches_of(scenario), study.sizes_of(scenario)
            limit = scenario.cluster.usable_bytes
            found = [
                best(scenario, strategy, sizes, batches, limit_bytes=limit, show=show)
                for strategy in study.strategies
            ]
            runs.append(_Run(scenario, found, verdict(scenario, found, batches)))
    known = [one for run in runs for one in run.found]
    if all(one.summary is None for one in known):
        raise ValueError(known[0].refused)
    return runs


def _write_trace(run: _Run, path: Path) -> str:
    """Writes the timeline of the first batch; returns the path and which ranks it shows."""
    from distca.sim.simulate import simulate
    from distca.sim.trace import MAX_RANKS, trace

    (batch,) = run.scenario.batches(1)
    chosen = [one.strategy for one in (run.verdict.ours, run.verdict.other) if one is not None]
    chosen = chosen or [one.summary.strategy for one in run.found if one.summary is not None][:1]
    steps = {one: simulate(run.scenario, one, batch, record=True).events for one in chosen}
    with writing(path):
        path.write_text(json.dumps(trace(steps)))
    ranks = max(one.parallel.num_plan_ranks for one in chosen)
    return f"{path} (the first {MAX_RANKS} of {ranks} ranks)" if ranks > MAX_RANKS else str(path)


def _show(record: dict[str, Any], screen: Console, written: list[str]) -> None:
    first, *others = heading(record)
    screen.print(first, style="bold")
    screen.print("\n".join(others))
    screen.print()
    screen.print(simulation_table(record["runs"], screen.width))
    several = len(record["runs"]) > 1
    screen.print()
    for run in record["runs"]:
        if text := run["verdict"]["text"]:
            where = f"{run['gpus']:,} GPUs: " if several else ""
            style = "bold green" if run["verdict"]["gain"] == "faster" else "bold"
            screen.print(f"{where}{text}", style=style)
    if written:
        screen.print(f"\nwritten: {', '.join(written)}", soft_wrap=True)
