"""``distca train``: reads a config, starts local ranks or joins those of torchrun, and shows."""

# What trains is imported inside the functions: `distca --help` must not wait for torch.
import json
import os
import signal
import sys
from dataclasses import dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer
from typer import Argument, Option

if TYPE_CHECKING:
    import torch
    from rich.console import Console

    from distca.runtime.launch import Stop
    from distca.train.config import Config

_RUN, _SHOW = "The run", "What to show"
COMPARE_OUT = "runs/compare"
# Two cores are done with it in a minute or two; whole files, long and short ones mixed.
COMPARE_DEFAULTS = (
    "train.steps=12",
    "train.tokens_per_step=8192",
    "train.warmup=4",
    "train.lr=1e-3",
    "data.context=8192",
    "data.overlong=drop",
)
SIDES: dict[str, dict[str, Any]] = {
    "colocated": {"policy": "colocated", "placement": "given", "ping_pong": False},
    "disaggregated": {"policy": "distca", "placement": "balanced"},
}
LOSS_TOLERANCE = {"float32": 1e-3, "bfloat16": 2e-2}
FOR_REAL = (
    "distca train --set 'data.sources=[\"my/*.jsonl\"]' --set train.steps=2000"
    " --set train.checkpoint_every=200 --out runs/mine"
)


def train(
    config: Annotated[
        Path | None,
        Argument(metavar="CONFIG.toml", help="What to run; by default a small model on text."),
    ] = None,
    settings: Annotated[
        list[str] | None,
        Option(
            "--set",
            metavar="A.B=C",
            help="Over the config, as often as needed: --set train.steps=50.",
            rich_help_panel=_RUN,
        ),
    ] = None,
    ranks: Annotated[
        int | None,
        Option(
            metavar="N",
            help="To start here; by default one for each GPU, or 2 on the CPU.",
            rich_help_panel=_RUN,
        ),
    ] = None,
    out: Annotated[
        Path | None,
        Option(
            metavar="DIR",
            help="Where records, logs and checkpoints go; runs/latest by default.",
            rich_help_panel=_RUN,
        ),
    ] = None,
    resume: Annotated[
        bool | None,
        Option(
            "--resume/--fresh",
            help="Go on from the newest checkpoint there, if any (the default), or start anew.",
            rich_help_panel=_RUN,
        ),
    ] = None,
    compare: Annotated[
        bool,
        Option(
            "--compare",
            help="The same steps colocated, then disaggregated, and both side by side.",
            rich_help_panel=_RUN,
        ),
    ] = False,
    trace: Annotated[
        int | None,
        Option(
            metavar="STEP",
            help="Write a timeline of this step over all ranks, for ui.perfetto.dev.",
            rich_help_panel=_SHOW,
        ),
    ] = None,
    as_json: Annotated[
        bool, Option("--json", help="One JSON object, for machines.", rich_help_panel=_SHOW)
    ] = False,
) -> None:
    """Trains a model.

    Starts ranks on what this machine has; under torchrun it joins. Ctrl-C saves and ends.

    For a first look: distca train --compare
    """
    from distca.runtime.launch import is_launched, is_rank, reporting

    wishes = [*(settings or ()), *([] if trace is None else [f"train.trace={trace}"])]
    asked = _Asked(config, tuple(wishes), out, resume, compare, as_json)
    if not is_rank():
        _start(asked, ranks)
        return
    with reporting():
        import torch.distributed

        chosen, world = asked.config(), int(os.environ["WORLD_SIZE"])
        if ranks not in (None, world):
            raise ValueError(f"--ranks {ranks}, but {world} ranks were started: leave out --ranks")
        if not is_launched() and os.environ["RANK"] == "0" and not as_json:
            _announce(chosen, world, compare)
        # A Ctrl-C under torchrun reaches every rank.
        signal.signal(signal.SIGINT, lambda *_: signal.raise_signal(signal.SIGTERM))
        (_compare if compare else _train)(chosen, as_json)
        torch.distributed.destroy_process_group()


