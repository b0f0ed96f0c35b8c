"""What is known of a run, and what has happened to it."""

from collections.abc import Sequence
from dataclasses import dataclass, field

from distca.report.tables import Record

Event = tuple[int, str, str]  # step, kind and words


@dataclass(frozen=True)
class Run:
    """What is known of a run.

    records: one for each step, as in ``metrics.jsonl``.
    faults: lines of ``faults.jsonl``.
    config: its ``config.json``; empty if there is none.
    trace: the path of its timeline; empty if there is none.
    ticks: its ``ticks.json``; empty if there is none.
    """

    name: str
    records: Sequence[Record]
    faults: Sequence[Record] = ()
    config: Record = field(default_factory=dict)
    trace: str = ""
    ticks: Record = field(default_factory=dict)


def events_of(run: Run) -> list[Event]:
    """Returns all that has happened to a run, in the order of the steps."""
    found: list[Event] = []
    for line in run.faults:
        if "recovery" in line:
            found.append(
                (line["step"], "recovery", f"restart {line['recovery']} went on from here")
            )
        elif "fault" in line:
            found.append((line["step"], "fault", f"{line['fault']} (rank {line['rank']})"))
    for record in run.records:
        found += [
            (record["step"], "lost server", f"rank {loss['rank']}: {loss['how']}")
            for loss in record.get("lost_servers", ())
        ]
        found += [
            (record["step"], f"server {what}", f"rank {change['rank']}, before this step")
            for what in ("joined", "left")
            for change in record.get(f"{what}_servers", ())
        ]
        if record.get("skipped"):
            found.append((record["step"], "skipped", "the loss or its gradient was not finite"))
        if record.get("stopped"):
            found.append((record["step"], "stopped", "by a signal"))
    return sorted(found, key=lambda event: event[0])
