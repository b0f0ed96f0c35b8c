"""``distca bench policies``: trains a few steps with each policy in turns, and compares them."""

import json
import os
from dataclasses import asdict, dataclass
from functools import cached_property, partial
from pathlib import Path
from typing import TYPE_CHECKING, Any

import typer

from distca.cli.command import (
    OUTPUT,
    check_output,
    check_sharing,
    console,
    exit_if_stopped,
    json_switch,
    option,
    rank_command,
    share_switch,
    sharing,
)
from distca.data.length_names import FORMS
from distca.report.policies import (
    figures_of,
    heading,
    policies_table,
    round_line,
    verdicts,
)
from distca.report.progress import progress
from distca.runtime import launch, launched
from distca.runtime.disk import writing

if TYPE_CHECKING:
    from distca.measure.policies import Study

LOGS = Path("runs/bench-policies/logs")
DEFAULTS: dict[str, dict[str, Any]] = {  # for options that are None
    "cuda": {"model": "llama3.2-1b", "context": "64K", "steps": 10},
    "cpu": {"model": "debug", "context": "1K", "steps": 4},
}
COSTS = {"flash": "h200-flash"}  # by backend, on a GPU
ABOUT = ("model", "layers", "lengths", "backend", "recompute", "seed", "warm_up")
POLICIES = (
    "colocated,wlb,head-tail-cp,per-document-cp,kk,dynamic-cp,"
    "given,given+ping-pong,balanced,balanced+ping-pong"
)
_ranks, _data, _model, _measure, _output = (
    partial(option, panel=panel) for panel in ("Ranks", "Documents", "Model", "Measurement", OUTPUT)
)


