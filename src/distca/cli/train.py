"""``distca train``: reads a config, starts ranks or joins those of torchrun, and shows progress."""

import json
import os
import signal
from collections.abc import Sequence
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any

import typer

from distca.cli import compare, faults
from distca.cli.attempts import Attempts, tell_what_is_saved
from distca.cli.before_start import announce, check, check_free_memory, check_trace, precision
from distca.cli.command import (
    OUTPUT,
    argument,
    check_sharing,
    console,
    exit_if_stopped,
    json_switch,
    option,
    rank_command,
    share_switch,
    sharing,
)
from distca.cli.serve import ServeCommand
from distca.report.progress import progress
from distca.report.training import outcome, step_line, summary
from distca.runtime import launch, launched
from distca.runtime.interrupts import outlast_sigterm
from distca.runtime.rank_watch import Stop

if TYPE_CHECKING:
    from distca.train.config import Config
    from distca.train.faults import Fault
    from distca.train.setup import Components

_run, _output = partial(option, panel="Run"), partial(option, panel=OUTPUT)


@dataclass(frozen=True, kw_only=True)
class TrainCommand:
    """Trains a model.

    Starts ranks on this machine; under torchrun it joins them.
    Ctrl-C saves a checkpoint and ends the run.

    For example: distca train --compare

    All keys of a config, with their meaning: distca train --print-config
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
    ranks: int | None = _run(
        "N", "Ranks to start. Default: one for each GPU, or 2 that share it or the CPU."
    )
    share_gpu: bool = share_switch("Run")
    in_turns: bool = _run(
        "",
        "With --share-gpu, without MPS: slow, but ranks survive the death of others.",
        False,
        "--in-turns",
    )
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
    from_step: int | None = _run(
        "STEP",
        "Continue from the checkpoint of this step; later ones are set aside.",
        None,
        "--from",
    )
    max_restarts: int = _run(
        "N",
        "Restart all ranks from the newest checkpoint if one was killed or failed, up to N times.",
        0,
    )
    min_ranks: int | None = _run(
        "N",
        "With --max-restarts: leave out a rank that fails again before the first step, as long as"
        " N are left and the mesh allows it.",
    )
    server_restarts: int = _run(
        "N",
        "Start dedicated servers that were lost again, up to N times in all; they join the run"
        " between two steps.",
        3,
    )
    inject: list[str] | None = _run(
        "FAULT",
        "Inject a fault, as in 'kill rank 1 step 5 layer 3 backward'; may be repeated. See"
        " docs/fault-injection.md.",
        None,
        "--inject",
    )
    compare: bool = _run(
        "", "Train the same steps colocated and disaggregated, and compare.", False, "--compare"
    )
    trace: int | None = _output(
        "STEP", "Write a timeline of this step over all ranks, for ui.perfetto.dev."
    )
    print_config: bool = _output(
        "",
        "Print the config as commented TOML, after CONFIG.toml and all options, and exit.",
        False,
        "--print-config",
    )
    as_json: bool = json_switch()

    def run(self) -> None:
        if self.print_config:
            from distca.train.config_text import toml

            typer.echo(toml(self.read()), nl=False)
            return
        if not launched.is_rank():
            self._launch()
            return
        from distca.runtime.lost_ranks import naming_lost_ranks

        with launched.reporting():
            with naming_lost_ranks():
                result = self._run_rank()
            faults.check_delivered(result)

    def _run_rank(self) -> dict[str, Any]:
        import torch.distributed

        from distca.runtime.together import together
        from distca.runtime.world import join_world
        from distca.train.agreement import agree

        check_sharing(self.share_gpu)
        join_world()
        is_first = os.environ["RANK"] == "0" and not launched.is_launched()
        with together():  # so that a mistake is told once, and not by every rank
            config, planned = self.read(), faults.read(self.inject)
            world = int(os.environ["WORLD_SIZE"])
            if self.ranks not in (None, world):
                raise ValueError(
                    f"--ranks {self.ranks}, but {world} ranks were started: leave out --ranks"
                )
            if is_first:
                faults.begin(config, planned)
        # A rank with faults takes part in collectives that others do not know.
        agree({"--compare": self.compare, "--inject": [str(fault) for fault in planned]})
        if is_first and not self.as_json:
            announce(config, world, self.compare)
        # A Ctrl-C under torchrun reaches every rank.
        signal.signal(signal.SIGINT, lambda *_: signal.raise_signal(signal.SIGTERM))
        result: dict[str, Any] = {}
        if self.compare:
            compare.run(config, precision(config), self.as_json)
        else:
            result = _train(config, self.as_json, planned)
        torch.distributed.destroy_process_group()
        return result

    def read(self) -> "Config":
        """Reads the configuration, in the launcher and again in every rank."""
        from distca.train.config import Config

        if self.compare and (self.resume or self.from_step is not None):
            raise ValueError("--compare starts both sides from step 0: leave out --resume, --from")
        if self.max_restarts < 0 or (self.compare and self.max_restarts):
            raise ValueError(
                f"--max-restarts {self.max_restarts}: give 0 or more, and leave it out with"
                " --compare, which saves no checkpoints"
            )
        if self.min_ranks is not None and (self.min_ranks < 1 or not self.max_restarts):
            raise ValueError(
                f"--min-ranks {self.min_ranks}: give 1 or more, together with --max-restarts"
            )
        if self.server_restarts < 0:
            raise ValueError(f"--server-restarts {self.server_restarts}: give 0 or more")
        if self.compare and self.inject:
            raise ValueError("--compare with --inject: inject faults into one run, without it")
        if self.from_step is not None and self.from_step < 0:
            raise ValueError(f"--from {self.from_step}: give the step of a checkpoint, 0 or more")
        if self.resume is False and self.from_step is not None:
            raise ValueError(f"--fresh with --from {self.from_step}: choose one of them")
        settings = list(self.settings or [])
        if self.compare and self.config is None:
            chosen = any(one.startswith("model.") for one in settings)
            settings = [*compare.DEFAULTS, *([] if chosen else [compare.MODEL]), *settings]
        settings += [] if self.trace is None else [f"train.trace={self.trace}"]
        config = Config.read(self.config, settings)
        if self.out is not None:
            config = replace(config, out=str(self.out))
        elif self.compare and config.out == Config.out:
            config = replace(config, out=compare.OUT)
        if self.compare or self.resume is not None:
            config = replace(config, resume=bool(self.resume))
        if self.from_step is not None:
            config = replace(config, resume=True, from_step=self.from_step)
        return config

    def _launch(self) -> None:
        from distca.train.run_lock import RunLock

        config, num_ranks = self.read(), launch.local_ranks(self.ranks, self.share_gpu)
        out = Path(config.out)
        planned = faults.read(self.inject)
        faults.check(planned, config, self._check(config, num_ranks))
        check_trace(config)
        lock = RunLock(out)
        try:
            faults.begin(config, planned)
            attempts = Attempts(
                config, self.max_restarts, self.min_ranks, partial(self._check, config)
            )
            stop = attempts.run(num_ranks, partial(self._run_once, config))
        finally:
            lock.release()
            console().show_cursor()  # rank 0 hides it, and may have been killed
        exit_if_stopped(stop, continues=True)

    def _check(self, config: "Config", num_ranks: int) -> "Components":
        return check(config, num_ranks, self._sides, self.share_gpu)

    @property
    def _sides(self) -> int:
        """The runs that share the memory of a rank."""
        return len(compare.SIDES) if self.compare else 1

    def _run_once(
        self, config: "Config", local_ranks: Sequence[int], restart: int, has_begun: bool
    ) -> Stop | None:
        out, num_ranks = Path(config.out), len(local_ranks)
        logs = out / "logs" / f"restart-{restart}" if restart else out / "logs"
        command = replace(self, ranks=num_ranks) if restart else self
        if has_begun:
            command = replace(command, resume=True, from_step=None)
        with sharing(self.share_gpu, num_ranks, logs, in_turns=self.in_turns) as gpu:
            if gpu is not None:
                check_free_memory(config, num_ranks, self._sides, gpu)
            if not self.as_json and not restart:
                announce(config, num_ranks, self.compare, gpu)
            with tell_what_is_saved(out):
                # With --compare, two runs share the ranks, and a loss ends both.
                servers = 0 if self.compare else config.parallel.servers
                stop = launch.launch(
                    rank_command("train", command),
                    num_ranks,
                    logs,
                    gpu,
                    spares=range(num_ranks - servers, num_ranks),
                    rejoining=launch.Rejoining(_rejoin, self.server_restarts, _tell),
                    restart=restart,
                    local_ranks=local_ranks,
                )
                outlast_sigterm()
                return stop


def _rejoin(store: str) -> list[str]:
    """Returns the command of a dedicated server that is started again."""
    return rank_command("serve", ServeCommand(join=store))


def _tell(sentence: str) -> None:
    typer.echo(f"distca: {sentence}", err=True)


def _train(config: "Config", as_json: bool, planned: Sequence["Fault"]) -> dict[str, Any]:
    """Trains; returns what is shown at the end, on rank 0."""
    from distca.train.step_folders import newest
    from distca.train.trainer import Trainer

    first, notes = os.environ["RANK"] == "0", list[str]()
    screen = console(quiet=as_json or not first)
    with progress(screen, "step", config.train.steps, start="preparing") as update:

        def show(record: dict[str, Any]) -> None:
            update(record["step"] + 1, step_line(record))

        def tell(sentence: str) -> None:
            notes.append(sentence)
            screen.print(sentence, soft_wrap=True)

        trainer = Trainer(config, show, tell)
        records = faults.fit(trainer, planned)
    if not trainer.is_needed:
        launched.end_to_be_started_again()
    launched.report_finished()
    if not first:
        return {}
    found = newest(Path(config.out) / "checkpoints")
    result = {"out": config.out, "steps": config.train.steps, "notes": notes} | summary(records)
    result["metrics"] = f"{config.out}/metrics.jsonl"
    result["checkpoint"] = None if found is None else str(found)
    if any(record["step"] == config.train.trace for record in records):
        result["trace"] = f"{config.out}/traces/trace.json"
    result |= {"faults": faults.counts(config, planned)} if planned else {}
    if as_json:
        typer.echo(json.dumps(result))
    else:
        console().print(outcome(result), soft_wrap=True)
    return result
