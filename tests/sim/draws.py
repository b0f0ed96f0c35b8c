"""What hypothesis draws for small simulations, and how their numbers are compared."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import numpy as np
import pytest
from hypothesis import strategies as st
from sim.oracle import OracleTransfer

from distca.planning.spans import as_ints
from distca.sim.streams import Transfer

Draw = Callable[[st.SearchStrategy[Any]], Any]


def close(expected: float | Sequence[float]) -> Any:
    return pytest.approx(expected, rel=1e-12, abs=1e-15)


def kernels(ranks: int) -> st.SearchStrategy[list[float]]:
    """Seconds of each rank, often 0 and often alike."""
    seconds = st.sampled_from([0.0, 0.0, 1.0, 2.5, 7.0]) | st.floats(0.0, 10.0)
    return st.lists(seconds, min_size=ranks, max_size=ranks)


def speeds(ranks: int) -> st.SearchStrategy[list[float]]:
    speed = st.sampled_from([1.0, 1.0, 0.5, 1.3])
    return st.lists(speed, min_size=ranks, max_size=ranks)


@st.composite
def transfers(draw: Draw, ranks: int) -> OracleTransfer:
    """Between any pairs of ranks; ranks without a partner take no part."""
    rank = st.integers(0, ranks - 1)
    pairs = draw(st.sets(st.tuples(rank, rank).filter(lambda p: p[0] != p[1]), min_size=1))
    partners: dict[int, set[int]] = {}
    for one, other in pairs:
        partners.setdefault(one, {one}).add(other)
        partners.setdefault(other, {other}).add(one)
    seconds = st.sampled_from([1.0, 4.0]) | st.floats(0.01, 10.0)
    return OracleTransfer(
        {rank: draw(seconds) for rank in partners},
        {rank: frozenset(others) for rank, others in partners.items()},
    )


def transfer_of(transfer: OracleTransfer, ranks: int) -> Transfer:
    """The same for ``Streams``."""
    sets = [sorted(transfer.partners.get(rank, {rank})) for rank in range(ranks)]
    first = np.cumsum([0, *map(len, sets[:-1])])
    return Transfer(
        seconds=np.array([transfer.seconds.get(rank, 0.0) for rank in range(ranks)]),
        partner=as_ints([other for others in sets for other in others]),
        first=as_ints(first),
        num_bytes=0,
    )
