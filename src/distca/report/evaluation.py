"""The evaluation of a checkpoint as a table."""

from rich.table import Table

from distca.report import units
from distca.report.tables import Record, new_table


def evaluation_table(result: Record) -> Table:
    """Returns loss and perplexity by document length, and of all targets in the last row.

    result: loss, perplexity and targets, and ``by_length`` the same for each class of lengths.
    """
    table = new_table("tokens of a document", "targets", "loss", "perplexity")
    table.columns[0].justify = "left"
    for name, figures in (*result["by_length"].items(), ("all", result)):
        perplexity = f"{figures['perplexity']:.4g}"
        length = name.replace("_", " ")
        table.add_row(length, units.count(figures["targets"]), f"{figures['loss']:.4f}", perplexity)
    return table