@dataclass(frozen=True)
class _Asked:
    """The command line, read by the launcher and again by every rank."""

    path: Path | None
    settings: tuple[str, ...]
    out: Path | None
    resume: bool | None
    compare: bool
    as_json: bool

    def config(self) -> "Config":
        from distca.train.config import Config

        if self.compare and self.resume:
            raise ValueError("--compare starts both sides anew: leave out --resume")
        defaults = COMPARE_DEFAULTS if self.compare and self.path is None else ()
        chosen = Config.read(self.path, [*defaults, *self.settings])
        if self.out is not None:
            chosen = replace(chosen, out=str(self.out))
        elif self.compare and chosen.out == Config.out:
            chosen = replace(chosen, out=COMPARE_OUT)
        if self.compare or self.resume is not None:
            chosen = replace(chosen, resume=bool(self.resume))
        return chosen

    def arguments(self) -> list[str]:
        return [
            "train",
            *(f"--set={setting}" for setting in self.settings),
            *([] if self.out is None else [f"--out={self.out}"]),
            *([] if self.resume is None else ["--resume" if self.resume else "--fresh"]),
            *(["--compare"] if self.compare else []),
            *(["--json"] if self.as_json else []),
            *([] if self.path is None else ["--", str(self.path)]),
        ]


def _start(asked: _Asked, ranks: int | None) -> None:
    from distca.runtime.launch import launch, local_ranks

    config, num_ranks = asked.config(), local_ranks(ranks)
    check(config, num_ranks)
    if not asked.as_json:
        _announce(config, num_ranks, asked.compare)
    try:
        stop = launch(this_command(asked.arguments()), num_ranks, Path(config.out) / "logs")
    finally:
        _console().show_cursor()  # a rank that was killed could not
    leave(stop)


def this_command(arguments: list[str]) -> list[str]:
    """-P: what lies in the working directory is not imported by accident."""
    return [sys.executable, "-P", "-c", "from distca.cli import main; main()", *arguments]


def leave(stop: "Stop | None") -> None:
    """SIGTERM is a wish that was granted; a Ctrl-C should stop a script too."""
    if stop is None:
        return
    if stop.early:
        typer.echo("stopped before the first step: there was nothing to save", err=True)
    if stop.signal == signal.SIGINT:
        raise typer.Exit(130)


def check(config: "Config", num_ranks: int) -> None:
    """What can be known to be wrong before anything is started."""
    from distca.runtime import parallelize
    from distca.train import setup

    parallel = setup.parallel_of(config, num_ranks)
    parallel.check(num_ranks)
    model = setup.model_of(config, setup.tokenizer_of(config))
    parallelize.check(model, parallel.tp)
    setup.planner_of(config, parallel, model, _device())


def _announce(config: "Config", num_ranks: int, compare: bool) -> None:
    from distca.pipeline.stages import stage_layers
    from distca.report import units
    from distca.report.training import facts
    from distca.train import setup

    model = setup.model_of(config, setup.tokenizer_of(config))
    sizes = setup.parallel_of(config, num_ranks)
    axes = [f"{axis} {getattr(sizes, axis)}" for axis in ("pp", "dp", "cp", "tp")]
    if sizes.servers:
        axes.append(units.several(sizes.servers, "dedicated server"))
    p, t, out = config.parallel, config.train, Path(config.out)
    device = _device()
    where = "GPUs" if device.type == "cuda" else "the CPU"
    *parts, total = setup.memory_of(config, sizes, model, device).table().items()
    memory = ", ".join(f"{name} {gib:.2g}" for name, gib in parts)
    how = "colocated, then disaggregated" if compare else f"{p.policy}, {p.placement} placement"
    stages = [stop - start for start, stop in stage_layers(model.layers, sizes.pp, p.stage_layers)]
    rows = {
        "model": f"{config.model.name}, {units.count(model.num_parameters)} parameters,"
        f" {units.several(model.layers, 'layer')}, {_precision(config)}",
        "ranks": f"{num_ranks} on {where}: {' x '.join(axes)}",
        **({"pipeline": _pipeline(stages, p.micro_batches)} if sizes.pp > 1 else {}),
        "attention": how + (", ping-pong" if p.ping_pong else ""),
        "data": f"{', '.join(config.data.sources)}; documents of up to"
        f" {units.count(config.data.context)} tokens",
        "memory": f"about {total[1]:.2g} GiB on a rank: {memory}",
        "steps": f"{units.count(t.steps)} of {units.count(t.tokens_per_step)} tokens",
        "records": f"{out}/{'*/' if compare else ''}metrics.jsonl, logs in {out}/logs",
    }
    console = _console()
    console.print(facts(rows))
    console.print()


