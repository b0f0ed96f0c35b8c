"""Slices and medium documents go to the workers that can take them."""

from unittest.mock import patch

import numpy as np
from hypothesis import given, settings
from hypothesis import strategies as st

from distca.planning.api import PlanOptions
from distca.planning.placement import Placement
from distca.planning.placers.dealing import DealtShards, _Workers, deal_slices
from distca.planning.placers.slices import Slice, SliceLimits, Slicer
from distca.planning.spans import Ints, as_ints

DEALS = given(
    lengths=st.lists(st.integers(1, 20_000), min_size=1, max_size=40),
    num_workers=st.integers(1, 12),
    density=st.sampled_from([0.0, 0.2, 0.6]),
    room=st.sampled_from([0.5, 1.0, 1.5]),
)


def dealt(
    lengths: list[int], num_workers: int, density: float, room: float
) -> tuple[Ints, list[Slice], Slicer]:
    """Cuts all documents from the tail, and deals the slices to workers of equal capacity."""
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
    return *deal_slices(slicer, slices, none, traffic_limit), slicer


def best_of_all(workers: _Workers, taken: Slice) -> int:
    """What ``_Workers.best`` finds, by comparing all workers in every rule."""
    room, left = np.array(workers.net_headroom), np.array(workers.tokens_left)
    has_any = left >= workers._shortest
    if not has_any.any():
        return int(left.argmax())
    room = np.where(has_any, room, -np.inf)
    most = room.max()
    if taken.net > most > workers.worth_a_cut:
        return int(room.argmax())
    fits = room >= min(taken.net, most - workers.worth_a_cut)
    has_tokens = fits & (left >= taken.size)
    sent = np.array(workers._sent_keys) + taken.num_above * taken.size
    received = np.array(workers._received_keys) + taken.start
    within = has_tokens & (np.maximum(sent, received) <= workers._traffic_limit)
    for chosen in (within, has_tokens):
        if chosen.any():
            return int(np.where(chosen, room, -np.inf).argmax())
    longest = np.flatnonzero(np.where(fits, left, -1.0) == left[fits].max())
    return int(longest[room[longest].argmax()])


@settings(deadline=None)
@DEALS
def test_each_slice_goes_to_the_best_of_all_workers(
    lengths: list[int], num_workers: int, density: float, room: float
) -> None:
    best = _Workers.best

    def compared(workers: _Workers, taken: Slice) -> int:
        found = best(workers, taken)
        assert found == best_of_all(workers, taken)
        return found

    with patch.object(_Workers, "best", compared):
        dealt(lengths, num_workers, density, room)


@settings(deadline=None)
@DEALS
def test_every_token_is_dealt_once_with_its_load(
    lengths: list[int], num_workers: int, density: float, room: float
) -> None:
    worker, slices, slicer = dealt(lengths, num_workers, density, room)
    assert len(worker) == len(slices)
    assert 0 <= worker.min() <= worker.max() < num_workers
    for document, length in enumerate(lengths):
        parts = sorted((one for one in slices if one.document == document), key=lambda p: p.start)
        assert [0, *(one.stop for one in parts)] == [*(one.start for one in parts), length]
    columns = (as_ints([getattr(one, n) for one in slices]) for n in ("document", "start", "stop"))
    np.testing.assert_array_equal(slicer.documents.load(*columns), [one.load for one in slices])


@settings(deadline=None)
@DEALS
def test_no_worker_gets_too_many_tokens_while_others_have_some(
    lengths: list[int], num_workers: int, density: float, room: float
) -> None:
    worker, slices, slicer = dealt(lengths, num_workers, density, room)
    tokens, least = 1.1 * sum(lengths) / num_workers, slicer.grain.min_shard
    held = np.zeros(num_workers)
    for one, taken in zip(worker.tolist(), slices, strict=True):
        others_have_some = np.any(tokens - held >= 2 * least + slicer.grain.spacing)
        if others_have_some and taken.size > 3 * least:
            assert held[one] + taken.size <= tokens + 2 * least
        held[one] += taken.size
