"""Worlds of one to four ranks that stay for all tests of this folder."""

from collections.abc import Callable, Iterator

import pytest
import torch
from ranks import RankPool

World = Callable[[int], RankPool]


@pytest.fixture(autouse=True, scope="package")
def one_thread() -> Iterator[None]:
    before = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(before)


@pytest.fixture(scope="package")
def world() -> Iterator[World]:
    """The pool whose world has so many ranks; started when first asked for."""
    pools: dict[int, RankPool] = {}

    def ask(size: int) -> RankPool:
        if size not in pools:
            pools[size] = RankPool(size)
        return pools[size]

    yield ask
    for pool in pools.values():
        pool.close()
