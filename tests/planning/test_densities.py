"""When the search for a density ends on many ranks."""

import numpy as np
import pytest

from distca.data.lengths import distribution
from distca.planning.api import place_and_plan
from distca.planning.devices import UNLIMITED
from distca.planning.placement import Placement
from distca.planning.placers import balanced
from distca.planning.plan import Plan
from distca.planning.policies import policy_of

CONTEXT = 8192


def planned(ranks: int, monkeypatch: pytest.MonkeyPatch) -> tuple[int, Plan]:
    """Returns how many densities were tried, and the plan."""
    tried = 0
    attempt = balanced._attempt

    def counted(*args: object) -> object:
        nonlocal tried
        tried += 1
        return attempt(*args)  # type: ignore[arg-type]

    lengths = distribution("prolong", CONTEXT).batch(ranks * CONTEXT, seed=1)
    with monkeypatch.context() as patch:
        patch.setattr(balanced, "_attempt", counted)
        plan = place_and_plan(
            Placement.in_order(np.array(lengths), ranks),
            policy_of("distca", "balanced"),
            model="llama3-8b",
            cost="analytic",
        )
    return tried, plan


@pytest.mark.parametrize(
    ("name", "never", "at_once", "densities"),
    [("MOST_SLICES", UNLIMITED, 1, 1), ("HARDLY_LESS", np.inf, 0.0, 2)],
)
def test_many_ranks_try_fewer_densities(
    name: str, never: float, at_once: float, densities: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    for other, value in (("MOST_SLICES", UNLIMITED), ("HARDLY_LESS", np.inf), (name, never)):
        monkeypatch.setattr(balanced, other, value)
    alike, _ = planned(64, monkeypatch)
    most, _ = planned(96, monkeypatch)
    monkeypatch.setattr(balanced, name, at_once)
    fewer, plan = planned(96, monkeypatch)
    assert fewer < most
    assert fewer <= densities * len(balanced.TARGETS)
    assert plan.meets_bound
    assert planned(64, monkeypatch)[0] == alike > 1
