"""Tables and sentences about simulations, from the records of ``distca simulate --json``."""

from collections.abc import Sequence

from rich.console import Group, RenderableType
from rich.text import Text

from distca.report import units
from distca.report.tables import NOTHING, POLICY, Columns, Record, fitting_table, meanings


def heading(record: Record) -> list[str]:
    machines, runs = record["cluster"], record["runs"]
    gpus = ", ".join(units.count(run["gpus"]) for run in runs)
    sequences = ", ".join(units.count(run["sequences"]) for run in runs)
    lines = [
        f"{record['model']['name']} on {gpus} GPUs ({machines['name']}:"
        f" {machines['gpus_per_node']} in a node, {units.size(machines['memory_bytes'])} each,"
        f" {units.bandwidth(machines['inside']['bytes_per_s'])} inside,"
        f" {units.bandwidth(machines['across']['bytes_per_s'])} across nodes)",
        f"{sequences} sequences of {units.count(record['context'])} tokens a step,"
        f" {record['lengths']}, {record['mask']}; mean of {_steps(record)}; kernels"
        f" {machines['profile']}",
    ]
    lines += [f"deviations: {words}"] if (words := _deviations(machines)) else []
    return lines


def _steps(record: Record) -> str:
    steps = units.several(record["batches"] * len(record["seeds"]), "step")
    return steps if len(record["seeds"]) == 1 else f"{steps} of {len(record['seeds'])} seeds"


def _deviations(machines: Record) -> str:
    words = [
        f"{what} vary by {machines[key]:.0%}"
        for what, key in (("kernels", "jitter"), ("transfers", "link_jitter"))
        if machines[key]
    ]
    if share := machines["transfer_sms"]:
        words.append(f"transfers occupy {_share(share)} of the SMs")
    words += [f"GPU {gpu} at {speed:g} x speed" for gpu, speed in machines["slow"].items()]
    if machines["slow"] and not machines["known"]:
        words.append("unknown to the planner")
    return ", ".join(words)


COLUMNS: Columns = {
    "\nGPUs": lambda one: units.count(one["gpus"]),
    POLICY: lambda one: one["policy"],
    "\nstep": lambda one: units.seconds(one["step_s"]),
    "speed-\nup": lambda one: units.ratio(one["speed_up"]) if one["speed_up"] else NOTHING,
    "over\nsteps": lambda one: _spread(one["batch_speed_ups"]),
    "pp x dp x\ncp x tp": lambda one: " x ".join(
        str(one["sizes"][axis]) for axis in ("pp", "dp", "cp", "tp")
    ),
    "\nmemory": lambda one: units.size(one["memory_bytes"]),
    "\nidle": lambda one: _share(one["idle"]),
    "\nexposed": lambda one: _share(one["exposed"]),
    "micro-\nbatches": lambda one: str(one["sizes"]["micro_batches"]),
    "sent by\na GPU": lambda one: units.size(one["bytes_per_gpu"]),
    "\ntokens/s": lambda one: f"{one['tokens_per_s']:,.0f}",
    "TFLOP/s\na GPU": lambda one: f"{one['tflops_per_gpu']:.0f}",
    "time to\nplan": lambda one: units.seconds(one["plan_s"]),
}
_FIGURES = ("step_s", "memory_bytes", "idle", "exposed", "bytes_per_gpu")
_MEANINGS = {  # by column
    "speed-\nup": "speed-up: over the best strategy without disaggregation, mean and range over the"
    " steps",
    "\nidle": "idle: fraction of all GPUs' time",
    "\nexposed": "exposed: fraction of the step that faster links between nodes would save",
}
CAPTION = "; ".join(_MEANINGS.values())  # of all columns


def simulation_table(runs: Sequence[Record], width: int) -> RenderableType:
    """Returns a table with a section for each number of GPUs and the columns that fit ``width``.

    Below it are remarks, and what these columns mean.
    """
    known = [
        {**one, "gpus": run["gpus"]}
        for run in runs
        for one in run["strategies"]
        if "error" not in one and one["policy"] not in repeated(run)
    ]
    columns = dict(COLUMNS)
    if len(runs) == 1:
        del columns["\nGPUs"]
    if not any(len(one["batch_speed_ups"]) > 1 for one in known):
        del columns["over\nsteps"]
    table, lines = fitting_table(columns, known, width)
    for one, cells, following in zip(known, lines, [*known[1:], None], strict=True):
        style = "red" if not one["fits"] else "cyan" if one["disaggregated"] else None
        last = following is not None and following["gpus"] != one["gpus"]
        table.add_row(*cells, style=style, end_section=last)
    return Group(table, *_remarks(runs), meanings(table, _MEANINGS))


def repeated(run: Record) -> dict[str, str]:
    """Returns policies whose figures are all those of another one, by name, with the other's name.

    Without disaggregation, context-parallel policies with cp 1 are such: they are colocated.
    """
    first: dict[str, str] = {}
    found = {}
    for one in run["strategies"]:
        if "error" in one or one["disaggregated"]:
            continue
        figures = [f"{one[name]:.6g}" for name in _FIGURES]
        other = first.setdefault(f"{one['sizes']} {figures}", one["policy"])
        if other != one["policy"]:
            found[one["policy"]] = other
    return found


