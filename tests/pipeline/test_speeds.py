"""Learned speeds: what they converge to, what they ignore, and the loop that they close."""

from __future__ import annotations

import dataclasses
import json
from collections.abc import Callable

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from distca.pipeline.mesh import MeshShape
from distca.pipeline.speeds import WINDOW, LearnedSpeeds, compensated
from distca.pipeline.step_planner import StepPlanner
from distca.planning.costs.base import PS
from distca.planning.masks import Mask
from distca.planning.models import ModelShape
from distca.planning.options import PlanOptions
from distca.planning.spans import Floats

ONES = np.ones(4)
SLOW = np.array([1.0, 1.0, 0.6, 1.0])
DEPTH = 2  # steps that the trainer plans ahead


def learn(speeds: LearnedSpeeds, true: Floats, updates: int, planned: Floats = ONES) -> list[float]:
    for _ in range(updates):
        speeds.update(planned, planned / true)
    return list(speeds.speed)


@given(
    planned=st.lists(st.floats(1e-6, 1e3), min_size=2, max_size=9),
    factor=st.floats(1e-3, 1e3),
    updates=st.integers(1, 12),
)
def test_equal_ranks_have_speed_one(planned: list[float], factor: float, updates: int) -> None:
    """Whatever their loads are, and however wrong the cost model is by a common factor."""
    loads = np.array(planned)
    assert learn(LearnedSpeeds(np.ones(len(loads))), loads * 0 + factor, updates, loads) == [
        1.0
    ] * len(loads)


