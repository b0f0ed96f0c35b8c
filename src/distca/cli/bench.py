"""``distca bench``, with ``distca bench replay``: single ranks of large runs on one device."""

import json
import time
from dataclasses import asdict, dataclass
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any

import typer
from rich.console import Console

from distca.cli.bench_policies import PoliciesCommand
from distca.cli.command import OUTPUT, console, for_typer, json_switch, option
from distca.data.length_names import FORMS
from distca.planning.policies import PLACEMENTS
from distca.report.progress import Update, progress
from distca.report.replay import heading, replay_facts, replay_table
from distca.report.tables import facts
from distca.runtime.disk import writing

if TYPE_CHECKING:
    import torch

    from distca.model.llama import Llama
    from distca.pipeline.step_plan import StepPlan
    from distca.sim.isolated import Case, Comparison

DEFAULTS: dict[str, dict[str, Any]] = {  # for options that are None
    "cuda": {"model": "llama3-8b", "tp": 8, "tokens": "64K", "context": "128K", "cost": "h200",
             "sample": 12},
    "cpu": {"model": "debug", "tp": 1, "tokens": "1K", "context": "8K", "cost": "cpu", "sample": 6},
}  # fmt: skip
OF_CASE = ("ranks", "lengths", "cost", "placement", "seed", "ping_pong")
OF_MEASUREMENT = ("model", "tp", "layers", "sample", "rounds")
_plan, _rank, _measure = (
    partial(option, panel=panel) for panel in ("Plan", "Replayed rank", "Measurement")
)
_output = partial(option, panel=OUTPUT)


@dataclass(frozen=True, kw_only=True)
class ReplayCommand:
    """Replays single ranks of a large plan on this device and compares them with the simulator.

    The device runs a rank's real share forward and backward through a few
    layers, while exchanges take as long as on the given link.

    For example: distca bench replay --ranks 16
    """

    ranks: int = _plan("N", "Ranks of the plan, each with tp GPUs.", 64)
    lengths: str = _plan("NAME", f"Lengths: {FORMS}.", "pretrain")
    context: str | None = _plan("TOKENS", "Longest document. Default: 128K, or 8K on the CPU.")
    tokens: str | None = _plan("TOKENS", "Tokens of a rank. Default: 64K, or 1K on the CPU.")
    placement: str = _plan("NAME", f"Placement: {' or '.join(PLACEMENTS)}.", "given")
    ping_pong: bool | None = _plan(
        "",
        "Overlap two half-batches. Default: measure with and without.",
        None,
        "--ping-pong/--no-ping-pong",
    )
    cost: str | None = _plan(
        "NAME",
        "Cost model of planner and simulator: h200, h200-flash, cpu, a profile file,"
        " analytic or pairs. Default: h200, or cpu on the CPU.",
    )
    seed: int = _plan("N", "Random seed of the documents and of the sample.", 0)

    model: str | None = _rank("NAME", "Name of a model. Default: llama3-8b, or debug on the CPU.")
    tp: int | None = _rank(
        "N",
        "Tensor-parallel GPUs of a rank, of which one is replayed. Default: 8, or 1 on the CPU.",
    )
    layers: int = _rank("N", "Layers to run.", 2)
    across: str = _rank("BANDWIDTH", "Of the rank's link: 50GB/s or 400Gb/s.", "50GB/s")
    latency: float = _rank("US", "Latency of each exchange in microseconds.", 20.0)
    backend: str = _rank(
        "NAME", "Attention backend: auto, fa4, flash, sdpa, blocks or reference.", "auto"
    )

    sample: int | None = _measure(
        "N",
        "Ranks to replay: the extreme ones and random ones. A third of them"
        " calibrates the simulator. Default: 12, or 6 on the CPU.",
    )
    rounds: int = _measure("N", "Repetitions, of which the median counts.", 3)
    as_json: bool = json_switch()
    out: Path | None = _output("FILE", "Append one line of JSON for each case to this file.")

    def run(self) -> None:
        import torch

        device = torch.device("cuda", 0) if torch.cuda.is_available() else torch.device("cpu")
        if device.type == "cpu":
            torch.set_num_threads(1)  # what the cost model of a CPU stands for
        if self.layers < 1 or self.rounds < 1 or self.seed < 0:
            raise ValueError(
                f"--layers {self.layers}, --rounds {self.rounds}, --seed {self.seed}: give 1 or"
                " more layers and rounds, and a seed of 0 or more"
            )
        given = {name: value for name, value in asdict(self).items() if value is not None}
        if self.out is not None:
            self.out.open("a").close()  # reports a wrong path before anything is measured
        records = []
        for ping_pong in (True, False) if self.ping_pong is None else (self.ping_pong,):
            chosen = DEFAULTS[device.type] | given | {"ping_pong": ping_pong}
            records.append(_replay(chosen, device, console(quiet=self.as_json)))
            if self.out is not None:
                with writing(self.out), self.out.open("a") as file:
                    file.write(json.dumps(records[-1]) + "\n")
        if self.as_json:
            typer.echo(json.dumps({"cases": records}))
        elif self.out is not None:
            console().print(f"\nwritten: {self.out}", soft_wrap=True)


