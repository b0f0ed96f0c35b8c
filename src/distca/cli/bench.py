"""``distca bench``: measures parts of large runs on the device at hand."""

# torch and numpy are imported inside the functions: `distca --help` must not wait for them.
import json
import time
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer
from typer import Option

if TYPE_CHECKING:
    import torch
    from rich.console import Console

app = typer.Typer(
    help="Measures parts of large runs on this machine's device.",
    invoke_without_command=True,
)
_PLAN, _RANK, _SHOW = "The plan", "A rank", "What to measure and show"


@dataclass(frozen=True)
class _Sizes:
    """What is replayed unless something else is asked for."""

    model: str
    tp: int
    tokens: str
    context: str
    cost: str
    sample: int


SIZES = {
    "cuda": _Sizes("llama3-8b", tp=8, tokens="64K", context="128K", cost="h200", sample=12),
    "cpu": _Sizes("debug", tp=1, tokens="1K", context="8K", cost="cpu", sample=6),
}


@app.callback()
def _bench(context: typer.Context) -> None:
    if context.invoked_subcommand is None:
        typer.echo(context.get_help())


@app.command()
def replay(
    ranks: Annotated[
        int, Option(metavar="N", help="Of the plan, each of tp GPUs.", rich_help_panel=_PLAN)
    ] = 64,
    lengths: Annotated[
        str,
        Option(
            metavar="NAME",
            help="Of documents: pretrain, prolong, lognormal:MEDIAN:SIGMA or fixed:N.",
            rich_help_panel=_PLAN,
        ),
    ] = "pretrain",
    context: Annotated[
        str | None,
        Option(
            metavar="TOKENS",
            help="The longest document; 128K by default, 8K on the CPU.",
            rich_help_panel=_PLAN,
        ),
    ] = None,
    tokens: Annotated[
        str | None,
        Option(
            metavar="TOKENS",
            help="Of a rank; 64K by default, 1K on the CPU.",
            rich_help_panel=_PLAN,
        ),
    ] = None,
    placement: Annotated[
        str,
        Option(
            metavar="NAME",
            help="given: documents in order over all ranks; balanced places them anew.",
            rich_help_panel=_PLAN,
        ),
    ] = "given",
    ping_pong: Annotated[
        bool | None,
        Option(
            "--ping-pong/--no-ping-pong",
            help="In halves that hide each other's exchanges; by default with and without.",
            rich_help_panel=_PLAN,
        ),
    ] = None,
    cost: Annotated[
        str | None,
        Option(
            metavar="NAME",
            help="What plan and simulation go by: pairs, analytic, h200, h200-flash, cpu or a"
            " profile file; h200 by default, cpu on the CPU.",
            rich_help_panel=_PLAN,
        ),
    ] = None,
    seed: Annotated[
        int,
        Option(metavar="N", help="Of documents and of the sample.", rich_help_panel=_PLAN),
    ] = 0,
    model: Annotated[
        str | None,
        Option(
            metavar="NAME",
            help="llama3-8b by default, debug on the CPU.",
            rich_help_panel=_RANK,
        ),
    ] = None,
    tp: Annotated[
        int | None,
        Option(
            metavar="N",
            help="Tensor-parallel GPUs, of which one is replayed; 8 by default, 1 on the CPU.",
            rich_help_panel=_RANK,
        ),
    ] = None,
    layers: Annotated[int, Option(metavar="N", help="Of the model.", rich_help_panel=_RANK)] = 2,
    across: Annotated[
        str,
        Option(metavar="BYTES", help="A second, each way, of its link.", rich_help_panel=_RANK),
    ] = "50GB",
    latency: Annotated[
        float,
        Option(metavar="US", help="Microseconds of every exchange.", rich_help_panel=_RANK),
    ] = 20.0,
    backend: Annotated[
        str,
        Option(
            metavar="NAME",
            help="Of attention: auto, fa4, flash, sdpa or reference.",
            rich_help_panel=_RANK,
        ),
    ] = "auto",
    sample: Annotated[
        int | None,
        Option(
            metavar="N",
            help="Ranks to replay: those at the ends, and others at random; a third of them"
            " calibrates the simulation. 12 by default, 6 on the CPU.",
            rich_help_panel=_SHOW,
        ),
    ] = None,
    rounds: Annotated[
        int, Option(metavar="N", help="Of which the median counts.", rich_help_panel=_SHOW)
    ] = 3,
    as_json: Annotated[
        bool, Option("--json", help="One JSON object, for machines.", rich_help_panel=_SHOW)
    ] = False,
    out: Annotated[
        Path | None,
        Option(
            metavar="FILE",
            help="Append each case to this file, as a line of JSON.",
            rich_help_panel=_SHOW,
        ),
    ] = None,
) -> None:
    """Runs ranks of a large plan one by one on this device, and simulates the same.

    One GPU takes a rank's real share forward and backward through a few layers;
    what is exchanged moves at the speed of a link. For a first look, anywhere:
    distca bench replay --ranks 16
    """
    import torch

    from distca.cli.sources import parse_bytes, parse_tokens
    from distca.sim.cluster import Link

    device = torch.device("cuda", 0) if torch.cuda.is_available() else torch.device("cpu")
    sizes = SIZES[device.type]
    if device.type == "cpu":
        torch.set_num_threads(1)  # what the cost model of a CPU stands for
    if layers < 1 or rounds < 1 or seed < 0:
        raise ValueError(
            f"--layers {layers}, --rounds {rounds}, --seed {seed}: take 1 or more layers and"
            " rounds, and a seed that is not negative"
        )
    bench = _Bench(
        model=model or sizes.model,
        tp=sizes.tp if tp is None else tp,
        layers=layers,
        backend=backend,
        sample=sizes.sample if sample is None else sample,
        rounds=rounds,
    )
    plan = {
        "ranks": ranks,
        "lengths": lengths,
        "context": parse_tokens(context or sizes.context),
        "tokens": parse_tokens(tokens or sizes.tokens),
        "link": Link(parse_bytes(across), latency / 1e6),
        "cost": cost or sizes.cost,
        "placement": placement,
        "seed": seed,
    }
    if out is not None:
        out.open("a").close()  # what cannot be written is said before anything is measured
    ways = [True, False] if ping_pong is None else [ping_pong]
    console = _console(quiet=as_json)
    records = []
    for way in ways:
        records.append(_replay(bench, plan | {"ping_pong": way}, device, console))
        if out is not None:
            with out.open("a") as file:
                file.write(json.dumps(records[-1]) + "\n")
    if as_json:
        typer.echo(json.dumps({"cases": records}))
    elif out is not None:
        console.print(f"\nwritten: {out}", soft_wrap=True)


