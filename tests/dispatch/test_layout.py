"""Layouts of all ranks, run as one exchange in one process.

The payload is who a token is, (document, position), so that every row shows where it came from.
"""

from dataclasses import dataclass
from itertools import pairwise

import numpy as np
import numpy.typing as npt
import pytest
from hypothesis import given, settings
from planning.oracles import (
    Task,
    Token,
    homes_of,
    keys_needed,
    mask_names,
    placed_rows,
    planned,
    read_tasks,
    rows_of,
)
from strategies import MASKS, Batch, Entry, batches, shard

from distca.dispatch.layout import Call, Layout, PeerRows
from distca.dispatch.rows import Rows
from distca.planning.plan import Plan

Tokens = npt.NDArray[np.int64]  # [tokens, 2]
FINE = {"cost": "pairs", "tile": 4, "min_shard": 4}


@dataclass(frozen=True)
class Inbox:
    """The blocks of a rank: its own rows, and after them those that each sender sent."""

    queries: list[Tokens]
    keys: list[Tokens]


def payload(tokens: list[Token]) -> Tokens:
    return np.asarray(tokens, dtype=np.int64).reshape(-1, 2)


def taken(rows: Rows, blocks: list[Tokens]) -> Tokens:
    for run in rows.runs:
        assert 0 <= run.start < run.stop <= len(blocks[run.block])
    return np.concatenate([payload([]), *(blocks[r.block][r.start : r.stop] for r in rows.runs)])


def all_to_all(own: list[Tokens], moves: list[PeerRows]) -> list[list[Tokens]]:
    """What every rank receives, in the order of the senders that send anything."""
    sent = [
        {receiver: taken(rows, [mine]) for receiver, rows in peers.send.items()}
        for mine, peers in zip(own, moves, strict=True)
    ]
    received = []
    for rank, peers in enumerate(moves):
        arriving = {sender: parts[rank] for sender, parts in enumerate(sent) if rank in parts}
        assert peers.recv == {sender: len(part) for sender, part in arriving.items()}
        assert list(peers.recv) == sorted(peers.recv)
        assert list(peers.send) == sorted(peers.send)
        assert peers.moves == any(sent)
        received.append(list(arriving.values()))
    return received


def deliver(plan: Plan, layouts: list[Layout]) -> list[Inbox]:
    rows = placed_rows(plan)
    rows += [[] for _ in range(plan.devices.num_ranks - len(rows))]
    own = [payload(tokens) for tokens in rows]
    queries = all_to_all(own, [layout.q for layout in layouts])
    keys = all_to_all(own, [layout.kv for layout in layouts])
    return [Inbox([mine, *q], [mine, *kv]) for mine, q, kv in zip(own, queries, keys, strict=True)]


def computed(call: Call, inbox: Inbox) -> list[tuple[list[Token], list[Token]]]:
    """Queries and keys of each task of a call, as tokens."""
    assert call.q_offsets[0] == call.kv_offsets[0] == 0
    assert call.q_offsets[-1] == len(call.q)
    assert call.behind is not None or call.kv_offsets[-1] == len(call.kv)
    q = np.split(taken(call.q, inbox.queries), call.q_offsets[1:-1])
    kv = np.split(taken(call.kv, inbox.keys)[: call.kv_offsets[-1]], call.kv_offsets[1:-1])
    return [
        ([(d, p) for d, p in queries.tolist()], [(d, p) for d, p in keys.tolist()])
        for queries, keys in zip(q, kv, strict=True)
    ]


def seen_behind(call: Call, inbox: Inbox) -> dict[Token, set[Token]]:
    """The keys that each query of a call sees behind its own, by its second kernel."""
    seen: dict[Token, set[Token]] = {}
    if (behind := call.behind) is None:
        return seen
    q = [(d, p) for d, p in taken(call.q, inbox.queries)[behind.rows].tolist()]
    kv = taken(call.kv, inbox.keys)[call.kv_offsets[-1] :][::-1]
    keys = [(d, p) for d, p in kv.tolist()]
    assert (len(q), len(keys)) == (behind.q_offsets[-1], behind.kv_offsets[-1])
    parts = zip(pairwise(behind.q_offsets), pairwise(behind.kv_offsets), strict=True)
    for q_part, kv_part in parts:
        queries, among = q[slice(*q_part)], keys[slice(*kv_part)]
        for number, query in enumerate(queries):  # bottom-right aligned
            last = len(among) - len(queries) + number + 1
            seen[query] = set(among[max(last - behind.mask.reach, 0) : last])
    return seen


