"""Plans compared with the published head-tail greedy: imbalance, bytes, busiest rank, seconds.

    python benchmarks/plan.py                  all cases, about a quarter of an hour on one core
    python benchmarks/plan.py --jobs 4         the same on four cores, each with one thread
    python benchmarks/plan.py --quick          a few of them
    python benchmarks/plan.py --only short     one part; the other results are kept

Writes benchmarks/results/plan.md and plan.json. Every case is one global batch of documents in
order of arrival, K tokens per rank, with the bytes of Llama-3-8B. Documents are packed in two ways.
*ended*: a document ends at a rank's border, and its rest counts as a new document (the input that
the published planner supports). *spanning*: it continues on the next rank, and its keys live on
both. The greedy uses tolerance 0.01.
"""

from __future__ import annotations

import argparse
import json
import os
import platform
import sys
import time
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ProcessPoolExecutor
from dataclasses import replace
from datetime import date
from functools import cache, partial
from itertools import chain, product
from pathlib import Path
from typing import Any, NamedTuple

os.environ["OMP_NUM_THREADS"] = "1"  # one core, as stated

import numpy as np
from plan_common import MODEL, Case, Row, ended, fastest, run_again
from plan_few_ranks import few_ranks, few_ranks_cases, few_ranks_report
from plan_random import many_ranks_cases, random_batch, random_cases, random_report
from plan_short import short, short_cases, short_report
from rich.progress import track

from distca.data.lengths import distribution
from distca.dispatch.layout import Layout
from distca.pipeline.mesh import MeshShape
from distca.pipeline.step_planner import StepPlanner
from distca.planning.api import place_and_plan
from distca.planning.checks import verify
from distca.planning.masks import Mask
from distca.planning.options import PlanOptions
from distca.planning.placement import Placement
from distca.planning.plan import Plan
from distca.planning.policies import policy_of

RESULTS = Path(__file__).parent / "results"
DATA = ("pretrain", "prolong")
CONTEXTS = (65536, 131072, 524288)
SERVERS = (8, 16, 32, 64, 128, 256, 512)
SEEDS = (0, 1, 2)
GROWTH = (64, 128, 256, 512, 1024, 2048, 4096)


PACKINGS: dict[str, Callable[[Placement], Placement]] = {
    "ended": ended,
    "spanning": lambda placement: placement,
}


def cases(quick: bool) -> list[tuple[str, int, int, int]]:
    servers, seeds = ((8, 64), SEEDS[:1]) if quick else (SERVERS, SEEDS)
    return [*product(DATA, CONTEXTS[1:2] if quick else CONTEXTS, servers, seeds)]


def checked(
    tokens: Placement, policy: str = "distca", placement: str = "given", **options: Any
) -> Plan:
    began = time.process_time()
    result = place_and_plan(tokens, policy_of(policy, placement), model=MODEL, **options)
    result = replace(result, plan_s=time.process_time() - began)  # on a machine that others use
    verify(result)
    return result


def tiles_kept(result: Plan, given: Placement, tile: int = 128) -> bool:
    """Whether every cut is a multiple of the tile and every cut piece is at least one tile long.

    A document's own ends are not cuts, nor are borders of workers where tokens are as given or in
    order of arrival; where we place tokens, they are.
    """
    placed, forward, backward = result.placement, result.forward, result.backward
    stride = int(placed.lengths.max()) + 1
    in_order = Placement.in_order(placed.lengths, placed.num_workers)
    as_given = placed is given or np.array_equal(placed.start, in_order.start)
    borders = placed.document * stride + placed.start if as_given else np.zeros(0, np.int64)
    for document, start, stop in (
        (placed.document, placed.start, placed.stop),
        (forward.document, forward.q_start, forward.q_stop),
        (backward.document, backward.q_start, backward.q_stop),
    ):
        first = (start == 0) | np.isin(document * stride + start, borders)
        last = (stop == placed.lengths[document]) | np.isin(document * stride + stop, borders)
        off_grid = (~first & (start % tile != 0)) | (~last & (stop % tile != 0))
        if np.any(off_grid | (~(first & last) & (stop - start < tile))):
            return False
    return True


