"""Halves of a step with ping-pong: equal ones are placed and planned once."""

import numpy as np
import pytest

from distca.pipeline.mesh import MeshShape
from distca.pipeline.step_plan import StepPlan
from distca.pipeline.step_planner import StepPlanner
from distca.planning.masks import Mask
from distca.planning.options import PlanOptions
from distca.planning.policies import policy_of


def planned(lengths: list[int], placement: str, cost: str = "h200") -> StepPlan:
    planner = StepPlanner(
        MeshShape(dp=4),
        (Mask.parse("causal"),) * 2,
        PlanOptions(model="llama3-8b", cost=cost),
        policy=policy_of("distca", placement),
        ping_pong=True,
    )
    return planner.plan(np.array(lengths))


@pytest.mark.parametrize("placement", ["given", "balanced"])
def test_equal_halves_share_a_plan(placement: str) -> None:
    step = planned([8192] * 8, placement)
    ((first, second),) = step.micro_batches
    assert sorted([*first.members, *second.members]) == [*range(8)]
    assert first.placement is second.placement
    for tick in step.slots:
        for one, other in tick:
            assert one is other


@pytest.mark.parametrize("placement", ["given", "balanced"])
def test_other_halves_have_plans_of_their_own(placement: str) -> None:
    for one, other in planned([8192, 8192, 8192, 4233, 3959], placement).slots[0]:
        assert one.placement.lengths.tolist() != other.placement.lengths.tolist()


def test_a_long_document_leaves_few_tokens_to_the_other_half_of_its_worker() -> None:
    step = planned([100_000, *[1000] * 300], "given")
    ((ping, pong),) = step.micro_batches
    assert (ping.placement.tokens + pong.placement.tokens).tolist() == [100_000] * 4
    assert sorted(half.placement.tokens.max() for half in (ping, pong)) == [50_000, 100_000]
