"""Slices that are cut from the tail are the largest that fit."""

from unittest.mock import patch

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from distca.planning.api import PlanOptions
from distca.planning.placement import Placement
from distca.planning.placers import slices
from distca.planning.placers.slices import SliceLimits, Slicer
from distca.planning.spans import as_ints


def largest_that_fits(slicer: Slicer, document: int, stop: int, limits: SliceLimits) -> int:
    """Returns where it starts, by a look at one cut after the other."""

    def fits(start: int) -> bool:
        load = int(slicer.documents.load(as_ints([document]), as_ints([start]), as_ints([stop]))[0])
        net_load = load - slicer.density * (stop - start)
        return stop - start <= limits.tokens and net_load <= limits.net_load

    grain = slicer.grain
    cuts = range(grain.first_cut(0), grain.last_cut(stop) + 1)
    if fits(0) or not cuts:
        return 0
    return next((cut for cut in cuts if fits(cut * grain.spacing)), cuts[-1]) * grain.spacing


@pytest.mark.parametrize("few_cuts", [0, 10**6])  # a search, and all cuts at once
@settings(deadline=None)
@given(
    lengths=st.lists(st.integers(1, 5000), min_size=1, max_size=12),
    density=st.sampled_from([0.0, 0.3, 0.6]),
    net_load=st.sampled_from([0.02, 0.2, 0.8]),
    tokens=st.integers(128, 6000),
)
def test_slices_are_the_largest_that_fit(
    few_cuts: int, lengths: list[int], density: float, net_load: float, tokens: int
) -> None:
    problem = PlanOptions(model="llama3-8b", cost="pairs").problem(
        Placement.in_order(as_ints(lengths), 1)
    )
    documents = problem.document_loads(problem.cost.both().ps)
    if not few_cuts:
        density = 0.0  # the search assumes that longer slices have more net load
    slicer = Slicer(documents, density * documents.whole.sum() / sum(lengths), problem.grain)
    limits = SliceLimits(net_load * int(documents.whole.max()), tokens)
    with patch.object(slices, "FEW_CUTS", few_cuts):
        start, load = slicer._starts(
            np.arange(len(lengths)),
            as_ints(lengths),
            limits.net_load,
            np.full(len(lengths), tokens),
        )
    expected = [largest_that_fits(slicer, *one, limits) for one in enumerate(lengths)]
    assert start.tolist() == expected
    stop = as_ints(lengths)
    np.testing.assert_array_equal(load, documents.load(np.arange(len(stop)), start, stop))


@given(
    lengths=st.lists(st.integers(1, 9000), min_size=1, max_size=6),
    net_load=st.sampled_from([1e-4, 0.01, 0.1, 0.8]),
    tokens=st.integers(128, 2000),
    min_shard=st.sampled_from([128, 300]),
)
def test_slices_of_equal_length_are_cut_at_once_as_one_by_one(
    lengths: list[int], net_load: float, tokens: int, min_shard: int
) -> None:
    problem = PlanOptions(model="llama3-8b", cost="pairs", min_shard=min_shard).problem(
        Placement.in_order(as_ints(lengths), 1)
    )
    documents = problem.document_loads(problem.cost.both().ps)
    slicer = Slicer(documents, 0.0, problem.grain)
    limits = SliceLimits(net_load * int(documents.whole.max()), tokens)
    found, traffic_limit = slicer.cut_from_the_tail(np.arange(len(lengths)), limits)
    expected, topmost = [], []
    for document, stop in enumerate(lengths):
        num_above = 0
        while stop:
            longest = min(limits.tokens, traffic_limit / max(num_above, 1))
            start = largest_that_fits(slicer, document, stop, limits._replace(tokens=longest))
            expected.append((document, start, stop, num_above))
            topmost += [start] * (num_above == 0 < start)
            stop, num_above = start, num_above + 1
    assert traffic_limit == max(topmost, default=np.inf)
    assert sorted((s.document, s.start, s.stop, s.num_above) for s in found) == sorted(expected)
    assert [s.net for s in found] == sorted((s.net for s in found), reverse=True)
    for one in found:
        span = as_ints([one.document]), as_ints([one.start]), as_ints([one.stop])
        assert one.load == documents.load(*span)[0]
