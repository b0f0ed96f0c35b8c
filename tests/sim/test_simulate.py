"""Whole steps: worked out by hand, what they conserve, and how they may change."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from sim.draws import close
from sim.runs import batch_of, moved, outcome, scenario
from sim.tiny import END, KV_BYTES, LAYER, MODEL, Q_BYTES, US

from distca.pipeline.mesh import MeshShape
from distca.pipeline.step_plan import StepPlan
from distca.planning.spans import as_ints
from distca.sim.cluster import Link
from distca.sim.scenario import Scenario, Strategy
from distca.sim.simulate import Outcome, Summary, simulate

# -- by hand -------------------------------------------------------------------------------------


def test_two_gpus_with_a_document_each(profile: str) -> None:
    """10 tokens and 55 pairs on each.

    Forward: 10 + 20 us, 10 of the head, 0.055. Backward: 80 and 0.110.
    Weights: 2 bytes of 640 parameters, half of them from the other: 1 + 640 / 64 us. They come
    under the forward, but for those of the layer, 384 of 640: 0.6 x 11 us show.
    Gradients: 4 bytes: 1 + 1280 / 64 us, under the backward: 0.6 x 21 us show.
    Optimizer: 320 x 40 bytes of 1280 bytes a us.
    """
    found = outcome(scenario(profile, [10, 10], 10), "colocated", MeshShape(dp=2))
    assert found.step_s == close((40.055 + 80.110 + 6.6 + 12.6 + 10) * US)
    assert found.busy_s.tolist() == close([(40.055 + 80.110 + 10) * US] * 2)
    assert found.num_bytes == 2 * (640 + 1280)


def test_a_document_over_two_gpus(profile: str) -> None:
    """16 tokens, head and tail: 8 tokens and 68 pairs on each, and 8 x 16 bytes of keys to fetch.

    Forward: 8 us, keys 1 + 2, attention 0.068, 16, head 8. Backward: 16, 32, 0.136, 1 + 2, 16.
    Weights and gradients as above: 6.6 and 12.6 us of them show.
    """
    found = outcome(scenario(profile, [16], 16), "head-tail-cp", MeshShape(cp=2))
    assert found.step_s == close((35.068 + 67.136 + 6.6 + 12.6 + 10) * US)
    assert found.num_bytes == 2 * (640 + 1280) + 2 * 2 * 8 * KV_BYTES


def test_a_task_that_moves(profile: str) -> None:
    """In us; 90,304 pairs stay on rank 0, 33,024 are rank 1's own and 41,024 come to it.

    Forward
      weights     256 parameters of the first seam, 256 bytes from the other, at 0-5; then 384, 5-12
      before      5-517
      dispatch    q of 128 tokens, keys of 384: 8192 bytes, 517-646
      attention   rank 0: 517-607.304; rank 1: its own 517-550.024, then 646-687.024
      return      o of 128 tokens: 2048 bytes, 687.024-720.024
      after       with the head: 720.024-2256.024
    Backward
      weights     384 parameters: 2256.024-2263.024; then 256: -2268.024
      after       with the head: 2263.024-5335.024
      dispatch    q, o, do and two floats of 128 tokens, keys of 384: 13,312 bytes, -5544.024
      gradients   4 bytes of 384 parameters, 768 from the other: -5557.024
      attention   rank 0: 5335.024-5515.632; rank 1: -5401.072, then 5544.024-5626.072
      return      dq of 128 tokens, dk and dv of 384: 8192 bytes, 5626.072-5755.072
      before      5755.072-6779.072
      gradients   4 bytes of 256 parameters, 512 from the other: -6788.072
      optimizer   -6798.072
    """
    found = moved(profile)
    assert found.step_s == close(6798.072 * US)
    busy = [6 * 512 + 3 * 1024 + 0.003 * pairs + 10 for pairs in (90_304, 33_024 + 41_024)]
    assert found.busy_s.tolist() == close([seconds * US for seconds in busy])


def test_bytes_of_a_task_that_moves(profile: str) -> None:
    forward = 128 * 2 * Q_BYTES + 384 * KV_BYTES
    backward = 128 * (4 * Q_BYTES + 2 * 4) + 384 * 2 * KV_BYTES
    weights = (LAYER + 2 * END) * (2 + 2 + 4)
    assert moved(profile).num_bytes == forward + backward + weights


def test_bytes_are_the_same_in_tensor_parallel_parts(profile: str) -> None:
    """But for the floats of heads, of which there are four here, half as wide."""
    model = replace(MODEL, heads=4, kv_heads=2, head_dim=2)
    packed = outcome(
        scenario(profile, [16], 16, model=model, gpus=4), "head-tail-cp", MeshShape(cp=2, tp=2)
    )
    assert packed.num_bytes == 640 * (2 + 4) + 2 * 2 * 8 * KV_BYTES
    ours = moved(profile, model=model, gpus=4, tp=2)
    forward = 128 * 2 * Q_BYTES + 384 * KV_BYTES
    backward = 128 * (4 * Q_BYTES + 4 * 4) + 384 * 2 * KV_BYTES
    assert ours.num_bytes == forward + backward + 640 * (2 + 2 + 4)


def test_exchanges_between_nodes_take_the_slower_link(profile: str) -> None:
    """Each of the four exchanges takes 2 us + 1 us for each 16 bytes now, and so do weights: one
    GPU in each node. Before: 129 + 33 + 209 + 129 of exchanges; 5 of the first weights, 7 of the
    first of backward, and 9 of the last gradients. Those in between stay hidden."""
    was, inside = 129 + 33 + 209 + 129, 5 + 7 + 9
    exchanges = 4 * 2 + (8192 + 2048 + 13_312 + 8192) / 16
    # Gradients of the first seam, 2 + 768 / 16 us after the dispatch, hide behind the attention.
    weights = 3 * 2 + (256 + 384 + 512) / 16
    found = moved(profile, gpus_per_node=1)
    assert found.step_s == close((6798.072 - was - inside + exchanges + weights) * US)


def test_without_time_between_nodes_a_step_takes_what_links_inside_leave(profile: str) -> None:
    """On one node free links change nothing; on two there are only weights left, at the rate of
    the links inside."""
    near = moved(profile)
    assert near.free_s == near.step_s
    far = moved(profile, gpus_per_node=1)
    weights = (256 + 384 + 512) / 64
    computing = 10 + 6 * 512 + 3 * 1024
    forward, backward = 90.304, 180.608
    assert far.free_s == close((computing + forward + backward + weights) * US)
    assert far.exposed == close(1 - far.free_s / far.step_s)


def test_free_links_leave_a_gathering_the_links_inside(profile: str) -> None:
    """A document of 16 tokens over two nodes: keys take 2 + 8 us in each direction, weights 2 +
    40, and gradients 2 + 80. At the rate inside, and without latency, those are 2, 10 and 20. Of
    weights and gradients 0.6 show, the layer's: forward and backward, of 42.068 and 74.136 us, or
    of 34.068 and 66.136, hide all the rest."""
    one = scenario(profile, [16], 16, gpus_per_node=1)
    found = outcome(one, "head-tail-cp", MeshShape(cp=2))
    computing = 32.068 + 64.136 + 10
    assert found.step_s == close((computing + 2 * 10 + 0.6 * (42 + 82)) * US)
    assert found.free_s == close((computing + 2 * 2 + 0.6 * (10 + 20)) * US)


def test_a_slow_gpu_holds_up_the_other(profile: str) -> None:
    """At half the speed, all that is computed takes twice as long, the optimizer's 10 us too."""
    even = outcome(scenario(profile, [10, 10], 10), "colocated", MeshShape(dp=2))
    slow = outcome(scenario(profile, [10, 10], 10, slow={1: 0.5}), "colocated", MeshShape(dp=2))
    assert slow.step_s - even.step_s == close((120.165 + 10) * US)
    assert slow.busy_s.tolist() == close([130.165 * US, 2 * 130.165 * US])


