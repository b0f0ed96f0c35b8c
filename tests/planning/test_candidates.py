"""Placements that are compared after scheduling, and the one that is scheduled only if need be."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest

from distca.planning.api import place_and_plan
from distca.planning.options import PlanOptions
from distca.planning.placement import Placement
from distca.planning.placers import candidates
from distca.planning.placers.balanced import balanced_placement
from distca.planning.placers.candidates import best_of
from distca.planning.placers.head_tail import deal_each_document
from distca.planning.policies import policy_of
from distca.planning.problem import Problem
from distca.planning.schedulers.disaggregated import BegunSchedule
from distca.planning.tasks import Tasks
from distca.planning.traffic import traffic

BALANCED = policy_of("distca", "balanced")


class Scheduled:
    """The problems whose placements are scheduled to be compared."""

    def __init__(self, patch: pytest.MonkeyPatch) -> None:
        self.problems: list[Problem] = []
        begin = candidates.begin_backward

        def recorded(problem: Problem, slices: int, max_peak: int) -> BegunSchedule:
            self.problems.append(problem)
            return begin(problem, slices, max_peak)

        patch.setattr(candidates, "begin_backward", recorded)

    @property
    def num_shards(self) -> list[int]:
        return [len(problem.placement.worker) for problem in self.problems]


def scheduled(lengths: np.ndarray, ranks: int, **options: object) -> Scheduled:
    """Plans documents and returns what was scheduled."""
    with pytest.MonkeyPatch.context() as patch:
        seen = Scheduled(patch)
        place_and_plan(Placement.in_order(lengths, ranks), BALANCED, model="llama3-8b", **options)
    return seen


def balanced(lengths: np.ndarray, ranks: int, **options: object) -> Problem:
    """Returns a problem with its balanced placement."""
    given = {"model": "llama3-8b", **options}
    problem = PlanOptions.of(None, given).problem(Placement.in_order(lengths, ranks))
    return replace(problem, placement=balanced_placement(problem).placement)


def random_lengths(seed: int, count: int, longest: int) -> np.ndarray:
    draw = np.random.default_rng(seed).lognormal(np.log(longest / 8), 1.2, count)
    return np.clip(draw, 64, longest).astype(np.int64)


@pytest.mark.parametrize(("count", "ranks"), [(60, 60), (64, 32), (40, 48)])
def test_thousands_of_shards_are_not_scheduled_to_be_compared(count: int, ranks: int) -> None:
    seen = scheduled(random_lengths(0, count, longest=262144), ranks, cost="pairs")
    assert len(seen.problems) == 2
    assert sum(seen.num_shards) <= 4 * (count + ranks)


@pytest.mark.parametrize(("count", "ranks"), [(60, 60), (64, 32), (40, 48)])
def test_documents_stay_in_order_where_no_worker_serves(count: int, ranks: int) -> None:
    lengths = random_lengths(0, count, longest=262144)
    seen = scheduled(lengths, ranks, cost="pairs", servers=3, workers_serve=False)
    (problem,) = seen.problems
    in_order = Placement.in_order(lengths, ranks)
    assert np.array_equal(problem.placement.worker, in_order.worker)
    assert np.array_equal(problem.placement.start, in_order.start)


def test_they_are_if_no_other_placement_meets_the_bound() -> None:
    # 256 tokens a rank: two tiles, which are too few to cut equal loads.
    seen = scheduled(np.full(8, 1024) + np.arange(8), 32, cost="pairs")
    assert seen.num_shards[-1] > 500


@pytest.mark.parametrize("mask", ["causal", "window:512"])
@pytest.mark.parametrize("seed", range(6))
def test_the_choice_is_about_as_good_as_that_of_scheduling_all(seed: int, mask: str) -> None:
    lengths = random_lengths(seed, 32, longest=[8192, 131072][seed % 2])
    problem = balanced(lengths, 8, cost="h200", mask=mask)
    in_order = Placement.in_order(lengths, 8)
    others, dealt = [problem.placement, in_order], deal_each_document(in_order, 8)
    chosen = best_of(others, problem, dealt).begun
    best = best_of([*others, dealt], problem).begun
    assert chosen is not None
    assert best is not None
    assert peak_of(chosen) <= 1.1 * peak_of(best)


def peak_of(begun: BegunSchedule) -> int:
    problem = begun.shards.problem
    return traffic(begun.first.tasks, problem.placement, problem.shape, problem.devices.node).worst


@pytest.mark.parametrize("mask", ["causal", "window:512"])
@pytest.mark.parametrize("seed", range(6))
def test_what_workers_fetch_is_about_the_peak(seed: int, mask: str) -> None:
    lengths = random_lengths(seed, 32, longest=[8192, 131072][seed % 2])
    problem = balanced(lengths, 8, cost="h200", mask=mask)
    dealt = deal_each_document(Placement.in_order(lengths, 8), 8)
    at_home = Tasks.at_home(dealt, problem.reach)
    peak = traffic(at_home, dealt, problem.shape, problem.devices.node).recv.max()
    assert 0.9 * peak <= candidates._fetched_bytes(dealt, problem) <= 1.15 * peak