def test_a_slow_rank_is_learnt_and_forgotten_within_ten_updates() -> None:
    speeds = LearnedSpeeds(ONES)
    assert learn(speeds, ONES, 20) == [1.0] * 4
    assert learn(speeds, SLOW, WINDOW // 2) == [1.0] * 4  # these may still be outliers
    assert learn(speeds, SLOW, 1) == [1.0, 1.0, 0.6, 1.0]
    assert learn(speeds, SLOW, 10) == [1.0, 1.0, 0.6, 1.0]
    assert learn(speeds, ONES, WINDOW // 2 + 1) == [1.0] * 4


def test_speeds_from_the_first_step_on_wait_for_enough_measurements() -> None:
    speeds = LearnedSpeeds(ONES)
    assert learn(speeds, SLOW, WINDOW // 2) == [1.0] * 4
    assert learn(speeds, SLOW, 1) == [1.0, 1.0, 0.6, 1.0]


def test_single_outliers_are_ignored() -> None:
    speeds, rng = LearnedSpeeds(ONES), np.random.default_rng(0)
    for number in range(100):
        true = ONES.copy()
        if number % 3 == 0:  # two or three in each window
            true[rng.integers(4)] = 0.1
        assert list(speeds.update(ONES, 1 / true)) == [1.0] * 4


@pytest.mark.parametrize(("true", "most"), [(ONES, 1), (SLOW, 20)])
def test_noise_does_not_make_speeds_flap(true: Floats, most: int) -> None:
    """At 3 % noise; a slow rank's speed may follow the noise now and then, by a few percent."""
    speeds, rng, changes = LearnedSpeeds(ONES), np.random.default_rng(0), 0
    learn(speeds, true, WINDOW)
    for _ in range(300):
        before = speeds.speed
        after = speeds.update(ONES, np.exp(rng.normal(0, 0.03, 4)) / true)
        assert np.allclose(after, true, rtol=0.08)
        changes += after != before
    assert changes <= most


@given(order=st.permutations(range(5)), seed=st.integers(0, 99))
def test_the_order_of_ranks_does_not_matter(order: list[int], seed: int) -> None:
    rng = np.random.default_rng(seed)
    one, other = LearnedSpeeds(np.ones(5)), LearnedSpeeds(np.ones(5))
    for _ in range(8):
        planned, measured = rng.uniform(0.2, 2, (2, 5))
        speed = one.update(planned, measured)
        assert other.update(planned[order], measured[order]) == tuple(np.array(speed)[order])


def test_given_speeds_are_the_start_and_right_ones_stay() -> None:
    given_speeds = np.array([0.0, 1.0, 0.7, 1.0])  # the first rank computes nothing
    speeds = LearnedSpeeds(given_speeds)
    loads = np.array([0.0, 2.0, 1.0, 1.0])
    measured = loads / np.array([1.0, 1.0, 0.7, 1.0])
    for _ in range(10):
        assert speeds.update(loads, measured) == (0.0, 1.0, 0.7, 1.0)
    for _ in range(10):
        speeds.update(loads, measured * [1, 1, 2, 1])
    assert speeds.speed == pytest.approx((0.0, 1.0, 0.35, 1.0))


def test_a_rank_without_work_is_measured_again() -> None:
    speeds = LearnedSpeeds(ONES)
    learn(speeds, SLOW, 10)
    for _ in range(WINDOW):
        speeds.update(np.zeros(4), np.zeros(4))  # nobody computed: nothing is known
    assert speeds.speed[2] == 0.6
    work = np.array([1.0, 1.0, 0.0, 1.0])
    for _ in range(WINDOW):
        speeds.update(work, work)
    assert speeds.speed == (1.0,) * 4


def test_nothing_is_learnt_from_a_tiny_attention() -> None:
    """The device waits for launches then, and a rank with less to do looks slower than it is."""
    speeds = LearnedSpeeds(ONES)
    for _ in range(WINDOW):
        assert speeds.update(ONES, 1e-3 / SLOW) == (1.0,) * 4
    learn(speeds, SLOW, 10)
    for _ in range(WINDOW):
        assert speeds.update(ONES, 1e-3 * ONES)[2] == 0.6


def test_a_rank_that_stands_still_keeps_some_attention() -> None:
    assert learn(LearnedSpeeds(ONES), np.array([1, 1, 1e-9, 1]), 10) == [1.0, 1.0, 0.1, 1.0]


def test_compensated_ranks_end_together() -> None:
    """Attention and other work: each rank does its own share of both at its own speed."""
    speed, other = np.array([1.0, 1.0, 0.8, 0.9]), 1.5
    planned = compensated(speed, other)
    attention = planned / planned.sum() * len(speed)
    together = len(speed) * (other + 1) / speed.sum()
    assert (other + attention) / speed == pytest.approx(np.full(4, together), rel=0.01)
    assert list(compensated(np.array([0.5, 0.0, 0.5]), other)) == [0.5, 0.0, 0.5]
    assert list(compensated(speed, 0.0)) == list(speed)
    assert list(compensated(np.array([1.0, 0.5]), 100.0)) == [1.0, 0.05]  # it is still measured


def test_a_slow_rank_is_compensated_only_if_other_work_is_told() -> None:
    for other_s, expected in ((None, [1, 1, 0.6, 1]), (ONES / SLOW, compensated(SLOW, 1.0))):
        speeds = LearnedSpeeds(ONES)
        for _ in range(WINDOW):
            speeds.update(ONES, ONES / SLOW, other_s)
        assert list(speeds.speed) == list(expected)
        known = LearnedSpeeds.of_state(json.loads(json.dumps(speeds.state())))
        assert known.speed == speeds.speed
        assert known.of_ranks([0, 2], [1, 1]).speed[1] < 0.61
    equal = LearnedSpeeds(ONES)
    assert equal.update(ONES, ONES, 7 * ONES) == (1.0,) * 4


def simulate(true: Callable[[int], Floats], steps: int, *, learns: bool) -> list[float]:
    """Returns the imbalance of each step: plans as the trainer makes them, and simulated ranks.

    A step is planned with the speeds that are known when the step ``DEPTH`` before it starts.
    """
    rng, speeds = np.random.default_rng(1), LearnedSpeeds(ONES)
    shape = ModelShape("layer", heads=8, kv_heads=2, head_dim=64)
    options = PlanOptions(model=shape, cost="cpu", search_orders=1)
    planner = StepPlanner(MeshShape(dp=4), (Mask.parse("causal"),), options)
    planners = [planner] * (DEPTH + 1)
    imbalances = []
    for step in range(steps):
        lengths = rng.integers(200, 8000, 12)
        plan, _ = next(planners[step].plan(lengths).passes)
        planned = (plan.forward_load_ps + plan.backward_load_ps) / PS
        exact = planned / true(step)
        imbalances.append(float(exact.max() / exact.mean()))
        measured = exact * np.exp(rng.normal(0, 0.01, 4)) * 1.3  # the cost model is wrong, too
        speed = speeds.update(planned, measured)
        planners.append(planner.with_speed(speed) if learns else planner)
    return imbalances


def test_plans_follow_a_slow_rank_within_ten_steps_and_back() -> None:
    def true(step: int) -> Floats:
        return SLOW if 8 <= step < 25 else ONES

    without = simulate(true, 22, learns=False)
    assert min(without[8:]) > 1.35
    learned = simulate(true, 42, learns=True)
    assert learned[:8] == without[:8]  # no other plans where all are equal
    assert max(learned[8 + 10 : 25]) <= 1.05
    assert max(learned[25 + 10 :]) <= 1.05


def test_what_is_known_about_the_ranks_that_are_left() -> None:
    speeds = LearnedSpeeds(np.array([1.0, 2.0, 1.0, 1.0]))
    learn(speeds, SLOW * [1, 2, 1, 1], WINDOW)
    kept = speeds.of_ranks([0, 2], [1.0, 1.0])
    assert kept.speed == (1.0, 0.6)
    assert speeds.speed == (1.0, 2.0, 0.6, 1.0)
    kept.update(np.ones(2), np.array([1.0, 1 / 0.6]))
    assert kept.speed == (1.0, 0.6)  # its measurements are kept too
    more = kept.of_ranks([0, 1, None], [1.0, 1.0, 3.0])
    assert more.speed == (1.0, 0.6, 3.0)
    same = LearnedSpeeds.of_state(json.loads(json.dumps(more.state())))
    for one in (more, same):
        one.update(np.ones(3), np.array([1.0, 1.0, 1 / 3]))
    assert same.speed == more.speed


def test_a_planner_for_the_ranks_that_are_left_plans_like_a_new_one() -> None:
    shape = ModelShape("layer", heads=8, kv_heads=2, head_dim=64)
    options = PlanOptions(model=shape, cost="cpu", speed=(1, 1, 1, 3, 2))
    mask, lengths = (Mask.parse("causal"),), np.array([900, 300, 2000, 1200])
    left = StepPlanner(MeshShape(dp=2, servers=3), mask, options).with_servers(1, (1, 1, 3))
    new = StepPlanner(
        MeshShape(dp=2, servers=1), mask, dataclasses.replace(options, speed=(1, 1, 3))
    )
    assert left.plan(lengths).fingerprint == new.plan(lengths).fingerprint
    alone = left.with_servers(0, (1, 1))
    assert alone.plan_options.servers == 0
    assert alone.plan(lengths).serves(0)