def test_a_slow_gpu_alone_is_as_slow_in_every_way(profile: str) -> None:
    one = scenario(profile, [10], 10, gpus=1, slow={0: 0.5})
    for policy in ("colocated", "distca"):
        found = outcome(one, policy, MeshShape(), ping_pong=False)
        assert found.step_s == close(2 * (120.165 + 20) * US)
        assert found.idle == pytest.approx(0.0, abs=1e-12)


def test_tensor_parallel_gpus_share_a_document(profile: str) -> None:
    """8 tokens, 36 pairs at half the nanosecond, and five exchanges of 1 + 1 us: one before the
    attention, three after it, one in the head. Forward 6 + 0.018 + 14 + 6, backward 10 + 22 + 10
    + 0.036; the optimizer has half of 640 parameters."""
    model = replace(MODEL, heads=4, kv_heads=2, head_dim=2)
    found = outcome(scenario(profile, [8], 8, model=model), "colocated", MeshShape(tp=2))
    assert found.step_s == close((26.018 + 42.036 + 10) * US)
    assert len(found.busy_s) == 1


def test_stages_that_are_alike_take_the_well_known_time(profile: str) -> None:
    """Two stages of one layer and no head, three micro-batches of 10 tokens, and links that take
    no time: (3 + 2 - 1) x (30.055 + 60.110), and the optimizer's 384 parameters."""
    model = replace(MODEL, layers=2, vocab_size=0)
    free = {"across": Link(1e30), "inside": Link(1e30)}
    one = scenario(profile, [10] * 3, 10, model=model, **free)
    found = outcome(one, "colocated", MeshShape(pp=2), micro_batches=3)
    assert found.step_s == close((4 * 90.165 + 12) * US)


