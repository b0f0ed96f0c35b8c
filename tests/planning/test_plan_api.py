"""``distca.plan``: errors are one clear sentence, and documented calls work."""

import re
import warnings
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
from strategies import OWN_BYTES, SHAPE, Batch, Entry, shard

import distca
from distca.planning.api import place_and_plan
from distca.planning.costs.base import PAIRS
from distca.planning.masks import Mask
from distca.planning.placement import Placement
from distca.planning.policies import POLICIES, policy_of
from distca.planning.spans import as_ints

RANKS: list[list[Entry]] = [[100], [8, 8]]


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"tolerance": -0.1}, r"tolerance = -0\.1: it must be at least 0"),
        ({"tolerance": 1.0}, r"tolerance = 1\.0"),
        ({"tolerance": float("nan")}, "tolerance = nan"),
        ({"policy": "magic"}, "policy 'magic' is unknown: choose one of distca, colocated"),
        ({"placement": "random"}, "placement 'random' is unknown: choose given or balanced"),
        ({"placement": "balanced", "policy": "wlb"}, "policy wlb places tokens itself"),
        ({"model": "gpt-9"}, "model 'gpt-9' is unknown"),
        ({"model": None}, "no model is given: give model, or heads, kv_heads and head_dim"),
        ({"model": "llama3-8b", "heads": 8}, "model llama3-8b and heads are both given"),
        ({"model": SHAPE, "heads": 8, "head_dim": 4}, "both given"),
        ({"model": None, "heads": 8}, "no model"),
        ({"model": None, "heads": 8, "kv_heads": 3, "head_dim": 4}, "multiple of kv_heads"),
        ({"cost": "free"}, "cost 'free' is unknown"),
        ({"mask": "diagonal"}, "mask 'diagonal' is unknown"),
        ({"mask": ["causal"]}, "1 masks for 3 documents"),
        ({"servers": -1}, "servers = -1: it must be a whole number from 0 to 1048576"),
        ({"ranks_per_node": 0}, "ranks_per_node = 0: it must be a whole number from 1 to 1048576"),
        ({"speed": [1.0]}, "1 values of speed for 2 ranks: give one for each"),
        ({"speed": [1.0, -1.0]}, r"speed = -1\.0: give each rank a number from 0 to 1e\+06"),
        ({"speed": [1.0, float("inf")]}, "speed"),
        ({"speed": [0.0, 0.0]}, "no rank computes attention"),
        ({"busy_s": [0.0, 0.0, 0.0]}, "3 values of busy_s for 2 ranks"),
        ({"busy_s": [0.0, -1.0]}, r"busy_s = -1\.0"),
        ({"busy_s": [0.0, float("nan")]}, "busy_s"),
        ({"workers_serve": False}, "no rank computes attention"),
        ({"tile": 0}, "tile = 0"),
        ({"min_shard": -5}, "min_shard = -5"),
        ({"memory_bytes": 100 * OWN_BYTES - 1}, "rank 0 holds 100 tokens, 8000 bytes"),
        ({"memory_bytes": 0}, "memory"),
        ({"memory_bytes": -1}, "memory"),
        ({"tolerence": 0.1}, "plan option 'tolerence' is unknown: did you mean tolerance"),
        ({"something": 1}, "plan option 'something' is unknown: choose one of model, heads"),
    ],
)
def test_wrong_use_is_refused(options: dict[str, Any], message: str) -> None:
    with pytest.raises(ValueError, match=message) as caught:
        Batch(RANKS, options).plan()
    assert "\n" not in str(caught.value)


@pytest.mark.parametrize("ranks", [[], [[0]], [[4], [-1]], [[shard(0, 2, 4)]], [["long"]]])
def test_wrong_ranks_are_refused(ranks: list[list[Entry]]) -> None:
    with pytest.raises(ValueError, match=r"\w+ \w+"):
        Batch(ranks).plan()


def test_memory_that_just_holds_the_tokens_is_enough() -> None:
    plan = Batch(RANKS, {"memory_bytes": 100 * OWN_BYTES, "tile": 4, "min_shard": 4}).plan()
    assert plan.devices.memory_bytes.tolist() == [8000, 8000]