def _pipeline(layers: list[int], micro_batches: int) -> str:
    from distca.pipeline.schedule import Schedule

    held = Schedule.aligned(len(layers), micro_batches).in_flight
    return (
        f"stages of {', '.join(map(str, layers))} layers,"
        f" {micro_batches} micro-batches, of which a stage holds up to"
        f" {', '.join(map(str, held))}"
    )


def _train(config: "Config", as_json: bool) -> None:
    from distca.report.training import outcome, summary
    from distca.train.step_folders import newest

    records = _fit(config, "step", as_json)
    if records is None:
        return
    found = newest(Path(config.out) / "checkpoints")
    result = {"out": config.out, "steps": config.train.steps} | summary(records)
    result["metrics"] = f"{config.out}/metrics.jsonl"
    result["checkpoint"] = None if found is None else str(found)
    if any(record["step"] == config.train.trace for record in records):
        result["trace"] = f"{config.out}/traces/trace.json"
    if as_json:
        typer.echo(json.dumps(result))
    else:
        _console().print(outcome(result), soft_wrap=True)


def _compare(config: "Config", as_json: bool) -> None:
    """Both sides in this world, one after the other; rank 0 shows."""
    import torch
    import torch.distributed as dist

    runs: list[list[dict[str, Any]]] = []
    for name, way in SIDES.items():
        parallel = replace(config.parallel, **way)
        side = replace(config, parallel=parallel, out=str(Path(config.out) / name))
        records = _fit(side, name.ljust(max(map(len, SIDES))), as_json)
        stopped = [bool(records and records[-1]["stopped"])]
        dist.broadcast_object_list(stopped, src=0, device=torch.device("cpu"))
        if stopped[0]:
            if records is not None:
                said = f"stopped: what was done is saved in {config.out}; there is no comparison"
                typer.echo(said, err=as_json)
            return
        runs.append(records or [])
    if dist.get_rank() == 0:
        _show_comparison(config, runs, as_json)


def _show_comparison(config: "Config", runs: list[list[dict[str, Any]]], as_json: bool) -> None:
    from distca.report.curves import draw_comparison
    from distca.report.training import comparison, comparison_table, verdict

    compared = comparison(runs[0], runs[1], LOSS_TOLERANCE[_precision(config)])
    picture = Path(config.out) / "compare.png"
    draw_comparison(runs[0], runs[1], compared, picture)
    if as_json:
        places = {"out": config.out, "picture": str(picture)}
        typer.echo(json.dumps(compared | places))
        return
    console = _console()
    console.print()
    console.print(comparison_table(compared))
    style = None if compared["losses_agree"] else "bold red"
    console.print(f"\n{verdict(compared)}", style=style, soft_wrap=True)
    console.print(f"records: {config.out}/*/metrics.jsonl, picture: {picture}", soft_wrap=True)
    console.print(f"to train for real: {FOR_REAL}", soft_wrap=True)


def _fit(config: "Config", title: str, as_json: bool) -> list[dict[str, Any]] | None:
    """The records of the steps that were taken; None on all ranks but the first."""
    from distca.report.training import said
    from distca.report.watch import Watch
    from distca.train.trainer import Trainer

    if os.environ["RANK"] != "0":
        Trainer(config).fit()
        return None
    if as_json:
        return Trainer(config).fit()
    with Watch(_console(), title, config.train.steps) as watch:

        def show(record: dict[str, Any]) -> None:
            watch(record["step"] + 1, said(record))

        return Trainer(config, show=show).fit()


def _precision(config: "Config") -> str:
    from distca.train import setup

    return str(setup.precision_of(config, _device()).compute).removeprefix("torch.")


def _device() -> "torch.device":
    import torch

    return torch.device("cuda" if torch.cuda.is_available() else "cpu")


def _console() -> "Console":
    from rich.console import Console

    return Console(highlight=False, markup=False)