# -- conservation --------------------------------------------------------------------------------

UNEVEN = [700, 200, 60, 40, 300, 300, 100, 300, 500, 490, 10, 1000]  # sequences of 1000
STRATEGIES = [
    Strategy("distca", MeshShape(dp=4)),
    Strategy("distca", MeshShape(dp=4), placement="balanced", ping_pong=False),
    Strategy("distca", MeshShape(dp=2, servers=2), ping_pong=False),
    Strategy("distca", MeshShape(pp=2, dp=2), micro_batches=2),
    Strategy("greedy", MeshShape(dp=4)),
    Strategy("colocated", MeshShape(dp=4)),
    Strategy("colocated", MeshShape(pp=2, dp=2), micro_batches=2),
    Strategy("head-tail-cp", MeshShape(dp=2, cp=2)),
    Strategy("per-document-cp", MeshShape(cp=4)),
    Strategy("wlb", MeshShape(dp=4)),
    Strategy("kk", MeshShape(dp=4)),
    Strategy("kk", MeshShape(pp=2, dp=2), micro_batches=2),
    Strategy("dynamic-cp", MeshShape(dp=2, cp=2)),
    Strategy("dynamic-cp", MeshShape(pp=2, cp=2), micro_batches=2),
]
strategies = pytest.mark.parametrize(
    "strategy", STRATEGIES, ids=lambda strategy: f"{strategy.name}, {strategy.sizes}"
)


def uneven(profile: str, **changes: Any) -> Scenario:
    model = replace(MODEL, layers=2)
    return scenario(
        profile, UNEVEN, 1000, model=model, **{"gpus": 4, "gpus_per_node": 2, **changes}
    )


def assert_computes(found: Outcome, pairs: int) -> None:
    """Busy: 9 us of a token in each layer and 3 in the head, 3 ns of a pair in each layer, and the
    optimizer; FLOPs: 6 of a token and parameter, 3.5 x 32 of a pair; what is embedded is free."""
    assert found.flops == close(6 * 4000 * (2 * LAYER + END) + 3.5 * 32 * pairs * 2)
    optimizer = (2 * LAYER + 2 * END) * 40 / 1.28e9
    computing = 4000 * (2 * 9 + 3) * US + pairs * 2 * 3e-9
    assert float(found.busy_s.sum()) == close(computing + optimizer)


