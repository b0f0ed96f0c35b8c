"""Pieces of one shard."""

import numpy as np
import pytest
from strategies import COSTS, SHAPE

from distca.planning.costs.choice import cost_model
from distca.planning.problem import Grain
from distca.planning.schedulers.cuts import Divisible


@pytest.mark.parametrize("cost", COSTS)
@pytest.mark.parametrize("reach", [1, 7, 300])
@pytest.mark.parametrize("start", [0, 101])
@pytest.mark.parametrize("grain", [Grain(1, 1), Grain(16, 1), Grain(16, 35), Grain(512, 512)])
def test_no_piece_is_lighter_than_the_lightest(
    cost: str, reach: int, start: int, grain: Grain
) -> None:
    """The scheduler tries no cut where every room is below it.

    A measured kernel may be a little faster with a few more keys, where pieces share its tile.
    """
    model = cost_model(cost, SHAPE)
    for price in (model.forward_ps, model.backward_ps):
        shard = Divisible.of(start, 300, 300, reach, price, grain)
        low, high = np.triu_indices(len(shard.cuts), 1)
        lightest = shard.load(shard.cuts[low], shard.cuts[high]).min()
        assert lightest == pytest.approx(shard.lightest, rel=0.02 if cost == "h200" else 0.0)
        assert shard.some_fit(shard.lightest)
        assert not shard.some_fit(shard.lightest - 1)
