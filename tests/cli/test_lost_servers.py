"""``distca train`` whose dedicated servers are killed from outside, at whatever moment it is."""

import json
import subprocess
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest
from cli.test_restarts import kill_at
from cli.test_train import command, metrics, run

SETTINGS = ("train.steps=8", "parallel.servers=2", "train.eval_every=4")


@contextmanager
def ended(command: list[str], *options: str) -> Iterator[subprocess.Popen[str]]:
    """Starts a command, which is killed if the test fails."""
    pipe = subprocess.PIPE
    process = subprocess.Popen([*command, *options], stdout=pipe, stderr=pipe, text=True)
    try:
        yield process
    finally:
        process.kill()


@pytest.mark.slow
@pytest.mark.skipif(not Path("/proc/self/task").exists(), reason="looks into /proc")
def test_the_run_goes_on_without_its_servers(tmp_path: Path) -> None:
    killed, whole = tmp_path / "killed", tmp_path / "whole"
    options = "--ranks=4", "--server-restarts=0", "--json"
    with ended(command(killed, *SETTINGS), *options) as process:
        for step, victim in ((2, 3), (5, 2)):
            kill_at(process, killed, step, victim)
        out, err = process.communicate(timeout=100)
    assert (process.returncode, err) == (0, "")
    result = json.loads(out)
    assert [loss["rank"] for loss in result["lost_servers"]] == [3, 2]
    assert [loss["servers"] for loss in result["lost_servers"]] == [1, 0]
    assert sum("a dedicated server, was lost in" in note for note in result["notes"]) == 2
    assert "rank 3, a dedicated server, was lost in" in (killed / "logs/rank-1.log").read_text()
    run(whole, *SETTINGS, options=("--ranks=4",))
    for found, right in zip(metrics(killed), metrics(whole), strict=True):
        assert found["loss"] == pytest.approx(right["loss"], rel=1e-6)
        assert found.get("eval_loss", 0) == pytest.approx(right.get("eval_loss", 0), rel=1e-6)


@pytest.mark.slow
@pytest.mark.skipif(not Path("/proc/self/task").exists(), reason="looks into /proc")
def test_a_worker_still_ends_it(tmp_path: Path) -> None:
    settings = ("train.steps=1000000", "parallel.servers=1")
    with ended(command(tmp_path, *settings), "--ranks=3", "--server-restarts=0") as process:
        kill_at(process, tmp_path, 1, 2)
        kill_at(process, tmp_path, len(metrics(tmp_path)) + 1, 1)
        _, err = process.communicate(timeout=60)
    assert process.returncode == 1
    assert "rank 1 was killed by SIGKILL, so all ranks were ended" in err
