"""Ranks of plans for 64 and 512 ranks, run one by one on one GPU and compared with the simulator.

    python benchmarks/replay.py                         all cases, about four minutes on an H200
    python benchmarks/replay.py --only "512 ranks"      the cases whose name contains this text
    python benchmarks/replay.py --quick                 a tiny grid on any device, to try the script

Results measured with the same settings are kept, so an interrupted run continues. Writes replay.md
and replay.json into results/, or into --out.

Some ranks of each plan are replayed (``distca bench replay`` does the same for one plan): an eighth
of Llama-3-8B, two layers without the output head, forward and backward, bfloat16, with an exchange
that moves the true number of bytes at 50 GB/s. The error of the simulator is stated for ranks that
did not calibrate it. Other processes make plans while the device measures.
"""

# torch is imported by the process that measures; those that plan are lighter without it.
from __future__ import annotations

import os

os.environ.setdefault("OMP_NUM_THREADS", "1")  # one core, where there is no GPU

import argparse
import json
import multiprocessing
import sys
import time
from collections.abc import Iterator
from concurrent.futures import Future, ProcessPoolExecutor
from contextlib import suppress
from dataclasses import asdict, dataclass, replace
from datetime import date
from importlib.metadata import PackageNotFoundError, version
from itertools import product
from pathlib import Path
from statistics import fmean
from typing import TYPE_CHECKING, Any

from distca.cli.bench import replay_ranks
from distca.pipeline.step_plan import StepPlan
from distca.planning.policies import PLACEMENTS
from distca.sim.cluster import Link
from distca.sim.isolated import Case

if TYPE_CHECKING:
    from distca.model.config import ModelConfig

HERE = Path(__file__).parent
Record = dict[str, Any]


@dataclass(frozen=True)
class Grid:
    """All cases, and what they have in common."""

    ranks: tuple[int, ...] = (64, 512)
    contexts: tuple[int, ...] = (131072, 524288)
    lengths: tuple[str, ...] = ("pretrain", "prolong")
    ping_pong: tuple[bool, ...] = (False, True)
    placements: tuple[str, ...] = ("given",)
    model: str = "llama3-8b"
    tp: int = 8
    layers: int = 2
    tokens: int = 65536  # of a rank
    cost: str = "h200"
    bytes_per_s: float = 50e9
    latency_s: float = 20e-6
    sample: int = 12
    rounds: int = 3
    seed: int = 0

    def cases(self, config: ModelConfig, element_bytes: int) -> Iterator[tuple[str, Case]]:
        masks = tuple(config.mask_of(layer) for layer in range(config.layers))
        axes = (self.placements, self.ranks, self.lengths, self.contexts, self.ping_pong)
        for placement, ranks, lengths, context, ping_pong in product(*axes):
            overlap = "ping-pong" if ping_pong else "plain"
            yield f"{placement}, {ranks} ranks, {lengths}, {context // 1024}K, {overlap}", Case(
                shape=config.shape, masks=masks, ranks=ranks, lengths=lengths, context=context,
                tokens=self.tokens, link=Link(self.bytes_per_s, self.latency_s), cost=self.cost,
                placement=placement, ping_pong=ping_pong, seed=self.seed,
                element_bytes=element_bytes,
            )  # fmt: skip