@strategies
def test_every_strategy_does_the_work_of_all_tokens_and_pairs(
    profile: str, strategy: Strategy
) -> None:
    one = uneven(profile)
    found = simulate(one, strategy, batch_of(one))
    pairs = sum(position + 1 for n in UNEVEN for position in range(n))
    assert found.tokens == sum(UNEVEN) == 4000
    assert_computes(found, pairs)


@strategies
def test_no_rank_is_busy_for_longer_than_the_step(profile: str, strategy: Strategy) -> None:
    one = uneven(profile, jitter=0.2, link_jitter=0.2, slow={1: 0.5})
    found = simulate(one, strategy, batch_of(one))
    assert np.all(found.busy_s <= found.step_s)
    assert 0 <= found.idle < 1


@pytest.mark.parametrize(
    "strategy", [strategy for strategy in STRATEGIES if strategy.policy != "greedy"]
)
def test_windows_cost_the_pairs_that_they_show(profile: str, strategy: Strategy) -> None:
    one = replace(uneven(profile), mask="window:30")
    found = simulate(one, strategy, batch_of(one))
    pairs = sum(min(position + 1, 30) for n in UNEVEN for position in range(n))
    assert_computes(found, pairs)


@strategies
def test_recorded_events_lie_inside_the_step(profile: str, strategy: Strategy) -> None:
    one = uneven(profile)
    found = simulate(one, strategy, batch_of(one), record=True)
    assert {event.stream for event in found.events} >= {"compute"}
    assert all(np.all(event.start <= event.stop) for event in found.events)
    assert max(float(event.stop.max()) for event in found.events) <= found.step_s * (1 + 1e-12)
    assert simulate(one, strategy, batch_of(one)).events == ()


def test_recorded_computing_of_ticks_adds_up_to_what_ranks_are_busy(profile: str) -> None:
    one = uneven(profile)
    found = simulate(one, STRATEGIES[0], batch_of(one), record=True)
    computing = [event.stop - event.start for event in found.events if event.stream == "compute"]
    assert np.sum(computing, axis=0).tolist() == close(found.busy_s.tolist())


# -- how numbers may change -----------------------------------------------------------------------


@settings(max_examples=15)
@given(strategy=st.sampled_from(STRATEGIES), slow=st.floats(1e5, 1e8), factor=st.floats(1.0, 1e3))
def test_more_bandwidth_between_nodes_is_never_slower(
    profile: str, strategy: Strategy, slow: float, factor: float
) -> None:
    batch = batch_of(uneven(profile))
    before, after = (
        simulate(uneven(profile, across=Link(rate, 2 * US)), strategy, batch)
        for rate in (slow, slow * factor)
    )
    assert after.free_s * (1 - 1e-12) <= after.step_s <= before.step_s


@settings(max_examples=15)
@given(strategy=st.sampled_from(STRATEGIES), speed=st.floats(0.2, 1.0), gpu=st.integers(0, 3))
def test_a_faster_gpu_is_never_slower_under_the_same_plan(
    profile: str, strategy: Strategy, speed: float, gpu: int
) -> None:
    """The planner is not told, so it plans the same."""
    batch = batch_of(uneven(profile))
    slower, slow, even = (
        simulate(uneven(profile, slow={gpu: value}, known=False), strategy, batch).step_s
        for value in (speed / 2, speed, 1.0)
    )
    assert even <= slow <= slower


def test_a_planner_that_knows_of_a_slow_gpu_gives_it_less_attention(profile: str) -> None:
    def found(known: bool) -> Outcome:
        one = uneven(profile, slow={0: 0.25}, known=known)
        return outcome(one, "distca", MeshShape(dp=4), ping_pong=False)

    assert found(True).busy_s[0] < found(False).busy_s[0]


def test_greedy_is_not_told_of_slow_gpus(profile: str) -> None:
    def found(known: bool) -> Outcome:
        one = uneven(profile, slow={0: 0.25}, known=known)
        return outcome(one, "greedy", MeshShape(dp=4), ping_pong=False)

    told, untold = found(True), found(False)
    assert told.busy_s.tolist() == untold.busy_s.tolist()
    assert told.step_s == untold.step_s


