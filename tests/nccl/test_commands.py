"""``--share-gpu``: real commands, one right behind the other, and nothing left behind."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import time
from pathlib import Path

import pytest
from nccl.commands import COMMAND, LIMIT_S, train

pytestmark = [pytest.mark.nccl, pytest.mark.usefixtures("shared_gpu_is_possible")]


def mps_processes() -> list[str]:
    """Returns the processes of MPS that were started by commands."""
    found = []
    for folder in Path("/proc").glob("[0-9]*"):
        try:
            if (folder / "comm").read_text().startswith("nvidia-cuda-mps") and (
                b"/distca-mps-" in (folder / "environ").read_bytes()
            ):
                found.append(folder.name)
        except OSError:
            continue
    return found


def test_selftest(tmp_path: Path) -> None:
    command = [*COMMAND, "selftest", "--share-gpu", "--ranks=8", "--json"]
    ran = subprocess.run(
        [*command, f"--out={tmp_path}"], capture_output=True, text=True, timeout=LIMIT_S
    )
    assert (ran.returncode, ran.stderr) == (0, "")
    record = json.loads(ran.stdout)
    assert (record["ranks"], record["device"]) == (8, "cuda")
    assert [row["check"] for row in record["checks"] if row["passed"] is False] == []


def test_policies_in_turns(tmp_path: Path) -> None:
    """At 32K tokens a rank, where messages are beyond NCCL's buffers."""
    out = tmp_path / "found.json"
    options = ["--share-gpu", "--ranks=4", "--context=32K", "--layers=1", "--steps=3"]
    command = [*COMMAND, "bench", "policies", *options, "--json", f"--out={out}"]
    ran = subprocess.run(command, cwd=tmp_path, capture_output=True, text=True, timeout=LIMIT_S)
    assert (ran.returncode, ran.stderr) == (0, "")
    record = json.loads(ran.stdout)
    assert record == json.loads(out.read_text())
    assert (record["ranks"], record["shares_gpu"], record["refused"]) == (4, True, {})
    rows = {row["policy"]: row for row in record["policies"]}
    assert len(rows) == 10
    for row in rows.values():
        assert len(row["seconds"]) == 3
        assert row["loss_difference"] < 1e-3
    assert mps_processes() == []


def test_training_with_pipeline_and_server_has_the_losses_of_one_without(tmp_path: Path) -> None:
    losses = {}
    for name, ranks, parallel in (
        ("pipeline", 5, {"pp": 2, "dp": 2, "servers": 1, "micro_batches": 2}),
        ("colocated", 2, {"policy": '"colocated"', "placement": '"given"', "ping_pong": "false"}),
    ):
        settings = {f"parallel__{key}": value for key, value in parallel.items()}
        command = [*train(tmp_path / name, 4, **settings), f"--ranks={ranks}"]
        ran = subprocess.run(command, capture_output=True, text=True, timeout=LIMIT_S)
        assert (ran.returncode, ran.stderr) == (0, "")
        lines = (tmp_path / name / "metrics.jsonl").read_text().splitlines()
        losses[name] = [json.loads(line)["loss"] for line in lines]
    assert len(losses["pipeline"]) == 4
    assert losses["pipeline"] == pytest.approx(losses["colocated"], rel=5e-3)


def test_collectives_of_ranks_find_room_next_to_each_other(tmp_path: Path) -> None:
    """With as many thread blocks as there are SMs, and a rank for which the others wait.

    In clusters, they made every run stand still within 12 steps.
    """
    steps = 12
    settings = {
        "model__name": '"1b"',
        "model__sizes": "{layers=4}",
        "data__sources": '["pretrain"]',
        "data__tokenizer": '"ids:256"',
        "data__context": 16384,
        "train__tokens_per_step": 65536,
    }
    fault = f"slow rank 2 x0.6 steps 2-{steps - 1}"
    ran = subprocess.run(
        [*train(tmp_path, steps, **settings), "--ranks=4", f"--inject={fault}"],
        env=os.environ | {"NCCL_MAX_CTAS": "32"},
        capture_output=True,
        text=True,
        timeout=LIMIT_S,
    )
    assert (ran.returncode, ran.stderr) == (0, "")
    assert len((tmp_path / "metrics.jsonl").read_text().splitlines()) == steps


def rank_of(launcher: int, number: int) -> int:
    """Returns the process id of a rank."""
    for child in Path(f"/proc/{launcher}/task/{launcher}/children").read_text().split():
        if f"\0RANK={number}\0".encode() in Path(f"/proc/{child}/environ").read_bytes():
            return int(child)
    raise AssertionError(f"there is no rank {number}")


@pytest.mark.parametrize("how", ["a killed rank", "Ctrl-C"])
def test_nothing_is_left_behind_by(how: str, tmp_path: Path) -> None:
    """Both in this order: MPS of the first may be unusable, and the second has one of its own."""
    before = {*mps_processes()}
    process = subprocess.Popen(
        [*train(tmp_path, 100_000), "--ranks=2"],
        stdout=subprocess.DEVNULL,
        stderr=subprocess.PIPE,
        text=True,
    )
    try:
        deadline = time.monotonic() + LIMIT_S / 2
        while not (tmp_path / "metrics.jsonl").exists():
            assert process.poll() is None, process.communicate()[1]
            assert time.monotonic() < deadline, "timed out"
            time.sleep(0.2)
        assert {*mps_processes()} > before
        if how == "Ctrl-C":
            process.send_signal(signal.SIGINT)
        else:
            other, killed_at = rank_of(process.pid, 0), time.monotonic()
            os.kill(rank_of(process.pid, 1), signal.SIGKILL)
            while Path(f"/proc/{other}").exists():
                time.sleep(0.05)
                assert time.monotonic() < killed_at + 5
        _, said = process.communicate(timeout=LIMIT_S / 2)
    finally:
        process.kill()
    if how == "Ctrl-C":
        assert process.returncode == 130
        assert any((tmp_path / "checkpoints").iterdir())
    else:
        assert process.returncode == 1
        assert said.startswith("distca: rank 1 was killed by SIGKILL")
        log = (tmp_path / "logs" / "rank-0.log").read_text()
        assert "distca: rank 1 is lost (its process ended without a word)" in log
    assert {*mps_processes()} <= before
