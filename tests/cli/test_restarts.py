"""``distca train --max-restarts``: ranks are killed, and the run ends as if they had not been."""

import os
import signal
import subprocess
import time
from pathlib import Path

import pytest
from cli.test_train import children, command, metrics, run

SETTINGS = ("train.steps=8", "train.checkpoint_every=2", "train.keep=3")


def kill_at(process: subprocess.Popen[str], out: Path, step: int, rank: int) -> None:
    """Kills a rank as soon as a step is recorded, and a checkpoint before it is complete."""
    deadline = time.monotonic() + 90
    while not (out / "metrics.jsonl").exists() or len(metrics(out)) <= step:
        assert time.monotonic() < deadline
        assert process.poll() is None, process.communicate()
        time.sleep(0.02)
    os.kill(children(process)[rank], signal.SIGKILL)


@pytest.mark.skipif(not Path("/proc/self/task").exists(), reason="looks into /proc")
@pytest.mark.slow  # test_inject.py has a shorter one
@pytest.mark.parametrize("victims", [[1], [0, 1, 0]])
def test_a_run_whose_ranks_are_killed_ends_like_one_without(
    tmp_path: Path, victims: list[int]
) -> None:
    restarted, whole = tmp_path / "restarted", tmp_path / "whole"
    process = subprocess.Popen(
        [*command(restarted, *SETTINGS), f"--max-restarts={len(victims)}"],
        stdout=subprocess.DEVNULL,
        stderr=subprocess.PIPE,
        text=True,
    )
    for number, victim in enumerate(victims):
        kill_at(process, restarted, 2 * number + 2, victim)
    _, err = process.communicate(timeout=100)
    assert process.returncode == 0, err
    assert err.count("was killed by SIGKILL, so all ranks were ended; its output is in") == len(
        victims
    )
    assert f"; restart 1 of {len(victims)} from {restarted}/checkpoints/step-0000000" in err
    run(whole, *SETTINGS)
    found, right = metrics(restarted), metrics(whole)
    assert [record["step"] for record in found] == list(range(8))
    for a, b in zip(found, right, strict=True):
        assert a["loss"] == pytest.approx(b["loss"], rel=1e-6)


@pytest.mark.slow
def test_mistakes_and_the_last_failure_are_not_tried_again(tmp_path: Path) -> None:
    _, err = run(tmp_path, "data.sources=nope.txt", options=("--max-restarts=2",), status=2)
    assert "restart" not in err
    _, err = run(tmp_path, options=("--max-restarts=-1",), status=2)
    assert err.startswith("distca: --max-restarts -1: give 0 or more")
    settings = ("train.lr=1e6", "train.warmup=0", "train.steps=30", "train.clip=0")
    _, err = run(tmp_path, *settings, options=("--max-restarts=2",), status=1)
    assert "restart" not in err
