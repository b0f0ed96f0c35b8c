"""The results of ``cluster_gpu.py``: cells in a JSON file, and tables that are made of them."""

from __future__ import annotations

import json
import os
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from statistics import fmean, median
from typing import Any

from cluster_sides import BASELINE, TORCH_CP

NAME = "cluster_gpu"
KEY = ("ranks", "lengths", "context", "backend")
SAME = (
    *KEY,
    "model",
    "recompute",
    "card",
    "SMs",
    "torch",
    "NCCL",
    "sides",
)  # in all parts of a cell
Record = dict[str, Any]


@dataclass
class Cell:
    """The steps of all sides for one number of ranks, lengths, context and backend."""

    about: Record  # may have a "note", which was added by hand
    tokens: int  # of a step
    sides: dict[str, Record] = field(default_factory=dict)  # figures of each step, by side

    @property
    def key(self) -> str:
        return ", ".join(str(self.about[name]) for name in KEY)

    @property
    def ran(self) -> dict[str, Record]:
        return {name: side for name, side in self.sides.items() if "refused" not in side}

    @property
    def num_steps(self) -> int:
        """Steps that all sides have made."""
        return min((len(side["seconds"]) for side in self.ran.values()), default=0)

    @property
    def last_seconds(self) -> str:
        return ", ".join(f"{name} {side['seconds'][-1]:.2f} s" for name, side in self.ran.items())

    def add(self, name: str, record: Mapping[str, Any]) -> None:
        figures = self.sides.setdefault(name, {})
        for figure, value in record.items():
            figures.setdefault(figure, []).append(value)


def folders(out: Path) -> list[Path]:
    """Returns where results are written: also under $OUT where that is set."""
    return [out, *(Path(where) for where in (os.environ.get("OUT"),) if where)]


def read_cells(out: Path) -> dict[str, Record]:
    path = out / f"{NAME}.json"
    cells: dict[str, Record] = json.loads(path.read_text()) if path.exists() else {}
    return cells


def read_cell(about: Record, out: Path) -> Cell | None:
    """Returns the cell in the results, if it was measured in the same way."""
    known = read_cells(out).get(Cell(about, 0).key)
    if known is None or any(known["about"].get(name) != about[name] for name in SAME):
        return None
    cell = Cell(**known)
    done = cell.num_steps
    for side in cell.ran.values():  # a run that was killed may have left half a round
        for figure, values in side.items():
            side[figure] = values[:done]
    return cell


def write_cell(cell: Cell, out: Path) -> None:
    """Replaces the cell in the results, and writes all tables again."""
    for folder in folders(out):
        folder.mkdir(parents=True, exist_ok=True)
        cells = read_cells(folder) | {cell.key: vars(cell)}
        _replace(folder / f"{NAME}.json", json.dumps(cells, indent=1) + "\n")
        _replace(folder / f"{NAME}.md", report([Cell(**one) for one in cells.values()]))


def _replace(path: Path, text: str) -> None:
    """Writes a file, of which a killed run leaves the old or the new content."""
    new = path.with_suffix(f"{path.suffix}.new")
    new.write_text(text)
    new.replace(path)


def rows(cell: Cell) -> list[Record]:
    """Returns the figures of each side, over all of its steps."""
    ran = cell.ran
    base = ran.get(BASELINE)
    found = []
    for name, side in ran.items():
        seconds = side["seconds"]
        if not seconds:
            continue
        row: Record = {"side": name, "s/step": fmean(seconds)}
        row["tokens/s"] = cell.tokens * len(seconds) / sum(seconds)
        if base is not None:
            steps = [b / s for b, s in zip(base["seconds"], seconds, strict=False)]
            row["ratio"] = sum(base["seconds"][: len(seconds)]) / sum(seconds)
            row["single steps"] = f"{min(steps):.2f} / {median(steps):.2f} / {max(steps):.2f}"
        own = name != TORCH_CP
        busy = sum(side["attention_mean"])
        row["worst/mean attention"] = sum(side["attention_worst"]) / busy if own and busy else None
        row["worst/mean tokens"] = _mean(side.get("worst_tokens", []))
        row["exposed s"] = fmean(side["exposed"]) if own else None
        row["exposed %"] = 100 * sum(side["exposed"]) / sum(seconds) if own else None
        row["GB/step"] = fmean(side["bytes"]) / 1e9 if own else None
        if base is not None:
            row["loss difference"] = (
                max(abs(a - b) for a, b in zip(base["loss"], side["loss"], strict=False))
                if own
                else None
            )
        row["step GiB"] = max(side["step_bytes"]) / (1 << 30)
        row["allocator retries"] = sum(side["alloc_retries"])
        predicted = [p for p in side["predicted"] if p is not None]
        row["measured/predicted"] = sum(seconds) / sum(predicted) if predicted else None
        found.append(row)
    return found


