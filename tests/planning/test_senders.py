"""Workers that would send too much swap slices: what changes, and what must not."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from distca.data.lengths import prolong
from distca.planning.api import place_and_plan
from distca.planning.placement import Placement
from distca.planning.placers import balanced
from distca.planning.placers.senders import EXCESS_TOKENS, NET_DIFFERENCE, even_out_senders
from distca.planning.placers.slices import Slice
from distca.planning.policies import policy_of


def slice_of(net: float, size: int, num_above: int = 0, start: int = 0) -> Slice:
    return Slice(net, 0, start, start + size, net, num_above, size)


def sent_by(worker: np.ndarray, slices: list[Slice], num_workers: int) -> np.ndarray:
    keys = [one.num_above * one.size for one in slices]
    return np.bincount(worker, keys, minlength=num_workers)


def test_two_slices_that_are_sent_often_part() -> None:
    slices = [slice_of(5, 40, 2), slice_of(5, 40, 2), slice_of(5, 40), slice_of(5, 40)]
    found = even_out_senders(np.array([0, 0, 1, 1]), slices, 2, tokens=80, traffic_limit=80)
    assert sent_by(found, slices, 2).tolist() == [80, 80]


@pytest.mark.parametrize(
    ("others", "why"),
    [
        (slice_of(5 * (1 - NET_DIFFERENCE) - 1, 40), "its net load is another one"),
        (slice_of(5, int(40 + 80 * EXCESS_TOKENS) + 1), "the worker has no room for its tokens"),
        (slice_of(5, 40, start=200), "the worker would receive more than it sends now"),
        (slice_of(5, 40, 2), "the other worker sends as much"),
    ],
    ids=lambda value: value if isinstance(value, str) else "",
)
def test_a_slice_stays_where(others: Slice, why: str) -> None:
    slices = [slice_of(5, 40, 2), slice_of(5, 40, 2), others, others]
    before = np.array([0, 0, 1, 1])
    found = even_out_senders(before, slices, 2, tokens=80, traffic_limit=80)
    np.testing.assert_array_equal(found, before)


slices_of_workers = st.lists(
    st.tuples(
        st.integers(0, 4),
        st.floats(0.1, 10),
        st.integers(1, 100),
        st.integers(0, 5),
        st.integers(0, 300),
    ),
    min_size=1,
    max_size=30,
)


@given(slices_of_workers, st.integers(1, 400))
@settings(max_examples=200)
def test_the_most_that_any_worker_sends_or_receives_never_grows(
    rows: list[tuple[int, float, int, int, int]], limit: int
) -> None:
    before = np.array([row[0] for row in rows])
    slices = [slice_of(*row[1:]) for row in rows]
    found = even_out_senders(before, slices, 5, tokens=100.0, traffic_limit=limit)
    assert sorted(found) == sorted(before)  # swaps only: each worker has as many slices as before
    starts = [one.start for one in slices]
    received = [np.bincount(worker, starts, minlength=5).max() for worker in (before, found)]
    sent = [sent_by(worker, slices, 5).max() for worker in (before, found)]
    assert sent[1] <= sent[0]
    assert received[1] <= max(received[0], sent[0])


def test_no_worker_of_long_documents_sends_much_more_than_it_may_receive(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Before they are evened out, the largest sender has 1.7 x the bytes of any receiver."""
    tokens = Placement.in_order(prolong(131072).batch(128 * 131072, 0), 128)

    def ratio() -> float:
        plan = place_and_plan(tokens, policy_of("distca", "balanced"), model="llama3-8b")
        assert plan.imbalance <= 1.02
        return float(plan.traffic.send.max() / plan.traffic.recv.max())

    swapped = ratio()
    monkeypatch.setattr(balanced, "SENDERS_AHEAD", np.inf)  # never evened out
    assert swapped < 1.2 < 1.4 < ratio()
