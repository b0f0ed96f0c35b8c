"""Ranks that share one GPU over NCCL. Run where there is one: ``pytest -m nccl``.

Where torch's own NCCL is older than 2.30, DISTCA_NCCL_LIBRARY names a newer one.
"""

from __future__ import annotations

import shutil
from collections.abc import Iterator
from contextlib import ExitStack
from pathlib import Path

import pytest
import torch
from ranks import RankPool, World

from distca.runtime.mps import CONTROL
from distca.runtime.nccl import find_nccl
from distca.runtime.shared_gpu import SharedGpu, share_gpu

RANKS = 8  # for which the GPU is prepared: fewer may use it too


@pytest.fixture(scope="session")
def shared_gpu_is_possible() -> None:
    """Skips a test on machines where ranks cannot share a GPU."""
    if not torch.cuda.device_count():
        pytest.skip("there is no CUDA device")
    if shutil.which(CONTROL) is None:
        pytest.skip(f"{CONTROL} was not found")
    try:
        find_nccl()
    except ValueError as error:
        pytest.skip(str(error))


class Worlds:
    """Worlds of several sizes on one GPU; after a failure that may have left it unusable, again."""

    def __init__(self, logs: Path) -> None:
        self.logs = logs
        self.open = ExitStack()
        self.gpu: SharedGpu | None = None
        self.pools: dict[int, RankPool] = {}

    def __call__(self, size: int) -> RankPool:
        if not all(pool.is_usable for pool in self.pools.values()):
            self.close()
        if self.gpu is None:
            self.gpu = self.open.enter_context(share_gpu(RANKS, self.logs))
        if size not in self.pools:
            self.pools[size] = RankPool(size, self.gpu)
            self.open.callback(self.pools[size].close)
        return self.pools[size]

    def close(self) -> None:
        self.gpu = None
        self.pools.clear()
        self.open.close()


@pytest.fixture(scope="session")
def gpu_world(
    shared_gpu_is_possible: None, tmp_path_factory: pytest.TempPathFactory
) -> Iterator[World]:
    """The pool whose world has so many ranks on the GPU."""
    worlds = Worlds(tmp_path_factory.mktemp("mps"))
    yield worlds
    worlds.close()
