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
    step = planned([8192] * 4, placement)
    ((first, second),) = step.micro_batches
    assert sorted([*first.members, *second.members]) == [0, 1, 2, 3]
    assert first.placement is second.placement
    for tick in step.slots:
        for one, other in tick:
            assert one is other


@pytest.mark.parametrize("placement", ["given", "balanced"])
def test_other_halves_have_plans_of_their_own(placement: str) -> None:
    for one, other in planned([8192, 8192, 8192, 4233, 3959], placement).slots[0]:
        assert one.placement.lengths.tolist() != other.placement.lengths.tolist()