@dataclass(frozen=True, kw_only=True)
class PoliciesCommand:
    """Trains a few steps with each policy, in turns, on the ranks at hand.

    All policies begin with the same weights and train the same documents. A
    step takes as long as its slowest rank, and plans are made before it.

    For example: distca bench policies --ranks 4 --share-gpu --lengths prolong
    """

    ranks: int | None = _ranks(
        "N", "Ranks to start. Default: one for each GPU, or 2 that share it or the CPU."
    )
    share_gpu: bool = share_switch("Ranks")
    lengths: str = _data("LENGTHS", f"{FORMS}; or a file of lengths.", "pretrain")
    context: str | None = _data("TOKENS", "Longest document. Default: 64K, or 1K on the CPU.")
    tokens: str | None = _data("TOKENS", "Tokens of a rank in a step. Default: the context.")
    seed: int = _data("N", "Random seed of the documents.", 0)
    policies: str = _model(
        "NAME,...",
        "Policies to compare with the first one: distca with a given or a balanced placement,"
        " with or without ping-pong, and others.",
        POLICIES,
    )
    model: str | None = _model("NAME", "Name of a model. Default: llama3.2-1b, or debug.")
    layers: int = _model("N", "Layers of it, with a vocabulary of at most 4,096.", 2)
    backend: str = _model(
        "NAME", "Attention backend: auto, fa4, flash, sdpa, blocks or reference.", "auto"
    )
    cost: str | None = _model(
        "NAME",
        "Cost model of all planners: h200, h200-flash, cpu, a profile file, analytic or pairs."
        " Default: that of the device and backend.",
    )
    recompute: bool = _model(
        "",
        "Recompute all but attention in the backward pass.",
        True,
        "--recompute/--keep-activations",
    )
    steps: int | None = _measure("N", "Steps of each policy. Default: 10, or 4 on the CPU.")
    warm_up: int = _measure("N", "Steps before them, which do not count.", 2)
    as_json: bool = json_switch()
    out: Path | None = _output("FILE", "Write the figures to a JSON file after every step.")

    def run(self) -> None:
        if launched.is_rank():
            from distca.runtime.lost_ranks import naming_lost_ranks

            with launched.reporting(), naming_lost_ranks():
                check_sharing(self.share_gpu)
                self._check_on_rank()
                self._compare()
            return
        num_ranks = launch.local_ranks(self.ranks, self.share_gpu)
        self._check(num_ranks)
        with sharing(self.share_gpu, num_ranks, LOGS) as gpu:
            if gpu is not None:
                console(quiet=self.as_json).print(str(gpu), soft_wrap=True)
            stop = launch.launch(rank_command("bench policies", self), num_ranks, LOGS, gpu)
        exit_if_stopped(stop)

    @cached_property
    def _chosen(self) -> dict[str, Any]:
        """The options, with their defaults on this device."""
        import torch

        given = {name: value for name, value in asdict(self).items() if value is not None}
        return DEFAULTS["cuda" if torch.cuda.is_available() else "cpu"] | given

    @property
    def _names(self) -> list[str]:
        return list(dict.fromkeys(self.policies.split(",")))

    def _check(self, num_ranks: int) -> None:
        """Raises ValueError for mistakes that can be found before ranks are started."""
        from distca.measure.sides import WAYS

        if unknown := [name for name in self._names if name not in WAYS]:
            named = " and ".join(map(repr, unknown))
            raise ValueError(f"--policies: {named} is unknown; choose of {', '.join(WAYS)}")
        for name, least in (("layers", 1), ("steps", 1), ("warm_up", 0), ("seed", 0)):
            if self._chosen[name] < least:
                flag = name.replace("_", "-")
                raise ValueError(f"--{flag} {self._chosen[name]}: it must be at least {least}")
        study = self._study(num_ranks)
        if not study.batch(0).num_targets:
            raise ValueError(
                f"--lengths {self.lengths}: no document has a second token, so there is no loss;"
                " give longer ones"
            )
        for name in self._names:
            study.planners(name)
        check_output("--out", self.out, self.lengths)
        if self.out is not None:
            with writing(self.out):
                self.out.open("a").close()

    def _check_on_rank(self) -> None:
        """Does so on each rank of torchrun; one of them is enough to tell it."""
        if not launched.is_launched():
            try:
                self._check(int(os.environ["WORLD_SIZE"]))
            except ValueError as error:
                launched.mark_repeated(error, os.environ["RANK"] != "0")
                raise

    def _study(self, num_ranks: int) -> "Study":
        import torch

        from distca.cli.sources import parse_tokens
        from distca.measure.policies import Study, dtype_on, layers_of
        from distca.measure.replay import backend_of

        chosen = self._chosen
        device = torch.device("cuda" if torch.cuda.is_available() else "cpu")
        config, context = layers_of(chosen["model"], self.layers), parse_tokens(chosen["context"])
        backend = backend_of(config, device, dtype_on(device), self.backend)
        default = "cpu" if device.type == "cpu" else COSTS.get(backend, "h200")
        return Study(
            ranks=num_ranks,
            config=config,
            lengths=self.lengths,
            context=context,
            tokens=context if self.tokens is None else parse_tokens(self.tokens),
            cost=self.cost or default,
            seed=self.seed,
            recompute=self.recompute,
        )

    def _compare(self) -> None:
        """Trains all steps on this rank; rank 0 shows and saves the figures."""
        import torch
        import torch.distributed as dist

        from distca.measure.policies import Comparison
        from distca.measure.profiling import device_name
        from distca.pipeline.mesh import MeshShape
        from distca.runtime.mesh import join_mesh
        from distca.runtime.rank_device import shares_gpu
        from distca.runtime.world import join_world

        device = join_world()
        num_ranks, steps = dist.get_world_size(), self._chosen["steps"]
        context = join_mesh(MeshShape(dp=num_ranks), device)
        study = self._study(num_ranks)
        comparison = Comparison(study, self._names, context, self.backend)
        record = {name: self._chosen[name] for name in ABOUT}
        record |= {"ranks": num_ranks, "shares_gpu": shares_gpu(), "device": device_name(device)}
        record |= {
            "context": study.context,
            "tokens": study.tokens,
            "cost": study.cost,
            "torch": torch.__version__,
        }
        taken: list[dict[str, Any]] = []  # of each step: figures by policy
        screen = console(quiet=self.as_json or context.rank > 0)
        screen.print(heading(record), style="bold", soft_wrap=True)
        with progress(screen, "step", steps, start="warming up") as update:
            for number in range(-self.warm_up, steps):
                figures = comparison.step(number)
                if number < 0:
                    continue
                taken.append({name: asdict(one) for name, one in figures.items()})
                update(number + 1, round_line(taken[-1]))
                if context.rank == 0:
                    self._save(record | figures_of(self._names, taken, comparison.refused, record))
        launched.report_finished()
        if context.rank == 0:
            self._show(record | figures_of(self._names, taken, comparison.refused, record))
        dist.barrier(context.world_group)
        dist.destroy_process_group()

    def _save(self, record: dict[str, Any]) -> None:
        if self.out is not None:
            with writing(self.out):
                self.out.write_text(json.dumps(record) + "\n")

    def _show(self, record: dict[str, Any]) -> None:
        if self.as_json:
            typer.echo(json.dumps(record))
            return
        screen = console()
        screen.print()
        screen.print(policies_table(record, screen.width))
        screen.print()
        for words, style in verdicts(record):
            screen.print(words, style=style, soft_wrap=True)
        if self.out is not None:
            screen.print(f"written: {self.out}", soft_wrap=True)
