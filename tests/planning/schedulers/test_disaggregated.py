"""The scheduler's guarantees, checked for every token, and examples worked out by hand."""

import json
from collections import Counter
from typing import Any

import numpy as np
import pytest
from hypothesis import example, given, settings
from planning.oracles import (
    backward_bytes,
    forward_bytes,
    homes_of,
    imbalance_of,
    keys_needed,
    mask_names,
    memory_bytes,
    placed_rows,
    planned,
    queries_of,
    read_tasks,
    rows_of,
    work_of,
)
from strategies import KV_BYTES, OWN_BYTES, Q_BYTES, Batch, Entry, batches, causal_batches, shard

import distca
from distca.planning.checks import verify
from distca.planning.plan import Plan

SLACK = 1e-9  # the library divides floats, the oracle fractions
FINE = {"cost": "pairs", "tile": 4, "min_shard": 4}


def check_coverage(batch: Batch, plan: Plan) -> None:
    """Checks that every query is in one task, with one home, its keys, and a serving rank."""
    rows = rows_of(batch.ranks)
    assert placed_rows(plan) == rows
    homes, masks = homes_of(rows), mask_names(batch)
    data = plan.to_json()
    for backward, listed in ((False, data["tasks"]), (True, data["backward_tasks"])):
        tasks = read_tasks(plan, masks, backward=backward)
        assert Counter(queries_of(tasks)) == Counter(homes.keys())
        for task, row in zip(tasks, listed or data["tasks"], strict=True):
            assert sorted(task.keys) == list(range(*row["kv"]))
            assert len({homes[token] for token in queries_of([task])}) == 1
            assert plan.devices.speed[task.server] > 0


def check_bound(batch: Batch, plan: Plan) -> None:
    """Checks that a plan meets the bound in both directions if and only if it has no shortfall."""
    masks, cost = mask_names(batch), batch.options["cost"]
    worst = max(
        imbalance_of(work_of(plan, masks, cost, backward=way), plan) for way in (False, True)
    )
    assert plan.imbalance == pytest.approx(float(worst), rel=1e-9)
    if plan.shortfall:
        assert worst > 1 + batch.tolerance - SLACK
        assert plan.shortfall.split(",")[0] in ("forward", "backward")
        assert len(plan.shortfall.split()) > 8
        assert "\n" not in plan.shortfall
    else:
        assert worst <= 1 + batch.tolerance + SLACK
    assert plan.meets_bound == (not plan.shortfall)


def check_cuts(batch: Batch, plan: Plan) -> None:
    """Checks that cuts are multiples of the tile, and pieces no smaller than the minimum."""
    tile, minimum = batch.options["tile"], batch.options["min_shard"]
    shards = {
        (s["document"], position): (s["start"], s["stop"])
        for worker in plan.to_json()["placement"]
        for s in worker
        for position in range(s["start"], s["stop"])
    }
    for backward in (False, True):
        for task in read_tasks(plan, mask_names(batch), backward=backward):
            start, stop = shards[task.document, task.start]
            assert shards[task.document, task.stop - 1] == (start, stop)
            assert task.start == start or task.start % tile == 0
            assert task.stop == stop or task.stop % tile == 0
            if (task.start, task.stop) != (start, stop):
                assert task.stop - task.start >= minimum


def check_traffic(batch: Batch, plan: Plan) -> None:
    """Checks the plan's bytes against the sum over all tokens."""
    masks = mask_names(batch)
    for oracle, traffic in (
        (forward_bytes(plan, masks), plan.traffic),
        (backward_bytes(plan, masks), plan.backward_traffic),
    ):
        assert traffic.send.tolist() == oracle.send
        assert traffic.recv.tolist() == oracle.recv
        assert traffic.cross_node == oracle.cross_node
        assert traffic.total == sum(oracle.send) == sum(oracle.recv)
        assert traffic.worst == max(*oracle.send, *oracle.recv)
    tasks = read_tasks(plan, masks)
    once = sum(map(len, keys_needed(tasks, plan.devices.num_ranks)))
    assert plan.traffic.key_copies == KV_BYTES * (sum(len(t.keys) for t in tasks) - once)


def check_memory(batch: Batch, plan: Plan) -> None:
    limit = batch.options.get("memory_bytes")
    if limit is not None:
        for backward in (False, True):
            used = memory_bytes(plan, mask_names(batch), backward=backward)
            assert max(used) <= limit, used


