"""The table of ``distca selftest``. Input is plain records, as its ``--json`` prints them."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from rich.box import SIMPLE_HEAD
from rich.table import Table
from rich.text import Text

from distca.report import units


def checks_table(rows: Sequence[Mapping[str, Any]]) -> Table:
    """rows: ``check``, ``passed`` (None: not possible here) and ``error`` with ``limit``,
    ``bytes_per_s`` or ``words``."""
    table = Table(box=SIMPLE_HEAD, pad_edge=False, show_edge=False, header_style="bold")
    table.add_column("check", no_wrap=True)
    table.add_column("", no_wrap=True)
    table.add_column("figure", overflow="fold")
    for row in rows:
        table.add_row(row["check"], _verdict(row["passed"]), _figure(row))
    return table


def _verdict(passed: bool | None) -> Text:
    if passed is None:
        return Text("skipped", "dim")
    return Text("pass", "green") if passed else Text("FAIL", "bold red")


def _figure(row: Mapping[str, Any]) -> str:
    if "bytes_per_s" in row:
        return f"{units.size(row['bytes_per_s'])}/s each way, on every rank"
    if "error" in row:
        return f"off by {row['error']:.1e}, allowed {row['limit']:g}"
    return str(row["words"])
