"""Possible pieces of one shard."""

import numpy as np
import pytest
from strategies import COSTS, SHAPE

from distca.planning.costs.choice import cost_model
from distca.planning.problem import Grain
from distca.planning.schedulers.cuttable import CuttableShard


@pytest.mark.parametrize("cost", COSTS)
@pytest.mark.parametrize("reach", [1, 7, 300])
@pytest.mark.parametrize("start", [0, 101])
@pytest.mark.parametrize("grain", [Grain(1, 1), Grain(16, 1), Grain(16, 35), Grain(512, 512)])
def test_no_piece_is_lighter_than_the_lightest(
    cost: str, reach: int, start: int, grain: Grain
) -> None:
    """The scheduler tries no cut if every headroom is below it.

    A measured kernel may be a little faster with a few more keys, where pieces share its tile.
    """
    model = cost_model(cost, SHAPE)
    for cost_of in (model.forward, model.backward):
        shard = CuttableShard.of((start, 300), 300, reach, cost_of, grain)
        low, high = np.triu_indices(len(shard.positions), 1)
        lightest = shard.load(shard.positions[low], shard.positions[high]).min()
        assert lightest == pytest.approx(shard.lightest_piece, rel=0.02 if cost == "h200" else 0.0)
        assert shard.any_piece_fits(shard.lightest_piece)
        assert not shard.any_piece_fits(shard.lightest_piece - 1)