def test_a_placement_is_taken_as_it_is() -> None:
    placement = Placement.from_ranks(RANKS)
    plan = distca.plan(placement, model=SHAPE)
    assert plan.placement is placement
    assert plan.fingerprint == Batch(RANKS).plan().fingerprint


def test_ranks_may_be_numpy_and_masks_objects() -> None:
    arrays = [np.asarray([100]), np.asarray([8, 8])]
    plan = distca.plan(arrays, model=SHAPE, mask=[Mask(5), "causal", "full"], cost=PAIRS)
    assert plan.to_json()["masks"] == ["window:5", "causal", "full"]
    assert plan.cost == "pairs"


@pytest.mark.parametrize("cost", ["pairs", "analytic", "h200"])
def test_chunks_cost_what_documents_of_their_size_do(cost: str) -> None:
    options = {"cost": cost, "policy": "colocated"}
    chunked = Batch([[1000, 300]], {**options, "mask": "chunk:300"}).plan()
    apart = Batch([[300, 300, 300, 100, 300]], options).plan()
    assert chunked.forward_load_ps.tolist() == apart.forward_load_ps.tolist()
    assert chunked.backward_load_ps.tolist() == apart.backward_load_ps.tolist()


def test_heads_are_a_model() -> None:
    plan = Batch(RANKS, {"model": None, "heads": 4, "kv_heads": 1, "head_dim": 4}).plan()
    assert (plan.shape.q_bytes, plan.shape.kv_bytes) == (32, 16)
    assert Batch(RANKS, {"model": None, "heads": 4, "head_dim": 4}).plan().shape.kv_heads == 4


def test_the_summary_says_what_the_design_lists() -> None:
    plan = Batch(RANKS, {"cost": "pairs", "tile": 4, "min_shard": 4, "servers": 1}).plan()
    summary = plan.summary()
    assert summary["servers"] == 1
    assert summary["ranks"] == 3
    assert summary["tokens"] == 116
    assert summary["documents"] == 3
    assert summary["tasks"] == len(plan.forward)
    assert summary["imbalance_before"] == pytest.approx(5050 / ((5050 + 72) / 2))
    assert summary["bytes_total"] == 116 * OWN_BYTES
    assert summary["bytes_send_max"] == max(100 * 48, 116 * 32)
    assert summary["bytes_recv_max"] == 116 * 48
    assert summary["bytes_backward"] == plan.backward_traffic.total
    assert summary["bytes_lower_bound"] <= summary["bytes_total"]
    assert summary["plan_s"] > 0
    assert summary["meets_bound"] is True


def test_json_is_as_the_design_writes_it() -> None:
    data = Batch(RANKS, {"policy": "colocated"}).plan().to_json()
    assert data["placement"] == [
        [{"document": 0, "start": 0, "stop": 100}],
        [{"document": 1, "start": 0, "stop": 8}, {"document": 2, "start": 0, "stop": 8}],
    ]
    assert data["tasks"][0] == {"document": 0, "q": [0, 100], "kv": [0, 100], "server": 0}
    assert data["backward_tasks"] is None


def test_seconds_are_work_over_speed_after_other_work() -> None:
    options = {"cost": "pairs", "policy": "colocated", "speed": [2.0, 1.0], "busy_s": [0.0, 1e-6]}
    forward, backward = Batch(RANKS, options).plan().seconds
    assert forward.tolist() == pytest.approx([5050e-12, 1e-6 + 144e-12])
    assert backward.tolist() == pytest.approx([5050 * 2.5e-12, 1e-6 + 360e-12])


def test_lengths_are_placed_then_planned() -> None:
    lengths = [200, 40, 30, 20, 10] * 2
    options = distca.PlanOptions(model=SHAPE, cost="pairs", tile=4, min_shard=4)
    placement = distca.place(lengths, 4, options)
    assert np.ptp(placement.tokens) <= 4
    assert placement.lengths.tolist() == lengths
    plan = distca.plan(placement, options, tolerance=0.1)
    assert plan.placement is placement
    assert plan.meets_bound
    again = distca.place(Placement.in_order(as_ints(lengths), 4), options=options)
    assert again.worker.tolist() == placement.worker.tolist()


