"""Candidates, what no step goes below, and the search for the best of them."""

from dataclasses import replace
from functools import cache
from math import inf
from typing import Any

import pytest
from quick import others_slow

from distca.pipeline.mesh import MeshShape
from distca.planning.models import MODELS, ModelShape
from distca.sim.cluster import cluster
from distca.sim.lower_bounds import min_bytes, min_step_s
from distca.sim.scenario import Batch, Scenario, Strategy
from distca.sim.simulate import Outcome, Summary, simulate
from distca.sim.sweep import Sizes, best, candidates, tensor_sizes

SMALL = ModelShape("small", 4, 2, 128, layers=3, hidden=512, ffn=2048, vocab_size=32000)
SCENARIO = Scenario(SMALL, replace(cluster("h200"), gpus=4, gpus_per_node=2), 16384, 4)
TEMPLATES = {
    strategy.name: strategy
    for strategy in (
        Strategy("colocated", MeshShape()),
        Strategy("head-tail-cp", MeshShape()),
        Strategy("wlb", MeshShape()),
        Strategy("kk", MeshShape()),
        Strategy("dynamic-cp", MeshShape()),
        Strategy(
            "distca", MeshShape(), placement="balanced", tolerance=0.3
        ),  # short documents, few tiles
    )
}
EACH = pytest.mark.parametrize("name", TEMPLATES)


@cache
def batch() -> Batch:
    return next(SCENARIO.batches(1))


@cache
def exhaustive(name: str) -> dict[Strategy, Outcome]:
    """Every candidate, but for the pipelines that take long to plan."""
    strategies = candidates(SCENARIO, TEMPLATES[name], Sizes())
    few = [
        strategy for strategy in strategies if strategy.parallel.pp * strategy.micro_batches <= 4
    ]
    return {strategy: simulate(SCENARIO, strategy, batch()) for strategy in few}


@EACH
def test_candidates_make_up_the_gpus_and_divide_the_sequences(name: str) -> None:
    strategies = candidates(SCENARIO, TEMPLATES[name], Sizes())
    assert len(set(strategies)) == len(strategies) > 5
    for strategy in strategies:
        p = strategy.parallel
        assert p.num_ranks == 4
        assert p.tp in (1, 2)
        assert p.pp in (1, 2)  # of 3 layers, and 4 would leave no GPU for more
        if strategy.disaggregated:
            assert p.dp == 1
            assert strategy.micro_batches % p.pp == 0
        elif strategy.policy == "wlb":
            assert p.dp * strategy.micro_batches <= 4
        elif strategy.policy in ("kk", "dynamic-cp"):
            assert strategy.micro_batches in (1, 2, 4, 8)
            assert p.cp & (p.cp - 1) == 0
        else:
            assert 4 % (p.dp * strategy.micro_batches) == 0
        assert p.cp == 1 or strategy.policy not in ("colocated", "kk")


def test_tensor_parallelism_divides_node_heads_and_feed_forward() -> None:
    machines = SCENARIO.cluster
    assert tensor_sizes(SMALL, machines) == [1, 2]
    assert tensor_sizes(replace(SMALL, kv_heads=1), machines) == [1]
    assert tensor_sizes(SMALL, replace(machines, gpus=3)) == [1]
    sizes = Sizes().as_published(SMALL, machines)
    assert (sizes.tp, sizes.pp) == ((2,), (1,))
    assert Sizes(tp=(1,), pp=(2,)).as_published(SMALL, machines) == Sizes(tp=(1,), pp=(2,))


def test_given_sizes_are_kept() -> None:
    sizes = Sizes(tp=(1,), pp=(1,), cp=(2,), micro_batches=(2,))
    for name, template in TEMPLATES.items():
        found = {
            (strategy.parallel.sizes, strategy.micro_batches)
            for strategy in candidates(SCENARIO, template, sizes)
        }
        assert found == (set() if name in ("colocated", "kk") else {((1, 2, 2, 1), 2)})
    served = candidates(
        SCENARIO, TEMPLATES["distca, balanced"], Sizes(tp=(1,), pp=(1,), servers=(0, 2))
    )
    assert {(strategy.parallel.cp, strategy.parallel.servers) for strategy in served} == {
        (4, 0),
        (2, 2),
    }
    with pytest.raises(ValueError, match="tp = 0: give 1 or more"):
        Sizes(tp=(0,))
    with pytest.raises(ValueError, match="servers = -2: give 0 or more"):
        Sizes(servers=(-2,))


@EACH
def test_no_step_goes_below_the_least(name: str) -> None:
    for strategy, outcome in exhaustive(name).items():
        assert outcome.step_s >= min_step_s(SCENARIO, strategy, batch()), strategy
        assert outcome.memory.total >= min_bytes(SCENARIO, strategy), strategy


@pytest.mark.parametrize("changes", [{"jitter": 0.3}, {"jitter": 0.05, "link_jitter": 0.9}])
@EACH
def test_no_lucky_step_goes_below_the_least(name: str, changes: dict[str, float]) -> None:
    shaken = replace(SCENARIO, cluster=replace(SCENARIO.cluster, **changes))
    for strategy, outcome in exhaustive(name).items():
        least = min_step_s(shaken, strategy, batch())
        for seed in range(3):
            one = simulate(shaken, strategy, batch(), planned=outcome.planned, seed=seed)
            assert one.step_s >= least, strategy


