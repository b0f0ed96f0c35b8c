"""The load of each rank as bars of text, before and after, for a terminal."""

from typing import Any

import numpy as np
import numpy.typing as npt
from rich.table import Table
from rich.text import Text

from distca.report import units

MOST_ROWS = 16
LONGEST_BAR = 48  # characters; longer bars show no more detail
_BLOCKS = " ▏▎▍▌▋▊▉█"  # eighths of a character

Floats = npt.NDArray[np.float64]


def load_bars(record: dict[str, Any], width: int, *, ascii_only: bool = False) -> Table:
    """Returns the attention of each rank in a terminal of ``width`` columns.

    record: ``load_before`` and ``load_after``, each [2, ranks], forward and backward, where 1 is
    the mean of that direction. The bars show the mean of both directions.
    """
    before, after = (np.mean(record[key], axis=0) for key in ("load_before", "load_after"))
    shown = choose_ranks(before, after)
    top = float(max(before.max(), after.max(), 1.0))
    label = len(units.ratio(top))
    rank = max(len("rank"), len(str(len(after) - 1)))
    length = max(4, min(LONGEST_BAR, (width - rank - 2 * label - 8) // 2))

    table = Table(box=None, pad_edge=False, padding=(0, 2, 0, 0), show_edge=False)
    table.add_column("rank", justify="right", style="dim", width=rank)
    for title in ("before", "after"):
        table.add_column(title, width=length + 1 + label, no_wrap=True)
    for index in shown.tolist():
        table.add_row(
            str(index),
            *(
                Text(f"{bar(load / top, length, ascii_only)} ", style).append(
                    units.ratio(load).rjust(label), "default"
                )
                for load, style in ((before[index], "yellow"), (after[index], "cyan"))
            ),
        )
    return table


def caption(num_ranks: int) -> str:
    """Returns what the bars show, and how many of the ranks."""
    if num_ranks <= MOST_ROWS:
        return "Attention per rank (the mean is 1)"
    return (
        f"Attention per rank (the mean is 1): {MOST_ROWS} of {num_ranks} ranks, with the heaviest"
    )


def choose_ranks(before: Floats, after: Floats, most: int = MOST_ROWS) -> npt.NDArray[np.intp]:
    """Returns all ranks if they are few; else the heaviest ones and an even choice of others."""
    if len(after) <= most:
        return np.arange(len(after))
    heaviest = [np.argsort(-load, kind="stable")[: most // 4] for load in (before, after)]
    shown = np.unique(np.concatenate(heaviest))
    others = np.setdiff1d(np.arange(len(after)), shown)
    even = np.linspace(0, len(others) - 1, most - len(shown)).round().astype(np.intp)
    return np.union1d(shown, others[even])


def bar(share: float, length: int, ascii_only: bool = False) -> str:
    """Returns a bar over ``share`` of ``length`` characters, padded to ``length``."""
    share = min(max(share, 0.0), 1.0)
    if ascii_only:
        return ("#" * round(share * length)).ljust(length)
    eighths = round(share * length * 8)
    if share > 0:
        eighths = max(eighths, 1)  # small loads stay visible
    return (_BLOCKS[8] * (eighths // 8) + _BLOCKS[eighths % 8]).ljust(length)[:length]
