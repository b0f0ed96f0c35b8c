"""Tables fit 80 columns, whatever their figures are, and nothing in them is cut."""

from __future__ import annotations

import io
import re
from typing import Any

import pytest
from rich.console import Console
from rich.table import Table

from distca.report.profiles import rates_table
from distca.report.training import comparison, comparison_table


def printed(table: Table) -> str:
    screen = Console(file=io.StringIO(), width=80)
    screen.print(table)
    assert isinstance(screen.file, io.StringIO)
    text = screen.file.getvalue()
    assert "…" not in text
    assert max(map(len, text.splitlines())) <= 80
    return text


def steps(tokens_per_s: float) -> list[dict[str, Any]]:
    return [
        {
            "step": step, "loss": 12345.6789, "tokens": 10**9, "seconds": 1e9 / tokens_per_s,
            "tokens_per_s": tokens_per_s, "imbalance_before": 512.0, "imbalance_planned": 512.0,
            "imbalance_measured": 512.0, "bytes": 999e12, "exposed_s": 98765.43, "stopped": False,
        }
        for step in range(3)
    ]  # fmt: skip


def test_comparisons_fit() -> None:
    compared = comparison(steps(123_456_789.0), steps(987_654_321.0), 1e-3)
    assert re.search(
        r"^  lowest to highest +8.00x to 8.00x", printed(comparison_table(compared)), re.M
    )


@pytest.mark.parametrize("most", [0.9996, 99.96, 4321.0])
def test_rates_of_any_device_fit(most: float) -> None:
    sizes = [128 << power for power in range(11)]
    rates = [[most if keys >= queries else None for keys in sizes] for queries in sizes]
    text = printed(
        rates_table({"keys": sizes, "queries": sizes, "backward_tflops": rates}, "backward")
    )
    assert {0.9996: " 1000 ", 99.96: " 100 ", 4321.0: " 4321 "}[most] in text
