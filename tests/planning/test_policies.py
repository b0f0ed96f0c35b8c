"""The policies to compare with, on examples worked out by hand.

A token's q and o weigh 32 bytes each, its k and v 16 together. Pairs cost 2 ps forward.
"""

from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st
from planning.oracles import (
    Token,
    forward_bytes,
    head_tail,
    homes_of,
    mask_names,
    placed_rows,
    read_tasks,
    rows_of,
)
from strategies import KV_BYTES, OWN_BYTES, Q_BYTES, Batch, Entry, causal_batches, shard

from distca.planning.checks import verify
from distca.planning.plan import Plan
from distca.planning.policies import POLICIES

BASELINES = ("colocated", "head-tail-cp", "per-document-cp", "wlb", "kk", "dynamic-cp", "greedy")


def plan_of(ranks: list[list[Entry]], policy: str, **options: Any) -> Plan:
    return Batch(ranks, {"cost": "pairs", "policy": policy, **options}).plan()


def forward_pairs(plan: Plan) -> list[int]:
    return [work // 2 for work in plan.forward_load_ps.tolist()]


def spans_on(plan: Plan, rank: int) -> list[tuple[int, int, int]]:
    """Returns the tasks of a rank, as document and queries."""
    tasks = plan.to_json()["tasks"]
    return [(t["document"], *t["q"]) for t in tasks if t["server"] == rank]


def test_every_policy_of_the_issue_is_there() -> None:
    assert set(POLICIES) == {"distca", *BASELINES}


@pytest.mark.parametrize("policy", BASELINES)
@given(batch=causal_batches())
def test_every_policy_makes_a_sound_plan(policy: str, batch: Batch) -> None:
    plan = batch.plan(policy=policy)
    verify(plan)
    tokens = [token for row in placed_rows(plan) for token in row]
    assert sorted(tokens) == sorted(token for row in rows_of(batch.ranks) for token in row)
    oracle = forward_bytes(plan, mask_names(batch))
    assert plan.traffic.send.tolist() == oracle.send
    assert plan.traffic.recv.tolist() == oracle.recv


# -- colocated -----------------------------------------------------------------------------------


def test_colocated_moves_nothing() -> None:
    plan = plan_of([[4], [2, 2]], "colocated")
    assert forward_pairs(plan) == [10, 3 + 3]
    assert plan.backward_load_ps.tolist() == [50, 30]
    assert plan.traffic.total == plan.backward_traffic.total == 0
    assert plan.imbalance == plan.imbalance_before == 10 / 8
    assert plan.shortfall


def test_colocated_fetches_the_keys_of_a_spanning_document() -> None:
    plan = plan_of([[shard(0, 0, 3)], [shard(0, 3, 4)]], "colocated")
    assert forward_pairs(plan) == [6, 4]
    assert plan.traffic.send.tolist() == [3 * KV_BYTES, 0]
    assert plan.traffic.recv.tolist() == [0, 3 * KV_BYTES]
    assert plan.backward_traffic.send.tolist() == [3 * KV_BYTES, 3 * KV_BYTES]


# -- context parallel ----------------------------------------------------------------------------


def test_head_tail_cp_of_a_packed_sequence() -> None:
    """16 tokens in four chunks: 0 and 3 to rank 0, 1 and 2 to rank 1. Packed, it is not even."""
    plan = plan_of([[8], [4, 4]], "head-tail-cp", cp=2)
    assert spans_on(plan, 0) == [(0, 0, 4), (2, 0, 4)]
    assert spans_on(plan, 1) == [(0, 4, 8), (1, 0, 4)]
    assert forward_pairs(plan) == [10 + 10, 26 + 10]
    assert plan.traffic.send.tolist() == [4 * KV_BYTES, 0]
    assert plan.imbalance_before == (36 / 28)


def test_head_tail_cp_is_even_for_one_long_document() -> None:
    plan = plan_of([[16], []], "head-tail-cp", cp=2)
    assert spans_on(plan, 0) == [(0, 0, 4), (0, 12, 16)]
    assert spans_on(plan, 1) == [(0, 4, 12)] or spans_on(plan, 1) == [(0, 4, 8), (0, 8, 12)]
    assert forward_pairs(plan) == [68, 68]


@pytest.mark.parametrize("cp", [2, 4])
def test_needed_keys_are_sent_and_the_group_of_the_published_all_gather_is_kept(cp: int) -> None:
    """Each of four ranks has a head of one document and a tail of another: it sends the head."""
    plan = plan_of([[4], [4], [4], [4]], "head-tail-cp", cp=cp)
    assert plan.gather == cp
    assert plan.traffic.send.tolist() == [2 * KV_BYTES] * 4
    alone = plan_of([[4], [4]], "head-tail-cp", cp=1)
    assert (alone.gather, alone.traffic.total) == (0, 0)


def test_per_document_cp_is_even_for_any_documents() -> None:
    """8 tokens in four chunks of 2; 4 tokens in four chunks of 1."""
    plan = plan_of([[8], [4, 4]], "per-document-cp", cp=2)
    mine = {(0, 0), (0, 1), (0, 6), (0, 7), (1, 0), (1, 3), (2, 0), (2, 3)}
    assert set(placed_rows(plan)[0]) == mine
    assert forward_pairs(plan) == [18 + 5 + 5] * 2
    assert plan.traffic.send.tolist() == [(2 + 1 + 1) * KV_BYTES, (4 + 2 + 2) * KV_BYTES]
    assert plan.meets_bound


@given(st.lists(st.integers(1, 40), min_size=1, max_size=5), st.sampled_from([2, 3, 4]))
def test_context_parallel_deals_heads_and_tails(lengths: list[int], cp: int) -> None:
    ranks: list[list[Entry]] = [list(lengths), *([] for _ in range(cp - 1))]
    tokens: list[Token] = rows_of(ranks)[0]
    packed = plan_of(ranks, "head-tail-cp", cp=cp)
    assert homes_of(placed_rows(packed)) == homes_of(head_tail(tokens, cp))
    one_by_one = plan_of(ranks, "per-document-cp", cp=cp)
    expected: dict[Token, int] = {}
    for document in range(len(lengths)):
        expected |= homes_of(head_tail([token for token in tokens if token[0] == document], cp))
    assert homes_of(placed_rows(one_by_one)) == expected


@pytest.mark.parametrize("policy", ["head-tail-cp", "per-document-cp", "wlb"])
@pytest.mark.parametrize("cp", [0, 2, 4])
def test_a_group_that_does_not_divide_the_workers_is_refused(policy: str, cp: int) -> None:
    with pytest.raises(ValueError, match=f"cp = {cp}"):
        plan_of([[4], [4], [4]], policy, cp=cp)


# -- variable-length packing ---------------------------------------------------------------------


def test_wlb_puts_the_longest_first_where_least_work_is() -> None:
    """6 | 3, 3 (6 + 18/b < 6 + 36/b), 2 | 2."""
    plan = plan_of([[6, 3, 3], [2, 2]], "wlb", cp=1)
    lengths = [[len_of(plan, document) for document in docs] for docs in documents_on(plan)]
    assert sorted(lengths[0]) == [2, 6]
    assert sorted(lengths[1]) == [2, 3, 3]
    assert forward_pairs(plan) == [21 + 3, 6 + 6 + 3]
    assert plan.traffic.total == 0


def documents_on(plan: Plan) -> list[list[int]]:
    return [[s["document"] for s in shards] for shards in plan.to_json()["placement"]]


def len_of(plan: Plan, document: int) -> int:
    return int(plan.placement.lengths[document])


def test_wlb_evens_work_and_unevens_tokens() -> None:
    """With b = 131072 the long document weighs 2 and each short one 0.0664: 24 of them 1.6."""
    plan = plan_of([[131072], [8192] * 24], "wlb", cp=1)
    assert plan.placement.tokens.tolist() == [131072, 24 * 8192]


def test_wlb_keeps_to_its_token_limit() -> None:
    """32 short ones: a bin holds 1.25 x 196608 tokens, 30 of them; the last two go elsewhere."""
    plan = plan_of([[131072], [8192] * 32], "wlb", cp=1)
    assert plan.placement.tokens.tolist() == [131072 + 2 * 8192, 30 * 8192]


def test_wlb_shares_a_bin_over_its_group() -> None:
    """Bins of two workers, each document dealt head-tail inside its bin, keys sent there."""
    plan = plan_of([[8], [], [4, 4], []], "wlb", cp=2)
    assert forward_pairs(plan) == [18, 18, 10, 10]
    assert plan.traffic.send.tolist() == [2 * KV_BYTES, 4 * KV_BYTES] * 2


# -- the head-tail greedy ------------------------------------------------------------------------


def test_greedy_peels_the_inner_ends_of_head_and_tail() -> None:
    """136 pairs, mean 68; 68 / 17 = 4 tokens off the head [0, 8) and the tail [8, 16) each."""
    plan = plan_of([[16], []], "greedy", tolerance=0.01)
    assert spans_on(plan, 1) == [(0, 4, 12)]
    assert forward_pairs(plan) == [68, 68]
    assert plan.traffic.total == 8 * 2 * Q_BYTES + 12 * KV_BYTES


def test_greedy_peels_on_where_the_last_one_stopped() -> None:
    """Three ranks, mean 45: rank 1 gets 45 // 17 = 2 and 2, then gives up; rank 2 the next ones.

    The keys 0..12 of the document go to rank 2 once, for both of its pieces.
    """
    plan = plan_of([[16], [], []], "greedy", tolerance=0.01)
    assert spans_on(plan, 1) == [(0, 6, 10)]
    assert spans_on(plan, 2) == [(0, 4, 6), (0, 10, 12)]
    assert forward_pairs(plan) == [136 - 68, 34, 34]
    assert plan.traffic.recv.tolist()[1] == 4 * Q_BYTES + 10 * KV_BYTES
    assert plan.traffic.recv.tolist()[2] == 4 * Q_BYTES + 12 * KV_BYTES
    assert plan.traffic.recv.tolist()[0] == 8 * Q_BYTES
    assert "does not bound" in plan.shortfall


def test_greedy_gives_up_where_less_than_a_token_is_needed() -> None:
    """36 + 3 pairs: need 16, one pair of tokens of 9; then 7 are not a token's worth."""
    plan = plan_of([[8], [2]], "greedy", tolerance=0.01)
    assert spans_on(plan, 1) == [(0, 3, 5), (1, 0, 2)]
    assert forward_pairs(plan) == [27, 12]


def test_greedy_moves_a_document_whole_where_that_is_cheapest() -> None:
    """Need and surplus are 10, a document of 4: price 7.2, against 14.5 for a part of 16's."""
    plan = plan_of([[16, 4], [15, 3]], "greedy", tolerance=0.01)
    assert (1, 0, 4) in spans_on(plan, 1)
    assert forward_pairs(plan) == [136, 136]
    assert plan.traffic.total == 4 * OWN_BYTES


def test_greedy_stops_within_its_tolerance() -> None:
    """20 against 16 tokens of one: need 2 of mean 18 is within 0.2."""
    ranks: list[list[Entry]] = [[1] * 20, [1] * 16]
    assert plan_of(ranks, "greedy", tolerance=0.2).traffic.total == 0
    assert plan_of(ranks, "greedy", tolerance=0.01).traffic.total == 2 * OWN_BYTES


def test_greedy_serves_the_neediest_first() -> None:
    """Ranks 2, 1 in that order; both want more than the document's inner tokens."""
    plan = plan_of([[16], [4], []], "greedy", tolerance=0.01)
    (first,) = [span for span in spans_on(plan, 2) if span[0] == 0]
    assert first == (0, 6, 10)
    assert spans_on(plan, 1)[0][1] < 6


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"servers": 1, "workers_serve": True}, "only in-place servers of equal speed"),
        ({"speed": [1.0, 0.5]}, "only in-place servers of equal speed"),
        ({"mask": "full"}, "only causal masks"),
        ({"mask": "window:3"}, "only causal masks"),
    ],
)
def test_greedy_refuses_what_it_does_not_know(options: dict[str, Any], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        plan_of([[16], [4]], "greedy", **options)


@pytest.mark.parametrize("policy", ["colocated", "head-tail-cp", "per-document-cp", "wlb"])
def test_policies_at_home_refuse_workers_that_do_not_serve(policy: str) -> None:
    with pytest.raises(ValueError, match="some workers do not serve"):
        plan_of([[16], [4]], policy, servers=1)


@given(causal_batches())
def test_greedy_never_moves_a_token_twice_or_to_its_home(batch: Batch) -> None:
    plan = batch.plan(policy="greedy")
    homes = homes_of(rows_of(batch.ranks))
    tasks = read_tasks(plan, mask_names(batch))
    moved = [t for t in tasks if homes[t.document, t.start] != t.server]
    before = [sum(p + 1 for _, p in row) for row in rows_of(batch.ranks)]
    mean = sum(before) // len(before)
    for task in moved:
        assert before[homes[task.document, task.start]] > mean
        assert before[task.server] < mean
