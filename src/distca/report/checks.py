"""The table of ``distca selftest`` and ``distca check``, and what it means for the user.

The input is their JSON records.
"""

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
        return f"{units.size(row['bytes_per_s'])}/s each way, per rank"
    if "error" in row:
        return f"error {row['error']:.1e}, limit {row['limit']:g}"
    return str(row["words"])


def selftest_words(rows: Sequence[Record], logs: str) -> str:
    """Returns what the checks of ``distca selftest`` mean for runs on the same ranks."""
    failed = [row["check"] for row in rows if row["passed"] is False]
    if failed:
        return (
            f"{len(failed)} of {units.several(len(rows), 'check')} failed: do not train on these"
            f" ranks before they pass. See {logs}, and `distca doctor`."
        )
    skipped = sum(row["passed"] is None for row in rows)
    rest = f"; {skipped} skipped, which need another number of ranks" if skipped else ""
    return (
        f"All checks passed{rest}: attention, gradients and checkpoints of these ranks are those"
        " of one device. You can train on them."
    )


def leaks_words(rows: Sequence[Record]) -> list[str]:
    """Returns what the checks of ``distca check`` mean for training with each attention."""
    words = []
    for name in dict.fromkeys(row["attention"] for row in rows):
        found = [row["passed"] for row in rows if row["attention"] == name]
        leaking, checked = found.count(False), len(found) - found.count(None)
        if not checked:
            words.append(f"With {name}, nothing could be checked.")
        elif leaking:
            words.append(
                f"With {name}, packed documents see each other in {leaking} of {checked} ways to"
                " call the model: the loss is not that of separate documents. Train only in a way"
                " that passes, or with another attention."
            )
        else:
            words.append(
                f"With {name}, packed documents are independent: you can train on packed batches."
            )
    return words
