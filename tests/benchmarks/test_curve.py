"""The long runs: their report, and the script on two CPU ranks."""

from __future__ import annotations

import json
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest

FOLDER = Path(__file__).parents[2] / "benchmarks"


@pytest.fixture
def curve_report() -> Iterator[ModuleType]:
    """The module, which is imported as if from its folder."""
    sys.path.insert(0, str(FOLDER))
    try:
        yield __import__("curve_report")
    finally:
        sys.path.remove(str(FOLDER))


def side(loss: list[float], evaluated: dict[str, float]) -> dict[str, Any]:
    ones = [1.0] * len(loss)
    evaluations = {"2": {"eval_loss": 1.0, "eval_loss_from_256": 1.5}} if evaluated else {}
    return {"loss": loss, "grad_norm": ones, "seconds": ones, "eval": evaluations}


def test_a_report_of_a_run_that_was_killed(curve_report: ModuleType, tmp_path: Path) -> None:
    about = {"command": "c", "date": "d", "ranks": 2, "where": "CPU", "torch": "2"}
    about |= {"precision": "float32", "steps": 1000, "tokens per step": 2048, "context": 1024}
    sides = {
        "plain": side([2.0, 4.0], {"x": 1.0}),
        "plain, reversed": side([2.0, 4.0], {"x": 1.0}),
        "distca": side([2.0, 4.4], {}),
    }
    curves = about | {"sides": sides}
    text = curve_report.report(curves)
    assert "# 2 steps on real text" in text
    assert "| loss of the step, largest | 0.0e+00 | 1.0e-01 |" in text
    assert "from 256" not in text  # not evaluated on all sides
    sides["distca"] = side([2.0, 4.4], {"x": 1.0})
    assert "| from 256 tokens, step 2 | 1.50000 | 1.50000 | 1.50000 |" in curve_report.report(
        curves
    )
    curve_report.draw(curves, tmp_path / "curve.png")
    assert (tmp_path / "curve.png").stat().st_size > 10_000


@pytest.mark.slow
def test_the_script_runs_on_the_cpu(tmp_path: Path) -> None:
    command = [sys.executable, str(FOLDER / "curve.py"), "--steps=2"]
    command += [f"--out={tmp_path}", f"--images={tmp_path}"]
    ran = subprocess.run(command, cwd=tmp_path, capture_output=True, text=True, timeout=110)
    assert ran.returncode == 0, ran.stderr
    sides = json.loads((tmp_path / "curve.json").read_text())["sides"]
    assert len(sides) == 3
    plain = sides["plain"]
    assert len(plain["loss"]) == 2
    for one in sides.values():
        assert one["loss"] == pytest.approx(plain["loss"], rel=1e-5)
        assert one["grad_norm"] == pytest.approx(plain["grad_norm"], rel=1e-4)
        assert one["eval"].keys() == plain["eval"].keys() == {"1", "2"}
        for step, losses in plain["eval"].items():
            assert len(losses) == 4  # all documents, and three classes of lengths
            assert one["eval"][step] == pytest.approx(losses, rel=1e-5)
    assert (tmp_path / "curve.png").exists()
    assert "2 steps" in (tmp_path / "curve.md").read_text()
