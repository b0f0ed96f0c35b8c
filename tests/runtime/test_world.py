"""Ranks that join a run compare their devices before they wait for each other."""

from __future__ import annotations

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
