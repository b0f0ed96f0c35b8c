"""``distca profile``: measures the device at hand and writes one file that plans are priced by."""

# torch is imported inside the functions: `distca --help` must not wait for it.
import json
import signal
from dataclasses import asdict
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer
from typer import Option

if TYPE_CHECKING:
    import torch
    from rich.console import Console

    from distca.measure.profiling import Bench
    from distca.planning.costs.profile import Profile

OUT = Path("profile.json")
LOGS = Path("runs/profile/logs")
GPU_MODEL, CPU_MODEL = "llama3-8b", "debug"


def profile(
    model: Annotated[
        str | None,
        Option(
            metavar="NAME",
            help=f"Whose sizes are measured; {GPU_MODEL} by default, {CPU_MODEL} on the CPU.",
        ),
    ] = None,
    backend: Annotated[
        str, Option(metavar="NAME", help="Of attention: auto, fa4, flash, sdpa or reference.")
    ] = "auto",
    out: Annotated[
        Path,
        Option(metavar="FILE", help="The profile; one that is unfinished is gone on with."),
    ] = OUT,
    ranks: Annotated[
        int | None,
        Option(metavar="N", help="To start here; by default one for each GPU, or 1 on the CPU."),
    ] = None,
    quick: Annotated[
        bool, Option("--quick", help="Every other size, fewer rounds: a first look.")
    ] = False,
    as_json: Annotated[bool, Option("--json", help="One JSON object, for machines.")] = False,
) -> None:
    """Measures attention, linear layers, copies and exchanges on this machine's device.

    Takes minutes, and may be stopped: the same command goes on. Then: distca plan ... --cost FILE
    """
    from distca.cli.train import this_command
    from distca.runtime.launch import is_rank, launch, reporting

    if is_rank():
        with reporting():
            _measure_together(model, backend, out, quick, as_json)
        return
    num_ranks = _num_ranks(ranks)
    if num_ranks == 1:
        import torch

        device = torch.device("cuda", 0) if torch.cuda.is_available() else torch.device("cpu")
        bench = _bench(model, device, backend, quick)
        _measure(bench, _begin(bench, out), out, as_json)
        return
    arguments = ["profile", f"--backend={backend}", f"--out={out}"]
    arguments += [f"--model={model}"] if model else []
    arguments += [name for name, on in (("--quick", quick), ("--json", as_json)) if on]
    stop = launch(this_command(arguments), num_ranks, LOGS)
    if stop is not None:
        typer.echo(f"stopped: the same command goes on with what is in {out}", err=True)
        raise typer.Exit(130 if stop.signal == signal.SIGINT else 0)


def _num_ranks(wanted: int | None) -> int:
    import torch

    from distca.runtime.launch import local_ranks

    return 1 if wanted is None and not torch.cuda.device_count() else local_ranks(wanted)


def _bench(model: str | None, device: "torch.device", backend: str, quick: bool) -> "Bench":
    from distca.measure.profiling import Bench, Scope
    from distca.model.sizes import model_config

    config = model_config(model or (GPU_MODEL if device.type == "cuda" else CPU_MODEL))
    return Bench.of(config, device, backend, scope=Scope.of(device, config, quick))


def _begin(bench: "Bench", out: Path) -> "Profile":
    """What is there already, if it was measured here, or a blank one."""
    from distca.planning.costs.profile import Profile

    blank = bench.blank(out.stem)
    if not out.exists():
        return blank
    known = Profile.read(str(out))
    known.check_continues(blank)
    return known


def _measure(bench: "Bench", begun: "Profile", out: Path, as_json: bool) -> None:
    """Alone, or as the first of several ranks, which shows and saves."""
    from distca.measure.profiling import measure, steps
    from distca.report.watch import Watch

    console = _console(quiet=as_json)
    left, total = (len(steps(bench, one)) for one in (begun, bench.blank(begun.name)))
    if left < total:
        found = "all" if not left else f"{total - left} of {total} figures"
        console.print(f"{out} has {found} already: delete it to measure anew", soft_wrap=True)
    done = begun
    try:
        with Watch(console, "figure", total) as watch:
            for number, (what, done) in enumerate(measure(bench, begun), total - left + 1):
                done.write(out)
                watch(number, what)
    except KeyboardInterrupt:
        typer.echo(f"stopped: the same command goes on with what is in {out}", err=True)
        raise
    _show(done, out, console, as_json)


def _measure_together(
    model: str | None, backend: str, out: Path, quick: bool, as_json: bool
) -> None:
    import torch.distributed as dist

    from distca.measure.profiling import measure
    from distca.train.setup import join_world

    bench = _bench(model, join_world(), backend, quick)
    first = dist.get_rank() == 0
    begun: list[Any] = [_begin(bench, out) if first else None]
    if bench.clock.control is not None:
        dist.broadcast_object_list(begun, src=0, group=bench.clock.control)
    if first:
        _measure(bench, begun[0], out, as_json)
    else:
        for _ in measure(bench, begun[0]):
            pass
    dist.destroy_process_group()


def _show(done: "Profile", out: Path, console: "Console", as_json: bool) -> None:
    from distca.report.profiles import profile_facts, rates_table
    from distca.report.training import facts

    record = done.to_json() | {"out": str(out)}
    for way in ("forward", "backward"):
        errors = getattr(done, f"{way}_errors")
        record[f"{way}_errors"] = None if errors is None else asdict(errors)
    if as_json:
        typer.echo(json.dumps(record))
        return
    for way in ("forward", "backward"):
        console.print()
        console.print(rates_table(record, way))
    console.print()
    console.print(facts(profile_facts(record)))
    use = f'distca plan ... --cost {out}\n           parallel.cost = "{out}" in a config'
    console.print(f"\nwritten: {out}\nto use it: {use}", soft_wrap=True)


def _console(quiet: bool) -> "Console":
    from rich.console import Console

    return Console(highlight=False, markup=False, quiet=quiet)
