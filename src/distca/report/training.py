"""Training runs as text: a line for each step, and results after it.

The input is plain records, one for each step, as they are in ``metrics.jsonl``.
"""

from collections.abc import Sequence
from statistics import fmean, median
from typing import Any

from rich.table import Table

from distca.report import units
from distca.report.tables import Record, before_after_table

WARM_UP = 2  # steps that do not count for speeds: memory is allocated, kernels are chosen


def step_line(record: Record) -> str:
    line = (
        f"loss {record['loss']:.4f}  {record['tokens_per_s']:,.0f} tokens/s"
        f"  imbalance {units.ratio(record['imbalance_measured'])}"
    )
    line += f"  saved {record['tokens_saved']:,} tokens" if "tokens_saved" in record else ""
    line += f"  eval {record['eval_loss']:.4f}" if "eval_loss" in record else ""
    return line + ("  skipped: not finite" if record.get("skipped") else "")


def summary(records: Sequence[Record]) -> dict[str, Any]:
    """Summarizes a run.

    Speeds leave out the warm-up. They are all tokens over all seconds, since steps differ: a median
    would leave out the long ones.
    """
    if not records:
        return {"steps_taken": 0}
    steady = records[WARM_UP:] or records
    saved = sum(record.get("tokens_saved", 0) for record in records)
    evaluated = [record["eval_loss"] for record in records if "eval_loss" in record]
    return {
        "steps_taken": len(records),
        "step": records[-1]["step"] + 1,
        "loss": records[-1]["loss"],
        **({"eval_loss": evaluated[-1]} if evaluated else {}),
        "tokens": sum(record["tokens"] for record in records),
        **({"tokens_saved": saved} if saved else {}),
        "tokens_per_s": sum(r["tokens"] for r in steady) / sum(r["seconds"] for r in steady),
        "seconds": sum(record["seconds"] for record in records),
        **{
            name: fmean(record[name] for record in steady)
            for name in ("imbalance_before", "imbalance_planned", "imbalance_measured")
        },
        "bytes_per_step": fmean(record["bytes"] for record in records),
        "exposed_s": fmean(record["exposed_s"] for record in steady),
        **{
            name: [change for record in records for change in record.get(name, ())]
            for name in ("lost_servers", "joined_servers", "left_servers")
        },
        "stopped": records[-1]["stopped"],
    }


def outcome(result: Record) -> str:
    """Returns the end of a run in one sentence.

    result: its ``summary``, with steps, metrics and checkpoint.
    """
    steps, found = result["steps"], result["checkpoint"]
    if "faults" in result:
        rest = {name: value for name, value in result.items() if name != "faults"}
        return f"{outcome(rest)}\n{_faults(result['faults'])}"
    if not result["steps_taken"]:
        return f"all {steps} steps are done already ({found}): raise train.steps, or use --fresh"
    if result["stopped"]:
        where = "not saved"
        if found:
            then = "" if result["step"] == steps else "; the same command continues from there"
            where = f"saved in {found}{then}"
        return f"stopped after {result['step']} of {units.several(steps, 'step')}: {where}"
    lost = len(result["lost_servers"])
    joined = len(result["joined_servers"])
    places = []
    if "tokens_saved" in result:
        places += [f"{units.several(result['tokens_saved'], 'token')} saved by shared prefixes"]
    places += [f"went on without {units.several(lost, 'lost server')}"] if lost else []
    places += [f"{units.several(joined, 'server')} joined"] if joined else []
    places += [f"records in {result['metrics']}"]
    places += [f"saved in {found}"] if found else []
    places += [f"timeline in {result['trace']}"] if "trace" in result else []
    return (
        f"done: loss {result['loss']:.4f}, {result['tokens_per_s']:,.0f} tokens/s;"
        f" {', '.join(places)}"
    )


def _faults(counts: Record) -> str:
    restarts = "recovery was" if counts["recoveries"] == 1 else "recoveries were"
    return (
        f"{counts['delivered']} of {units.several(counts['planned'], 'planned fault')} delivered;"
        f" {counts['recoveries']} {restarts} completed"
    )


def comparison(
    colocated: Sequence[Record], disaggregated: Sequence[Record], tolerance: float
) -> dict[str, Any]:
    """Compares two runs over the same documents, whose steps were taken in turns.

    The speed-up is that of all steps together; those of single steps show how noisy it is.
    """
    sides = {"colocated": summary(colocated), "disaggregated": summary(disaggregated)}
    differences = [
        abs(ours["loss"] - theirs["loss"]) / abs(theirs["loss"])
        for theirs, ours in zip(colocated, disaggregated, strict=True)
    ]
    pairs = list(zip(colocated, disaggregated, strict=True))
    ratios = [before["seconds"] / after["seconds"] for before, after in pairs[WARM_UP:] or pairs]
    return sides | {
        "speed_up": sides["disaggregated"]["tokens_per_s"] / sides["colocated"]["tokens_per_s"],
        "speed_up_of_steps": {
            "lowest": min(ratios),
            "median": median(ratios),
            "highest": max(ratios),
        },
        "loss_difference": max(differences),
        "loss_tolerance": tolerance,
        "losses_agree": max(differences) <= tolerance,  # false if one is NaN
    }


def comparison_table(compared: Record) -> Table:
    before, after = compared["colocated"], compared["disaggregated"]
    table = before_after_table("", "colocated", "disaggregated")
    for name, key, show in (
        ("tokens/s", "tokens_per_s", "{:,.0f}".format),
        ("imbalance, planned", "imbalance_planned", units.ratio),
        ("imbalance, measured", "imbalance_measured", units.ratio),
        ("bytes exchanged per step (as bf16)", "bytes_per_step", units.size),
        ("exposed communication per step", "exposed_s", units.seconds),
        ("last loss", "loss", "{:.5f}".format),
    ):
        table.add_row(name, show(before[key]), show(after[key]))
    table.add_section()
    steps = {name: units.ratio(value) for name, value in compared["speed_up_of_steps"].items()}
    table.add_row("speed-up", "", units.ratio(compared["speed_up"]))
    table.add_row("  median of single steps", "", steps["median"])
    table.add_row("  lowest to highest", "", f"{steps['lowest']} to {steps['highest']}")
    table.add_row("largest relative difference of losses", "", f"{compared['loss_difference']:.1e}")
    return table


def verdict(compared: Record) -> str:
    """Returns in one sentence whether the losses of both runs agree."""
    steps = units.several(compared["colocated"]["steps_taken"], "step")
    if compared["losses_agree"]:
        return (
            f"The losses of all {steps} agree (relative difference at most"
            f" {compared['loss_tolerance']:g})."
        )
    return (
        f"The losses do NOT agree: they differ by up to {compared['loss_difference']:.1e} of their"
        f" size, where {compared['loss_tolerance']:g} is allowed."
    )
