"""``distca train``: reads a config, starts ranks or joins those of torchrun, and shows progress."""

import json
import os
import signal
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any

import typer

from distca.cli.command import (
    OUTPUT,
    argument,
    console,
    exit_if_stopped,
    json_switch,
    option,
    rank_command,
)
from distca.report import units
from distca.report.curves import draw_comparison
from distca.report.progress import progress
from distca.report.tables import facts
from distca.report.training import (
    comparison,
    comparison_table,
    outcome,
    step_line,
    summary,
    verdict,
)
from distca.runtime import launch

if TYPE_CHECKING:
    import torch

    from distca.train.config import Config

COMPARE_OUT = "runs/compare"
# Takes a minute or two on two cores; whole files, so that long and short documents are mixed.
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
NEXT_COMMAND = (
    "distca train --set 'data.sources=[\"my/*.jsonl\"]' --set train.steps=2000"
    " --set train.checkpoint_every=200 --out runs/mine"
)
_run, _output = partial(option, panel="Run"), partial(option, panel=OUTPUT)


@dataclass(frozen=True, kw_only=True)
class TrainCommand:
    """Trains a model.

    Starts ranks on this machine; under torchrun it joins them.
    Ctrl-C saves a checkpoint and ends the run.

    For a first look: distca train --compare
    """

    config: Path | None = argument(
        "CONFIG.toml",
        "Configuration of the run. Default: a small model on the text of Python's"
        " standard library.",
        default=None,
    )
    settings: list[str] | None = _run(
        "A.B=C",
        "Override a value of the config, as in train.steps=50; may be repeated.",
        None,
        "--set",
    )
    ranks: int | None = _run("N", "Ranks to start. Default: one for each GPU, or 2 on the CPU.")
    out: Path | None = _run(
        "DIR", "Folder for records, logs and checkpoints. Default: runs/latest."
    )
    resume: bool | None = _run(
        "",
        "Continue from the newest checkpoint in DIR, if there is one (the default), or"
        " start from the beginning.",
        None,
        "--resume/--fresh",
    )
    compare: bool = _run(
        "", "Train the same steps colocated and disaggregated, and compare.", False, "--compare"
    )
    trace: int | None = _output(
        "STEP", "Write a timeline of this step over all ranks, for ui.perfetto.dev."
    )
    as_json: bool = json_switch()

    def run(self) -> None:
        if not launch.is_rank():
            self._launch()
            return
        with launch.reporting():
            import torch.distributed

            config, world = self.read(), int(os.environ["WORLD_SIZE"])
            if self.ranks not in (None, world):
                raise ValueError(
                    f"--ranks {self.ranks}, but {world} ranks were started: leave out --ranks"
                )
            if not launch.is_launched() and os.environ["RANK"] == "0" and not self.as_json:
                _announce(config, world, self.compare)
            # A Ctrl-C under torchrun reaches every rank.
            signal.signal(signal.SIGINT, lambda *_: signal.raise_signal(signal.SIGTERM))
            (_compare if self.compare else _train)(config, self.as_json)
            torch.distributed.destroy_process_group()

    def read(self) -> "Config":
        """Reads the configuration, in the launcher and again in every rank."""
        from distca.train.config import Config

        if self.compare and self.resume:
            raise ValueError("--compare starts both sides from step 0: leave out --resume")
        settings = [*COMPARE_DEFAULTS] if self.compare and self.config is None else []
        settings += self.settings or []
        settings += [] if self.trace is None else [f"train.trace={self.trace}"]
        config = Config.read(self.config, settings)
        if self.out is not None:
            config = replace(config, out=str(self.out))
        elif self.compare and config.out == Config.out:
            config = replace(config, out=COMPARE_OUT)
        if self.compare or self.resume is not None:
            config = replace(config, resume=bool(self.resume))
        return config

    def _launch(self) -> None:
        config, num_ranks = self.read(), launch.local_ranks(self.ranks)
        check(config, num_ranks)
        if not self.as_json:
            _announce(config, num_ranks, self.compare)
        try:
            stop = launch.launch(rank_command("train", self), num_ranks, Path(config.out) / "logs")
        finally:
            console().show_cursor()  # rank 0 hides it, and may have been killed
        exit_if_stopped(stop)


