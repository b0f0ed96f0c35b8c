"""Heat maps of a run: the attention and the waiting of each rank over the steps."""

from collections.abc import Sequence
from typing import Any

import numpy as np
import numpy.typing as npt

from distca.report.pages.page import Figure, whole_ticks
from distca.report.tables import Record

MOST_COLUMNS = 400  # of a map; more steps share a column, in which the mean counts
ROW, LEAST, MOST = 14, 130, 420  # pixels of a rank, and of a map

Floats = npt.NDArray[np.float64]


def heat_map(records: Sequence[Record]) -> Figure | None:
    """Returns the maps of a run; None if its records do not have what each rank has measured."""
    known = [record for record in records if record.get("ranks")]
    if not known:
        return None
    steps = np.array([record["step"] for record in known])
    attention = by_rank(known, ("attention_s",))
    mean = np.array([_mean(column[column > 0]) for column in attention.T])
    waiting = by_rank(known, ("exposed_s", "waited_s"))
    shares = attention / np.where(mean > 0, mean, 1.0)
    pixels = min(max(ROW * len(shares), LEAST), MOST)
    height = 2 * pixels + 150
    cut = (pixels + 30) / (height - 90)
    return {
        "data": [
            _map(merge_columns(shares), steps, "y", "x the mean", cut, 1.0),
            _map(merge_columns(waiting), steps, "y2", "s", 0.0, cut - 0.09),
        ],
        "layout": {
            "height": height,
            "xaxis": {"title": {"text": "step"}, "anchor": "y2", "tickformat": ",d"},
            "yaxis": _axis("attention, rank", cut, 1.0, len(shares)),
            "yaxis2": _axis("waiting, rank", 0.0, cut - 0.09, len(shares)) | {"matches": "y"},
        },
    }


def by_rank(records: Sequence[Record], keys: Sequence[str]) -> Floats:
    """Returns the sum of what each rank has measured [ranks, records]; NaN for ranks without."""
    present = _ranks_present(records, keys[0])
    table = np.full((1 + max(max(ranks) for ranks in present), len(records)), np.nan)
    for column, (record, ranks) in enumerate(zip(records, present, strict=True)):
        table[ranks, column] = np.sum([record["ranks"][key] for key in keys], axis=0)
    return table


def _ranks_present(records: Sequence[Record], key: str) -> list[list[int]]:
    """Returns which ranks the values of each record belong to.

    Servers come and go where a record says so. One that is lost after the step, in its evaluation,
    still has a value. After a restart, all ranks of the start are back.
    """
    now = set(range(len(records[0]["ranks"][key])))
    present = []
    for record in records:
        count = len(record["ranks"][key])
        named = {
            what: {change["rank"] for change in record.get(f"{what}_servers", ())}
            for what in ("lost", "left", "joined")
        }
        in_step = (now - named["left"]) | named["joined"]
        now = in_step - named["lost"]
        if count not in (len(now), len(in_step)):
            now = in_step = set(range(count))
        present.append(sorted(now if count == len(now) else in_step))
    return present


def merge_columns(table: Floats, most: int = MOST_COLUMNS) -> Floats:
    """Returns the means of equal numbers of columns [ranks, at most ``most``]."""
    size = -(-table.shape[1] // most)
    starts = np.arange(0, table.shape[1], size)
    known = np.isfinite(table)
    sums = np.add.reduceat(np.where(known, table, 0.0), starts, axis=1)
    counts = np.add.reduceat(known.astype(np.float64), starts, axis=1)
    return np.where(counts > 0, sums / np.maximum(counts, 1.0), np.nan)


def _map(
    table: Floats, steps: npt.NDArray[np.int64], axis: str, unit: str, bottom: float, top: float
) -> dict[str, Any]:
    size = -(-len(steps) // table.shape[1])
    return {
        "type": "heatmap",
        "x": steps[::size].tolist(),
        "z": [[None if np.isnan(v) else float(f"{v:.4g}") for v in row] for row in table],
        "yaxis": axis,
        "hovertemplate": "step %{x}, rank %{y}: %{z:.3g} " + unit + "<extra></extra>",
        "colorbar": {"title": {"text": unit}, "y": (bottom + top) / 2, "len": top - bottom},
    }


def _axis(title: str, bottom: float, top: float, num_ranks: int) -> dict[str, Any]:
    return {
        "title": {"text": title},
        "domain": [bottom, top],
        "autorange": "reversed",
        "tick0": 0,
        "dtick": whole_ticks(num_ranks),
    }


def _mean(values: Floats) -> float:
    return float(values.mean()) if len(values) else 0.0
