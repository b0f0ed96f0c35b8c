"""When the search for a density ends on many ranks."""

import numpy as np
import pytest

from distca.data.lengths import distribution
from distca.planning.api import place_and_plan
from distca.planning.devices import UNLIMITED
from distca.planning.placement import Placement
from distca.planning.placers import attempts, balanced
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


def test_many_ranks_try_no_other_density_after_many_slices(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(balanced, "MOST_SLICES", UNLIMITED)
    alike, _ = planned(64, monkeypatch)
    most, _ = planned(96, monkeypatch)
    monkeypatch.setattr(balanced, "MOST_SLICES", 1)
    fewer, plan = planned(96, monkeypatch)
    assert fewer < most
    assert fewer <= len(balanced.TARGETS)
    assert plan.meets_bound
    assert planned(64, monkeypatch)[0] == alike > 1


def test_after_many_slices_a_density_has_to_do_much_better(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(balanced, "WORTH_A_SEARCH", 0.0)
    monkeypatch.setattr(balanced, "MANY_SLICES", UNLIMITED)
    alike, _ = planned(64, monkeypatch)
    most, _ = planned(96, monkeypatch)
    monkeypatch.setattr(balanced, "MANY_SLICES", 0)
    monkeypatch.setattr(attempts, "MUCH_CLOSER", (0.0, 0.0))  # none does
    fewer, plan = planned(96, monkeypatch)
    assert fewer < most
    assert plan.meets_bound
    assert planned(64, monkeypatch)[0] == alike
    monkeypatch.setattr(attempts, "MUCH_CLOSER", (1.0, 1.0))  # all that are closer do
    assert planned(96, monkeypatch)[0] == most


def test_many_ranks_try_no_other_density_where_few_tasks_move(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(balanced, "WORTH_A_SEARCH", 0.0)
    assert planned(96, monkeypatch)[0] > len(balanced.TARGETS)
    monkeypatch.setattr(balanced, "WORTH_A_SEARCH", 1.0)  # all that move are few
    fewer, plan = planned(96, monkeypatch)
    assert fewer == 1
    assert plan.meets_bound
    assert planned(64, monkeypatch)[0] > 1


@pytest.mark.parametrize("workers_serve", [False, True])
def test_documents_stay_in_order_where_no_worker_serves(
    workers_serve: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    """All tasks have to move then, so that cutting documents for workers gains nothing."""
    tried: list[object] = []
    search = balanced._search
    monkeypatch.setattr(
        balanced, "_search", lambda problem: tried.append(problem) or search(problem)
    )
    lengths = np.array(distribution("pretrain", CONTEXT).batch(8 * CONTEXT, seed=1))
    plan = place_and_plan(
        Placement.in_order(lengths, 8),
        policy_of("distca", "balanced"),
        model="llama3-8b",
        servers=2,
        workers_serve=workers_serve,
    )
    assert bool(tried) == workers_serve
    assert plan.meets_bound
    if not workers_serve:
        in_order = Placement.in_order(lengths, 8)
        assert np.array_equal(plan.placement.document, in_order.document)
        assert np.array_equal(plan.placement.worker, in_order.worker)
