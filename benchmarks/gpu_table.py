"""Benchmarks of single kernel calls on a GPU, whose result is one table."""

from __future__ import annotations

import argparse
import json
import sys
from datetime import date
from pathlib import Path
from typing import Any

import torch

from distca.measure.profiling import device_name

RESULTS = Path(__file__).parent / "results"
Row = dict[str, Any]


def gpu_parser(description: str) -> argparse.ArgumentParser:
    """Returns a parser with ``--out``."""
    parser = argparse.ArgumentParser(description=description)
    parser.add_argument("--out", type=Path, default=RESULTS)
    return parser


def gpu_of(parser: argparse.ArgumentParser) -> torch.device:
    """Returns the GPU; ends with a sentence if there is none."""
    if not torch.cuda.is_available():
        parser.error("this machine has no GPU, whose kernels are measured")
    return torch.device("cuda")


def write(out: Path, name: str, title: str, command: str, rows: list[Row], note: str = "") -> None:
    """Prints the table, and writes NAME.md and NAME.json."""
    device = device_name(torch.device("cuda"))
    about = f"`{command}`, {date.today()}, {device}, torch {torch.__version__}."
    columns = list(rows[0])
    lines = [f"# {title}", "", about, "", *([note, ""] if note else [])]
    lines += [f"| {' | '.join(columns)} |", "|" + "---|" * len(columns)]
    lines += [f"| {' | '.join(map(_shown, row.values()))} |" for row in rows]
    text = "\n".join([*lines, ""])
    sys.stdout.write(text)
    out.mkdir(parents=True, exist_ok=True)
    (out / f"{name}.md").write_text(text)
    (out / f"{name}.json").write_text(json.dumps({"about": about, "rows": rows}, indent=1))


def _shown(value: object) -> str:
    if isinstance(value, float):
        return f"{value:.3g}"
    return f"{value:,}" if isinstance(value, int) else str(value)
