"""Schedules that a placer has begun: plans that use them are those made from scratch."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable
from dataclasses import replace
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from strategies import SHAPE, Batch, batches

import distca
from distca.pipeline.mesh import MeshShape
from distca.pipeline.step_planner import StepPlanner
from distca.planning.api import place_and_plan, place_to_plan
from distca.planning.masks import Mask
from distca.planning.options import PlanOptions
from distca.planning.placement import Placement
from distca.planning.plan import Plan
from distca.planning.policies import policy_of
from distca.planning.prefixes import NO_PARENT, Prefixes
from distca.planning.problem import same_fields
from distca.planning.schedulers.orders import OrderSearch

BALANCED = policy_of("distca", "balanced")
COSTS = ("pairs", "analytic", "h200")
# Python files of up to 8,192 tokens, 32,768 tokens in all.
FILES = (
    [1024, 8192, 1233, 5568, 8192, 3108, 5451],
    [5452, 8192, 350, 1020, 8192, 8192, 1370],
    [8192, 8192, 8192, 4233, 3959],
)


def assert_equal_plans(plan: Plan, other: Plan) -> None:
    """Everything but the name of the policy and the seconds of planning."""
    plan, other = (replace(one, policy="", plan_s=0.0) for one in (plan, other))
    assert same_fields(plan, other)
    assert (plan.backward is plan.forward) == (other.backward is other.forward)


def planned_or_error(plan: Callable[[], Plan]) -> Plan | str:
    try:
        return plan()
    except ValueError as error:
        return str(error)


def assert_as_from_scratch(given: Placement, **changes: Any) -> None:
    options = PlanOptions(**changes)
    made = planned_or_error(lambda: place_and_plan(given, BALANCED, options))
    scratch = planned_or_error(
        lambda: distca.plan(distca.place(given, None, options), options, given=given)
    )
    if isinstance(made, Plan) and isinstance(scratch, Plan):
        assert_equal_plans(made, scratch)
    else:
        assert made == scratch


@settings(max_examples=80, deadline=None)
@given(batch=batches(max_ranks=5, max_documents=8), orders=st.sampled_from([1, 3, 8]))
def test_place_and_plan_is_place_and_then_plan(batch: Batch, orders: int) -> None:
    options = {"model": SHAPE, "search_orders": orders, **batch.options}
    assert_as_from_scratch(Placement.from_ranks(batch.ranks), **options)


@settings(max_examples=15, deadline=None)
@given(
    lengths=st.lists(st.integers(1, 8192), min_size=2, max_size=12),
    shared=st.lists(st.sampled_from([0.0, 0.3, 0.9]), min_size=12, max_size=12),
    workers=st.sampled_from([2, 4, 36]),
    servers=st.sampled_from([0, 0, 2]),
    cost=st.sampled_from(COSTS),
)
def test_documents_with_a_prefix_too(
    lengths: list[int], shared: list[float], workers: int, servers: int, cost: str
) -> None:
    prefix = [0] + [
        int(share * min(a, b - 1))
        for share, a, b in zip(shared, lengths[:-1], lengths[1:], strict=False)
    ]
    parent = [number - 1 if length else NO_PARENT for number, length in enumerate(prefix)]
    placement = Placement.in_order(
        np.array(lengths), workers, Prefixes(np.array(parent), np.array(prefix))
    )
    assert_as_from_scratch(placement, model="llama3-8b", cost=cost, servers=servers)


def planner_of(mesh: MeshShape, masks: list[str], cost: str, *, ping_pong: bool) -> StepPlanner:
    return StepPlanner(
        mesh,
        tuple(map(Mask.parse, masks)),
        PlanOptions(model="llama3-8b", cost=cost),
        policy=BALANCED,
        ping_pong=ping_pong,
        micro_batches=mesh.pp,
    )


MESHES = {
    "plain": MeshShape(dp=4),
    "servers": MeshShape(dp=3, servers=2),
    "fillers": MeshShape(dp=2, cp=2, tp=4),
    "pipeline": MeshShape(dp=2, pp=2),
}


@pytest.mark.parametrize("ping_pong", [False, True])
@pytest.mark.parametrize("mesh", MESHES)
@pytest.mark.parametrize("cost", COSTS)
def test_the_plans_of_a_step_are_those_from_scratch(cost: str, mesh: str, ping_pong: bool) -> None:
    planner = planner_of(MESHES[mesh], ["causal", "window:900"], cost, ping_pong=ping_pong)
    has_pipeline = planner.parallel.pp > 1
    for lengths in FILES[:1] if has_pipeline else FILES:
        step = planner.plan(np.array(lengths))
        passes = {id(plan): (plan, backward) for plan, backward in step.passes}
        for made, backward in passes.values():
            scratch = distca.plan(
                made.placement,
                planner.plan_options,
                mask=[Mask(int(reach)) for reach in made.reach],
                cost=planner.cost.one_way(backward=backward) if has_pipeline else planner.cost,
                speed=made.devices.speed,
                busy_s=made.devices.busy_s,
                workers_serve=True,
            )
            assert scratch.fingerprint == made.fingerprint
            np.testing.assert_array_equal(scratch.forward_load_ps, made.forward_load_ps)
            np.testing.assert_array_equal(scratch.backward_load_ps, made.backward_load_ps)


@pytest.fixture
def scheduled(monkeypatch: pytest.MonkeyPatch) -> Counter[tuple[object, ...]]:
    """How often each placement was scheduled in each direction."""
    count: Counter[tuple[object, ...]] = Counter()
    first = OrderSearch.first

    def counted(search: OrderSearch, *args: Any) -> Any:
        shards = search._shards
        placement = shards.problem.placement
        columns = (placement.document, placement.start, placement.stop, placement.worker)
        count[(id(shards.cost), *(column.tobytes() for column in columns))] += 1
        return first(search, *args)

    monkeypatch.setattr(OrderSearch, "first", counted)
    return count


@pytest.mark.parametrize("servers", [0, 2])
@pytest.mark.parametrize("cost", COSTS)
def test_a_placement_is_scheduled_once(
    scheduled: Counter[tuple[object, ...]], cost: str, servers: int
) -> None:
    for lengths in FILES:
        scheduled.clear()
        given = Placement.in_order(np.array(lengths), 4)
        place_and_plan(given, BALANCED, model="llama3-8b", cost=cost, servers=servers)
        assert set(scheduled.values()) == {1}


@pytest.mark.parametrize("ping_pong", [False, True])
@pytest.mark.parametrize("mesh", ["plain", "servers"])
@pytest.mark.parametrize("cost", COSTS)
def test_placements_of_a_step_are_too(
    scheduled: Counter[tuple[object, ...]], cost: str, mesh: str, ping_pong: bool
) -> None:
    planner = planner_of(MESHES[mesh], ["causal", "causal"], cost, ping_pong=ping_pong)
    for lengths in FILES:
        scheduled.clear()
        planner.plan(np.array(lengths))
        assert set(scheduled.values()) == {1}


@pytest.mark.parametrize(
    "change",
    [
        {"mask": "window:900"},
        {"cost": "analytic"},
        {"tolerance": 0.05},
        {"speed": [1.0, 1.0, 0.5, 1.0]},
        {"busy_s": [0.0, 1e-3, 0.0, 0.0]},
        {"servers": 1, "workers_serve": True},
        {"tile": 64},
        {"search_orders": 1},
        {"model": "llama3.2-1b"},
    ],
)
def test_other_options_do_not_use_it(change: dict[str, Any]) -> None:
    options = PlanOptions(model="llama3-8b", cost="h200")
    given = Placement.in_order(np.array(FILES[1]), 4)
    placed = place_to_plan(given, options, "balanced")
    assert placed.begun is not None
    scratch = distca.plan(placed.placement, options, **change)
    assert_equal_plans(distca.plan(placed, options, **change), scratch)
    # What is used a second time is the same, too.
    scratch = distca.plan(placed.placement, options)
    for _ in range(2):
        assert_equal_plans(distca.plan(placed, options), scratch)
