"""``distca profile``: measures this machine's device and writes a profile for the planner."""

import json
import signal
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

import typer

from distca.cli.command import (
    check_sharing,
    console,
    json_switch,
    option,
    rank_command,
    share_switch,
    sharing,
)
from distca.report.profiles import profile_facts, rates_table
from distca.report.progress import progress
from distca.report.tables import facts
from distca.runtime import launch, launched
from distca.runtime.disk import writing
from distca.runtime.interrupts import CTRL_C

if TYPE_CHECKING:
    import torch

    from distca.measure.bench import Bench
    from distca.planning.costs.profile import Direction, Profile

LOGS = Path("runs/profile/logs")
GPU_MODEL, CPU_MODEL = "llama3-8b", "debug"


@dataclass(frozen=True, kw_only=True)
class ProfileCommand:
    """Measures attention, linear layers, copies and exchanges on this machine's device.

    Takes minutes and may be stopped: the same command continues.

    For example: distca profile --out here.json

    To use the profile: distca plan ... --cost here.json
    """

    model: str | None = option(
        "NAME", f"Model whose sizes are measured. Default: {GPU_MODEL}, or {CPU_MODEL} on the CPU."
    )
    backend: str = option(
        "NAME", "Attention backend: auto, fa4, flash, sdpa, blocks or reference.", "auto"
    )
    out: Path = option("FILE", "The profile; an unfinished one is continued.", Path("profile.json"))
    ranks: int | None = option("N", "Ranks to start. Default: one for each GPU, or 1 on the CPU.")
    share_gpu: bool = share_switch()
    quick: bool = option("", "Measure every other size, with fewer rounds.", False, "--quick")
    as_json: bool = json_switch()

    def run(self) -> None:
        if launched.is_rank():
            from distca.runtime.lost_ranks import naming_lost_ranks

            with launched.reporting(), naming_lost_ranks():
                check_sharing(self.share_gpu)
                self._measure_together()
            return
        num_ranks = self._num_ranks()
        if num_ranks == 1:
            import torch

            gpu = torch.cuda.is_available()
            bench = self._bench(torch.device("cuda", 0) if gpu else torch.device("cpu"))
            self._measure(bench, self._begin(bench))
            return
        with sharing(self.share_gpu, num_ranks, LOGS) as shared:
            stop = launch.launch(rank_command("profile", self), num_ranks, LOGS, shared)
        if stop is not None:
            if stop.early:
                self._tell_stopped()
            raise typer.Exit(CTRL_C if stop.signal == signal.SIGINT else 0)

    def _num_ranks(self) -> int:
        import torch

        alone = self.ranks is None and not (torch.cuda.device_count() or self.share_gpu)
        return 1 if alone else launch.local_ranks(self.ranks, self.share_gpu)

    def _bench(self, device: "torch.device") -> "Bench":
        from distca.measure.bench import Bench, Scope
        from distca.model.sizes import model_config

        config = model_config(self.model or (GPU_MODEL if device.type == "cuda" else CPU_MODEL))
        scope = Scope.of(device, config, self.quick)
        return Bench(config, device, self.backend, scope=scope)

    def _begin(self, bench: "Bench") -> "Profile":
        """Returns the unfinished profile in the file, if it is of this device, or a blank one."""
        from distca.measure.profiling import blank
        from distca.planning.costs.profile import Profile

        fresh = blank(bench, self.out.stem)
        if not self.out.exists():
            return fresh
        known = Profile.read(str(self.out))
        known.check_continues(fresh)
        return known

    def _measure(self, bench: "Bench", begun: "Profile") -> None:
        """Measures, shows and saves, as the only rank or as rank 0 of several."""
        from distca.measure.profiling import blank, measure, missing_figures

        screen, out = console(quiet=self.as_json), self.out
        fresh = blank(bench, begun.name)
        left, total = (len(missing_figures(bench, one)) for one in (begun, fresh))
        if left < total:
            found = "all" if not left else f"{total - left} of {total}"
            screen.print(
                f"{out} holds {found} figures already: delete it to measure them again",
                soft_wrap=True,
            )
        done = begun
        try:
            with progress(screen, "figure", total) as update:
                for number, (what, done) in enumerate(measure(bench, begun), total - left + 1):
                    with writing(out):
                        done.write(out)
                    update(number, what)
        except KeyboardInterrupt:
            self._tell_stopped()
            raise
        launched.report_finished()
        self._show(done)

    def _measure_together(self) -> None:
        import torch.distributed as dist

        from distca.measure.profiling import measure
        from distca.runtime.world import join_world

        bench = self._bench(join_world())
        first = dist.get_rank() == 0
        begun: list[Any] = [self._begin(bench) if first else None]
        if bench.control is not None:
            dist.broadcast_object_list(begun, src=0, group=bench.control)
        if first:
            self._measure(bench, begun[0])
        else:
            for _ in measure(bench, begun[0]):
                pass
            launched.report_finished()
        dist.destroy_process_group()

    def _tell_stopped(self) -> None:
        typer.echo(f"stopped: the same command continues with what is in {self.out}", err=True)

    def _show(self, done: "Profile") -> None:
        record = done.to_json() | {"out": str(self.out)}
        directions: tuple[Direction, ...] = ("forward", "backward")
        for direction in directions:
            record[f"{direction}_errors"] = done.errors(direction)
        if self.as_json:
            typer.echo(json.dumps(record))
            return
        screen = console()
        for direction in directions:
            screen.print()
            screen.print(rates_table(record, direction))
        screen.print()
        screen.print(facts(profile_facts(record)))
        screen.print(
            f"\nwritten: {self.out}\nto use it: distca plan ... --cost {self.out}\n"
            f'           parallel.cost = "{self.out}" in a config',
            soft_wrap=True,
        )