def test_the_planner_knows_which_gpus_share_a_node(profile: str) -> None:
    found = outcome(uneven(profile), "distca", MeshShape(dp=4))
    assert isinstance(found.planned, StepPlan)
    nodes = [plan.devices.node.tolist() for plan, _ in found.planned.passes]
    assert nodes == [[0, 0, 1, 1]] * len(nodes)


def test_balanced_placement_evens_tokens(profile: str) -> None:
    """One document of 1000 tokens stays on one of four workers, unless it may be moved."""

    def most(placement: str) -> int:
        one = scenario(profile, [1000, *[10] * 100], 1000, gpus=4)
        found = outcome(one, "distca", MeshShape(dp=4), placement=placement, ping_pong=False)
        assert isinstance(found.planned, StepPlan)
        return int(found.planned.micro_batches[0][0].placement.tokens.max())

    assert most("given") == 1000
    assert most("balanced") <= 1.05 * 500


@strategies
def test_without_jitter_steps_are_the_same_again_and_with_it_for_the_same_seed(
    profile: str, strategy: Strategy
) -> None:
    def step_s(jitter: float, seed: int) -> float:
        one = uneven(profile, jitter=jitter, link_jitter=jitter)
        return simulate(one, strategy, batch_of(one), seed=seed).step_s

    assert step_s(0.0, 1) == step_s(0.0, 2)
    assert step_s(0.1, 1) == step_s(0.1, 1) != step_s(0.1, 2)


@strategies
def test_a_step_that_is_planned_already_takes_as_long(profile: str, strategy: Strategy) -> None:
    one = uneven(profile)
    first = simulate(one, strategy, batch_of(one))
    again = simulate(one, strategy, batch_of(one), planned=first.planned)
    assert again.planned is first.planned
    assert (again.step_s, again.num_bytes) == (first.step_s, first.num_bytes)


@strategies
def test_free_links_save_time_with_jitter_too(profile: str, strategy: Strategy) -> None:
    one = uneven(profile, jitter=0.3, link_jitter=0.3)
    found = simulate(one, strategy, batch_of(one))
    assert 0 < found.free_s <= found.step_s


@strategies
def test_kernels_take_longer_where_transfers_beside_them_occupy_sms(
    profile: str, strategy: Strategy
) -> None:
    """With packed bins, only the ring of dynamic groups is beside kernels of their own streams."""
    free, shared = (uneven(profile, transfer_sms=share) for share in (0.0, 0.5))
    before, after = (simulate(one, strategy, batch_of(one)) for one in (free, shared))
    slowed = strategy.disaggregated or strategy.policy == "dynamic-cp"
    assert (after.busy_s.sum() > before.busy_s.sum()) == slowed
    assert (after.step_s > before.step_s) == slowed
    assert after.num_bytes == before.num_bytes


def test_packed_ranks_are_the_more_idle_the_more_there_are(profile: str) -> None:
    """Eight sequences of 200 tokens, one of them one document and the others 200: the more groups
    share them, the more of them wait for that one. Links take no time."""
    documents = [200] + [1] * 1400
    idle = []
    for dp in (1, 2, 4, 8):
        free = {"inside": Link(1e30), "across": Link(1e30)}
        one = scenario(profile, documents, 200, gpus=dp, **free)
        idle.append(outcome(one, "colocated", MeshShape(dp=dp)).idle)
    assert idle[0] == pytest.approx(0.0, abs=1e-9)
    assert idle == sorted(idle)
    assert idle[3] > 2 * idle[1] > 0


def test_disaggregation_ends_that_wait(profile: str) -> None:
    """Attention is all of the work here, in a model without weights: 2048 tokens in one document,
    on one of two GPUs."""
    free = {"inside": Link(1e30), "across": Link(1e30)}
    model = replace(MODEL, hidden=0, vocab_size=0)
    one = scenario(profile, [2048] + [128] * 16, 2048, model=model, **free)
    packed = outcome(one, "colocated", MeshShape(dp=2))
    ours = outcome(one, "distca", MeshShape(dp=2), ping_pong=False)
    assert packed.idle > 0.4
    assert ours.idle < 0.02
    assert ours.step_s < 0.6 * packed.step_s


