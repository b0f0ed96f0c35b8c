"""Tables of plans. The input is plain records, as ``distca plan --json`` prints them."""

from collections.abc import Sequence

from rich.console import Group, RenderableType
from rich.table import Table

from distca.report import units
from distca.report.tables import (
    NOTHING,
    POLICY,
    Columns,
    Record,
    before_after_table,
    fitting_table,
    meanings,
)


def plan_table(record: Record) -> Table:
    """Returns one plan, before and after. record: see ``distca.cli.records``."""
    before, after, summary = record["before"], record["after"], record["summary"]
    table = before_after_table("one layer", "before", "after")
    for way, name in enumerate(("forward", "backward")):
        values = (side["imbalance_each"][way] for side in (before, after))
        table.add_row(f"imbalance, {name}", *map(units.ratio, values))
    table.add_section()
    for key, name in (
        ("bytes_total", "bytes, forward"),
        ("bytes_send_max", "  most sent by a rank"),
        ("bytes_recv_max", "  most received by a rank"),
    ):
        table.add_row(name, units.size(before[key]), units.size(after[key]))
    table.add_row("  lower bound", NOTHING, units.size(summary["bytes_lower_bound"]))
    table.add_row("  forward over lower bound", NOTHING, _over_bound(summary))
    table.add_row("bytes, backward", *(units.size(s["bytes_backward"]) for s in (before, after)))
    table.add_section()
    table.add_row("tasks", units.count(before["tasks"]), units.count(after["tasks"]))
    table.add_row("  moved", units.count(0), units.count(summary["tasks_moved"]))
    table.add_section()
    table.add_row("time to plan", NOTHING, units.seconds(summary["plan_s"]))
    table.add_row("time for one rank's layout", NOTHING, units.seconds(summary["layout_s"]))
    return table


def heading(summary: Record) -> str:
    tokens = units.several(summary["tokens"], "token")
    documents = units.several(summary["documents"], "document")
    ranks = units.several(summary["ranks"], "rank")
    if summary["servers"] != summary["ranks"]:
        ranks += f" ({units.count(summary['servers'])} serve)"
    return f"{tokens} in {documents} on {ranks}"


_COLUMNS: Columns = {
    "imbalance\nforward": lambda row: units.ratio(row["imbalance_each"][0]),
    "\nbackward": lambda row: units.ratio(row["imbalance_each"][1]),
    "bytes\nforward": lambda row: units.size(row["bytes_total"]),
    "worst\nrank": lambda row: units.size(max(row["bytes_send_max"], row["bytes_recv_max"])),
    "bytes\nbackward": lambda row: units.size(row["bytes_backward"]),
    "tokens\nper rank": lambda row: units.ratio(row["tokens_imbalance"]),
    "\ntasks": lambda row: units.count(row["tasks"]),
    "time to\nplan": lambda row: units.seconds(row["plan_s"]),
    "over\nbound": lambda row: _over_bound(row),
}
_MEANINGS = {  # by column
    "imbalance\nforward": "imbalance: the worst rank over the mean",
    "bytes\nforward": "bytes: one layer",
    "worst\nrank": "worst rank: the most that one rank sends or receives, forward",
    "tokens\nper rank": "tokens: the worst rank over the mean",
}


def compare_table(rows: Sequence[Record], width: int) -> RenderableType:
    """Returns a row for each policy, with the reason for those that cannot plan the batch.

    Below them is what the columns that fit ``width`` mean.

    rows: ``policy`` and either ``error`` or the figures of ``_COLUMNS``.
    """
    longest = max(len(_policy(row)) for row in rows)
    columns = {POLICY: lambda row: _policy(row).ljust(longest), **_COLUMNS}
    planned = [row for row in rows if "error" not in row]
    table, lines = fitting_table(columns, planned, width)
    for row, cells in zip(planned, lines, strict=True):
        table.add_row(*cells, style="cyan" if row["policy"].startswith("distca") else None)
    refused = Table.grid(padding=(0, 2, 0, 0))  # cells of a table cannot span columns
    refused.add_column(width=longest)
    for row in rows:
        if "error" in row:
            refused.add_row(_policy(row), row["error"], style="dim")
    return Group(table, *([refused] if refused.row_count else []), meanings(table, _MEANINGS))


def _policy(row: Record) -> str:
    return row["policy"].removesuffix(" placement")


def _over_bound(summary: Record) -> str:
    """Returns the traffic over its lower bound, which holds only for plans within the tolerance."""
    least = summary["bytes_lower_bound"]
    if not least or not summary["meets_bound"]:
        return NOTHING
    return units.ratio(summary["bytes_total"] / least)
