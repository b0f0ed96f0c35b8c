"""Which servers are asked, compared with a look at all of them."""

import numpy as np
from hypothesis import given
from hypothesis import strategies as st

from distca.planning.options import PlanOptions
from distca.planning.placement import Placement
from distca.planning.schedulers.ledger import Ledger
from distca.planning.schedulers.placed_shards import PlacedShards
from distca.planning.schedulers.server_sets import fewest_servers, server_sets


@given(
    lengths=st.lists(st.integers(1, 4000), min_size=1, max_size=12),
    nodes=st.integers(1, 4),
    ranks_per_node=st.integers(1, 4),
    load=st.floats(0.01, 3.0),
)
def test_the_servers_of_a_node_are_those_with_headroom(
    lengths: list[int], nodes: int, ranks_per_node: int, load: float
) -> None:
    placement = Placement.in_order(np.array(lengths), nodes * ranks_per_node)
    options = PlanOptions(model="llama3-8b", cost="pairs", ranks_per_node=ranks_per_node)
    problem = options.problem(placement)
    shards = PlacedShards.of(problem, problem.cost.backward)
    ledger = Ledger(shards)
    wanted = int(load * ledger.loads.per_rank.mean()) + 1
    for shard, home in enumerate(placement.worker.tolist()):
        near = [one for one in ledger.loads.headrooms if shards.same_node(one.server, home)]
        asked = server_sets(ledger, shard, wanted, spare=0, reserved={})
        expected = fewest_servers(near, wanted)
        assert not expected or expected in asked