def check_everything(batch: Batch) -> None:
    plan = planned(batch)
    if plan is not None:
        check_coverage(batch, plan)
        check_bound(batch, plan)
        check_cuts(batch, plan)
        check_traffic(batch, plan)
        check_memory(batch, plan)
        verify(plan)


@given(batches())
def test_every_query_is_computed_once_with_exactly_its_keys(batch: Batch) -> None:
    plan = planned(batch)
    if plan is not None:
        check_coverage(batch, plan)
        verify(plan)


# A task of two chunks, each of which costs what a document of its own does.
TWO_CHUNKS = Batch(
    ranks=[
        [1] * 5,
        [{"document": 5, "start": 0, "stop": 1}, {"document": 5, "start": 1, "stop": 8}],
    ],
    options={"mask": "chunk:7", "cost": "analytic", "tolerance": 0.0, "tile": 1, "min_shard": 1},
)


@example(TWO_CHUNKS)
@given(batches())
def test_the_bound_is_kept_or_the_plan_says_why_not(batch: Batch) -> None:
    plan = planned(batch)
    if plan is not None:
        check_bound(batch, plan)


@given(causal_batches())
def test_the_bound_is_kept_wherever_cuts_are_fine_enough(batch: Batch) -> None:
    """Where the tolerance holds two rows of the longest document, a single token can be moved."""
    plan = batch.plan(tile=1, min_shard=1)
    lengths = [max(1, int(length)) for length in plan.placement.lengths]
    total = sum(length * (length + 1) // 2 for length in lengths)
    if batch.tolerance * total / len(batch.ranks) >= 2 * max(lengths):
        assert plan.meets_bound, plan.shortfall


@given(batches())
def test_cuts_lie_on_tiles_and_leave_no_crumbs(batch: Batch) -> None:
    plan = planned(batch)
    if plan is not None:
        check_cuts(batch, plan)


@given(batches())
def test_bytes_are_those_of_every_token(batch: Batch) -> None:
    plan = planned(batch)
    if plan is not None:
        check_traffic(batch, plan)


@given(batches().filter(lambda batch: "memory_bytes" in batch.options))
def test_memory_is_never_exceeded(batch: Batch) -> None:
    plan = planned(batch)
    if plan is not None:
        check_memory(batch, plan)


@pytest.mark.parametrize("spanning", [False, True])
def test_memory_limits_what_a_rank_takes(spanning: bool) -> None:
    """A rank that may take only a few tokens more takes no more than those."""
    document: list[list[Entry]] = (
        [[shard(0, 0, 200)], [shard(0, 200, 210)]] if spanning else [[200], [8]]
    )
    for spare in (0, 20, 60, 120):
        batch = Batch(document, {**FINE, "memory_bytes": (200 + spare) * OWN_BYTES})
        plan = batch.plan()
        check_memory(batch, plan)
        check_bound(batch, plan)


@pytest.mark.parametrize("spare", [0.2, 0.5, 1.0, 1.5])
@pytest.mark.parametrize("roles", [{}, {"servers": 1, "workers_serve": True}, {"servers": 2}])
def test_memory_is_booked_for_every_piece_that_a_rank_takes(
    spare: float, roles: dict[str, Any]
) -> None:
    """Three ranks shed to few others, each of which could hold one rank's piece, but not all."""
    limit = int(96 * OWN_BYTES * (1 + spare))
    batch = Batch([[96], [96], [96], [1]], {**FINE, **roles, "memory_bytes": limit})
    plan = planned(batch)
    if plan is not None:
        check_memory(batch, plan)
        check_bound(batch, plan)


def test_keys_that_home_fetches_take_memory_too() -> None:
    """Rank 1 holds two tokens and has memory for no more: not even for the key of the first."""
    batch = Batch([[shard(0, 0, 1)], [shard(0, 1, 3)]], {**FINE, "memory_bytes": 2 * OWN_BYTES})
    plan = planned(batch)
    if plan is not None:
        check_memory(batch, plan)


@given(batches())
def test_the_same_batch_gives_the_same_plan_and_json_gives_it_back(batch: Batch) -> None:
    plan = planned(batch)
    if plan is None:
        return
    again = batch.plan()
    assert plan.fingerprint == again.fingerprint
    assert timeless(plan) == timeless(again)
    data = json.loads(json.dumps(plan.to_json()))
    back = Plan.from_json(data)
    assert back.to_json() == plan.to_json()
    assert back.fingerprint == plan.fingerprint
    verify(back)


def timeless(plan: Plan) -> dict[str, Any]:
    data = plan.to_json()
    assert data["summary"].pop("plan_s") > 0
    return data


def test_a_file_gives_the_plan_back(tmp_path: Any) -> None:
    plan = Batch([[100], [3, 4]], FINE).plan()
    plan.save(tmp_path / "plan.json")
    assert Plan.load(tmp_path / "plan.json").to_json() == plan.to_json()


def test_different_plans_have_different_fingerprints() -> None:
    ranks: list[list[Entry]] = [[100], [3, 4]]
    others = [
        Batch(ranks, FINE),
        Batch(ranks, {**FINE, "mask": "window:9"}),
        Batch(ranks, {**FINE, "policy": "colocated"}),
        Batch(ranks, {**FINE, "heads": 8, "kv_heads": 1, "head_dim": 4, "model": None}),
        Batch([[100], [4, 3]], FINE),
        Batch([[100], [3, 4], []], {**FINE, "policy": "colocated"}),
        Batch(ranks, {**FINE, "servers": 1, "workers_serve": True, "policy": "colocated"}),
    ]
    assert len({other.plan().fingerprint for other in others}) == len(others)


# 512 tokens are 131,328 pairs, the other documents 5,710: the mean of three ranks is 45,679, and
# none may hold more than 46,592.
GOLDEN_RANKS: list[list[Entry]] = [[512], [64, 64], [40, 30, 20, 10]]
GOLDEN_PAIRS = [131_328, 4_160, 820 + 465 + 210 + 55]


def test_the_golden_plan() -> None:
    """The same input gives this very plan on every platform; change it only on purpose."""
    plan = distca.plan(GOLDEN_RANKS, model="llama3-8b", cost="pairs", tile=4, min_shard=4)
    assert plan.imbalance_before == pytest.approx(131_328 * 3 / sum(GOLDEN_PAIRS))
    assert plan.meets_bound
    tasks = [(t["document"], *t["q"], *t["kv"], t["server"]) for t in plan.to_json()["tasks"]]
    assert tasks == GOLDEN_TASKS
    assert plan.fingerprint == GOLDEN_FINGERPRINT


GOLDEN_TASKS = [
    (0, 0, 212, 0, 212, 0),
    (0, 212, 356, 0, 356, 1),
    (0, 356, 464, 0, 464, 2),
    (0, 464, 512, 0, 512, 0),
    (1, 0, 64, 0, 64, 1),
    (2, 0, 64, 0, 64, 1),
    (3, 0, 40, 0, 40, 2),
    (4, 0, 30, 0, 30, 2),
    (5, 0, 20, 0, 20, 2),
    (6, 0, 10, 0, 10, 2),
]
GOLDEN_FINGERPRINT = "8a4f46f631aa2f7e7b8f069a11a94821097d5666dbfbf7c936312f35b2ffb1a5"


# -- by hand -------------------------------------------------------------------------------------


def test_one_rank_keeps_everything() -> None:
    plan = Batch([[100, 7, 1]], FINE).plan()
    assert plan.traffic.total == 0
    assert plan.imbalance == plan.imbalance_before == 1.0
    assert len(plan.forward) == 3


def test_ranks_that_are_even_move_nothing() -> None:
    plan = Batch([[64, 1], [64, 1], [1, 64]], FINE).plan()
    assert plan.traffic.total == plan.bytes_lower_bound == 0
    assert plan.meets_bound


def test_nothing_at_all_is_a_plan_too() -> None:
    plan = Batch([[], []], FINE).plan()
    assert (len(plan.forward), plan.traffic.total, plan.imbalance) == (0, 0, 1.0)


@pytest.mark.parametrize("cost", ["pairs", "analytic", "h200"])
@pytest.mark.parametrize("ranks", [[[1], [], []], [[], [1], []], [[1], [1], [], []]])
def test_a_single_token_among_empty_ranks(ranks: list[list[Entry]], cost: str) -> None:
    """It can be on one rank only, so the bound cannot be kept, and the plan says so."""
    batch = Batch(ranks, {**FINE, "cost": cost})
    plan = batch.plan()
    check_coverage(batch, plan)
    assert plan.imbalance == pytest.approx(len(ranks) / sum(map(len, ranks)))
    assert not plan.meets_bound


def test_empty_ranks_take_their_share() -> None:
    batch = Batch([[], [512], [], []], {**FINE, "tolerance": 0.05})
    plan = batch.plan()
    check_bound(batch, plan)
    assert plan.meets_bound
    assert min(work_of(plan, ["causal"], "pairs")) > 0.8 * 512 * 513 / 4


def test_a_dedicated_pool_computes_everything() -> None:
    batch = Batch([[200], [50, 60]], {**FINE, "servers": 3, "tolerance": 0.05})
    plan = batch.plan()
    check_everything(batch)
    assert set(plan.forward.server.tolist()) == {2, 3, 4}
    assert plan.meets_bound
    work = work_of(plan, mask_names(batch), "pairs")
    assert work[:2] == [0, 0]
    assert max(work) <= 1.05 * sum(work) / 3


def test_more_documents_than_a_pool_can_even_out_are_still_served() -> None:
    batch = Batch([[1], [1], [1]], {**FINE, "servers": 2})
    check_everything(batch)
    assert batch.plan().imbalance == pytest.approx(2 / 1.5)


def test_a_dedicated_pool_without_memory_is_refused() -> None:
    batch = Batch([[100], [100]], {**FINE, "servers": 1, "memory_bytes": 100 * OWN_BYTES})
    with pytest.raises(ValueError, match="memory"):
        batch.plan()


def test_dedicated_servers_beside_workers_that_serve() -> None:
    batch = Batch([[300], [20]], {**FINE, "servers": 1, "workers_serve": True, "tolerance": 0.05})
    check_everything(batch)
    plan = batch.plan()
    assert plan.meets_bound
    assert set(plan.forward.server.tolist()) == {0, 1, 2}


def test_work_is_in_proportion_to_speed() -> None:
    batch = Batch([[800], [], [], []], {**FINE, "speed": [1.0, 0.5, 2.0, 1.5]})
    plan = batch.plan()
    assert plan.meets_bound
    total = 800 * 801
    for work, speed in zip(work_of(plan, ["causal"], "pairs"), [1.0, 0.5, 2.0, 1.5], strict=True):
        assert 0.8 <= work / (total * speed / 5.0) <= 1.02 + SLACK


def test_a_busy_rank_gets_less() -> None:
    """800 tokens are 640,800 ps; busy for 100,000 ps, the level is 740,800 / 4."""
    calm = Batch([[800], [], [], []], FINE)
    busy = Batch(calm.ranks, {**FINE, "busy_s": [0.0, 1e-7, 0.0, 0.0]})
    plan = busy.plan()
    check_bound(busy, plan)
    assert plan.meets_bound
    level = 740_800 / 4
    assert int(plan.forward_load_ps[1]) <= 1.02 * level - 100_000 + 1
    assert plan.forward_load_ps[1] < calm.plan().forward_load_ps[1]


def test_a_rank_busy_past_the_bound_gets_nothing_and_is_named() -> None:
    plan = Batch([[200], [], []], {**FINE, "busy_s": [0.0, 0.0, 1.0]}).plan()
    assert 2 not in plan.forward.server
    assert "rank 2" in plan.shortfall
    assert "busy" in plan.shortfall


def test_keys_are_not_sent_twice() -> None:
    """Both halves of a document go to the only server; its keys are sent once."""
    halves: list[list[Entry]] = [[shard(0, 0, 40)], [shard(0, 40, 80)]]
    batch = Batch(halves, {**FINE, "servers": 1})
    plan = batch.plan()
    assert plan.forward.server.tolist() == [2, 2]
    assert plan.traffic.total == 80 * (2 * Q_BYTES + KV_BYTES)
    check_traffic(batch, plan)


def test_keys_that_live_on_the_server_do_not_travel() -> None:
    """Rank 1 holds 60 of the 64 keys that the tail on rank 0 needs: it moves there, with four."""
    batch = Batch([[shard(0, 60, 64), 64], [shard(0, 0, 60)]], {**FINE, "tolerance": 0.3})
    plan = batch.plan()
    check_everything(batch)
    assert plan.traffic.total == 4 * OWN_BYTES < 60 * KV_BYTES


def test_backward_may_have_tasks_of_its_own() -> None:
    """Short shards are expensive in backward only, so one set of tasks cannot meet both bounds."""
    ranks: list[list[Entry]] = [[4096 * 4], [128] * 128, [512] * 32, [1024] * 16]
    plan = distca.plan(ranks, model="llama3-8b", cost="analytic")
    assert plan.meets_bound
    for work in (plan.forward_load_ps, plan.backward_load_ps):
        assert work.max() <= 1.02 * work.mean() + 1


@pytest.mark.parametrize(
    "ranks",
    [
        [[256], [], [256], []],
        [[], [256], [], [256]],
        [[362], [], [256], [256]],
        [[256, 8], [8], [8, 8], [256]],
    ],
)
def test_nothing_crosses_nodes_where_each_node_has_room(ranks: list[list[Entry]]) -> None:
    batch = Batch(ranks, {**FINE, "ranks_per_node": 2})
    plan = batch.plan()
    check_bound(batch, plan)
    assert plan.meets_bound
    assert plan.traffic.total > 0
    assert plan.traffic.cross_node == 0


def test_what_a_node_cannot_hold_crosses() -> None:
    batch = Batch([[256], [256], [], []], {**FINE, "ranks_per_node": 2})
    plan = batch.plan()
    check_traffic(batch, plan)
    assert plan.meets_bound
    assert plan.traffic.cross_node > 0


@pytest.mark.parametrize("mask", ["full", "window:16", "window:100"])
@pytest.mark.parametrize("ranks", [[[300], [], []], [[shard(0, 0, 150)], [shard(0, 150, 300)], []]])
def test_other_masks_are_balanced_too(mask: str, ranks: list[list[Entry]]) -> None:
    batch = Batch(ranks, {**FINE, "mask": mask, "tolerance": 0.05})
    check_everything(batch)
    assert batch.plan().meets_bound


def test_a_window_moves_only_its_keys() -> None:
    """Queries [200, 300) behind a window of 16 need 115 keys, not 300."""
    batch = Batch([[300], []], {**FINE, "mask": "window:16", "tolerance": 0.05})
    plan = batch.plan()
    (moved,) = plan.forward.moved.tolist()
    assert plan.forward.keys[moved] <= plan.forward.queries[moved] + 15
    keys, queries = int(plan.forward.keys[moved]), int(plan.forward.queries[moved])
    assert plan.traffic.total == queries * 2 * Q_BYTES + keys * KV_BYTES


# -- heavier -------------------------------------------------------------------------------------


@pytest.mark.slow
@settings(max_examples=600)
@given(batches(max_ranks=6, max_documents=8, max_length=160))
def test_everything_at_length(batch: Batch) -> None:
    check_everything(batch)


def training_batch(seed: int, workers: int, context: int) -> list[list[Entry]]:
    """Log-normal documents with some long ones among them, packed in order of arrival."""
    generator = np.random.default_rng(seed)
    held: list[list[Entry]] = []
    for _ in range(workers):
        left, entries = context, []
        while left:
            long = generator.random() < 0.06
            size = generator.uniform(0.5, 1) if long else generator.lognormal(np.log(0.046), 0.75)
            entries.append(int(min(max(size * context, 1), left)))
            left -= entries[-1]
        held.append(list(entries))
    return held


def check_spans(plan: Plan, ranks: list[list[Entry]]) -> None:
    """Checks coverage, cuts and the bound of a plan that is too large to check every token."""
    lengths = [int(entry) for entries in ranks for entry in entries]
    work = [0] * plan.devices.num_ranks
    reached = [0] * len(lengths)
    for row in plan.to_json()["tasks"]:
        document, (start, stop) = row["document"], row["q"]
        assert start == reached[document]
        assert row["kv"] == [0, stop]
        assert start % 128 == 0
        assert stop % 128 == 0 or stop == lengths[document]
        assert stop - start >= 128 or (start, stop) == (0, lengths[document])
        reached[document] = stop
        work[row["server"]] += stop * (stop + 1) - start * (start + 1)
    assert reached == lengths
    assert max(work) <= 1.02 * sum(work) / len(work)
    assert work == plan.forward_load_ps.tolist()


@pytest.mark.parametrize("workers", [8])
def test_a_training_batch(workers: int) -> None:
    ranks = training_batch(0, workers, 65536)
    check_spans(distca.plan(ranks, model="llama3-8b", cost="pairs"), ranks)
    check_seconds(ranks)


@pytest.mark.slow
@pytest.mark.parametrize("seed", range(4))
@pytest.mark.parametrize("workers", [16, 64, 128])
def test_training_batches_of_many_ranks(workers: int, seed: int) -> None:
    ranks = training_batch(seed, workers, 131072)
    check_spans(distca.plan(ranks, model="llama3-8b", cost="pairs"), ranks)
    check_seconds(ranks)


def check_seconds(ranks: list[list[Entry]]) -> None:
    for cost in ("h200", "h200-flash", "analytic"):
        plan = distca.plan(ranks, model="llama3-8b", cost=cost)
        assert plan.meets_bound, (cost, plan.shortfall)
        verify(plan)