def check(config: "Config", num_ranks: int) -> None:
    """Raises ValueError for mistakes that can be found before anything is started."""
    from distca.train import setup

    parallel = setup.parallel_of(config, num_ranks)
    parallel.check(num_ranks)
    model = setup.model_of(config, setup.tokenizer_of(config))
    model.shape.share(parallel.tp)
    setup.planner_of(config, parallel, model, _device())


def _announce(config: "Config", num_ranks: int, compare: bool) -> None:
    from distca.pipeline.stages import stage_layers
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
    screen = console()
    screen.print(facts(rows))
    screen.print()


def _pipeline(layers: list[int], micro_batches: int) -> str:
    from distca.pipeline.schedule import Schedule

    held = Schedule.aligned(len(layers), micro_batches).in_flight
    return (
        f"stages of {', '.join(map(str, layers))} layers,"
        f" {micro_batches} micro-batches, of which a stage holds up to"
        f" {', '.join(map(str, held))}"
    )


def _train(config: "Config", as_json: bool) -> None:
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
        console().print(outcome(result), soft_wrap=True)


def _compare(config: "Config", as_json: bool) -> None:
    """Trains both sides on these ranks, one after the other; rank 0 shows the comparison."""
    import torch
    import torch.distributed as dist

    runs: list[list[dict[str, Any]]] = []
    for name, changes in SIDES.items():
        parallel = replace(config.parallel, **changes)
        side = replace(config, parallel=parallel, out=str(Path(config.out) / name))
        records = _fit(side, name.ljust(max(map(len, SIDES))), as_json)
        stopped = [bool(records and records[-1]["stopped"])]
        dist.broadcast_object_list(stopped, src=0, device=torch.device("cpu"))
        if stopped[0]:
            if records is not None:
                stopped_in = f"stopped: the steps so far are saved in {config.out}, not compared"
                typer.echo(stopped_in, err=as_json)
            return
        runs.append(records or [])
    if dist.get_rank() == 0:
        _show_comparison(config, runs, as_json)


def _show_comparison(config: "Config", runs: list[list[dict[str, Any]]], as_json: bool) -> None:
    compared = comparison(runs[0], runs[1], LOSS_TOLERANCE[_precision(config)])
    picture = Path(config.out) / "compare.png"
    draw_comparison(runs[0], runs[1], compared, picture)
    if as_json:
        places = {"out": config.out, "picture": str(picture)}
        typer.echo(json.dumps(compared | places))
        return
    screen = console()
    screen.print()
    screen.print(comparison_table(compared))
    style = None if compared["losses_agree"] else "bold red"
    screen.print(f"\n{verdict(compared)}", style=style, soft_wrap=True)
    screen.print(f"records: {config.out}/*/metrics.jsonl, picture: {picture}", soft_wrap=True)
    screen.print(f"to train on your own data: {NEXT_COMMAND}", soft_wrap=True)


def _fit(config: "Config", title: str, as_json: bool) -> list[dict[str, Any]] | None:
    """Trains and returns the records of the steps that were taken; None on ranks other than 0."""
    from distca.train.trainer import Trainer

    first = os.environ["RANK"] == "0"
    with progress(console(quiet=as_json or not first), title, config.train.steps) as update:

        def show(record: dict[str, Any]) -> None:
            update(record["step"] + 1, step_line(record))

        records = Trainer(config, show=show).fit()
    return records if first else None


def _precision(config: "Config") -> str:
    from distca.train import setup

    return str(setup.precision_of(config, _device()).compute).removeprefix("torch.")


def _device() -> "torch.device":
    import torch

    return torch.device("cuda" if torch.cuda.is_available() else "cpu")