# -- summaries -----------------------------------------------------------------------------------


def test_a_summary_is_the_mean_of_its_steps(profile: str) -> None:
    one = replace(uneven(profile), lengths=as_ints([*UNEVEN, *[10] * 400]))
    strategy, batches = STRATEGIES[5], list(one.batches(2))
    first, second = (simulate(one, strategy, batch) for batch in batches)
    found = Summary.of(one, strategy, batches)
    step_s = (first.step_s + second.step_s) / 2
    assert first.step_s != second.step_s
    assert found.step_s == close(step_s)
    assert found.tokens_per_s == close(4000 / step_s)
    assert found.tflops_per_gpu == close((first.flops + second.flops) / 2 / step_s / 4 / 1e12)
    busy = float(first.busy_s.mean() + second.busy_s.mean())
    assert found.idle == pytest.approx(1 - busy / (2 * step_s))
    assert found.exposed == pytest.approx(1 - (first.free_s + second.free_s) / (2 * step_s))
    assert found.bytes_per_gpu == close((first.num_bytes + second.num_bytes) / 2 / 4)


def test_every_batch_of_a_summary_is_shaken_by_itself(profile: str) -> None:
    one = uneven(profile, jitter=0.2)
    batch, strategy = batch_of(one), STRATEGIES[5]
    steps = [simulate(one, strategy, batch, seed=seed).step_s for seed in (0, 1)]
    assert Summary.of(one, strategy, [batch, batch]).step_s == close(sum(steps) / 2)
    assert steps[0] != steps[1]


def test_all_strategies_are_given_the_same_documents(profile: str) -> None:
    one = replace(uneven(profile), lengths="pretrain")
    chosen = [STRATEGIES[0], STRATEGIES[5], STRATEGIES[9]]
    batches = list(one.batches(2))
    compared = [Summary.of(one, strategy, batches) for strategy in chosen]
    assert [found.strategy for found in compared] == chosen
    # Equal FLOPs, as attention makes them, are equal documents.
    done = {round(found.tflops_per_gpu * found.step_s * 1e15) for found in compared}
    assert len(done) == 1


# -- refusals ------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("policy", "parallel", "choices", "message"),
    [
        ("colocated", MeshShape(dp=3), {}, "need 3 ranks, but 4 were started"),
        ("distca", MeshShape(dp=3), {}, "need 3 ranks, but 4 were started"),
        ("colocated", MeshShape(dp=4), {"micro_batches": 3}, "4 sequences over dp 4 x 3 micro-ba"),
        ("wlb", MeshShape(dp=4), {"micro_batches": 4}, "12 documents for dp 4 x 4 micro-batches"),
        ("distca", MeshShape(dp=4), {"micro_batches": 7}, "12 documents cannot be split into 14 s"),
        ("distca", MeshShape(tp=4), {}, "tp = 4 with 2 GPUs in a node: tensor parallelism stays"),
        ("distca", MeshShape(dp=2, tp=2), {}, "tp = 2 does not divide 2 heads, 1 kv heads and an"),
        ("distca", MeshShape(pp=4), {}, "2 layers on 4 stages: every stage needs a layer"),
        ("wlb", MeshShape(pp=4), {}, "2 layers on 4 stages: every stage needs a layer"),
    ],
)
def test_steps_that_cannot_be_are_refused_in_one_sentence(
    profile: str, policy: str, parallel: MeshShape, choices: dict[str, int], message: str
) -> None:
    with pytest.raises(ValueError, match=message) as refused:
        outcome(uneven(profile), policy, parallel, **choices)
    assert "\n" not in str(refused.value)
    assert len(str(refused.value)) < 250


@pytest.mark.parametrize("policy", ["colocated", "distca"])
def test_an_unknown_profile_is_told_the_known_ones(policy: str) -> None:
    one = scenario("h300", [10, 10], 10)
    with pytest.raises(ValueError, match="profile 'h300' does not exist: give h200, h200-flash,"):
        outcome(one, policy, MeshShape(dp=2))