@dataclass(frozen=True)
class _Bench:
    """How ranks are replayed."""

    model: str
    tp: int
    layers: int
    backend: str
    sample: int
    rounds: int


def _replay(
    bench: _Bench, plan: dict[str, Any], device: "torch.device", console: "Console"
) -> dict[str, Any]:
    """One case: plans, simulates, measures, compares, shows."""
    import torch

    from distca.measure.profiling import device_name
    from distca.measure.replay import Replay, backend_of, layers_of, measure, share_of
    from distca.model.sizes import model_config
    from distca.report.replay import CAPTION, heading, replay_facts, replay_table
    from distca.report.training import facts
    from distca.report.watch import Watch
    from distca.sim.isolated import Case, RankSeconds, compare, simulate_isolated

    dtype = torch.bfloat16 if device.type == "cuda" else torch.float32
    config = share_of(model_config(bench.model), bench.tp, bench.layers)
    backend = backend_of(config, device, dtype, bench.backend)
    masks = tuple(config.mask_of(layer) for layer in range(config.layers))
    case = Case(config.shape, masks, **plan, element_bytes=dtype.itemsize)
    record = plan | asdict(bench) | asdict(case.link)
    del record["link"]
    record |= {"backend": backend, "device": device_name(device), "torch": torch.__version__}
    with console.status(heading(record)):
        began = time.perf_counter()
        step = case.plan()
        record["plan_s"] = time.perf_counter() - began
        model = layers_of(config, device, dtype)
        sample = simulate_isolated(case, step).sample(bench.sample, case.seed)
    console.print(heading(record), style="bold")
    measured = {}
    with Watch(console, "rank", len(sample)) as watch:
        for number, rank in enumerate(sample, 1):
            replayed = Replay(
                model,
                step,
                rank,
                bytes_per_s=case.link.bytes_per_s,
                latency_s=case.link.latency_s,
                dtype=dtype,
                backend=backend,
            )
            measured[rank] = RankSeconds(*measure(replayed, bench.rounds))
            watch(number, f"rank {rank}: {measured[rank].step * 1e3:.1f} ms")
    record |= compare(case, step, sample, measured).to_json()
    console.print()
    console.print(replay_table(record, console.width))
    console.print(f"\n{CAPTION}\n", style="dim")
    console.print(facts(replay_facts(record)))
    console.print()
    return record


def _console(quiet: bool) -> "Console":
    from rich.console import Console

    return Console(highlight=False, markup=False, quiet=quiet)
