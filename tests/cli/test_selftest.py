"""``distca selftest``: what it says where all is well, and where it is not."""

import json
import subprocess
import sys
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from distca.cli import main
from distca.cli.selftest import all_pass
from distca.measure import selftest
from distca.measure.selftest import exact


def test_two_ranks_pass(tmp_path: Path) -> None:
    command = [sys.executable, "-P", "-m", "distca"]
    ran = subprocess.run(
        [*command, "selftest", f"--out={tmp_path}", "--json"],
        capture_output=True,
        text=True,
        timeout=100,
    )
    assert (ran.returncode, ran.stderr) == (0, "")
    record = json.loads(ran.stdout)
    assert (record["ranks"], record["device"]) == (2, "cpu")
    assert [row["passed"] for row in record["checks"]] == [True] * 13
    assert {"error", "bytes_per_s"} <= set().union(*record["checks"])
    assert json.loads((tmp_path / "selftest.json").read_text()) == record
    assert record["words"].startswith("All checks passed: ")
    assert not (tmp_path / "checkpoints").exists()


@pytest.mark.usefixtures("only_rank")
def test_what_is_not_exact_fails(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """In this process, as under torchrun, with a reference that is off by a thousandth."""
    right = selftest.dense
    monkeypatch.setattr(selftest, "dense", lambda *args: right(*args) * 1.001)
    with pytest.raises(SystemExit) as exited:
        main(["selftest", f"--out={tmp_path}"])
    said = capsys.readouterr().out
    assert exited.value.code == 1
    assert said.count("FAIL") == 7  # all but the checkpoint and what needs two ranks
    assert said.count("skipped") == 5
    assert "7 of 13 checks failed: do not train on these ranks" in said


def test_sharing_a_gpu_under_torchrun_is_refused(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """There, nobody prepares the GPU before the ranks."""
    monkeypatch.setenv("RANK", "0")
    for command in ("selftest", "train", "profile", "bench policies"):
        with pytest.raises(SystemExit) as exited:
            main([*command.split(), "--share-gpu"])
        assert exited.value.code == 2
        assert "--share-gpu under torchrun: leave out torchrun" in capsys.readouterr().err


@pytest.mark.parametrize(
    ("passed", "expected"), [([True, None], True), ([True, False], False), ([], True)]
)
def test_what_was_skipped_does_not_count(passed: list[bool | None], expected: bool) -> None:
    rows: list[dict[str, Any]] = [{"passed": one} for one in passed]
    assert all_pass(rows) is expected


def test_a_nan_passes_nothing() -> None:
    one, nan = torch.ones(2), torch.tensor([1.0, torch.nan])
    assert exact([(one, one), (one, one)], 0.0).passed
    assert not exact([(nan, one), (one, one)], 1.0).passed
    assert not exact([(one, one), (nan, one)], 1.0).passed
    assert not exact([(one, 2 * one)], 0.1).passed


def test_an_exchange_that_does_not_fit_is_skipped(monkeypatch: pytest.MonkeyPatch) -> None:
    """On 80 ranks of 100 MB each, say: 16 GB, which a rank that shares its GPU may not have."""
    context: Any = SimpleNamespace(parallel=SimpleNamespace(num_ranks=80))
    monkeypatch.setattr(selftest, "_free_bytes", lambda _: 10**10)
    found = selftest._bandwidth(context, 10**8)
    assert found.passed is None
    assert found.words == "needs 16 GB on each rank, and one has 10 left"