def _mean(figures: list[float | None]) -> float | None:
    known = [figure for figure in figures if figure is not None]
    return fmean(known) if known else None


def table(cell: Cell) -> str:
    listed = rows(cell)
    if not listed:
        return "no steps yet\n"
    lines = ["| " + " | ".join(listed[0]) + " |", "|---" * len(listed[0]) + "|"]
    lines += ["| " + " | ".join(map(_shown, row.values())) + " |" for row in listed]
    for name, side in cell.sides.items():
        if "refused" in side:
            lines += ["", f"{name} did not run: {side['refused']}"]
    return "\n".join(lines) + "\n"


INTRODUCTION = f"""# A little cluster on one GPU

Ranks share one GPU through MPS, each with its share of the SMs, and train over NCCL
(`benchmarks/cluster_gpu.py`). All sides start with the same weights and train the same batches, in
turns; a rank has as many tokens as the longest document. HBM, L2 and power are shared, so ratios
say more than seconds.

- *ratio*: tokens/s over those of `{BASELINE}`, over the whole run; *single steps*: least, median
  and largest.
- *worst/mean attention*: attention seconds of the busiest rank over the mean, measured.
- *worst/mean tokens*: those of the busiest rank, as placed; with ping-pong, of the busiest rank of
  each half, for which all others wait. Not known where the planner has changed since the run.
- *exposed s*, *exposed %*: seconds of a step, and share of the time, in which the rank that waits
  most for peers does so.
- *loss difference*: the largest one to `{BASELINE}` in any step.
- *step GiB*: memory beyond weights and optimizer states at the peak of a step.
- *allocator retries*: how often a rank was short of memory and emptied the allocator's cache.
- *measured/predicted*: seconds over those of the simulator, from a profile of the same ranks;
  transfers occupy the SMs that NCCL may use (`benchmarks/cluster_predict_again.py`).
- `head-tail-cp` trains one row of about `context` tokens after the other, as published; all other
  sides have one micro-batch.
- `{TORCH_CP}` is PyTorch's `context_parallel` with SDPA, as it ships. It knows no documents, so it
  computes attention across them: each row of `context` tokens is one sequence. Its loss is another
  one and is not compared.
"""


def report(cells: list[Cell]) -> str:
    parts = [INTRODUCTION]
    for cell in cells:
        about = cell.about
        recomputed = "linear layers" if about["recompute"] else "nothing"
        parts.append(
            f"## {about['ranks']} ranks, {about['lengths']}, context {about['context']},"
            f" {about['backend']}\n\n`{about['command']}`, {about['date']}, {about['card']}"
            f" ({about['SMs']} SMs a rank), torch {about['torch']}, NCCL {about['NCCL']},"
            f" {about['model']}, {recomputed} recomputed,"
            f" {cell.num_steps} steps a side of {cell.tokens:,} tokens."
            f" {about.get('note', '')}".rstrip()
            + f"\n\n{table(cell)}"
        )
    return "\n".join(parts)


def _shown(value: object) -> str:
    if value is None:
        return ""
    if isinstance(value, float):
        return (
            f"{value:,.0f}"
            if abs(value) >= 1000
            else f"{value:.3g}"
            if abs(value) < 0.01
            else f"{value:.2f}"
        )
    return str(value)
