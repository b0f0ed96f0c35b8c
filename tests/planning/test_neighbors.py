"""Workers that hold parts of the same documents are put into the same node."""

from __future__ import annotations

from collections import Counter

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from distca.planning.api import place_and_plan
from distca.planning.options import PlanOptions
from distca.planning.placement import Placement
from distca.planning.placers.neighbors import gather_in_nodes
from distca.planning.policies import policy_of
from distca.planning.problem import Problem
from distca.planning.tasks import Tasks
from distca.planning.traffic import traffic

SHAPE = {"heads": 8, "kv_heads": 2, "head_dim": 64}


def problem_of(placement: Placement, **options: object) -> Problem:
    return PlanOptions.of(None, SHAPE | {"cost": "pairs"} | options).problem(placement)


def between_nodes(placement: Placement, ranks_per_node: int) -> int:
    problem = problem_of(placement)
    tasks = Tasks.at_home(placement, problem.reach)
    node = np.arange(placement.num_workers) // ranks_per_node
    return traffic(tasks, placement, problem.shape, node).cross_node


def test_halves_of_documents_come_together() -> None:
    """Workers 0 and 2 share a document, and so do 1 and 3, in nodes of two."""
    shards = [(0, 0, 0, 512), (1, 1, 0, 512), (2, 0, 512, 1024), (3, 1, 512, 1024)]
    apart = Placement.from_shards(None, shards, 4)
    near = gather_in_nodes(apart, problem_of(apart, ranks_per_node=2))
    assert between_nodes(apart, 2) > 0
    assert between_nodes(near, 2) == 0
    assert problem_of(near).placement.tokens.tolist() == [512] * 4


@pytest.mark.parametrize(
    "options",
    [
        {},
        {"ranks_per_node": 4},
        {"ranks_per_node": 2, "speed": [1.0, 1.0, 1.0, 0.5]},
    ],
    ids=["one node by default", "one node", "workers that differ"],
)
def test_otherwise_workers_keep_their_shards(options: dict) -> None:
    shards = [(0, 0, 0, 512), (1, 1, 0, 512), (2, 0, 512, 1024), (3, 1, 512, 1024)]
    placement = Placement.from_shards(None, shards, 4)
    assert gather_in_nodes(placement, problem_of(placement, **options)) is placement


def sets_of_shards(placement: Placement) -> Counter[tuple]:
    """Returns what workers hold, in order, whatever their numbers are."""
    columns = (placement.document, placement.start, placement.stop)
    rows = np.stack(columns).T
    return Counter(
        tuple(map(tuple, rows[placement.worker == worker].tolist()))
        for worker in range(placement.num_workers)
    )


@given(
    st.lists(st.integers(1, 4000), min_size=1, max_size=12),
    st.sampled_from([4, 6, 8]),
    st.sampled_from([1, 2, 3, 4]),
    st.randoms(use_true_random=False),
)
def test_sets_of_shards_stay_and_less_is_sent_between_nodes(
    lengths: list[int], workers: int, ranks_per_node: int, random: object
) -> None:
    in_order = Placement.in_order(np.array(lengths), workers)
    shuffled = list(range(workers))
    random.shuffle(shuffled)  # type: ignore[attr-defined]
    worker = np.array(shuffled)[in_order.worker]
    table = np.stack([worker, in_order.document, in_order.start, in_order.stop]).T
    placement = Placement.from_shards(in_order.lengths, table, workers)
    near = gather_in_nodes(placement, problem_of(placement, ranks_per_node=ranks_per_node))
    assert sets_of_shards(near) == sets_of_shards(placement)
    assert between_nodes(near, ranks_per_node) <= between_nodes(placement, ranks_per_node)


def test_balanced_plans_send_less_between_nodes() -> None:
    """The same shards lie together, and less is sent between nodes, also by tasks that move."""
    draw = np.random.default_rng(0)
    lengths = np.minimum(draw.lognormal(7, 1.6, 60).astype(np.int64) + 1, 32768)
    given_placement = Placement.in_order(lengths, 16)
    options = PlanOptions.of(None, SHAPE | {"cost": "pairs"})
    policy = policy_of("distca", "balanced")
    anywhere = place_and_plan(given_placement, policy, options)
    nodes = PlanOptions.of(None, SHAPE | {"cost": "pairs", "ranks_per_node": 4})
    near = place_and_plan(given_placement, policy, nodes)
    assert near.imbalance == pytest.approx(anywhere.imbalance, abs=0.01)
    node = np.arange(16) // 4
    before = traffic(anywhere.forward, anywhere.placement, anywhere.shape, node)
    assert sets_of_shards(near.placement) == sets_of_shards(anywhere.placement)
    assert near.traffic.cross_node < 0.9 * before.cross_node