def _remarks(runs: Sequence[Record]) -> list[Text]:
    """Returns remarks on strategies that do not fit, cannot run, or repeat another."""
    names_of: dict[tuple[str, str], list[str]] = {}
    for run in runs:
        where = f"{units.count(run['gpus'])} GPUs: " if len(runs) > 1 else ""
        unfit = f"no sizes fit into {units.size(run['limit_bytes'])}; those above need least"
        for name, other in repeated(run).items():
            words = f"{where}same sizes and figures as {other}"
            names_of.setdefault((words, "dim"), []).append(name)
        for one in run["strategies"]:
            if "error" in one or not one["fits"]:
                words = where + one.get("error", unfit)
                names_of.setdefault((words, "dim" if "error" in one else "red"), []).append(
                    one["policy"]
                )
    return [
        Text(f"\n{'; '.join(names)}: {words}", style) for (words, style), names in names_of.items()
    ]


def verdict_text(run: Record) -> str:
    """Returns a sentence on whether disaggregation helps; empty if there is nothing to compare."""
    result = run["verdict"]
    ours, other = result["ours"], result["other"]
    if ours is None or other is None:
        return _one_sided(run)
    others = f"{other['policy']}, {other['sizes']}"
    if result["gain"] == "faster":
        words = f"{ours['policy']} is {result['speed_up']:.2f} x as fast as the best of the others"
        gained = f"idle {_share(other['idle'])} -> {_share(ours['idle'])}"
        gained += f", exposed {_share(other['exposed'])} -> {_share(ours['exposed'])}"
        return f"{words} ({others}): {gained}."
    words = f"{ours['policy']} is {result['speed_up']:.2f} x as fast as {others}"
    if result["gain"] == "even":
        noise = f"within the noise of {result['noise']:.2f}"
        said = f"Disaggregation makes no difference here: {words}, {noise}."
    else:
        said = f"Disaggregation does not help here: {words}."
    if (enough := result["enough"]) is None:
        return f"{said} {_reason(result)}."
    within = f"{max(enough['busiest'] - 1, 0.001):.1%}"
    return (
        f"{said} Your documents balance to within {within} without moving anything: use"
        f" {enough['policy']}."
    )


def _spread(speed_ups: Sequence[float]) -> str:
    return f"{min(speed_ups):.2f}-{max(speed_ups):.2f}" if speed_ups else NOTHING


def _reason(result: Record) -> str:
    ours, other = result["ours"], result["other"]
    match result["because"]:
        case "noise":
            return "The batches differ too much to tell: simulate more of them (--batches, --seed)"
        case "links":
            slow = f"{_share(ours['exposed'])} of its step is exposed communication:"
            if (needed := result["needed_bytes_per_s"]) is None:
                return f"{slow} faster links between nodes would help the others as much"
            enough = f"from about {units.bandwidth(needed)} between nodes it would help"
            return f"{slow} the links are too slow; {enough}"
        case "attention":
            return f"Attention is only {_share(result['attention'])} of the work at this context"
        case "slow":
            why = "for whose linear layers all others wait"
            if not result["known"]:
                why = "whose speeds the planner does not know"
            return f"It idles {_share(ours['idle'])} of the time because of slow GPUs, {why}"
        case "even":
            return (
                f"Attention is even without it: the busiest worker of {other['policy']} has"
                f" {result['busiest']:.2f} x the mean"
            )
        case "little":
            busy = _share(1 - other["idle"])
            return f"{other['policy']} computes {busy} of the time, so little is left to gain"
    return f"It idles {_share(ours['idle'])} of the time too: attention is not what others wait for"


def _one_sided(run: Record) -> str:
    """Returns the sentence for a comparison in which one side is missing or does not fit."""
    strategies = [one for one in run["strategies"] if "error" not in one]
    ours, others = ([w for w in strategies if w["disaggregated"] == side] for side in (True, False))
    if not ours or not others:
        return ""
    limit = units.size(run["limit_bytes"])
    if not any(one["fits"] for one in strategies):
        least = min(strategies, key=lambda one: one["memory_bytes"])
        return (
            f"Nothing fits into {limit}: the smallest need is {units.size(least['memory_bytes'])}"
            f" ({least['policy']}, {least['sizes_text']}); use more GPUs, or try --sweep."
        )
    if run["verdict"]["ours"] is None:
        return f"Disaggregation does not help here: no disaggregated strategy fits into {limit}."
    best = run["verdict"]["ours"]
    return f"Only disaggregation fits into {limit}: {best['policy']}, {best['sizes']}."


def _share(value: float) -> str:
    """Formats a fraction as 12% or 1.4%, and never as -0.0%."""
    return f"{value:.0%}" if abs(value) >= 0.0995 else f"{abs(value):.1%}"