def run_case(data: str, context: int, servers: int, seed: int) -> Iterator[Row]:
    lengths = distribution(data, context)
    in_order = Placement.in_order(lengths.batch(context * servers, seed), servers)
    for packing, pack in PACKINGS.items():
        given = pack(in_order)
        greedy = checked(given, policy="greedy", cost="pairs", tolerance=0.01)
        row: Row = {
            "data": data,
            "context": context,
            "servers": servers,
            "seed": seed,
            "packing": packing,
            "imbalance_before": greedy.imbalance_before,
            "greedy": {
                "imbalance": greedy.imbalance,
                "bytes_total": greedy.traffic.total,
                "bytes_worst": greedy.traffic.worst,
            },
        }
        for placement in ("given", "balanced"):
            ours = checked(given, placement=placement, cost="pairs")
            seconds = checked(given, placement=placement, cost="analytic")
            row[placement] = {
                "imbalance": ours.imbalance,
                "imbalance_seconds": seconds.imbalance,
                "total": ours.traffic.total / greedy.traffic.total,
                "worst": ours.traffic.worst / greedy.traffic.worst,
                "over_bound": max(ours.traffic.total, 1) / max(ours.bytes_lower_bound, 1),
                "tasks_moved": len(ours.forward.moved),
                "tiles_kept": tiles_kept(ours, given) and tiles_kept(seconds, given),
                "token_spread": int(np.ptp(ours.placement.tokens)),
                "plan_s": ours.plan_s,
            }
        yield row


def growth_cases(quick: bool) -> list[tuple[str, int, int]]:
    """From 64 to 4,096 servers."""
    wanted = [("pretrain", 131072, n) for n in (GROWTH[:3] if quick else GROWTH)]
    return [*wanted, ("prolong", 131072, 256), ("prolong", 524288, 512)]


def growth(data: str, context: int, servers: int) -> Iterator[Row]:
    lengths = distribution(data, context).batch(context * servers, 0)
    given = ended(Placement.in_order(lengths, servers))
    row: Row = {"data": data, "context": context, "servers": servers}
    row["documents"] = given.num_documents
    for cost, placement in (("pairs", "given"), ("analytic", "given"), ("pairs", "balanced")):
        policy = policy_of("distca", placement)
        made, seconds = fastest(partial(place_and_plan, given, policy, model=MODEL, cost=cost))
        row[f"{placement}_{cost}_s"] = seconds
        row[f"{placement}_{cost}_layout_s"] = fastest(partial(Layout.of, made, 0))[1]
    yield row


def step_cases(quick: bool) -> list[tuple[str, int, str, int]]:
    return [*product(DATA, CONTEXTS, ("pairs", "h200"), (64,) if quick else (512,))]


def steps(data: str, context: int, cost: str, ranks: int) -> Iterator[Row]:
    """A whole training step: balanced placement, two halves."""
    planner = StepPlanner(
        MeshShape(dp=ranks),
        (Mask.parse("causal"),),
        PlanOptions(model=MODEL, cost=cost),
        policy=policy_of("distca", "balanced"),
        ping_pong=True,
    )
    lengths = distribution(data, context).batch(context * ranks, 0)
    began = time.process_time()
    halves = planner.plan(lengths).slots[0][0]
    yield {
        "data": data,
        "context": context,
        "servers": ranks,
        "cost": cost,
        "documents": len(lengths),
        "imbalance": max(half.imbalance for half in halves),
        "seconds": time.process_time() - began,
    }


def slowest_report(rows: list[Row], steps: list[Row]) -> list[str]:
    """The slowest batches of all, and steps with ping-pong."""
    lines = ["", "## Slowest plans (cost pairs, all batches; one core)", ""]
    lines += ["| packing | placement | slowest | seconds |", "|---|---|---|---|"]
    for packing, placement in product(PACKINGS, ("given", "balanced")):
        worst = max(
            (r for r in rows if r["packing"] == packing), key=lambda r: r[placement]["plan_s"]
        )
        case = f"{worst['data']}, {worst['context'] // 1024}K, {worst['servers']} servers"
        lines.append(f"| {packing} | {placement} | {case} | {worst[placement]['plan_s']:.3f} |")
    lines += ["", "## Steps with ping-pong (balanced placement, both halves; one core)", ""]
    lines += ["| data | context | servers | documents | cost | imbalance | seconds |"]
    lines += ["|---|---|---|---|---|---|---|"]
    for s in steps:
        lines.append(
            f"| {s['data']} | {s['context'] // 1024}K | {s['servers']} | {s['documents']}"
            f" | {s['cost']} | {s['imbalance']:.4f} | {s['seconds']:.2f} |"
        )
    return lines


