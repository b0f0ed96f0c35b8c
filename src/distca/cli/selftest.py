"""``distca selftest``: whether the ranks there are compute what one device would, and how fast
they exchange. One table."""

# torch is imported inside the functions: `distca --help` must not wait for it.
import json
import time
from collections.abc import Callable
from datetime import timedelta
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer
from typer import Option

if TYPE_CHECKING:
    import torch.distributed as dist

OUT = Path("runs/selftest")
PATIENCE_S = 60  # for ranks whose check fails in the middle of an exchange

Row = dict[str, Any]


def selftest(
    ranks: Annotated[
        int | None,
        Option(metavar="N", help="To start here; by default one for each GPU, or 2 on the CPU."),
    ] = None,
    out: Annotated[
        Path,
        Option(metavar="DIR", help="For logs and a checkpoint; a folder that all nodes share."),
    ] = OUT,
    as_json: Annotated[bool, Option("--json", help="One JSON object, for machines.")] = False,
) -> None:
    """Checks that attention, training and checkpoints are exact on the ranks there are.

    Starts ranks on what this machine has; under torchrun it joins, on as many nodes as there are:

    torchrun --nproc-per-node 8 --no-python distca selftest
    """
    from distca.cli.train import leave, this_command
    from distca.runtime.launch import is_launched, is_rank, launch, local_ranks, reporting

    result = out / "selftest.json"
    if is_rank():
        with reporting():
            rows = _run(out, result, as_json)
        if not is_launched():
            raise typer.Exit(0 if all_pass(rows) else 1)
        return  # the launcher reads the result: a rank that ends with 1 would count as broken
    result.unlink(missing_ok=True)
    arguments = ["selftest", f"--out={out}", *(["--json"] if as_json else [])]
    leave(launch(this_command(arguments), local_ranks(ranks), out / "logs"))
    if not result.exists() or not all_pass(json.loads(result.read_text())["checks"]):
        raise typer.Exit(1)


def all_pass(rows: list[Row]) -> bool:
    return all(row["passed"] is not False for row in rows)


def _run(out: Path, result: Path, as_json: bool) -> list[Row]:
    """All checks, on all ranks; the first shows and keeps what came of them."""
    import torch.distributed as dist

    from distca.measure.selftest import checks_of
    from distca.pipeline.mesh import MeshShape
    from distca.runtime.mesh import join_mesh
    from distca.train.setup import join_world

    device = join_world()
    context = join_mesh(MeshShape(dp=dist.get_world_size()), device)
    patient = dist.new_group(backend="gloo", timeout=timedelta(seconds=PATIENCE_S))
    began = time.perf_counter()
    rows = [_row(name, check, patient) for name, check in checks_of(context, out).items()]
    seconds = time.perf_counter() - began
    if context.rank == 0:
        record = {"ranks": dist.get_world_size(), "device": device.type, "seconds": seconds}
        record["checks"] = rows
        out.mkdir(parents=True, exist_ok=True)
        result.write_text(json.dumps(record) + "\n")
        _show(record, as_json)
    dist.barrier(patient)
    dist.destroy_process_group()
    return rows


def _show(record: Row, as_json: bool) -> None:
    from rich.console import Console

    from distca.report import units
    from distca.report.checks import checks_table

    if as_json:
        typer.echo(json.dumps(record))
        return
    console = Console(highlight=False, markup=False)
    ranks = units.several(record["ranks"], "rank")
    console.print(f"{ranks} on {record['device']}, {record['seconds']:.1f} s\n", style="bold")
    console.print(checks_table(record["checks"]))


def _row(name: str, check: Callable[[], Row], patient: "dist.ProcessGroup") -> Row:
    """The worst of all ranks' results. An error that all ranks meet is a row like others; of one
    that leaves peers in an exchange they will not come, and then it is raised."""
    import torch.distributed as dist

    error: Exception | None = None
    try:
        mine = check()
    except Exception as raised:
        error, mine = raised, {"passed": False, "words": f"{type(raised).__name__}: {raised}"}
    everyone: list[Any] = [None] * dist.get_world_size()
    try:
        dist.all_gather_object(everyone, mine, group=patient)
    except RuntimeError:
        late = TimeoutError(f"{name}: other ranks did not come within {PATIENCE_S} s")
        raise error or late from None
    failed = [row for row in everyone if row["passed"] is False]
    if failed:
        return {"check": name} | failed[0]
    if "bytes_per_s" in mine:
        return {"check": name} | min(everyone, key=lambda row: row["bytes_per_s"])
    return {"check": name} | max(everyone, key=lambda row: row.get("error", 0.0))
