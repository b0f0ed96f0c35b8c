"""Plans compared with the published head-tail greedy: imbalance, bytes, busiest rank, seconds.

    python benchmarks/plan.py            all cases, about ten minutes on one core
    python benchmarks/plan.py --quick    a few of them
    python benchmarks/plan.py --short    short documents only; the other results are kept

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
from collections.abc import Callable, Iterator
from dataclasses import replace
from datetime import date
from itertools import product
from math import log2
from pathlib import Path
from typing import Any

os.environ["OMP_NUM_THREADS"] = "1"  # one core, as stated

import numpy as np
from plan_few_ranks import few_ranks, few_ranks_report

from distca.data.lengths import LengthDistribution, distribution, pretrain, prolong
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
MODEL = "llama3-8b"
CONTEXTS = (65536, 131072, 524288)
SERVERS = (8, 16, 32, 64, 128, 256, 512)
SEEDS = (0, 1, 2)
BEST_OF = 3  # runs, of which the fastest counts
# Lengths of the first and of the second half of the ranks.
SHORT = {
    "chat": ("lognormal:150:0.8",) * 2,
    "SFT": ("lognormal:600:1.0",) * 2,
    "RL": ("lognormal:3000:0.7",) * 2,
    "64s and 20s": ("fixed:64", "fixed:20"),
    "chat and SFT": ("lognormal:150:0.8", "lognormal:600:1.0"),
    "chat and pretrain": ("lognormal:150:0.8", "pretrain"),
}
SHORT_SERVERS, SHORT_TOKENS = (8, 64, 512), (32768, 131072)
GROWTH = (64, 128, 256, 512, 1024, 2048, 4096)


def ended(placement: Placement) -> Placement:
    """Every shard becomes a document of its own."""
    size = placement.stop - placement.start
    order = np.arange(len(size), dtype=np.int64)
    return Placement(
        size, order, np.zeros_like(size), size, placement.worker, placement.num_workers
    )


PACKINGS: dict[str, Callable[[Placement], Placement]] = {
    "ended": ended,
    "spanning": lambda placement: placement,
}


def cases(quick: bool) -> Iterator[tuple[LengthDistribution, int, int]]:
    for draw in (pretrain, prolong):
        for context in CONTEXTS[1:2] if quick else CONTEXTS:
            for servers in (8, 64) if quick else SERVERS:
                for seed in SEEDS[:1] if quick else SEEDS:
                    yield draw(context), servers, seed


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


def run_case(lengths: LengthDistribution, servers: int, seed: int) -> Iterator[dict[str, Any]]:
    in_order = Placement.in_order(lengths.batch(lengths.context * servers, seed), servers)
    for packing, pack in PACKINGS.items():
        given = pack(in_order)
        greedy = checked(given, policy="greedy", cost="pairs", tolerance=0.01)
        row: dict[str, Any] = {
            "data": lengths.name,
            "context": lengths.context,
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


def growth(quick: bool) -> list[dict[str, Any]]:
    """Planning time from 64 to 4,096 servers; the best of three, since machines are noisy."""
    rows = []
    wanted = [(131072, pretrain, n) for n in (GROWTH[:3] if quick else GROWTH)]
    wanted += [(131072, prolong, 256), (524288, prolong, 512)]
    for context, draw, servers in wanted:
        lengths = draw(context).batch(context * servers, 0)
        given = ended(Placement.in_order(lengths, servers))
        row: dict[str, Any] = {"data": draw(context).name, "context": context, "servers": servers}
        row["documents"] = given.num_documents
        for name, cost, placement in (
            ("given_pairs_s", "pairs", "given"),
            ("given_analytic_s", "analytic", "given"),
            ("balanced_pairs_s", "pairs", "balanced"),
        ):
            policy = policy_of("distca", placement)
            times, layouts = [], []
            for _ in range(BEST_OF):
                began = time.process_time()
                made = place_and_plan(given, policy, model=MODEL, cost=cost)
                middle = time.process_time()
                Layout.of(made, 0)
                times.append(middle - began)
                layouts.append(time.process_time() - middle)
            row[name] = min(times)
            row[name.replace("_s", "_layout_s")] = min(layouts)
        rows.append(row)
    return rows


def steps(quick: bool) -> list[dict[str, Any]]:
    """Seconds of one core for a whole training step: balanced placement, two halves, 512 ranks."""
    rows = []
    ranks = 64 if quick else 512
    for draw, context, cost in product((pretrain, prolong), CONTEXTS, ("pairs", "h200")):
        planner = StepPlanner(
            MeshShape(dp=ranks),
            (Mask.parse("causal"),),
            PlanOptions(model=MODEL, cost=cost),
            policy=policy_of("distca", "balanced"),
            ping_pong=True,
        )
        lengths = draw(context).batch(context * ranks, 0)
        began = time.process_time()
        halves = planner.plan(lengths).slots[0][0]
        rows.append(
            {
                "data": draw(context).name,
                "context": context,
                "servers": ranks,
                "cost": cost,
                "documents": len(lengths),
                "imbalance": max(half.imbalance for half in halves),
                "seconds": time.process_time() - began,
            }
        )
    return rows


def slowest_report(rows: list[dict[str, Any]], steps: list[dict[str, Any]]) -> list[str]:
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


def allowed_s(documents: int, servers: int) -> float:
    return 0.1 + 1e-6 * documents * log2(servers)


def short(quick: bool) -> list[dict[str, Any]]:
    """Batches of short documents: bound, bytes, and seconds of one core against those allowed."""
    rows = []
    for name, spec in SHORT.items():
        for servers in SHORT_SERVERS[:1] if quick else SHORT_SERVERS:
            for tokens in SHORT_TOKENS:
                halves = [
                    ended(
                        Placement.in_order(
                            distribution(one, tokens).batch(tokens * servers // 2, seed),
                            servers // 2,
                        )
                    )
                    for seed, one in enumerate(spec)
                ]
                lengths = np.concatenate([half.lengths for half in halves])
                worker = np.concatenate([halves[0].worker, halves[1].worker + servers // 2])
                number = np.arange(len(lengths))
                given = Placement(lengths, number, number * 0, lengths, worker, servers)
                for placement, cost in product(
                    ("given", "balanced"), ("pairs", "analytic", "h200")
                ):
                    taken = np.inf
                    for _ in range(BEST_OF):
                        began = time.process_time()
                        made = place_and_plan(
                            given, policy_of("distca", placement), model=MODEL, cost=cost
                        )
                        taken = min(taken, time.process_time() - began)
                    verify(made)
                    rows.append(
                        {
                            "data": name,
                            "tokens": tokens,
                            "servers": servers,
                            "documents": len(lengths),
                            "placement": placement,
                            "cost": cost,
                            "imbalance_before": made.imbalance_before,
                            "imbalance": made.imbalance,
                            "megabytes": made.traffic.total / servers / 1e6,
                            "seconds": taken,
                            "allowed_s": allowed_s(len(lengths), servers),
                        }
                    )
    return rows


def short_report(rows: list[dict[str, Any]], run: str) -> list[str]:
    """One line for each batch and placement; seconds and imbalance are the largest of all costs."""
    lines = [
        "",
        "## Short documents (largest of the costs pairs, analytic, h200; best of three; one core)",
        "",
        run,
        "",
        "| data | tokens a rank | servers | documents | placement | imbalance before | imbalance"
        " | MB a rank | seconds | allowed |",
        "|---|---|---|---|---|---|---|---|---|---|",
    ]
    keys = dict.fromkeys((r["data"], r["tokens"], r["servers"], r["placement"]) for r in rows)
    for data, tokens, servers, placement in keys:
        part = [
            r
            for r in rows
            if (r["data"], r["tokens"], r["servers"], r["placement"])
            == (data, tokens, servers, placement)
        ]
        largest = {name: max(r[name] for r in part) for name in part[0] if name != "cost"}
        late = " **above**" if largest["seconds"] > largest["allowed_s"] else ""
        lines.append(
            f"| {data} | {tokens // 1024}K | {servers} | {largest['documents']} | {placement}"
            f" | {largest['imbalance_before']:.2f} | {largest['imbalance']:.4f}"
            f" | {largest['megabytes']:.1f} | {largest['seconds']:.3f}{late}"
            f" | {largest['allowed_s']:.3f} |"
        )
    return lines


def geometric_mean(values: list[float]) -> float:
    """A ratio below 0.01 (a balanced placement that cuts no document moves nothing) counts 0.01."""
    return float(np.exp(np.mean(np.log(np.maximum(values, 0.01)))))


def this_run() -> str:
    """When, where and with which command results are measured."""
    return (
        f"{date.today().isoformat()}, {platform.machine()}, Python {platform.python_version()},"
        f" numpy {np.__version__}, one core: `python {' '.join(sys.argv)}`"
    )


def report(results: dict[str, Any]) -> str:
    rows, times = results["cases"], results["seconds"]
    lines = [
        "# Plans against the head-tail greedy",
        "",
        results["run"],
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
    lines += slowest_report(rows, results["steps"])
    lines += few_ranks_report(results["few_ranks"])
    return "\n".join([*lines, *short_report(results["short"], results["short_run"])]) + "\n"


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawTextHelpFormatter
    )
    parser.add_argument("--quick", action="store_true", help="a few cases")
    parser.add_argument(
        "--short", action="store_true", help="short documents only; the other results are kept"
    )
    parser.add_argument(
        "--out", type=Path, default=RESULTS, help="where to write plan.md and plan.json"
    )
    arguments = parser.parse_args()
    from rich.progress import track

    path = arguments.out / "plan.json"
    if arguments.short:
        results = json.loads(path.read_text())
    else:
        todo = list(cases(arguments.quick))
        results = {
            "run": this_run(),
            "cases": [row for case in track(todo, "planning") for row in run_case(*case)],
            "seconds": growth(arguments.quick),
            "steps": steps(arguments.quick),
            "few_ranks": few_ranks(arguments.quick),
        }
    results |= {"short_run": this_run(), "short": short(arguments.quick)}
    text = report(results)
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(json.dumps(results) + "\n")
    path.with_suffix(".md").write_text(text)
    sys.stdout.write(text)


if __name__ == "__main__":
    main()