def geometric_mean(values: list[float]) -> float:
    """A ratio below 0.01 (a balanced placement that cuts no document moves nothing) counts 0.01."""
    return float(np.exp(np.mean(np.log(np.maximum(values, 0.01)))))


@cache
def loop_s() -> float:
    """Returns how fast a core is, in seconds that any machine can be compared by."""

    def loop() -> None:
        for _ in range(10_000_000):
            pass

    return fastest(loop)[1]


def this_run() -> str:
    """When, where and with which command results are measured."""
    return (
        f"{date.today().isoformat()}, {platform.machine()}, Python {platform.python_version()},"
        f" numpy {np.__version__}, one core, on which ten million iterations of an empty loop take"
        f" {loop_s():.2f} s: `python {' '.join(sys.argv)}`"
    )


def report(results: dict[str, Any]) -> str:
    rows, times = results["cases"]["rows"], results["seconds"]["rows"]
    lines = [
        "# Plans against the head-tail greedy",
        "",
        results["cases"]["run"],
        "",
        f"{len(rows) // 2} batches: pretrain and prolong, contexts"
        f" {', '.join(f'{context // 1024}K' for context in sorted({r['context'] for r in rows}))},"
        f" {min(r['servers'] for r in rows)} to {max(r['servers'] for r in rows)} servers,"
        f" {len({r['seed'] for r in rows})} seeds. Bytes of one layer forward, as a ratio to the"
        " greedy's (tolerance 0.01) on the same batch; both balance `pairs`. `worst` is the busiest"
        " rank, the larger of sent and received. Imbalance is worst / mean, the larger of forward"
        " and backward. `tasks moved` counts batches: balanced placement moves tasks only where it"
        " falls back.",
        "",
        "## All batches",
        "",
        "| packing | placement | total (geo. mean) | total (max) | worst (geo. mean) | worst (max)"
        " | imbalance, pairs (max) | imbalance, seconds (max) | bytes / lower bound | tasks moved"
        " | tiles kept |",
        "|---|---|---|---|---|---|---|---|---|---|---|",
    ]
    for packing in PACKINGS:
        mine = [r for r in rows if r["packing"] == packing]
        for placement in ("given", "balanced"):
            part = [r[placement] for r in mine]
            lines.append(
                f"| {packing} | {placement}"
                f" | **{geometric_mean([p['total'] for p in part]):.3f}**"
                f" | {max(p['total'] for p in part):.3f}"
                f" | **{geometric_mean([p['worst'] for p in part]):.3f}**"
                f" | {max(p['worst'] for p in part):.3f}"
                f" | {max(p['imbalance'] for p in part):.4f}"
                f" | {max(p['imbalance_seconds'] for p in part):.4f}"
                f" | {geometric_mean([p['over_bound'] for p in part]):.2f}"
                f" | {sum(p['tasks_moved'] > 0 for p in part)}"
                f" | {'all' if all(p['tiles_kept'] for p in part) else 'NOT ALL'} |"
            )
        greedy = [r["greedy"]["imbalance"] for r in mine]
        before = [r["imbalance_before"] for r in mine]
        lines.append(
            f"| {packing} | greedy | 1 | 1 | 1 | 1 | {max(greedy):.4f} | - | - | {len(mine)} | - |"
        )
        lines.append(
            f"| {packing} | colocated | - | - | - | - | {max(before):.2f} | - | - | 0 | - |"
        )
    lines += ["", "## By case (mean over seeds, geometric for ratios)", ""]
    lines += [
        "| data | context | servers | packing | greedy GB/rank | greedy imbalance | given total"
        " | given worst | balanced total | balanced worst |",
        "|---|---|---|---|---|---|---|---|---|---|",
    ]
    keys = sorted({(r["data"], r["context"], r["servers"], r["packing"]) for r in rows})
    for data, context, servers, packing in keys:
        part = [
            r
            for r in rows
            if (r["data"], r["context"], r["servers"], r["packing"])
            == (data, context, servers, packing)
        ]
        gb = np.mean([r["greedy"]["bytes_total"] / servers / 1e9 for r in part])
        ratios = [
            geometric_mean([r[placement][what] for r in part])
            for placement in ("given", "balanced")
            for what in ("total", "worst")
        ]
        lines.append(
            f"| {data} | {context // 1024}K | {servers} | {packing} | {gb:.2f}"
            f" | {max(r['greedy']['imbalance'] for r in part):.3f} | "
            + " | ".join(f"{ratio:.3f}" for ratio in ratios)
            + " |"
        )
    lines += [
        "",
        "## Seconds (documents ended at borders; best of three; one core)",
        "",
        "| data | context | servers | documents | given, pairs | given, analytic | balanced, pairs"
        " | one rank's layout |",
        "|---|---|---|---|---|---|---|---|",
    ]
    for t in times:
        lines.append(
            f"| {t['data']} | {t['context'] // 1024}K | {t['servers']} | {t['documents']}"
            f" | {t['given_pairs_s']:.3f} | {t['given_analytic_s']:.3f}"
            f" | {t['balanced_pairs_s']:.3f} | {t['given_pairs_layout_s']:.3f} |"
        )
    lines += slowest_report(rows, results["steps"]["rows"])
    for name, report_of in (
        ("few_ranks", few_ranks_report),
        ("random", random_report),
        ("many_ranks", random_report),
        ("short", short_report),
    ):
        lines += report_of(results[name]["rows"])
        if results[name]["run"] != results["cases"]["run"]:
            lines += ["", results[name]["run"]]
    return "\n".join(lines) + "\n"


