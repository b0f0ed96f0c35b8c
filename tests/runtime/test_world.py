"""Ranks that join a run compare their devices before they wait for each other."""

from __future__ import annotations

import os
import signal
import socket
import subprocess
import sys
import time
from concurrent.futures import ThreadPoolExecutor
from datetime import timedelta
from pathlib import Path

import pytest
from torch.distributed import FileStore  # type: ignore[attr-defined]

from distca.runtime import world


def errors_of(kinds: list[str], file: Path) -> list[str]:
    """The error of each rank, which has one of these kinds of devices."""

    def check(rank: int) -> str:
        store = FileStore(str(file), len(kinds))
        store.set_timeout(timedelta(seconds=20))
        try:
            world._check_devices(store, rank, len(kinds), kinds[rank])
        except ValueError as error:
            return str(error)
        return ""

    with ThreadPoolExecutor(len(kinds)) as threads:
        return list(threads.map(check, range(len(kinds))))


@pytest.mark.parametrize("kinds", [["cuda"] * 3, ["cpu"] * 3, ["cpu"]])
def test_equal_devices(kinds: list[str], tmp_path: Path) -> None:
    assert errors_of(kinds, tmp_path / "store") == [""] * len(kinds)


def test_ranks_without_a_gpu_among_others_are_named_on_all(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("socket.gethostname", lambda: "node-b")
    found = errors_of(["cuda", "cuda", "cpu", "cuda"], tmp_path / "one")
    assert len({*found}) == 1
    assert found[0].startswith("1 of 4 ranks has no GPU (rank 2 on node-b), but all others have")
    found = errors_of(["cpu"] * 5 + ["cuda"], tmp_path / "several")
    assert len({*found}) == 1
    assert "5 of 6 ranks have no GPU" in found[0]
    assert " and 2 more)" in found[0]


@pytest.mark.parametrize(
    ("changes", "words"),
    [
        ({"WORLD_SIZE": None}, "RANK is set, but WORLD_SIZE is not or is empty: start ranks with"),
        ({"RANK": ""}, "RANK is set, but RANK is not or is empty"),
        ({"RANK": "abc"}, "RANK = 'abc' is no number: start ranks with torchrun, or unset RANK"),
        ({"MASTER_PORT": "x"}, "MASTER_PORT = 'x' is no number"),
        ({"RANK": "5"}, "RANK = 5 with WORLD_SIZE = 2: ranks are from 0 to WORLD_SIZE - 1"),
        ({"MASTER_ADDR": None}, "RANK is set, but MASTER_ADDR is not"),
    ],
)
def test_incomplete_variables_of_a_launcher_are_named(
    changes: dict[str, str | None], words: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    complete = {"RANK": "1", "WORLD_SIZE": "2", "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": "1"}
    for name, value in (complete | changes).items():
        if value is None:
            monkeypatch.delenv(name, raising=False)
        else:
            monkeypatch.setenv(name, value)
    with pytest.raises(ValueError, match=f"^{words}"):
        world.join_world()


@pytest.mark.parametrize(("number", "status"), [(signal.SIGTERM, 0), (signal.SIGINT, 130)])
def test_a_rank_that_waits_for_the_first_one_can_be_stopped(
    number: int, status: int, tmp_path: Path
) -> None:
    with socket.create_server(("127.0.0.1", 0)) as silent:
        silent.settimeout(60)
        variables = {"RANK": "1", "WORLD_SIZE": "2", "LOCAL_RANK": "1", "CUDA_VISIBLE_DEVICES": ""}
        variables |= {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(silent.getsockname()[1])}
        process = subprocess.Popen(
            [sys.executable, "-m", "distca", "train", "--out", str(tmp_path)],
            env=os.environ | variables,
            stderr=subprocess.PIPE,
            text=True,
        )
        connection, _ = silent.accept()
        with connection:
            time.sleep(0.3)  # it waits for an answer now
            process.send_signal(number)
            _, err = process.communicate(timeout=20)
    assert (process.returncode, err) == (status, "")
