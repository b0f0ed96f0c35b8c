"""A timeline of a simulated step, from the trace that is written for Perfetto."""

from collections.abc import Sequence
from typing import Any

from distca.report.tables import Record

MOST_EVENTS = 200_000  # more are left to Perfetto


def timeline_record(trace: Record) -> dict[str, Any] | None:
    """Returns the events of a trace by columns, for the timeline of a page.

    A row is a stream of a rank. None if there are too many events.
    """
    events: Sequence[Record] = trace["traceEvents"]
    shown = sorted((one for one in events if one["ph"] == "X"), key=lambda one: one["ts"])
    if len(shown) > MOST_EVENTS:
        return None
    ranks = {one["pid"]: one["args"]["name"] for one in events if one["name"] == "process_name"}
    streams = {
        (one["pid"], one["tid"]): one["args"]["name"]
        for one in events
        if one["name"] == "thread_name"
    }
    rows = sorted({(one["pid"], one["tid"]) for one in shown})
    places = {row: number for number, row in enumerate(rows)}
    names, kinds = list[str](), list[str]()
    for one in shown:
        names.append(one["name"])
        kinds.append(one["name"].split(",")[0].split(" ")[0])
    all_names, all_kinds = list(dict.fromkeys(names)), list(dict.fromkeys(kinds))
    name_of = {name: number for number, name in enumerate(all_names)}
    kind_of = {kind: number for number, kind in enumerate(all_kinds)}
    return {
        "rows": [f"{ranks[pid]}, {streams[pid, tid]}" for pid, tid in rows],
        "names": all_names,
        "kinds": all_kinds,
        "row": [places[one["pid"], one["tid"]] for one in shown],
        "name": [name_of[name] for name in names],
        "kind": [kind_of[kind] for kind in kinds],
        "from": [round(one["ts"] / 1e6, 7) for one in shown],
        "to": [round((one["ts"] + one["dur"]) / 1e6, 7) for one in shown],
    }
