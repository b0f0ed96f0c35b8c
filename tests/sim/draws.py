"""What hypothesis draws for small simulations, and how their numbers are compared."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import numpy as np
import pytest
from hypothesis import strategies as st
from sim.oracle import Transfer

from distca.planning.spans import as_ints
from distca.sim.streams import Exchange

Draw = Callable[[st.SearchStrategy[Any]], Any]


def close(expected: float | Sequence[float]) -> Any:
    return pytest.approx(expected, rel=1e-12, abs=1e-15)


def kernels(lanes: int) -> st.SearchStrategy[list[float]]:
    """Seconds of each lane, often 0 and often alike."""
    seconds = st.sampled_from([0.0, 0.0, 1.0, 2.5, 7.0]) | st.floats(0.0, 10.0)
    return st.lists(seconds, min_size=lanes, max_size=lanes)


def speeds(lanes: int) -> st.SearchStrategy[list[float]]:
    speed = st.sampled_from([1.0, 1.0, 0.5, 1.3])
    return st.lists(speed, min_size=lanes, max_size=lanes)


@st.composite
def transfers(draw: Draw, lanes: int) -> Transfer:
    """Between any pairs of lanes; lanes without a partner take no part."""
    lane = st.integers(0, lanes - 1)
    pairs = draw(st.sets(st.tuples(lane, lane).filter(lambda p: p[0] != p[1]), min_size=1))
    partners: dict[int, set[int]] = {}
    for one, other in pairs:
        partners.setdefault(one, {one}).add(other)
        partners.setdefault(other, {other}).add(one)
    seconds = st.sampled_from([1.0, 4.0]) | st.floats(0.01, 10.0)
    return Transfer(
        {lane: draw(seconds) for lane in partners},
        {lane: frozenset(others) for lane, others in partners.items()},
    )


def exchange_of(transfer: Transfer, lanes: int) -> Exchange:
    """The same for ``Streams``."""
    sets = [sorted(transfer.partners.get(lane, {lane})) for lane in range(lanes)]
    first = np.cumsum([0, *map(len, sets[:-1])])
    return Exchange(
        seconds=np.array([transfer.seconds.get(lane, 0.0) for lane in range(lanes)]),
        partner=as_ints([other for others in sets for other in others]),
        first=as_ints(first),
        num_bytes=0,
    )
