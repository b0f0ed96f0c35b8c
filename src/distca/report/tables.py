"""What all tables have in common: their style, and how many columns fit a terminal."""

from collections.abc import Callable, Mapping, Sequence
from typing import Any

from rich.box import SIMPLE_HEAD
from rich.table import Table
from rich.text import Text

NOTHING = "-"
POLICY = "\npolicy"  # the title of the one column that is aligned left
Record = Mapping[str, Any]
Columns = Mapping[str, Callable[[Record], str]]  # by title, the most important column first


def new_table(*titles: str, compact: bool = False) -> Table:
    """Returns a table without rows, whose cells do not wrap."""
    table = Table(box=SIMPLE_HEAD, pad_edge=False, show_edge=False, header_style="bold")
    if compact:
        table.padding = (0, 1, 0, 0)
    for title in titles:
        table.add_column(title, justify="left" if title == POLICY else "right", no_wrap=True)
    return table


def before_after_table(title: str, before: str, after: str) -> Table:
    """Returns a table without rows that compares figures of two sides.

    Its cells wrap in a narrow terminal, since there is no column to leave out.
    """
    table = new_table(title, before, after)
    for column in table.columns:
        column.no_wrap, column.overflow = False, "fold"
    table.columns[0].justify = "left"
    table.columns[1].style, table.columns[2].style = "yellow", "cyan"
    return table


def fitting_table(
    columns: Columns, rows: Sequence[Record], width: int
) -> tuple[Table, list[tuple[str, ...]]]:
    """Returns a table with the first columns that fit ``width``, and the cells of each row."""
    shown: dict[str, list[str]] = {}
    for title, show in columns.items():
        cells = [show(row) for row in rows]
        width -= max(map(len, [*title.split("\n"), *cells])) + 2  # spaces between columns
        if shown and width < 0:
            break
        shown[title] = cells
    return new_table(*shown, compact=True), list(zip(*shown.values(), strict=True))


def meanings(table: Table, known: Mapping[str, str]) -> Text:
    """Returns what the columns of a table mean, by their titles, without those that did not fit."""
    shown = [known[str(one.header)] for one in table.columns if str(one.header) in known]
    return Text(f"\n{'; '.join(shown)}" if shown else "", "dim")


def facts(rows: Mapping[str, str]) -> Table:
    """Returns names and values in two columns."""
    table = Table.grid(padding=(0, 2, 0, 0))
    table.add_column(style="bold", no_wrap=True)
    table.add_column(overflow="fold")
    for name, value in rows.items():
        table.add_row(name, value)
    return table
