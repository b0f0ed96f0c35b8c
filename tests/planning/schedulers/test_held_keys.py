"""Keys that ranks have before anything moves, compared with sets of tokens."""

from attention.test_prefixes import tree_plans
from hypothesis import given
from planning.oracles import owner_of, planned
from strategies import Batch, batches

from distca.planning.options import PlanOptions
from distca.planning.plan import Plan
from distca.planning.problem import Problem
from distca.planning.schedulers.held_keys import HeldKeys
from distca.planning.schedulers.placed_shards import PlacedShards

Key = tuple[int, int, int]  # worker, document that has the token, position


def keys_at_home(problem: Problem) -> set[Key]:
    """Returns the keys that the queries of every worker need, one by one."""
    placement = problem.placement
    return {
        (worker, owner_of(placement, document, position), position)
        for worker, document, start, stop in placement.shards()
        for position in range(*problem.masks.keys_needed(document, (start, stop)))
    }


def check(shards: PlacedShards) -> None:
    problem = shards.problem
    held = {
        (worker, document, position)
        for document in range(problem.placement.num_documents)
        for worker, spans in shards.held_at_home(document).items()
        for span in spans
        for position in range(*span)
    }
    assert held == keys_at_home(problem)


def holders(keys: HeldKeys, document: int) -> set[int]:
    """Returns the ranks that have keys of a document, with those of its prefix."""
    found = {rank for rank in keys.possible_holders(document) if keys.holds(document, rank)}
    assert found == {rank for rank in keys.possible_holders(document) if keys.held(document, rank)}
    return found


def check_changes(shards: PlacedShards) -> None:
    """What one ledger adds, or drops, changes neither the next one nor a copy made before."""
    problem = shards.problem
    keys, server = HeldKeys(shards), problem.devices.num_ranks
    before = keys.copy()
    for document in range(problem.placement.num_documents):
        keys.add(document, server, (0, int(problem.placement.lengths[document])))
        keys.keep_own(document, next(iter(shards.homes(document))))
    for document in range(problem.placement.num_documents):
        assert server in holders(keys, document)
        assert server not in holders(before, document)
        assert server not in holders(HeldKeys(shards), document)
    check(shards)


@given(batches())
def test_any_batch(batch: Batch) -> None:
    plan = planned(batch)
    if plan is not None:
        problem = PlanOptions(**{"model": plan.shape} | batch.options).problem(plan.placement)
        check(PlacedShards.of(problem, problem.cost.backward))


@given(tree_plans())
def test_shared_prefixes(plan: Plan) -> None:
    problem = PlanOptions(model=plan.shape).problem(plan.placement)
    shards = PlacedShards.of(problem, problem.cost.backward)
    check(shards)
    check_changes(shards)