@EACH
def test_the_best_of_all_is_found_and_memory_is_kept(name: str) -> None:
    known = exhaustive(name)
    needs = sorted(outcome.memory.total for outcome in known.values())
    for limit in (inf, needs[len(needs) // 2], needs[0]):
        fitting = {strategy: one for strategy, one in known.items() if one.memory.total <= limit}
        found = best(SCENARIO, TEMPLATES[name], Sizes(), [batch()], limit_bytes=limit)
        assert found.fits
        assert found.summary is not None
        assert found.summary.memory.total <= limit
        assert found.summary.step_s <= (1 + 1e-9) * min(one.step_s for one in fitting.values())
        assert found.tried <= len(candidates(SCENARIO, TEMPLATES[name], Sizes()))


def test_much_is_left_out() -> None:
    name = "distca, balanced"
    shown: list[Strategy] = []
    found = best(SCENARIO, TEMPLATES[name], Sizes(), [batch()], limit_bytes=inf, show=shown.append)
    assert set(shown) == set(candidates(SCENARIO, TEMPLATES[name], Sizes()))
    assert found.tried <= len(shown) / 3


@EACH
def test_where_nothing_fits_the_smallest_need_is_told(name: str) -> None:
    least = min(
        min_bytes(SCENARIO, strategy) for strategy in candidates(SCENARIO, TEMPLATES[name], Sizes())
    )
    found = best(SCENARIO, TEMPLATES[name], Sizes(), [batch()], limit_bytes=1.0)
    assert not found.fits
    assert found.summary is not None
    assert least <= found.summary.memory.total <= 1.3 * least


@pytest.mark.parametrize("lengths", others_slow(["pretrain", "prolong"], quick={"prolong"}))
@pytest.mark.parametrize("seed", others_slow([0, 1], quick={0}))
@pytest.mark.parametrize(
    "changes",
    [{}, {"jitter": 0.3}, {"jitter": 0.9, "link_jitter": 0.9}, {"slow": {1: 0.5, 2: 1.7}}],
    ids=["even", "jitter", "much jitter", "slow"],
)
@EACH
def test_the_search_finds_what_trying_everything_finds(
    name: str, changes: dict[str, Any], lengths: str, seed: int
) -> None:
    machines = replace(SCENARIO.cluster, **changes)
    scenario = replace(SCENARIO, lengths=lengths, seed=seed, cluster=machines)
    batches, sizes = list(scenario.batches(3)), Sizes(pp=(1,))
    every = [
        Summary.of(scenario, strategy, batches)
        for strategy in candidates(scenario, TEMPLATES[name], sizes)
    ]
    needs = sorted(one.memory.total for one in every)
    for limit in (inf, needs[len(needs) // 2], needs[0]):
        found = best(scenario, TEMPLATES[name], sizes, batches, limit_bytes=limit).summary
        assert found is not None
        fastest = min(one.step_s for one in every if one.memory.total <= limit)
        assert found.step_s == pytest.approx(fastest, rel=1e-9)


@pytest.mark.parametrize("policy", ["head-tail-cp", "wlb"])
def test_sizes_that_are_slow_on_the_first_batch_may_be_best_on_all(policy: str) -> None:
    scenario = Scenario(MODELS["llama3-8b"], cluster("h200"), 524288, 4, "prolong")
    template, batches = Strategy(policy, MeshShape()), list(scenario.batches(3))
    sizes = Sizes(tp=(8,), pp=(1,))
    found = best(scenario, template, sizes, batches, limit_bytes=inf).summary
    assert found is not None
    every = {
        strategy: Summary.of(scenario, strategy, batches).step_s
        for strategy in candidates(scenario, template, sizes)
    }
    assert found.step_s == min(every.values())


@pytest.mark.parametrize("policy", ["wlb", "kk", "dynamic-cp"])
def test_packed_documents_may_have_as_many_micro_batches_as_sequences(policy: str) -> None:
    scenario, sizes = replace(SCENARIO, sequences=6), Sizes(tp=(2,), pp=(1,), dp=(2,))
    more = set() if policy == "wlb" else {4, 8}
    found = candidates(scenario, Strategy(policy, MeshShape()), sizes)
    assert {one.micro_batches for one in found} == {1, 2, 3} | more


def test_all_batches_count() -> None:
    batches = list(SCENARIO.batches(3))
    found = best(SCENARIO, TEMPLATES["wlb"], Sizes(tp=(1,), pp=(1,)), batches, limit_bytes=inf)
    assert found.summary is not None
    mean = sum(simulate(SCENARIO, found.summary.strategy, one).step_s for one in batches) / 3
    assert found.summary.step_s == pytest.approx(mean)


def test_sizes_that_do_not_apply_are_said() -> None:
    found = best(SCENARIO, TEMPLATES["colocated"], Sizes(dp=(3,)), [batch()], limit_bytes=inf)
    assert (found.summary, found.tried, found.fits) == (None, 0, False)
    assert found.refused.startswith("4 GPUs and 4 sequences do not divide by dp 3, cp 1: tp x pp")


def test_what_the_simulator_refuses_is_passed_on() -> None:
    whole = replace(SCENARIO, sequences=1, lengths="fixed:16384")
    sizes = Sizes(tp=(1,), pp=(1,), micro_batches=(2,))
    found = best(
        whole, TEMPLATES["distca, balanced"], sizes, list(whole.batches(1)), limit_bytes=inf
    )
    assert found.summary is None
    assert "documents cannot be split into 4 sets" in found.refused
