"""Shards that move to their keys: what is found for all shards at once, compared with a loop."""

import numpy as np
import pytest
from attention.test_prefixes import tree_plans
from hypothesis import given
from planning.oracles import owner_of, planned
from planning.test_traffic import sent_and_received
from strategies import Batch, Entry, batches

from distca.planning.options import PlanOptions
from distca.planning.placement import Placement
from distca.planning.plan import Plan
from distca.planning.problem import Problem
from distca.planning.schedulers.cuts import Piece
from distca.planning.schedulers.ledger import Ledger
from distca.planning.schedulers.moves_to_keys import (
    MOST_SHARDS,
    may_gain,
    move_to_keys,
    possible_moves,
)
from distca.planning.schedulers.placed_shards import PlacedShards
from distca.planning.spans import as_ints
from distca.planning.tasks import Tasks
from distca.planning.traffic import flows


def one_by_one(shards: PlacedShards) -> set[tuple[int, int, int]]:
    """Returns (saved bytes, shard, worker): the other worker that holds the most keys."""
    placement, shape = shards.problem.placement, shards.problem.shape
    moves = set()
    for shard, (worker, document, start, stop) in enumerate(placement.shards()):
        if start == 0 or shards.problem.devices.speed[worker] == 0:
            continue
        need = shards.keys_needed(document, (start, stop))
        held = {
            rank: sum(len(range(max(low, need[0]), min(high, need[1]))) for low, high in spans)
            for rank, spans in shards.owners(document).items()
        }
        own = held.pop(worker, 0)
        best = max(held, key=lambda rank: (held[rank], -rank), default=None)
        if best is not None and held[best]:
            saved = shape.kv_bytes * (held[best] - own) - shape.qo_bytes * (stop - start)
            moves.add((saved, shard, best))
    return moves


def check(problem: Problem) -> None:
    shards = PlacedShards.of(problem, problem.cost.backward)
    serves = problem.devices.speed[problem.placement.worker] > 0
    fetches = np.flatnonzero((problem.placement.start > 0) & serves)
    moves = possible_moves(shards, fetches)
    found = list(zip(*(column.tolist() for column in moves), strict=True))
    assert found == sorted(found, reverse=True)
    assert len(found) == len(set(found))
    assert set(found) == one_by_one(shards)
    check_moves(shards, [(shard, rank) for _, shard, rank in found])
    check_all_at_once(shards, [(shard, rank) for _, shard, rank in found])


def check_moves(shards: PlacedShards, moves: list[tuple[int, int]]) -> None:
    """Moves of whole shards change what moves of a single piece with all queries change."""
    whole, pieces = Ledger(shards), Ledger(shards)
    for shard, server in moves:
        whole.move_whole(shard, server)
        piece = Piece(*shards.span(shard), server, int(shards.load[shard]))
        pieces.move([(shard, [piece])])
        assert whole.is_cut(shard)
    for name in ("sent", "received", "free_bytes"):
        np.testing.assert_array_equal(getattr(whole, name), getattr(pieces, name))
    np.testing.assert_array_equal(whole.loads.per_rank, pieces.loads.per_rank)
    assert whole.loads.headrooms == pieces.loads.headrooms
    for one, other in zip(vars(whole.tasks()).values(), vars(pieces.tasks()).values(), strict=True):
        np.testing.assert_array_equal(one, other)


def check_all_at_once(shards: PlacedShards, moves: list[tuple[int, int]]) -> None:
    """What ranks send, and the keys that they have, are those of the tasks after all moves."""
    ledger, problem = Ledger(shards), shards.problem
    shard, server = as_ints(moves).reshape(-1, 2).T
    ledger.send_to_keys(shard, server)
    tasks = ledger.tasks()
    flow = flows(tasks, problem.placement, problem.shape, backward=False)
    sent, received = sent_and_received(flow, problem.devices.num_ranks)
    np.testing.assert_array_equal(ledger.sent, sent)
    np.testing.assert_array_equal(ledger.received, received)
    held = {
        (rank, document, key)
        for document in range(problem.placement.num_documents)
        for rank in range(problem.devices.num_ranks)
        for span in ledger.keys.held(document, rank)
        for key in range(*span)
    }
    assert held == keys_with_prefixes(problem.placement, tasks)


def keys_with_prefixes(placement: Placement, tasks: Tasks) -> set[tuple[int, int, int]]:
    """Returns (rank, document, key) that ranks have: those of their tasks, and their own."""
    columns = (tasks.server, tasks.document, tasks.kv_start, tasks.kv_stop)
    spans = [*placement.shards(), *zip(*(column.tolist() for column in columns), strict=True)]
    on_ranks: dict[tuple[int, int], set[int]] = {}  # (owner, key) -> ranks
    for rank, document, start, stop in spans:
        for key in range(start, stop):
            on_ranks.setdefault((owner_of(placement, document, key), key), set()).add(rank)
    return {
        (rank, document, key)
        for document, length in enumerate(placement.lengths.tolist())
        for key in range(length)
        for rank in on_ranks[owner_of(placement, document, key), key]
    }


def check_memory(shards: PlacedShards) -> None:
    """Loads and memory after all moves are those after the same moves one by one."""
    together, alone = Ledger(shards), Ledger(shards)
    move_to_keys(together, possible_moves(shards, may_gain(together)), max_adopted=1.0)
    for shard in np.flatnonzero(together.server != alone.server).tolist():
        alone.move_whole(shard, int(together.server[shard]))
    np.testing.assert_array_equal(together.free_bytes, alone.free_bytes)
    np.testing.assert_array_equal(together.loads.per_rank, alone.loads.per_rank)
    assert together.loads.headrooms == alone.loads.headrooms


@given(batches())
def test_any_batch(batch: Batch) -> None:
    plan = planned(batch)
    if plan is not None:
        check(PlanOptions(**{"model": plan.shape} | batch.options).problem(plan.placement))
        limited = {"model": plan.shape} | batch.options | {"memory_bytes": 1 << 40}
        problem = PlanOptions(**limited).problem(plan.placement)
        check_memory(PlacedShards.of(problem, problem.cost.backward))


@given(tree_plans())
def test_shared_prefixes(plan: Plan) -> None:
    check(PlanOptions(model=plan.shape).problem(plan.placement))


def dealt(num_ranks: int, tile: int = 4) -> Placement:
    """Two documents, with a head and a tail of each on every rank."""
    held: list[list[Entry]] = [
        [
            {"document": document, "start": tile * slot, "stop": tile * (slot + 1)}
            for document in range(2)
            for slot in (rank, 2 * num_ranks - 1 - rank)
        ]
        for rank in range(num_ranks)
    ]
    return Placement.from_ranks(held)


@pytest.mark.parametrize("mask", ["causal", "window:9", "full"])
def test_shards_of_documents_that_are_dealt_over_many_ranks_stay(mask: str) -> None:
    few, many = dealt(MOST_SHARDS // 2), dealt(MOST_SHARDS // 2 + 1)
    check(PlanOptions(model="llama3-8b", mask=mask).problem(few))
    speed = [1.0] * (few.num_workers - 1) + [0.5]  # whose surplus has to move
    for placement, moves in ((few, True), (many, False)):
        slow = speed + [1.0] * (placement.num_workers - len(speed))
        problem = PlanOptions(model="llama3-8b", mask=mask, speed=slow).problem(placement)
        shards = PlacedShards.of(problem, problem.cost.backward)
        assert bool(len(may_gain(Ledger(shards)))) is moves
