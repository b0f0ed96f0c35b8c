"""Writes the tables of ``benchmarks/paper.py`` from its records into docs/simulator.md."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

Record = dict[str, Any]
PAGE = Path(__file__).parent.parent / "docs" / "simulator.md"
BEGIN, END = "<!-- written by benchmarks/paper.py -->", "<!-- until here -->"
NAMES = {
    "greedy, given": "published design",
    "distca, given": "our cuts",
    "distca, balanced": "balanced placement",
}
KERNEL_NAMES = {"h200-flash": "flash", "h200": "fa4"}


PUBLISHED_4D = {
    ("llama3-8b", "pretrain"): "1.15 to 1.30",
    ("llama3-8b", "prolong"): "1.10 to 1.35",
    ("llama-34b", "pretrain"): "up to 1.15",
    ("llama-34b", "prolong"): "up to 1.25",
}


def report(results: Record) -> str:
    return "\n".join(
        line for name, table in TABLES.items() if name in results for line in table(results[name])
    )


def dated(part: Record, title: str) -> list[str]:
    said = f"{part['date']}, global batches of each cell: {part['batches']}."
    return ["", f"### {title}", "", said, ""]


def gather_table(part: Record) -> list[str]:
    lines = dated(part, "The all-gather of context parallelism")
    lines += ["8B, documents of 32K, per-document context parallel over all nodes.", ""]
    lines += ["| nodes | published share | simulated |", "|---|---|---|"]
    for r in part["rows"]:
        lines.append(f"| {r['nodes']} | {r['published']:.1%} | {r['exposed']:.1%} |")
    return lines


def idle_table(part: Record) -> list[str]:
    lines = dated(part, "Stragglers")
    lines += ["8B, 512K, 64 GPUs, WLB-LLM's packing with dp groups of context-parallel nodes.", ""]
    lines += ["| dp | published idle share | simulated |", "|---|---|---|"]
    for r in part["rows"]:
        lines.append(f"| {r['dp']} | {r['published']:.1%} | {r['idle'] - r['exposed']:.1%} |")
    return lines


def cp_table(part: Record) -> list[str]:
    lines = dated(part, "Seconds against head-tail context parallelism")
    lines += [
        "34B, 256 GPUs, 2M tokens a step, no pipeline; seconds of a step, published / simulated.",
        "",
        "| data, context | kernel | head-tail | WLB-LLM | published design | our cuts | balanced |"
        " head-tail over ours |",
        "|---|---|---|---|---|---|---|---|",
    ]
    for r in part["rows"]:
        strategies, flash = r["strategies"], r["kernel"] == "h200-flash"
        published = dict(zip(("greedy, given", "wlb", "head-tail-cp"), r["published"], strict=True))
        cells = []
        for name in ("head-tail-cp", "wlb", *NAMES):
            mine = f"{strategies[name]['step_s']:.1f}" if name in strategies else "-"
            theirs = f"{published[name]:.1f} / " if flash and name in published else ""
            cells.append(theirs + mine)
        gain = strategies["head-tail-cp"]["step_s"] / fastest(strategies)
        ratio = f"{published['head-tail-cp'] / published['greedy, given']:.2f} / " if flash else ""
        where = f"{r['data']}, {r['context']}K"
        cells = [where, KERNEL_NAMES[r["kernel"]], *cells, f"{ratio}{gain:.2f}"]
        lines.append(f"| {' | '.join(cells)} |")
    return lines


def three_d_table(part: Record) -> list[str]:
    lines = dated(part, "3D: without a pipeline, over WLB-LLM's best split")
    lines += [
        "Speed-up over the fastest dp x cp of WLB-LLM. Published: pretrain 1.07 to 1.20, prolong"
        " 1.05 to 1.12.",
        "",
    ]
    return lines + speed_ups(part["rows"], kernels=True)


def four_d_table(part: Record) -> list[str]:
    lines = dated(part, "4D: two stages, over WLB-LLM with 1F1B")
    said = "; ".join(f"{model} {data} {text}" for (model, data), text in PUBLISHED_4D.items())
    lines += [f"Speed-up over the fastest of WLB-LLM's splits. Published: {said}.", ""]
    return lines + speed_ups(part["rows"], kernels=False)


def speed_ups(rows: Sequence[Record], *, kernels: bool) -> list[str]:
    """One line for each model, data and context; GPUs side by side in a cell."""
    first = ["model", "data", "context", "GPUs", *(["kernel"] if kernels else [])]
    lines = [f"| {' | '.join([*first, 'WLB-LLM', *NAMES.values()])} |"]
    lines.append("|" + "---|" * (len(first) + 1 + len(NAMES)))
    groups: dict[tuple[Any, ...], list[Record]] = {}
    for r in rows:
        groups.setdefault((r["model"], r["data"], r["context"], r["kernel"]), []).append(r)
    for (model, data, context, kernel), same in groups.items():
        cells = [model, data, f"{context}K", ", ".join(str(r["gpus"]) for r in same)]
        cells += [KERNEL_NAMES[kernel]] if kernels else []
        cells.append(", ".join(f"{r['strategies']['wlb']['step_s']:.1f}" for r in same) + " s")
        for name in NAMES:
            gains = (
                f"{r['strategies']['wlb']['step_s'] / r['strategies'][name]['step_s']:.2f}"
                if name in r["strategies"]
                else "-"
                for r in same
            )
            cells.append(", ".join(gains))
        lines.append(f"| {' | '.join(cells)} |")
    return lines


def fastest(strategies: dict[str, Record]) -> float:
    return min(float(strategies[name]["step_s"]) for name in NAMES if name in strategies)


def pipeline_table(part: Record) -> list[str]:
    lines = dated(part, "Stages: would interleaving help?")
    lines += [
        "`distca`, given placement; the fastest number of micro-batches that fits. The last column"
        " is the step if interleaving two chunks on every stage halved all that idles: no schedule"
        " of such chunks can do better.",
        "",
        "| model, data, context, GPUs | stages | micro-batches | step | idle | GiB | interleaved,"
        " at best |",
        "|---|---|---|---|---|---|---|",
    ]
    for r in part["rows"]:
        where = f"{r['model']}, {r['data']}, {r['context']}K, {r['gpus']}"
        best = r["best"]
        if best is None:
            lines.append(f"| {where} | {r['pp']} | does not fit | | | | |")
            continue
        many = best["sizes"].rpartition("x ")[2].removesuffix(" micro-batches")
        many = many if many.isdecimal() else "1"
        halved = "-" if r["pp"] == 1 else f"{best['step_s'] * (1 - best['idle'] / 2):.1f} s"
        figures = [f"{best['step_s']:.1f} s", f"{best['idle']:.1%}", f"{best['memory_gib']:.0f}"]
        lines.append(f"| {where} | {r['pp']} | {many} | {' | '.join(figures)} | {halved} |")
    return lines


TABLES = {
    "gather": gather_table,
    "idle": idle_table,
    "cp": cp_table,
    "3d": three_d_table,
    "4d": four_d_table,
    "pipeline": pipeline_table,
}


def write(results: Record) -> None:
    """Into the page, between the marks."""
    text = PAGE.read_text()
    head, rest = text.split(BEGIN)
    _, tail = rest.split(END)
    PAGE.write_text(f"{head}{BEGIN}\n{report(results)}\n\n{END}{tail}")
