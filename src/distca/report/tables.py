"""Tables of plans. The input is plain records, as ``distca plan --json`` prints them."""

from collections.abc import Callable, Sequence
from typing import Any

from rich.box import SIMPLE_HEAD
from rich.console import Group, RenderableType
from rich.table import Table

from distca.report import units

NOTHING = "-"


def plan_table(record: dict[str, Any]) -> Table:
    """Returns one plan, before and after. record: see ``distca.cli.records``."""
    before, after, summary = record["before"], record["after"], record["summary"]
    table = Table(box=SIMPLE_HEAD, pad_edge=False, show_edge=False, header_style="bold")
    table.add_column("one layer", no_wrap=True)
    table.add_column("before", justify="right", style="yellow", no_wrap=True)
    table.add_column("after", justify="right", style="cyan", no_wrap=True)

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


def heading(summary: dict[str, Any]) -> str:
    """Returns what was planned, in one line."""
    tokens = units.several(summary["tokens"], "token")
    documents = units.several(summary["documents"], "document")
    ranks = units.several(summary["ranks"], "rank")
    if summary["servers"] != summary["ranks"]:
        ranks += f" ({units.count(summary['servers'])} serve)"
    return f"{tokens} in {documents} on {ranks}"


# Columns of the comparison, the most important first: a title of two lines, and a row's value.
_COLUMNS: dict[str, Callable[[dict[str, Any]], str]] = {
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
COMPARE_CAPTION = (
    "imbalance, tokens: the worst rank over the mean; bytes: one layer; worst rank: the most that"
    " one rank sends or receives, forward"
)
_GAP = 1  # and one more for the box between columns


def compare_table(rows: Sequence[dict[str, Any]], width: int) -> RenderableType:
    """Returns a row for each policy, with the reason for those that cannot plan the batch.

    rows: ``policy`` and either ``error`` or the figures of ``_COLUMNS``. As many columns are shown
    as fit into ``width`` without wrapping.
    """
    names = [row["policy"].removesuffix(" placement") for row in rows]
    first = max(map(len, names))
    table = Table(box=SIMPLE_HEAD, pad_edge=False, show_edge=False, header_style="bold")
    table.padding = (0, _GAP, 0, 0)
    table.add_column("\npolicy", width=first)
    columns = []
    left = width - first - _GAP
    for title, show in _COLUMNS.items():
        cells = [NOTHING if "error" in row else show(row) for row in rows]
        needed = max(map(len, [*title.split("\n"), *cells])) + _GAP + 1
        if needed > left:
            break
        left -= needed
        table.add_column(title, justify="right", no_wrap=True)
        columns.append(cells)
    refused = Table.grid(padding=(0, _GAP + 1, 0, 0))  # cells of a table cannot span columns
    refused.add_column(width=first)
    refused.add_column()
    for name, row, *cells in zip(names, rows, *columns, strict=True):
        if "error" in row:
            refused.add_row(name, row["error"], style="dim")
        else:
            table.add_row(name, *cells, style="cyan" if name.startswith("distca") else None)
    return Group(table, refused) if refused.row_count else table


def _over_bound(summary: dict[str, Any]) -> str:
    """Returns the traffic over its lower bound, which holds only for plans within the tolerance."""
    least = summary["bytes_lower_bound"]
    if not least or not summary["meets_bound"]:
        return NOTHING
    return units.ratio(summary["bytes_total"] / least)
