"""Simulations as people read them. Input is plain records, as ``distca simulate --json`` prints."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any

from rich.box import SIMPLE_HEAD
from rich.console import Group, RenderableType
from rich.table import Table
from rich.text import Text

from distca.report import units

NOTHING = "-"
Record = Mapping[str, Any]


def heading(record: Record) -> list[str]:
    """What is simulated, one line each."""
    machines, runs = record["cluster"], record["runs"]
    gpus = ", ".join(units.count(run["gpus"]) for run in runs)
    sequences = ", ".join(units.count(run["sequences"]) for run in runs)
    lines = [
        f"{record['model']['name']} on {gpus} GPUs ({machines['name']}:"
        f" {machines['gpus_per_node']} in a node, {units.size(machines['memory_bytes'])} each,"
        f" {units.size(machines['inside']['bytes_per_s'])}/s inside,"
        f" {units.size(machines['across']['bytes_per_s'])}/s across nodes)",
        f"{sequences} sequences of {units.count(record['context'])} tokens a step,"
        f" {record['lengths']}, {record['mask']}; mean of"
        f" {units.several(record['batches'], 'step')}; kernels {machines['profile']}",
    ]
    lines += [f"not ideal: {words}"] if (words := _not_ideal(machines)) else []
    return lines


def _not_ideal(machines: Record) -> str:
    words = [
        f"{what} vary by {machines[key]:.0%}"
        for what, key in (("kernels", "jitter"), ("exchanges", "link_jitter"))
        if machines[key]
    ]
    words += [f"GPU {gpu} at {speed:g} x speed" for gpu, speed in machines["slow"].items()]
    if machines["slow"] and not machines["known"]:
        words.append("which the planner is not told")
    return ", ".join(words)


# Columns, most wanted first: a title of two lines, and what a way shows.
_COLUMNS: dict[str, Callable[[Record], str]] = {
    "\nstep": lambda way: units.seconds(way["step_s"]),
    "speed-\nup": lambda way: units.ratio(way["speed_up"]) if way["speed_up"] else NOTHING,
    "pp x dp x\ncp x tp": lambda way: " x ".join(
        str(way["sizes"][axis]) for axis in ("pp", "dp", "cp", "tp")
    ),
    "\nmemory": lambda way: units.size(way["memory_bytes"]),
    "\nidle": lambda way: _share(way["idle"]),
    "\nexposed": lambda way: _share(way["exposed"]),
    "micro-\nbatches": lambda way: str(way["sizes"]["micro_batches"]),
    "sent by\na GPU": lambda way: units.size(way["bytes_per_gpu"]),
    "\ntokens/s": lambda way: f"{way['tokens_per_s']:,.0f}",
    "TFLOP/s\na GPU": lambda way: f"{way['tflops_per_gpu']:.0f}",
    "time to\nplan": lambda way: units.seconds(way["planning_s"]),
}
CAPTION = (
    "speed-up: over the best that computes attention at home; idle: of all GPUs' time; exposed: of"
    " the step, that faster links between nodes would save"
)
_GAP = 1  # and one more for the box between columns


def simulation_table(runs: Sequence[Record], width: int) -> RenderableType:
    """Ways side by side, a section for each number of GPUs; as many columns as fit ``width``."""
    known = [(run, way) for run in runs for way in run["ways"] if "error" not in way]
    several = len(runs) > 1
    table = Table(box=SIMPLE_HEAD, pad_edge=False, show_edge=False, header_style="bold")
    table.padding = (0, _GAP, 0, 0)
    shown: list[tuple[str, list[str]]] = []
    if several:
        shown.append(("\nGPUs", [units.count(run["gpus"]) for run, _ in known]))
    shown.append(("\npolicy", [way["policy"] for _, way in known]))
    left = width - sum(_width(title, cells) for title, cells in shown)
    for title, show in _COLUMNS.items():
        cells = [show(way) for _, way in known]
        if _width(title, cells) > left:
            break
        left -= _width(title, cells)
        shown.append((title, cells))
    for title, _ in shown:
        table.add_column(title, justify="left" if title == "\npolicy" else "right", no_wrap=True)
    last = runs[0]
    rows = zip(*(cells for _, cells in shown), strict=True)
    for (run, way), row in zip(known, rows, strict=True):
        if run["gpus"] != last["gpus"]:
            table.add_section()
        style = "red" if not way["fits"] else "cyan" if way["disaggregated"] else None
        table.add_row(*row, style=style)
        last = run
    return Group(table, *_remarks(runs))


def _width(title: str, cells: Sequence[str]) -> int:
    return max(map(len, [*title.split("\n"), *cells])) + _GAP + 1


def _remarks(runs: Sequence[Record]) -> list[Text]:
    """On what does not fit, and what cannot run."""
    said: dict[tuple[str, str], list[str]] = {}
    for run in runs:
        where = f"{units.count(run['gpus'])} GPUs: " if len(runs) > 1 else ""
        unfit = f"no sizes fit into {units.size(run['limit_bytes'])}; those above need least"
        for way in run["ways"]:
            if "error" in way or not way["fits"]:
                words = where + way.get("error", unfit)
                said.setdefault((words, "dim" if "error" in way else "red"), []).append(
                    way["policy"]
                )
    return [Text(f"\n{'; '.join(names)}: {words}", style) for (words, style), names in said.items()]


def verdict(run: Record) -> str:
    """Whether disaggregation pays, in one sentence; empty where there is nothing to compare."""
    said = run["verdict"]
    ours, other = said["ours"], said["other"]
    if ours is None or other is None:
        return _one_sided(run)
    others = f"{other['policy']}, {other['sizes']}"
    if said["pays"]:
        words = f"{ours['policy']} is {said['speed_up']:.2f} x as fast as the best of the others"
        gained = f"idle {_share(other['idle'])} -> {_share(ours['idle'])}"
        gained += f", exposed {_share(other['exposed'])} -> {_share(ours['exposed'])}"
        return f"{words} ({others}): {gained}."
    words = (
        f"It does not pay here: {ours['policy']} is {said['speed_up']:.2f} x as fast as {others}"
    )
    return f"{words}. {_reason(said)}."


def _reason(said: Record) -> str:
    ours, other = said["ours"], said["other"]
    match said["because"]:
        case "links":
            slow = f"{_share(ours['exposed'])} of its step is exposed communication:"
            if (needed := said["needed_bytes_per_s"]) is None:
                return f"{slow} faster links between nodes would help the others as much"
            enough = f"from about {units.size(needed)}/s between nodes it would pay"
            return f"{slow} the links are too slow; {enough}"
        case "attention":
            return f"Attention is only {_share(said['attention'])} of the work at this context"
        case "slow":
            why = "which hold up the linear layers of all"
            if not said["known"]:
                why = "of which the planner is not told"
            return f"It idles {_share(ours['idle'])} of the time because of slow GPUs, {why}"
        case "even":
            return (
                f"Attention is even without it: the busiest worker of {other['policy']} has"
                f" {said['busiest']:.2f} x the mean"
            )
        case "little":
            busy = _share(1 - other["idle"])
            return f"{other['policy']} computes {busy} of the time, so little is left to win"
    return f"It idles {_share(ours['idle'])} of the time too: attention is not what others wait for"


def _one_sided(run: Record) -> str:
    """Where one side, or none, fits or was asked for."""
    ways = [way for way in run["ways"] if "error" not in way]
    ours, others = ([w for w in ways if w["disaggregated"] == side] for side in (True, False))
    if not ours or not others:
        return ""
    limit = units.size(run["limit_bytes"])
    if not any(way["fits"] for way in ways):
        least = min(ways, key=lambda way: way["memory_bytes"])
        return (
            f"Nothing fits into {limit}: the smallest need is {units.size(least['memory_bytes'])}"
            f" ({least['policy']}, {least['sizes_said']}); take more GPUs, or try --sweep."
        )
    if run["verdict"]["ours"] is None:
        return f"It does not pay here: nothing that disaggregates fits into {limit}."
    best = run["verdict"]["ours"]
    return f"Only disaggregation fits into {limit}: {best['policy']}, {best['sizes']}."


def _share(value: float) -> str:
    """12%, 1.4%; never -0.0%"""
    return f"{value:.0%}" if abs(value) >= 0.0995 else f"{abs(value):.1%}"
