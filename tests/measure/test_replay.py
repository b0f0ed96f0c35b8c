"""One rank of many, replayed and simulated: the same work, the same bytes, the same time."""

from collections.abc import Sequence
from dataclasses import asdict, replace
from typing import Any

import numpy as np
import pytest
import torch

from distca.dispatch.transports.throttled import ThrottledTransport
from distca.measure.replay import Measured, Replay, layers_of, measure, share_of, typical
from distca.model.config import ModelConfig
from distca.model.sizes import model_config
from distca.pipeline.mesh import MeshShape
from distca.pipeline.step_plan import StepPlan
from distca.pipeline.step_planner import StepPlanner
from distca.planning.costs.base import PS
from distca.planning.costs.choice import cost_model
from distca.planning.masks import CAUSAL, Mask
from distca.planning.options import PlanOptions
from distca.planning.spans import as_ints
from distca.planning.traffic import flows, needs_peers
from distca.sim.cluster import Link
from distca.sim.isolated import (
    UNCALIBRATED,
    Case,
    Factors,
    RankSeconds,
    compare,
    fit,
    simulate_isolated,
)

CPU = torch.device("cpu")
DEBUG = model_config("debug")
CONFIG = share_of(DEBUG, tp=2, layers=2)
MASKS = (Mask(CAUSAL),) * CONFIG.layers
FREE = Link(1e18)


def case_of(**changes: Any) -> Case:
    """Four ranks with a document over all of them in each half."""
    case = Case(
        CONFIG.shape, MASKS, ranks=4, lengths="fixed:700", context=1024, tokens=384, link=FREE,
        cost="cpu", ping_pong=False,
    )  # fmt: skip
    return replace(case, **changes)


def replays(
    case: Case,
    step: StepPlan,
    rank: int,
    dtype: torch.dtype = torch.float32,
    config: ModelConfig = CONFIG,
) -> Replay:
    model = layers_of(config, CPU, dtype)
    link = {"bytes_per_s": case.link.bytes_per_s, "latency_s": case.link.latency_s}
    return Replay(model, step, rank, **link, dtype=dtype)


# -- the device side -----------------------------------------------------------------------------


@pytest.mark.parametrize("ping_pong", [False, True])
def test_every_rank_of_a_plan_runs(ping_pong: bool) -> None:
    case = case_of(ping_pong=ping_pong)
    step = case.plan()
    assert step.num_bytes > 0
    for rank in range(case.ranks):
        measured = replays(case, step, rank)()
        assert 0 < measured.attention_s < measured.step_s
        assert 0 < measured.exposed_s < measured.step_s
        assert 0 < measured.host_s <= measured.step_s


