"""Processes that only these tests use, since trainers change global state."""

from __future__ import annotations

from collections.abc import Iterator
from typing import TYPE_CHECKING

import pytest

if TYPE_CHECKING:
    from ranks import RankPool


@pytest.fixture(scope="session")
def pair() -> Iterator[RankPool]:
    """Two ranks of a gloo world."""
    from ranks import RankPool

    pool = RankPool(2)
    yield pool
    pool.close()
