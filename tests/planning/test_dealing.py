"""Slices that are dealt at once go where they would go one by one."""

from unittest.mock import patch

import numpy as np
from hypothesis import given, settings
from hypothesis import strategies as st

from distca.planning.api import PlanOptions
from distca.planning.placement import Placement
from distca.planning.placers import dealing
from distca.planning.placers.dealing import DealtShards, deal_slices
from distca.planning.placers.slices import Slice, SliceLimits, Slicer
from distca.planning.spans import Ints, as_ints

Dealt = tuple[Ints, list[Slice]]


def dealt(lengths: list[int], num_workers: int, density: float, room: float) -> Dealt:
    """Cuts all documents from the tail, and deals the slices."""
    placement = Placement.in_order(as_ints(lengths), num_workers)
    problem = PlanOptions(model="llama3-8b", cost="pairs").problem(placement)
    documents = problem.document_loads(problem.cost.both().ps)
    capacity = np.full(num_workers, room * documents.whole.sum() / num_workers)
    tokens = 1.1 * sum(lengths) / num_workers
    slicer = Slicer(documents, density * documents.whole.sum() / sum(lengths), problem.grain)
    limits = SliceLimits(0.8 * capacity[0], tokens)
    slices, traffic_limit = slicer.cut_from_the_tail(np.arange(len(lengths)), limits)
    assert slices == sorted(slices, key=lambda one: (-one.net, one.document, one.start))
    none = DealtShards.none(capacity, tokens, short=np.zeros(len(lengths), bool))
    return deal_slices(slicer, slices, none, traffic_limit)


@settings(deadline=None)
@given(
    lengths=st.lists(st.integers(1, 20_000), min_size=1, max_size=80),
    equal=st.integers(0, 40),
    num_workers=st.integers(1, 12),
    density=st.sampled_from([0.0, 0.2, 0.6]),
    room=st.sampled_from([0.5, 1.0, 1.5]),
)
def test_at_once_as_one_by_one(
    lengths: list[int], equal: int, num_workers: int, density: float, room: float
) -> None:
    lengths = lengths + [3000] * equal
    worker, slices = dealt(lengths, num_workers, density, room)
    with patch.object(dealing._Workers, "take_at_once", lambda *_: []):
        expected, one_by_one = dealt(lengths, num_workers, density, room)
    assert slices == one_by_one
    np.testing.assert_array_equal(worker, expected)


def test_most_slices_are_dealt_at_once() -> None:
    with patch.object(dealing._Workers, "best", side_effect=AssertionError):
        worker, _ = dealt([4000 - n for n in range(64)], 64, density=0.0, room=2.0)
    assert sorted(worker.tolist()) == list(range(64))