@pytest.mark.parametrize("ping_pong", [False, True])
def test_the_bytes_are_those_of_the_plan(ping_pong: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    """Each exchange once, forward and backward, in every layer: recomputing exchanges nothing."""
    moved = np.zeros((2, 0), np.int64)
    start = ThrottledTransport.start

    def counted(
        self: Any, send: Any, recv: Any, out: Sequence[int], back: Sequence[int], check: Any
    ) -> Any:
        nonlocal moved
        moved = np.append(moved, [[sum(out)], [sum(back)]], axis=1)
        return start(self, send, recv, out, back, check)

    monkeypatch.setattr(ThrottledTransport, "start", counted)
    # Narrow, since matrix products in bfloat16 are slow on some CPUs.
    config = replace(CONFIG, hidden=16, ffn=16, head_dim=8)
    case = case_of(shape=config.shape, ping_pong=ping_pong)
    step = case.plan()
    for rank in range(case.ranks):
        moved = moved[:, :0]
        replays(case, step, rank, torch.bfloat16, config)()
        sent = received = 0
        for plan, backward in step.passes:
            traffic = plan.backward_traffic if backward else plan.traffic
            sent, received = sent + int(traffic.send[rank]), received + int(traffic.recv[rank])
            if not backward:  # log-sum-exp comes home with outputs, which plans do not count
                tasks = plan.forward.only(plan.forward.moved)
                lse = 4 * CONFIG.heads * tasks.queries
                sent += int(lse[tasks.server == rank].sum())
                received += int(lse[tasks.home == rank].sum())
        padding = 128 * 6 * case.ranks * moved.shape[1]  # up to a boundary for peers
        assert sent <= moved[0].sum() < sent + padding
        assert received <= moved[1].sum() < received + padding


def test_a_slow_link_is_waited_for() -> None:
    case = case_of(link=Link(4e6, 1e-3), element_bytes=4)
    step = case.plan()
    simulated = simulate_isolated(case, step)
    rank = int(np.argmax(simulated.sent))
    measured = replays(case, step, rank)()
    port = max(simulated.sent[rank], simulated.received[rank]) * CONFIG.layers / 4e6
    assert measured.step_s > port > 0.3
    assert measured.exposed_s > 0.7 * simulated.exposed_s[rank]
    with_free_link = replays(case_of(), step, rank)()
    assert with_free_link.exposed_s < 0.3 * measured.exposed_s


def test_medians_come_after_a_warm_up() -> None:
    rounds = iter(
        [Measured(9.0, 5.0, 5.0, 2.0), *(Measured(n, 6.0 - n, n / 2, n) for n in (3.0, 1, 5))]
    )
    assert measure(lambda: next(rounds), 3) == Measured(3.0, 3.0, 1.5, 3.0)  # type: ignore[arg-type]
    assert typical([Measured(2.0, 1.0, 0.5, 0.1)]) == Measured(2.0, 1.0, 0.5, 0.1)
    with pytest.raises(ValueError, match="0 rounds: measure 1 or more"):
        measure(lambda: next(rounds), 0)  # type: ignore[arg-type]


def test_a_share_is_what_one_of_tp_ranks_has() -> None:
    assert (CONFIG.heads, CONFIG.kv_heads, CONFIG.ffn, CONFIG.layers) == (4, 2, 160, 2)
    assert (CONFIG.hidden, CONFIG.head_dim, CONFIG.vocab_size) == (256, 32, 130)
    names = [name for name, _ in layers_of(CONFIG, CPU, torch.float32).named_parameters()]
    assert not any("head" in name for name in names)
    tied = share_of(model_config("llama3.2-1b"), 8, 1)  # has no head to be tied to
    assert not tied.tied
    with pytest.raises(ValueError, match="tp = 3 does not divide"):
        share_of(DEBUG, 3, 2)


def test_what_cannot_be_replayed_is_refused() -> None:
    step = case_of().plan()
    with pytest.raises(ValueError, match="rank 4 of a plan for 4 workers"):
        replays(case_of(), step, 4)
    planner = StepPlanner(MeshShape(pp=2, cp=2), MASKS, PlanOptions(model=CONFIG.shape))
    with pytest.raises(ValueError, match="a plan of 2 stages and 1 micro-batches"):
        replays(case_of(), planner.plan(as_ints([300, 200])), 0)


# -- the simulated side ----------------------------------------------------------------------------


def by_hand(case: Case, step: StepPlan, rank: int) -> tuple[float, float]:
    """Seconds of a rank by itself, and those in which it waits; one half."""
    s, cost, plan = case.shape, cost_model(case.cost, case.shape), step.slots[0][0][0]

    def linear(elements: int) -> float:
        return 2 * elements * int(plan.placement.tokens[rank]) / (cost.linear_tflops * 1e12)

    def port(source: Any, target: Any, num_bytes: Any) -> float:
        load = max(int(num_bytes[end == rank].sum()) for end in (source, target))
        return case.link.latency_s + load / case.link.bytes_per_s if load else 0.0

    before = linear(s.hidden * (s.heads + 2 * s.kv_heads) * s.head_dim)
    after = linear(s.hidden * (s.heads * s.head_dim + 3 * s.ffn))
    now = waited = 0.0
    for backward in (False, True):
        tasks = plan.backward if backward else plan.forward
        sent = flows(tasks, plan.placement, plan.shape, backward=backward)
        pairs = tasks.pairs(plan.placement, plan.reach)
        each = cost.of(backward=backward).ps(tasks.queries, tasks.keys, pairs) / PS
        mine, away = tasks.server == rank, needs_peers(tasks, plan.placement)
        for _ in range(s.layers):
            now += 3 * after if backward else before  # two gradients, and once again forward
            arrives = now + port(sent.source, sent.target, sent.out)
            now += each[mine & ~away].sum()
            waited += max(arrives - now, 0.0)
            now = max(arrives, now) + each[mine & away].sum()
            home = port(sent.target, sent.source, sent.back)
            waited += home
            now += home + (3 * before if backward else after)
    return now, waited


@pytest.mark.parametrize("lengths", ["fixed:700", "fixed:100"])
def test_an_isolated_rank_takes_what_a_hand_computes(lengths: str) -> None:
    case = case_of(link=Link(3e8, 1e-5), lengths=lengths)
    step = case.plan()
    found = simulate_isolated(case, step)
    for rank in range(case.ranks):
        expected = by_hand(case, step, rank)
        assert (found.step_s[rank], found.exposed_s[rank]) == pytest.approx(expected, rel=1e-9)


@pytest.mark.parametrize("ping_pong", [False, True])
def test_factors_and_links_are_all_that_changes(ping_pong: bool) -> None:
    case = case_of(ping_pong=ping_pong)
    step = case.plan()
    plain, slower = simulate_isolated(case, step), simulate_isolated(case, step, Factors(2.0, 3.0))
    assert plain.exposed_s == pytest.approx(np.zeros(4), abs=1e-9)
    linear = plain.step_s - plain.attention_s
    assert slower.step_s == pytest.approx(2 * linear + 3 * plain.attention_s, rel=1e-6)
    work = [p.backward_load_ps if b else p.forward_load_ps for p, b in step.passes]
    assert plain.attention_s == pytest.approx(np.sum(work, axis=0) / PS)
    narrow = simulate_isolated(replace(case, link=Link(1e8)), step)
    wider = simulate_isolated(replace(case, link=Link(2e8), element_bytes=4), step)
    assert narrow.step_s == pytest.approx(wider.step_s)  # twice the bytes at twice the speed
    assert 2 * narrow.sent == pytest.approx(wider.sent)
    assert (narrow.step_s - narrow.exposed_s) == pytest.approx(plain.step_s)


def test_the_sample_has_the_ends_and_then_any() -> None:
    case = case_of(ranks=16, link=Link(1e8))
    found = simulate_isolated(case, case.plan())
    sample = found.sample(8, seed=1)
    assert len(sample) == 8
    assert int(np.argmax(found.step_s)) in sample
    assert int(np.argmin(found.step_s)) in sample
    assert "random" in sample.values()
    assert sample == found.sample(8, seed=1) != found.sample(8, seed=2)
    assert sorted(found.sample(99)) == list(range(16))
    with pytest.raises(ValueError, match="a sample of 1 of 16 ranks: give 2 or more"):
        found.sample(1)
    lonely = case_of(ranks=1, context=384, lengths="fixed:100")
    with pytest.raises(ValueError, match="a sample of 3 of 1 ranks"):
        simulate_isolated(lonely, lonely.plan()).sample(3)


def test_calibration_finds_the_factors_and_is_held_to_others() -> None:
    case = case_of(ranks=12, link=Link(2e8), ping_pong=True)
    step = case.plan()
    truth, sample = (
        simulate_isolated(case, step, Factors(1.3, 0.7)),
        simulate_isolated(case, step).sample(9),
    )
    found = compare(case, step, sample, {rank: truth.seconds(rank) for rank in sample})
    assert found.factors.linear == pytest.approx(1.3, rel=1e-6)
    assert found.factors.attention == pytest.approx(0.7, rel=1e-6)
    assert [row.calibrates for row in found.rows] == [False] * 6 + [True] * 3
    assert found.calibrated["worst"] < 1e-6
    assert found.raw["mean"] > 0.01
    off = [abs(row.simulated.step / row.measured.step - 1) for row in found.rows[:6]]
    assert found.raw == pytest.approx({"mean": np.mean(off), "worst": max(off)})
    usual = [row.measured.step for row in found.rows if row.why == "random"]
    assert found.step_s == pytest.approx(np.mean(usual))
    assert asdict(found)["rows"][0]["measured"].keys() == {"step", "exposed", "attention", "host"}


def test_what_says_nothing_calibrates_nothing() -> None:
    nothing, something = RankSeconds(0.0, 0.0, 0.0), RankSeconds(1.0, 0.5, 0.2)
    assert fit([(nothing, something)]) == UNCALIBRATED


@pytest.mark.parametrize(
    ("changes", "words"),
    [
        ({"ranks": 0}, "ranks = 0: give 1 or more"),
        ({"context": 4096}, "all ranks together must hold the longest document"),
        ({"placement": "even"}, "placement 'even' is unknown: choose given or balanced"),
    ],
)
def test_bad_cases_are_refused(changes: dict[str, Any], words: str) -> None:
    with pytest.raises(ValueError, match=words):
        case_of(**changes)


@pytest.mark.gpu
def test_on_a_gpu() -> None:
    device, link = torch.device("cuda", 0), Link(50e9)
    config = share_of(model_config("llama3-8b"), 8, 2)
    case = Case(config.shape, MASKS, 16, "pretrain", 16384, 8192, link, "h200")
    step, model = case.plan(), layers_of(config, device, torch.bfloat16)
    replay = Replay(model, step, 3, bytes_per_s=link.bytes_per_s, dtype=torch.bfloat16)
    measured = measure(replay, 2)
    assert 0 < measured.attention_s < measured.step_s < 1.0
