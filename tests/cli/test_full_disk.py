"""Commands whose result finds no space on the disk: one sentence with the place."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from disks import small_disk
from report_records import write_run

from distca.cli import main


@pytest.fixture
def full_disk(tmp_path: Path) -> Iterator[Path]:
    """A file system of one page, which is full."""
    with small_disk(tmp_path / "disk", "4k") as place:
        (place / "filler").write_bytes(b"x" * 4096)
        yield place


@pytest.fixture
def refused(full_disk: Path, capsys: pytest.CaptureFixture[str]) -> Any:
    """Checks that a command ends with the sentence on a place on the full disk."""

    def call(name: str, *args: str | Path, needs: str = "") -> None:
        with pytest.raises(SystemExit) as exited:
            main([*map(str, args)])
        said = capsys.readouterr().err
        assert exited.value.code == 2, said
        assert said == (
            f"distca: no space left on {full_disk / name}: {needs}0 GB are free; free space or use"
            " another folder\n"
        )

    return call


def test_the_start_of_a_run(refused: Any, full_disk: Path) -> None:
    few = "train.tokens_per_step=512", "data.context=256", "model.sizes={layers=1}"
    args = "train", "--ranks=1", f"--out={full_disk}/run", *(f"--set={one}" for one in few)
    refused("run/checkpoints", *args, needs="a checkpoint needs about 0.00691 GB and ")
    refused("run", *args, "--set=train.save_at_end=false")


def test_files_of_other_commands(refused: Any, full_disk: Path) -> None:
    refused("run.toml", "init", full_disk / "run.toml", "--ranks=2")
    plan = "plan", "fixed:4096", "--ranks=2", "--context=8K"
    refused("plan.json", *plan, "--out", full_disk / "plan.json")
    refused("plan.png", *plan, "--plot", full_disk / "plan.png")
    steps = "simulate", "--gpus=8", "--batches=1", "--context=8K", "--policy=distca"
    refused("trace.json", *steps, "--trace", full_disk / "trace.json")
    refused("steps.svg", *steps, "--plot", full_disk / "steps.svg")


def test_a_report(refused: Any, full_disk: Path, tmp_path: Path) -> None:
    pytest.importorskip("plotly")
    folder = write_run(tmp_path / "run", 3)
    refused("page.html", "report", folder, "--out", full_disk / "page.html")