def sequences(task: Task, mask: str) -> list[tuple[list[Token], list[Token]]]:
    """Queries and keys that a kernel sees by themselves: those of a task, or of each chunk."""
    size = int(mask.removeprefix("chunk:")) if mask.startswith("chunk") else 1 << 40
    if mask.startswith("band:"):
        keys = [(task.document, key) for key in sorted(task.keys) if key < task.stop]
        return [([(task.document, p) for p in range(task.start, task.stop)], keys)]
    return [
        ([(task.document, p) for p in range(task.start, task.stop) if p // size == chunk],
         [(task.document, key) for key in sorted(task.keys) if key // size == chunk])
        for chunk in range(task.start // size, (task.stop - 1) // size + 1)
    ]  # fmt: skip


def check_layouts(batch: Batch, plan: Plan, *, backward: bool = False) -> None:
    """Every task of every rank finds exactly its rows, in order, and nothing is left over."""
    masks, ranks = mask_names(batch), plan.devices.num_ranks
    tasks = read_tasks(plan, masks, backward=backward)
    homes, lengths = homes_of(placed_rows(plan)), plan.placement.lengths.tolist()
    layouts = [Layout.of(plan, rank, backward=backward) for rank in range(ranks)]
    inboxes = deliver(plan, layouts)
    for rank, (layout, inbox) in enumerate(zip(layouts, inboxes, strict=True)):
        own = [token for token, home in homes.items() if home == rank]
        assert (layout.rank, layout.num_ranks, layout.num_tokens) == (rank, ranks, len(own))
        # 1. Exactly the tasks of this rank, each with its own queries and keys, in order.
        expected = {
            queries[0]: (queries, keys)
            for task in tasks
            if task.server == rank
            for queries, keys in sequences(task, masks[task.document])
        }
        at_home = {
            (task.document, position)
            for task in tasks
            if all(
                homes[task.document, p] == rank for p in (*range(task.start, task.stop), *task.keys)
            )
            for position in range(task.start, task.stop)
        }
        found = []
        for calls, local in ((layout.local, True), (layout.remote, False)):
            kinds = [(str(call.mask), str(call.behind and call.behind.mask)) for call in calls]
            assert len(set(kinds)) == len(kinds), "one call per side and mask kind"
            for call in calls:
                for queries, keys in computed(call, inbox):
                    assert expected[queries[0]] == (queries, keys)
                    kind, _, size = masks[queries[0][0]].partition(":")
                    kernel = {"chunk": "causal", "band": f"window:{int(size or 0) + 1}"}
                    assert str(call.mask) == kernel.get(kind, masks[queries[0][0]])
                    found.append(queries[0])
                    assert (queries[0] in at_home) == local
                for (document, query), keys in seen_behind(call, inbox).items():
                    band = int(masks[document].removeprefix("band:"))
                    last = min(query + band + 1, lengths[document])
                    assert keys == {(document, key) for key in range(query + 1, last)}
                if local:
                    assert {run.block for run in (*call.q.runs, *call.kv.runs)} == {0}
        assert sorted(found) == sorted(expected)
        # 2. Nothing is received that is not needed, and nothing twice.
        queries_in = np.concatenate([payload([]), *inbox.queries[1:]]).tolist()
        wanted = [t for queries, _ in expected.values() for t in queries if homes[t] != rank]
        assert sorted(map(tuple, queries_in)) == sorted(wanted)
        keys_in = np.concatenate([payload([]), *inbox.keys[1:]]).tolist()
        needed = keys_needed(tasks, ranks)[rank]
        assert sorted(map(tuple, keys_in)) == sorted(t for t in needed if homes[t] != rank)


def check_both_ways(batch: Batch) -> None:
    plan = planned(batch)
    if plan is not None:
        check_layouts(batch, plan)
        check_layouts(batch, plan, backward=True)


@given(batches())
def test_every_task_finds_its_rows(batch: Batch) -> None:
    check_both_ways(batch)


@given(batches(max_length=60, max_documents=8))
@settings(max_examples=20)
def test_every_task_finds_its_rows_after_balanced_placement(batch: Batch) -> None:
    plan = planned(batch, placement="balanced")
    if plan is not None:
        check_layouts(batch, plan)


@pytest.mark.slow
@given(batches(max_ranks=8, max_documents=10))
@settings(max_examples=400)
def test_every_task_finds_its_rows_at_length(batch: Batch) -> None:
    check_both_ways(batch)


@pytest.mark.parametrize("mask", MASKS)
@pytest.mark.parametrize(
    "ranks",
    [
        [[100], []],
        [[shard(0, 50, 90)], [7, shard(0, 0, 20)], [], [shard(0, 20, 50), 1]],
        [[shard(0, 10, 20), shard(0, 0, 10)], [shard(0, 20, 60)]],
    ],
    ids=["whole", "spanning", "shards-out-of-order"],
)
@pytest.mark.parametrize("servers", [0, 2])
def test_every_mask_on_every_role(mask: str, ranks: list[list[Entry]], servers: int) -> None:
    check_both_ways(Batch(ranks, {**FINE, "mask": mask, "servers": servers}))


def test_masks_are_told_apart() -> None:
    batch = Batch([[60, 9, 60], [12]], {**FINE, "mask": ["causal", "full", "window:7", "causal"]})
    check_both_ways(batch)
    masks = {str(call.mask) for call in Layout.of(batch.plan(), 0).local}
    assert masks <= {"causal", "full", "window:7"}
    assert len(masks) >= 2


@pytest.mark.parametrize("policy", ["colocated", "greedy", "head-tail-cp", "per-document-cp"])
def test_layouts_of_other_policies(policy: str) -> None:
    """Layouts of policies that gather all keys hold only the keys that are needed."""
    batch = Batch([[64], [8, 8]], {**FINE, "policy": policy, "cp": 2})
    check_layouts(batch, batch.plan())


def test_colocated_documents_exchange_nothing() -> None:
    layout = Layout.of(Batch([[20, 3], [8]], {**FINE, "policy": "colocated"}).plan(), 0)
    assert layout.remote == ()
    (call,) = layout.local
    assert str(call.q) == str(call.kv) == "0[0:23]"
    assert call.q_offsets.tolist() == call.kv_offsets.tolist() == [0, 20, 23]
    for peers in (layout.q, layout.kv):
        assert (peers.send, peers.recv, peers.moves) == ({}, {}, False)
    assert layout.is_one_call


def test_by_hand() -> None:
    """Rank 1 holds [3, 5) of a document and fetches keys [0, 3) from rank 0's rows 2, 3, 4."""
    batch = Batch([[2, shard(0, 0, 3)], [shard(0, 3, 5)]], {**FINE, "policy": "colocated"})
    first, second = (Layout.of(batch.plan(), rank) for rank in (0, 1))
    assert first.kv.send == {1: Rows(((0, 2, 5),))}
    assert (first.kv.recv, second.kv.recv) == ({}, {0: 3})
    assert first.q.send == second.q.send == {}
    assert (first.q.moves, first.kv.moves) == (False, True)
    assert second.local == ()
    (call,) = second.remote
    assert (str(call.q), str(call.kv)) == ("0[0:2]", "1[0:3] 0[0:2]")


@pytest.mark.parametrize(
    ("ranks", "options", "one_call"),
    [
        ([[20, 3], [20, 3]], {}, True),
        ([[20, 3], [9]], {"mask": ["causal", "full", "causal"], "policy": "colocated"}, False),
        ([[40, 3], [3]], {}, False),
        ([[shard(0, 10, 20), shard(0, 0, 10)], [20]], {"policy": "colocated"}, False),
        ([[], [5]], {"policy": "colocated"}, False),
    ],
    ids=["all at home", "two masks", "some leave", "repeated keys", "no tokens"],
)
def test_one_call_is_all_rows_as_they_lie(
    ranks: list[list[Entry]], options: dict[str, object], one_call: bool
) -> None:
    assert Layout.of(Batch(ranks, {**FINE, **options}).plan(), 0).is_one_call == one_call


def test_a_server_without_tokens() -> None:
    plan = Batch([[20], [12]], {**FINE, "servers": 1}).plan()
    layout = Layout.of(plan, 2)
    assert layout.num_tokens == 0
    assert layout.local == ()
    assert layout.q.recv == layout.kv.recv == {0: 20, 1: 12}
    for rank in (0, 1):
        worker = Layout.of(plan, rank)
        assert worker.local == worker.remote == ()


def test_ranks_without_anything() -> None:
    batch = Batch([[], [5], []], {**FINE, "policy": "colocated"})
    layout = Layout.of(batch.plan(), 2)
    assert (layout.num_tokens, layout.local, layout.remote) == (0, (), ())
    assert (layout.q.send, layout.q.recv) == ({}, {})
    check_both_ways(Batch([[], []], FINE))


@pytest.mark.parametrize("rank", [-1, 2])
def test_a_rank_beyond_the_plan_is_refused(rank: int) -> None:
    with pytest.raises(ValueError, match=f"rank {rank} of a plan for 2 ranks"):
        Layout.of(Batch([[4], [4]], FINE).plan(), rank)


def test_the_oracle_reads_ranks_as_the_plan_does() -> None:
    batch = Batch([[shard(5, 2, 4), 3], [shard(5, 0, 2)]], FINE)
    assert placed_rows(batch.plan()) == rows_of(batch.ranks)
