"""Ranks that nobody launches, as on several nodes: the others tell that one of them is lost."""

import os
import signal
import subprocess
import time
from pathlib import Path

import pytest
from cli.test_train import command, metrics
from quick import others_slow

from distca.runtime.launch import _store

RANKS = 3
pytestmark = pytest.mark.alone


def start(out: Path, *settings: str) -> list[subprocess.Popen[str]]:
    """Ranks that train without end, and have done a step."""
    store = _store(RANKS)
    common = {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(store.port), "WORLD_SIZE": str(RANKS)}
    ranks = [
        subprocess.Popen(
            command(out, "train.steps=1000000", "parallel.dp=2", "parallel.servers=1", *settings),
            env=os.environ | common | {"RANK": str(rank), "TORCHELASTIC_USE_AGENT_STORE": "True"},
            stdout=subprocess.DEVNULL,
            stderr=subprocess.PIPE,
            text=True,
        )
        for rank in range(RANKS)
    ]
    deadline = time.monotonic() + 90
    while not (out / "metrics.jsonl").exists() or not metrics(out):
        assert time.monotonic() < deadline
        time.sleep(0.1)
    return ranks


@pytest.mark.parametrize("victim", others_slow([0, 1], quick={0}))
def test_the_others_end_within_five_seconds_and_name_it(tmp_path: Path, victim: int) -> None:
    ranks = start(tmp_path)
    try:
        began = time.monotonic()
        os.kill(ranks[victim].pid, signal.SIGKILL)
        for number, rank in enumerate(ranks):
            _, err = rank.communicate(timeout=30)
            if number != victim:
                assert rank.returncode == 1
                assert err.count("distca: ") == 1
                assert f"distca: rank {victim} is lost (its process ended without a word)" in err
        assert time.monotonic() - began < 10  # 5 s on a quiet machine
    finally:
        for rank in ranks:
            rank.kill()
