"""Dedicated servers are killed over NCCL, and the run goes on with the same losses.

Messages are larger than NCCL's buffers, so a killed server leaves peers waiting on their devices.
Ranks take turns on the GPU, since MPS would let the death of one reach the others.
"""

from __future__ import annotations

import json
import subprocess
from pathlib import Path
from typing import Any

import pytest
from nccl.commands import LIMIT_S, train

pytestmark = [pytest.mark.nccl, pytest.mark.usefixtures("shared_gpu_is_possible")]
STEPS = 8
SETTINGS: dict[str, object] = {
    "model__sizes": "{layers=4, hidden=512, heads=8, kv_heads=4, head_dim=64, ffn=1024}",
    "data__sources": '["lognormal:3000:1"]',
    "data__context": 8192,
    "data__held_out": 0.05,
    "train__tokens_per_step": 32768,
    "train__eval_every": 3,
    "train__eval_tokens": 8192,
    "train__checkpoint_every": 4,
    "parallel__precision": '"float32"',
    "parallel__servers": 2,
}


def run(folder: Path, *faults: str, steps: int = STEPS, restarts: int = 0) -> list[dict[str, Any]]:
    """Trains on 2 workers and 2 servers; returns the records of its steps.

    restarts: how often a lost server is started again.
    """
    options = ["--ranks=4", "--in-turns", f"--server-restarts={restarts}"]
    options += [f"--inject={fault}" for fault in faults]
    command = [*train(folder, steps, **SETTINGS), *options]
    ran = subprocess.run(command, capture_output=True, text=True, timeout=LIMIT_S)
    assert ran.returncode == 0, ran.stderr
    return [json.loads(line) for line in (folder / "metrics.jsonl").read_text().splitlines()]


@pytest.fixture(scope="module")
def undisturbed(
    shared_gpu_is_possible: None, tmp_path_factory: pytest.TempPathFactory
) -> list[dict[str, Any]]:
    return run(tmp_path_factory.mktemp("undisturbed") / "run")


@pytest.mark.parametrize(
    "faults",
    [
        ["kill server 1 step 3 layer 1 backward", "kill server 0 step 6 between steps"],
        ["kill server 0 step 5 layer 0 forward", "kill server 1 step 5 layer 0 forward"],
        ["kill server 1 step 2 evaluation", "kill server 0 step 4 layer 2 forward"],
    ],
    ids=" and ".join,
)
def test_a_run_goes_on(
    tmp_path: Path, undisturbed: list[dict[str, Any]], faults: list[str]
) -> None:
    records = run(tmp_path, *faults)
    assert [record["step"] for record in records] == list(range(STEPS))
    for record, right in zip(records, undisturbed, strict=True):
        assert record["loss"] == pytest.approx(right["loss"], rel=1e-6)
    losses = [loss for record in records for loss in record.get("lost_servers", ())]
    print(*(f"{loss['during']}: {loss['seconds']:.2f} s" for loss in losses), sep="\n")
    assert len(losses) == len(faults)


def test_a_lost_server_comes_back(tmp_path: Path) -> None:
    records = run(tmp_path / "run", "kill server 1 step 2 layer 1 forward", steps=14, restarts=1)
    assert len(records) == 14
    (joined,) = (change for record in records for change in record.get("joined_servers", ()))
    print(f"joined before {joined['before']}, {joined['seconds']:.2f} s")
    assert (joined["rank"], joined["servers"]) == (3, 2)
    right = run(tmp_path / "right", steps=14)
    for record, expected in zip(records, right, strict=True):
        assert record["loss"] == pytest.approx(expected["loss"], rel=1e-6)