QUICK = Grid(
    ranks=(8,), contexts=(4096,), model="debug", tp=2, tokens=1024, cost="cpu", bytes_per_s=1e9,
    sample=4, rounds=1,
)  # fmt: skip


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--only", default="", help="cases whose name has this")
    parser.add_argument("--quick", action="store_true", help="a tiny grid, to try the script")
    parser.add_argument("--placement", nargs="+", choices=PLACEMENTS, default=["given"])
    parser.add_argument("--layers", type=int, default=Grid.layers)
    parser.add_argument("--sample", type=int, help="ranks of each plan")
    parser.add_argument("--rounds", type=int, help="of which the median counts")
    parser.add_argument("--backend", default="auto")
    parser.add_argument("--planners", type=int, default=min(4, max((os.cpu_count() or 1) // 2, 1)))
    parser.add_argument("--out", type=Path)
    options = parser.parse_args()
    grid = QUICK if options.quick else Grid()
    given = {"sample": options.sample, "rounds": options.rounds}
    changed = {name: value for name, value in given.items() if value is not None}
    grid = replace(grid, placements=tuple(options.placement), layers=options.layers, **changed)
    out = options.out or (HERE.parent / "build/replay" if options.quick else HERE / "results")
    out.mkdir(parents=True, exist_ok=True)
    failed = run(grid, options.only, options.backend, options.planners, out)
    sys.exit(f"failed: {'; '.join(failed)}" if failed else 0)


def run(grid: Grid, only: str, backend: str, planners: int, out: Path) -> list[str]:
    """Measures what is missing; the names of cases that failed."""
    import torch

    from distca.measure.profiling import device_name
    from distca.measure.replay import backend_of, layers_of, share_of
    from distca.model.sizes import model_config

    device = torch.device("cuda", 0) if torch.cuda.is_available() else torch.device("cpu")
    dtype = torch.bfloat16 if device.type == "cuda" else torch.float32
    config = share_of(model_config(grid.model), grid.tp, grid.layers)
    backend = backend_of(config, device, dtype, backend)
    path = out / "replay.json"
    results: Record = json.loads(path.read_text()) if path.exists() else {"cases": {}}
    results |= {
        "date": str(date.today()),
        "device": device_name(device),
        "versions": {"torch": torch.__version__, "backend": backend} | _kernels(),
        "command": command(),
    }
    known, failed = results["cases"], []
    missing = {
        name: case
        for name, case in grid.cases(config, dtype.itemsize)
        if only in name
        and (
            known.get(name, {}).get("setting") != setting(grid, case, results)
            or "host_s" not in known[name]  # of an earlier version
        )
    }
    model = layers_of(config, device, dtype)
    context = multiprocessing.get_context("spawn")  # a fork would take CUDA along
    with ProcessPoolExecutor(planners, mp_context=context) as pool:
        plans = {name: pool.submit(planned, case) for name, case in missing.items()}
        for name, case in missing.items():
            print(f"{name}: ", end="", flush=True)
            try:
                found = replayed(grid, case, plans.pop(name), model, dtype, backend)
            except (RuntimeError, ValueError) as error:  # the others may still go well
                failed.append(name)
                print(f"failed: {error}", flush=True)
                continue
            known[name] = {"setting": setting(grid, case, results)} | found
            print(in_words(found), flush=True)
            path.write_text(json.dumps(results, indent=1) + "\n")
    text = report(results)
    print(f"\n{text}")
    (out / "replay.md").write_text(text)
    return failed


def command() -> str:
    """As it was called, but for where results go."""
    words = [word for word in sys.argv[1:] if not word.startswith("--out")]
    if "--out" in sys.argv:
        words.remove(sys.argv[sys.argv.index("--out") + 1])
    return " ".join(["python benchmarks/replay.py", *words])


def setting(grid: Grid, case: Case, results: Record) -> Record:
    """What a result depends on, as JSON gives it back."""
    names = ("ranks", "lengths", "context", "tokens", "cost", "placement", "ping_pong", "seed")
    of_grid = ("model", "tp", "layers", "bytes_per_s", "latency_s", "sample", "rounds")
    found = {name: getattr(case, name) for name in names} | {"device": results["device"]}
    return found | {name: getattr(grid, name) for name in of_grid}


def planned(case: Case) -> tuple[StepPlan, float]:
    began = time.perf_counter()
    return case.plan(), time.perf_counter() - began


def replayed(
    grid: Grid,
    case: Case,
    plan: Future[tuple[StepPlan, float]],
    model: Any,
    dtype: Any,
    backend: str,
) -> Record:
    import torch

    def update(number: int, text: str) -> None:
        print(".", end="", flush=True)

    step, plan_s = plan.result()
    began = time.perf_counter()
    found = replay_ranks(case, step, model, dtype, backend, grid.sample, grid.rounds, update)
    if torch.cuda.is_available():
        torch.cuda.empty_cache()
    took = {"plan_s": plan_s, "replay_s": time.perf_counter() - began}
    return took | asdict(found)


def in_words(record: Record) -> str:
    return (
        f" {record['step_s'] * 1e3:.1f} ms, worst / mean {record['worst_over_mean']:.3f},"
        f" host {record['host_s'] / record['step_s']:.2f} of it,"
        f" exposed {record['exposed_s'] * 1e3:.1f} ms, error {record['calibrated']['mean']:.1%}"
        f" (raw {record['raw']['mean']:.1%}); planned in {record['plan_s']:.1f} s,"
        f" replayed in {record['replay_s']:.1f} s"
    )


def _kernels() -> dict[str, str]:
    with suppress(PackageNotFoundError):  # it may lie on the path without being installed
        return {"flash-attn-4": version("flash-attn-4")}
    return {}


# -- the report --------------------------------------------------------------------------------

COLUMNS = {
    "placement": lambda r: r["setting"]["placement"],
    "ranks": lambda r: str(r["setting"]["ranks"]),
    "documents": lambda r: f"{r['setting']['lengths']}, {r['setting']['context'] // 1024}K",
    "ping-pong": lambda r: "on" if r["setting"]["ping_pong"] else "off",
    "attention, before": lambda r: f"{r['imbalance_before']:.2f}x",
    "planned": lambda r: f"{r['imbalance']:.3f}x",
    "step ms": lambda r: f"{r['step_s'] * 1e3:.1f}",
    "device ms a layer": lambda r: per_layer(r, "step_s"),
    "host ms a layer": lambda r: per_layer(r, "host_s"),
    "replayed / simulated": lambda r: (
        f"{over(r, 'calibrated'):.3f}, raw {over(r, 'simulated'):.3f}"
    ),
    "worst / mean": lambda r: f"{r['worst_over_mean']:.3f}",
    "simulated, all ranks": lambda r: f"{r['simulated_worst_over_mean']:.3f}",
    "exposed ms": lambda r: f"{r['exposed_s'] * 1e3:.2f}",
    "exposed, worst": lambda r: f"{most(r, 'measured') * 1e3:.1f}",
    "simulated": lambda r: f"{most(r, 'calibrated') * 1e3:.1f}",
    "linear x": lambda r: f"{r['factors']['linear']:.3f}",
    "attention x": lambda r: f"{r['factors']['attention']:.3f}",
    "error, mean": lambda r: f"{r['calibrated']['mean']:.1%}",
    "error, worst": lambda r: f"{r['calibrated']['worst']:.1%}",
    "raw, mean": lambda r: f"{r['raw']['mean']:.1%}",
    "raw, worst": lambda r: f"{r['raw']['worst']:.1%}",
}


def per_layer(record: Record, name: str) -> str:
    """Milliseconds of one layer, forward and backward."""
    if name not in record:  # measured by an earlier version
        return ""
    return f"{record[name] / record['setting']['layers'] * 1e3:.2f}"


def over(record: Record, what: str) -> float:
    """Replayed over simulated steps, of the ranks that did not calibrate."""
    rows = [row for row in record["rows"] if not row["calibrates"]]
    return sum(row["measured"]["step"] for row in rows) / sum(row[what]["step"] for row in rows)


def most(record: Record, what: str) -> float:
    """The longest that a sampled rank waits."""
    return max(row[what]["exposed"] for row in record["rows"])


def report(results: Record) -> str:
    records = list(results["cases"].values())
    versions = ", ".join(f"{name} {value}" for name, value in results["versions"].items())
    lines = [
        "# Ranks of large plans, replayed on one device",
        "",
        f"`{results['command']}`, {results['date']}, {results['device']}, {versions}.",
        "",
    ]
    if not records:
        return "\n".join([*lines, "Nothing was measured."]) + "\n"
    s = records[0]["setting"]
    lines += [
        f"{s['model']}, one of tp {s['tp']}; {s['layers']} layers without the head, forward and"
        f" backward, parts of seams recomputed; {s['tokens'] // 1024}K tokens a rank,"
        f" cost {s['cost']}; a link of {s['bytes_per_s'] / 1e9:g} GB/s"
        f" and {s['latency_s'] * 1e6:g} us. {s['sample']} ranks of each plan: most traffic, most"
        " attention, slowest and fastest by simulation, the others at random; step and exposed are"
        " means over the latter. The host launches a step while the device computes it, and has to"
        " be faster. A third of the ranks calibrates two factors, of linear layers and of"
        " attention; replayed / simulated and errors of simulated step times are those of the other"
        " ranks, with the factors and without (raw).",
        "",
        "| " + " | ".join(COLUMNS) + " |",
        "|" + "---|" * len(COLUMNS),
    ]
    lines += ["| " + " | ".join(show(r) for show in COLUMNS.values()) + " |" for r in records]
    lines += ["", "; ".join(overall(records)) + "."]
    return "\n".join(lines) + "\n"


def overall(records: list[Record]) -> list[str]:
    held_out = [row for r in records for row in r["rows"] if not row["calibrates"]]

    def off(what: str) -> list[float]:
        return [abs(row[what]["step"] / row["measured"]["step"] - 1) for row in held_out]

    return [
        f"All {len(held_out)} ranks that did not calibrate: simulated within"
        f" {fmean(off('calibrated')):.1%} of replayed on average, {max(off('calibrated')):.1%} at"
        " worst",
        f"raw {fmean(off('simulated')):.1%} and {max(off('simulated')):.1%}",
    ]


if __name__ == "__main__":
    main()
