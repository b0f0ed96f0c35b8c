"""Possible cuts of shards, and searches among them, compared with lists of all cuts."""

import numpy as np
import pytest
from strategies import COSTS, SHAPE

from distca.planning.costs.choice import cost_model
from distca.planning.document_masks import DocumentMasks
from distca.planning.masks import reach_of
from distca.planning.problem import Grain
from distca.planning.schedulers.cuttable import CuttableShards
from distca.planning.spans import as_ints
from distca.planning.two_way import TwoWaySpans

LENGTH = 300
MASKS = ("window:1", "window:7", "window:120", "chunk:37", "band:9", "causal", "two-way spans")


@pytest.mark.parametrize("cost", COSTS)
@pytest.mark.parametrize("mask", MASKS)
@pytest.mark.parametrize("grain", [Grain(1, 1), Grain(16, 1), Grain(16, 35), Grain(512, 512)])
def test_searches_find_the_largest_piece_that_fits(cost: str, mask: str, grain: Grain) -> None:
    start = as_ints([[0], [101], [290]])
    length, document = np.full_like(start, LENGTH), 0 * start
    two_way, reach = TwoWaySpans.none(), reach_of("causal", 1)
    if mask == "two-way spans":
        two_way = TwoWaySpans.of({0: [(20, 150), (200, 299)]})
    else:
        reach = reach_of(mask, 1)
    seen = DocumentMasks(as_ints([LENGTH]), reach, two_way)
    for cost_of in (cost_model(cost, SHAPE).forward, cost_model(cost, SHAPE).backward):
        shards = CuttableShards(start, length, document, 0 * start, seen, cost_of, grain)
        total = shards.load(start, length)
        shards = CuttableShards(start, length, document, total, seen, cost_of, grain)
        for row, last in enumerate(shards.last_cut[:, 0].tolist()):
            one = shards.take(as_ints([row]))
            places = one.position(np.arange(last + 1)[None])[0]
            inside = places[1:-1]
            assert places[[0, -1]].tolist() == [start[row, 0], LENGTH]
            assert np.all(inside % grain.spacing == 0)
            assert np.all(np.diff(places) > 0)
            assert np.array_equal(one.nearest_cut(places[None] * 1.0)[0], np.arange(last + 1))
            for share in (0.0, 0.1, 0.5, 0.9, 1.0):
                headroom = as_ints(share * total[row])
                cut = int(one.lowest_start(as_ints([[last]]), headroom)[0, 0])
                fitting = one.load(places[None], length[row])[0] <= headroom
                assert fitting[cut]
                assert cut == 0 or not fitting[cut - 1]
                cut = int(one.highest_stop(as_ints([[last]]), headroom)[0, 0])
                fitting = one.load(start[row], places[None])[0] <= headroom
                assert fitting[cut]
                assert cut == last or not fitting[cut + 1]


def test_spread_cuts_are_all_cuts_of_a_short_shard() -> None:
    start, stop = as_ints([[0], [0]]), as_ints([[64], [640]])
    cost = cost_model("pairs", SHAPE).forward
    seen = DocumentMasks(as_ints([64, 640]), reach_of("causal", 2), TwoWaySpans.none())
    shards = CuttableShards(start, stop, as_ints([[0], [1]]), stop, seen, cost, Grain(16, 16))
    few, many = shards.spread_cuts(8, as_ints([[0], [0]]))
    assert sorted(set(few.tolist())) == [1, 2, 3, 4]
    assert many.tolist() == [5, 10, 15, 20, 25, 30, 35, 40]