class Section(NamedTuple):
    """A part of the results: its cases, and the rows of each."""

    cases: Callable[[bool], Sequence[Case]]  # of all or, if True, of a quick look
    rows: Callable[..., Iterator[Row]]


SECTIONS = {
    "cases": Section(cases, run_case),
    "seconds": Section(growth_cases, growth),
    "steps": Section(step_cases, steps),
    "few_ranks": Section(few_ranks_cases, few_ranks),
    "random": Section(random_cases, random_batch),
    "many_ranks": Section(many_ranks_cases, random_batch),
    "short": Section(short_cases, short),
}


def rows_of(name: str, case: Case) -> list[Row]:
    return [*SECTIONS[name].rows(*case)]


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawTextHelpFormatter
    )
    parser.add_argument("--quick", action="store_true", help="a few cases")
    parser.add_argument("--only", choices=SECTIONS, help="one part; the other results are kept")
    parser.add_argument("--jobs", type=int, default=1, help="processes, each on a core of its own")
    parser.add_argument(
        "--out", type=Path, default=RESULTS, help="where to write plan.md and plan.json"
    )
    arguments = parser.parse_args()
    path = arguments.out / "plan.json"
    if arguments.only and not path.exists():
        parser.error(f"--only adds to {path}, which does not exist: run all parts first")
    results = json.loads(path.read_text()) if arguments.only else {}
    measured: dict[str, dict[Case, list[Row]]] = {}
    with ProcessPoolExecutor(arguments.jobs) as pool:
        for name in [arguments.only] if arguments.only else SECTIONS:
            todo = SECTIONS[name].cases(arguments.quick)
            done = pool.map(partial(rows_of, name), todo)
            measured[name] = dict(zip(todo, track(done, name, len(todo)), strict=True))
    for name, rows in measured.items():
        run_again(rows, partial(rows_of, name))  # alone
        results[name] = {"run": this_run(), "rows": [*chain.from_iterable(rows.values())]}
    text = report(results)
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(json.dumps(results) + "\n")
    path.with_suffix(".md").write_text(text)
    sys.stdout.write(text)


if __name__ == "__main__":
    main()