def test_what_a_policy_does_is_place_and_plan() -> None:
    given = Placement.from_ranks([[64, 3], [9, 9], [30], []])
    options = distca.PlanOptions(model=SHAPE, cost="pairs", cp=2)
    for policy in POLICIES.values():
        placement = distca.place(given, options=options, placer=policy.placer)
        plan = distca.plan(placement, options, scheduler=policy.scheduler, given=given)
        assert plan.fingerprint == place_and_plan(given, policy, options).fingerprint
        assert plan.imbalance_before == distca.plan(given, options, scheduler="home").imbalance


@pytest.mark.parametrize(
    ("scheduler", "name"),
    [("distca", "distca"), ("home", "colocated"), ("all-gather", "all-gather scheduler")],
)
def test_a_plan_says_what_made_it(scheduler: str, name: str) -> None:
    placement = Placement.from_ranks(RANKS)
    assert distca.plan(placement, model=SHAPE, scheduler=scheduler).policy == name
    placed = distca.place(placement, model=SHAPE)
    plan = distca.plan(placed, model=SHAPE, scheduler=scheduler, given=placement)
    assert plan.policy == f"{scheduler} scheduler"


@pytest.mark.parametrize(
    ("call", "message"),
    [
        (lambda: distca.place([5, 5], model=SHAPE), "give the number of workers"),
        (lambda: distca.place([5], 2, model=SHAPE, placer="best"), "placer 'best' is unknown"),
        (lambda: distca.plan([[5]], model=SHAPE, scheduler="x"), "scheduler 'x' is unknown"),
        (lambda: policy_of("best"), "policy 'best' is unknown: choose one of distca, colocated"),
        (lambda: policy_of("distca", "x"), "placement 'x' is unknown: choose given or balanced"),
        (lambda: policy_of("wlb", "balanced"), "policy wlb places tokens itself"),
    ],
)
def test_unknown_names_are_refused(call: Callable[[], object], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        call()


ODD = [float("nan"), float("inf"), -1, 1e300, 10**40, "7", True, None]


@pytest.mark.parametrize("value", ODD, ids=repr)
@pytest.mark.parametrize(
    "name",
    [
        *("busy_s", "speed", "memory_bytes", "tolerance", "servers", "ranks_per_node", "cp"),
        *("tile", "min_shard", "search_orders", "heads", "kv_heads", "head_dim", "mask"),
    ],
)
def test_an_option_that_cannot_be_is_one_sentence(name: str, value: object) -> None:
    options = {"heads": 2, "kv_heads": 1, "head_dim": 8}
    per_rank = name in ("busy_s", "speed")
    if per_rank and value is True:
        return  # numpy reads [True, 1.0] as two ones
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("error")
            found = distca.plan(
                [[300], [7]], **options | {name: [value, 1.0] if per_rank else value}
            )
    except ValueError as error:
        sentence = str(error)
    else:
        optional = ("memory_bytes", "ranks_per_node", "cp", "kv_heads")
        assert value is None and name in optional, found.summary()  # noqa: PT018
        return
    assert "\n" not in sentence
    assert re.search(name if value is not None else ".", sentence), sentence


@pytest.mark.parametrize(
    ("documents", "workers", "words"),
    [
        ([100.9, 50.2], 2, "documents are .* give a list with the length of each"),
        (["12", "3"], 2, "documents are .* give a list"),
        ([True, False], 2, "documents are .* give a list"),
        ([[1, 2]], 2, "documents are .* give a list"),
        ([2**70], 2, "documents are .* whole numbers from 1 to below"),
        ([100], 1.5, "workers = 1.5: give the number of workers"),
        ([100], True, "workers = True: give the number of workers"),
    ],
)
def test_what_cannot_be_placed_is_a_sentence(documents: Any, workers: Any, words: str) -> None:
    with pytest.raises(ValueError, match=words):
        distca.place(documents, workers, heads=4, head_dim=8)
