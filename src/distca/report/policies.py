"""Real steps of several policies as text, from the figures of ``distca bench policies``."""

from collections.abc import Mapping, Sequence
from statistics import fmean, median
from typing import Any

from rich.console import Group

from distca.report import units
from distca.report.tables import NOTHING, POLICY, Columns, Record, fitting_table, meanings

LOSS_TOLERANCE = 1e-3  # relative; steps in bfloat16 differ by some 1e-5
_MEANINGS = {  # by column
    "speed-\nup": "speed-up: tokens/s over those of the first policy, of all steps together",
    "single\nsteps": "single steps: least and most",
    "atten-\ntion": "attention: seconds of the busiest rank over the mean",
    "\nexposed": "exposed: share of the time in which the rank that waits most for peers does so",
    "\nsent": "sent: by all ranks, in a step",
    "\nmemory": "memory: of the fullest rank, beyond weights and optimizer states",
}


def heading(record: Record) -> str:
    """Returns what all policies have in common."""
    share = " that share it" if record["shares_gpu"] else ""
    words = [
        f"{units.several(record['ranks'], 'rank')}{share}: {record['device']}",
        f"{units.several(record['layers'], 'layer')} of {record['model']}",
        f"{record['lengths']} up to {units.tokens(record['context'])}",
        f"{units.tokens(record['tokens'])} tokens a rank",
        f"cost {record['cost']}",
    ]
    return ", ".join(words)


def round_line(figures: Mapping[str, Record]) -> str:
    """Returns one step of all policies in a line."""
    return ", ".join(f"{name} {units.seconds(one['seconds'])}" for name, one in figures.items())


def figures_of(
    names: Sequence[str],
    steps: Sequence[Mapping[str, Record]],
    refused: Mapping[str, str],
    about: Record,
) -> dict[str, Any]:
    """Returns the figures of each policy over all of its steps, and why others have none.

    steps: the figures of each step, by policy.
    """
    rows, first = [], [step.get(names[0]) for step in steps]
    for name in names:
        pairs = [
            (step[name], base) for step, base in zip(steps, first, strict=True) if name in step
        ]
        if not pairs:
            continue
        taken = [one for one, _ in pairs]
        seconds = [one["seconds"] for one in taken]
        tokens = about["ranks"] * about["tokens"] * len(taken)
        busy = sum(one["attention_mean"] for one in taken)
        row = {
            "policy": name,
            "seconds": seconds,
            "tokens_per_s": tokens / sum(seconds),
            "attention_imbalance": sum(one["attention_worst"] for one in taken) / busy,
            "exposed_share": sum(one["exposed"] for one in taken) / sum(seconds),
            "bytes": fmean(one["bytes"] for one in taken),
            "step_bytes": max(one["step_bytes"] for one in taken),
            "alloc_retries": sum(one["alloc_retries"] for one in taken),
            "losses": [one["loss"] for one in taken],
        }
        both = [(one, base) for one, base in pairs if base is not None]
        rows.append(row | _compared(both))
    return {"steps": len(steps), "policies": rows, "refused": dict(refused)}


def _compared(pairs: Sequence[tuple[Record, Record]]) -> dict[str, Any]:
    """Compares steps of a policy with those of the first one."""
    if not pairs:
        return {"speed_up": None, "speed_up_of_steps": None, "loss_difference": None}
    ratios = [base["seconds"] / one["seconds"] for one, base in pairs]
    before, after = (sum(side["seconds"] for side in sides) for sides in zip(*pairs, strict=True))
    differences = [abs(one["loss"] - base["loss"]) / abs(base["loss"]) for one, base in pairs]
    return {
        "speed_up": after / before,
        "speed_up_of_steps": [min(ratios), median(ratios), max(ratios)],
        "loss_difference": max(differences),
    }


COLUMNS: Columns = {
    POLICY: lambda row: row["policy"],
    "s per\nstep": lambda row: units.seconds(fmean(row["seconds"])),
    "speed-\nup": lambda row: _ratio(row["speed_up"]),
    "single\nsteps": lambda row: _range(row["speed_up_of_steps"]),
    "atten-\ntion": lambda row: units.ratio(row["attention_imbalance"]),
    "\nexposed": lambda row: f"{row['exposed_share']:.1%}",
    "\nsent": lambda row: units.size(row["bytes"]),
    "\nmemory": lambda row: units.size(row["step_bytes"]) if row["step_bytes"] else NOTHING,
    "\ntokens/s": lambda row: f"{row['tokens_per_s']:,.0f}",
    "loss\ndiffers": lambda row: _share(row["loss_difference"]),
}


def policies_table(record: Record, width: int) -> Group:
    """Returns a row for each policy with the columns that fit ``width``, and what they mean."""
    table, lines = fitting_table(COLUMNS, record["policies"], width)
    for cells in lines:
        table.add_row(*cells)
    return Group(table, meanings(table, _MEANINGS))


def verdicts(record: Record) -> list[tuple[str, str | None]]:
    """Returns sentences and their styles: which policy is fastest, and what to look at."""
    rows = record["policies"]
    compared = [row for row in rows if row["speed_up"] is not None]
    found: list[tuple[str, str | None]] = []
    if compared:
        first, best = compared[0], max(compared, key=lambda row: row["speed_up"])
        steps = units.several(len(best["seconds"]), "step")
        found.append((f"{_fastest(first, best)}, over {steps}.", None))
    if short := [row["policy"] for row in rows if row["alloc_retries"]]:
        found.append(
            (
                f"Ranks were short of memory with {', '.join(short)}, which makes steps slower:"
                " compare fewer --policies, or give fewer --tokens or --layers.",
                "yellow",
            )
        )
    for name, why in record["refused"].items():
        found.append((f"{name} did not run to the end: {why}", "yellow"))
    if differing := [row for row in compared if not row["loss_difference"] <= LOSS_TOLERANCE]:
        names = ", ".join(f"{row['policy']} by {row['loss_difference']:.1e}" for row in differing)
        found.append(
            (
                f"Losses do NOT agree with those of {compared[0]['policy']}: {names} of their size,"
                f" where {LOSS_TOLERANCE:g} is allowed.",
                "bold red",
            )
        )
    return found


def _fastest(first: Record, best: Record) -> str:
    if best is first:
        return f"{first['policy']} is the fastest here"
    return f"{best['policy']} is {units.ratio(best['speed_up'])} as fast as {first['policy']}"


def _ratio(value: float | None) -> str:
    return NOTHING if value is None else units.ratio(value)


def _range(values: Sequence[float] | None) -> str:
    return NOTHING if values is None else f"{values[0]:.2f}-{values[-1]:.2f}"


def _share(value: float | None) -> str:
    return NOTHING if value is None else f"{value:.0e}"
