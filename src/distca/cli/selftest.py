"""``distca selftest``: checks that the ranks at hand compute what one device would."""

import json
import time
from dataclasses import dataclass
from datetime import timedelta
from pathlib import Path
from typing import TYPE_CHECKING, Any

import typer

from distca.cli.command import (
    LINE_S,
    check_sharing,
    console,
    exit_if_stopped,
    json_switch,
    option,
    rank_command,
    share_switch,
    sharing,
)
from distca.report import units
from distca.report.checks import checks_table, selftest_words
from distca.report.progress import progress
from distca.runtime import launch, launched
from distca.runtime.disk import writing

if TYPE_CHECKING:
    import torch.distributed as dist

    from distca.measure.selftest import Check, CheckResult

TIMEOUT_S = 60  # for ranks whose check fails in the middle of an exchange


@dataclass(frozen=True, kw_only=True)
class SelftestCommand:
    """Checks that attention, training and checkpoints are exact on the ranks at hand.

    Starts ranks on this machine. Under torchrun it joins the ranks of all nodes.

    For example: distca selftest --ranks 2

    On each of several nodes: torchrun --nproc-per-node 8 ... --no-python distca selftest
    """

    ranks: int | None = option(
        "N", "Ranks to start. Default: one for each GPU, or 2 that share it or the CPU."
    )
    share_gpu: bool = share_switch()
    out: Path = option(
        "DIR", "Folder for logs and a checkpoint; all nodes share it.", Path("runs/selftest")
    )
    as_json: bool = json_switch()

    def run(self) -> None:
        if launched.is_rank():
            from distca.runtime.lost_ranks import naming_lost_ranks

            with launched.reporting(), naming_lost_ranks():
                check_sharing(self.share_gpu)
                rows = self._check()
            if not launched.is_launched():
                raise typer.Exit(0 if all_pass(rows) else 1)
            return  # the launcher reads the result: a rank that exits with 1 would count as broken
        self.result.unlink(missing_ok=True)
        num_ranks = launch.local_ranks(self.ranks, self.share_gpu)
        command, logs = rank_command("selftest", self), self.out / "logs"
        with sharing(self.share_gpu, num_ranks, logs) as gpu:
            if gpu is not None:
                console(quiet=self.as_json).print(str(gpu), soft_wrap=True)
            stop = launch.launch(command, num_ranks, logs, gpu)
        exit_if_stopped(stop)
        if not self.result.exists() or not all_pass(json.loads(self.result.read_text())["checks"]):
            raise typer.Exit(1)

    @property
    def result(self) -> Path:
        return self.out / "selftest.json"

    def _check(self) -> list[dict[str, Any]]:
        """Runs all checks on all ranks; rank 0 shows and saves the results."""
        import torch.distributed as dist

        from distca.measure.selftest import checks_of
        from distca.pipeline.mesh import MeshShape
        from distca.runtime.mesh import join_mesh
        from distca.runtime.world import join_world

        device = join_world()
        context = join_mesh(MeshShape(dp=dist.get_world_size()), device)
        group = dist.new_group(backend="gloo", timeout=timedelta(seconds=TIMEOUT_S))
        began = time.perf_counter()
        rows, checks = [], checks_of(context, self.out)
        screen = console(quiet=self.as_json or context.rank > 0)
        with progress(screen, "check", len(checks), transient=True, every_s=LINE_S) as update:
            for number, (name, check) in enumerate(checks.items()):
                update(number, name)
                rows.append({"check": name} | _outcome(name, check, group).to_json())
        seconds = time.perf_counter() - began
        launched.report_finished()
        if context.rank == 0:
            record = {"ranks": dist.get_world_size(), "device": device.type, "seconds": seconds}
            words = selftest_words(rows, str(self.out / "logs"))
            self._show(record | {"checks": rows, "words": words})
        dist.barrier(group)
        dist.destroy_process_group()
        return rows

    def _show(self, record: dict[str, Any]) -> None:
        self.out.mkdir(parents=True, exist_ok=True)
        with writing(self.result):
            self.result.write_text(json.dumps(record) + "\n")
        if self.as_json:
            typer.echo(json.dumps(record))
            return
        screen, ranks = console(), units.several(record["ranks"], "rank")
        screen.print(f"{ranks} on {record['device']}, {record['seconds']:.1f} s\n", style="bold")
        screen.print(checks_table(record["checks"]))
        screen.print(f"\n{record['words']}")


def all_pass(rows: list[dict[str, Any]]) -> bool:
    """Returns whether no check failed; those that were skipped do not count."""
    return all(row["passed"] is not False for row in rows)


def _outcome(name: str, check: "Check", group: "dist.ProcessGroup") -> "CheckResult":
    """Runs a check and returns the worst outcome of all ranks.

    An error on all ranks is a failed check. An error on one rank, whose peers then wait for it in
    an exchange, is raised after a timeout.
    """
    import torch.distributed as dist

    from distca.measure.selftest import CheckResult

    error: Exception | None = None
    try:
        mine = check()
    except Exception as raised:
        error, mine = raised, CheckResult(False, words=f"{type(raised).__name__}: {raised}")
    outcomes: list[Any] = [None] * dist.get_world_size()
    try:
        dist.all_gather_object(outcomes, mine, group=group)
    except RuntimeError:
        late = TimeoutError(f"{name}: other ranks did not finish within {TIMEOUT_S} s")
        raise error or late from None
    return CheckResult.worst(outcomes)
