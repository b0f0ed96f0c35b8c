"""``distca train --compare``: both sides on the same ranks, with and without disaggregation."""

import json
import os
from contextlib import ExitStack, closing
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

import typer

from distca.cli.command import console
from distca.report.curves import draw_comparison
from distca.report.progress import progress
from distca.report.training import comparison, comparison_table, step_line, verdict
from distca.runtime.disk import writing
from distca.runtime.launched import report_finished

if TYPE_CHECKING:
    from distca.train.config import Config

OUT = "runs/compare"
# Takes a minute or two on two cores; whole files, so that long and short documents are mixed.
DEFAULTS = (
    "train.steps=8",
    "train.tokens_per_step=8192",
    "train.warmup=4",
    "train.lr=1e-3",
    "data.context=8192",
    "data.overlong=drop",
)
MODEL = "model.sizes.layers=2"  # of the default model, half of its layers
SIDES: dict[str, dict[str, Any]] = {
    "colocated": {"policy": "colocated", "placement": "given", "ping_pong": False},
    "disaggregated": {"policy": "distca", "placement": "balanced"},
}
LOSS_TOLERANCE = {"float32": 1e-3, "bfloat16": 2e-2}
NEXT_COMMAND = (
    "distca train --set 'data.sources=[\"my/*.jsonl\"]' --set train.steps=2000"
    " --set train.checkpoint_every=200 --out runs/mine"
)


def run(config: "Config", precision: str, as_json: bool) -> None:
    """Trains both sides on these ranks, step by step in turns; rank 0 shows the comparison.

    Noise of the machine reaches both sides then. Each goes first in every other step.
    """
    from distca.train.stop import StopRequest
    from distca.train.trainer import Trainer

    first, stop, steps = os.environ["RANK"] == "0", StopRequest(), config.train.steps
    train = replace(config.train, checkpoint_every=0, save_at_end=False)
    names = [name.ljust(max(map(len, SIDES))) for name in SIDES]
    runs: list[list[dict[str, Any]]] = [[] for _ in SIDES]
    with (
        progress(console(quiet=as_json or not first), "step", steps, start="preparing") as update,
        ExitStack() as stack,
    ):
        trainers = []
        for name, changes in SIDES.items():
            parallel, out = replace(config.parallel, **changes), str(Path(config.out) / name)
            changed = replace(config, parallel=parallel, train=train, out=out)
            trainers.append(Trainer(changed, stop=stop, sides=len(SIDES), survives=False))
        stack.enter_context(stop.on_sigterm())
        taken = [stack.enter_context(closing(trainer.steps())) for trainer in trainers]
        sides = list(zip(names, taken, runs, strict=True))
        for step in range(steps):
            for name, side, records in sides if step % 2 == 0 else reversed(sides):
                records.append(next(side))
                update(step + 1, f"{name}  {step_line(records[-1])}")
                if records[-1]["stopped"]:
                    if first:
                        typer.echo("stopped: nothing is compared", err=as_json)
                    return
    report_finished()
    if first:
        _show(config, precision, runs, as_json)


def _show(
    config: "Config", precision: str, runs: list[list[dict[str, Any]]], as_json: bool
) -> None:
    compared = comparison(runs[0], runs[1], LOSS_TOLERANCE[precision])
    picture = Path(config.out) / "compare.png"
    with writing(picture):
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
