"""The table of ``distca selftest`` and ``distca check``. The input is their JSON records."""

from collections.abc import Sequence

from rich.table import Table
from rich.text import Text

from distca.report import units
from distca.report.tables import Record, new_table

VERDICTS = {
    None: Text("skipped", "dim"),
    True: Text("pass", "green"),
    False: Text("FAIL", "bold red"),
}


def checks_table(rows: Sequence[Record]) -> Table:
    """Returns one line for each check.

    rows: ``check``, ``passed`` (None: skipped) and ``error`` with ``limit``, ``bytes_per_s`` or
    ``words``.
    """
    table = new_table()
    table.add_column("check", no_wrap=True)
    table.add_column("", no_wrap=True)
    table.add_column("figure", overflow="fold")
    for row in rows:
        table.add_row(row["check"], VERDICTS[row["passed"]], _figure(row))
    return table


def _figure(row: Record) -> str:
    if "bytes_per_s" in row:
        return f"{units.size(row['bytes_per_s'])}/s each way, on every rank"
    if "error" in row:
        return f"error {row['error']:.1e}, limit {row['limit']:g}"
    return str(row["words"])
