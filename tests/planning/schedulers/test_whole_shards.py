"""Shards that move to their keys: what is found for all shards at once, compared with a loop."""

from attention.test_prefixes import tree_plans
from hypothesis import given
from planning.oracles import planned
from strategies import Batch, batches

from distca.planning.options import PlanOptions
from distca.planning.plan import Plan
from distca.planning.problem import Problem
from distca.planning.schedulers.placed_shards import PlacedShards
from distca.planning.schedulers.whole_shards import _possible_moves
from distca.planning.spans import num_shared


def one_by_one(shards: PlacedShards) -> set[tuple[int, int, int]]:
    """Returns (saved bytes, shard, worker): the other worker that holds the most keys."""
    placement, shape = shards.problem.placement, shards.problem.shape
    moves = set()
    for shard, (worker, document, start, stop) in enumerate(placement.shards()):
        if start == 0 or shards.problem.devices.speed[worker] == 0:
            continue
        need = shards.keys_needed(document, (start, stop))
        held = {rank: num_shared(spans, need) for rank, spans in shards.owners(document).items()}
        own = held.pop(worker, 0)
        best = max(held, key=lambda rank: (held[rank], -rank), default=None)
        if best is not None and held[best]:
            saved = shape.kv_bytes * (held[best] - own) - shape.qo_bytes * (stop - start)
            moves.add((saved, shard, best))
    return moves


def check(problem: Problem) -> None:
    shards = PlacedShards.of(problem, problem.cost.backward)
    found = [tuple(move) for move in _possible_moves(shards)]
    assert len(found) == len(set(found))
    assert set(found) == one_by_one(shards)


@given(batches())
def test_any_batch(batch: Batch) -> None:
    plan = planned(batch)
    if plan is not None:
        check(PlanOptions(**{"model": plan.shape} | batch.options).problem(plan.placement))


@given(tree_plans())
def test_shared_prefixes(plan: Plan) -> None:
    check(PlanOptions(model=plan.shape).problem(plan.placement))
