"""One thread: cases are tiny, and on a busy machine threads would mostly wait for each other."""

from collections.abc import Iterator

import pytest
import torch
from ranks import RankPool, World


@pytest.fixture(autouse=True, scope="package")
def one_thread() -> Iterator[None]:
    before = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(before)


@pytest.fixture(scope="session")
def pool(world: World) -> RankPool:
    """Four ranks of a gloo world; bodies get a group of the first few."""
    return world(4)