def _replay(chosen: dict[str, Any], device: "torch.device", screen: Console) -> dict[str, Any]:
    """Plans, simulates and measures one case; shows it and returns its record.

    chosen: the options of the command, with their defaults.
    """
    import torch

    from distca.cli.sources import parse_bandwidth, parse_tokens
    from distca.measure.profiling import device_name
    from distca.measure.replay import backend_of, layers_of, share_of
    from distca.model.sizes import model_config
    from distca.sim.cluster import Link
    from distca.sim.isolated import Case

    dtype = torch.bfloat16 if device.type == "cuda" else torch.float32
    config = share_of(model_config(chosen["model"]), chosen["tp"], chosen["layers"])
    backend = backend_of(config, device, dtype, chosen["backend"])
    link = Link(parse_bandwidth(chosen["across"]), chosen["latency"] / 1e6)
    sizes = {name: parse_tokens(chosen[name]) for name in ("context", "tokens")}
    of_case = {name: chosen[name] for name in OF_CASE} | sizes
    masks = tuple(config.mask_of(layer) for layer in range(config.layers))
    case = Case(config.shape, masks, link=link, element_bytes=dtype.itemsize, **of_case)
    record = of_case | asdict(link) | {name: chosen[name] for name in OF_MEASUREMENT}
    record |= {"backend": backend, "device": device_name(device), "torch": torch.__version__}
    with screen.status(heading(record)):
        began = time.perf_counter()
        step = case.plan()
        record["plan_s"] = time.perf_counter() - began
        model = layers_of(config, device, dtype)
    screen.print(heading(record), style="bold")
    sample = chosen["sample"], chosen["rounds"]
    with progress(screen, "rank", min(chosen["sample"], case.ranks)) as update:
        found = replay_ranks(case, step, model, dtype, backend, *sample, update)
    record |= asdict(found)
    screen.print()
    screen.print(replay_table(record, screen.width))
    screen.print()
    screen.print(facts(replay_facts(record)))
    screen.print()
    return record


def replay_ranks(
    case: "Case",
    step: "StepPlan",
    model: "Llama",
    dtype: "torch.dtype",
    backend: str,
    num_ranks: int,
    rounds: int,
    update: Update,
) -> "Comparison":
    """Replays a sample of a plan's ranks, and compares them with the simulator.

    update: called after each rank with the number of ranks so far and a few words.
    """
    from distca.measure.replay import Replay, measure
    from distca.sim.isolated import RankSeconds, compare, simulate_isolated

    sample = simulate_isolated(case, step).sample(num_ranks, case.seed)
    measured = {}
    for number, rank in enumerate(sample, 1):
        replay = Replay(model, step, rank, **asdict(case.link), dtype=dtype, backend=backend)
        measured[rank] = RankSeconds(*measure(replay, rounds))
        update(number, f"rank {rank}: {measured[rank].step * 1e3:.1f} ms")
    return compare(case, step, sample, measured)


def _bench(context: typer.Context) -> None:
    """Measures policies on the ranks at hand, and parts of larger runs.

    For example: distca bench policies --ranks 4 --share-gpu
    """
    if context.invoked_subcommand is None:
        typer.echo(context.get_help())


app = typer.Typer(callback=_bench, invoke_without_command=True)
app.command("policies")(for_typer(PoliciesCommand))
app.command("replay")(for_typer(ReplayCommand))
