"""Placements: in order, as given, and balanced."""

from collections.abc import Callable

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from planning.oracles import (
    Token,
    head_tail,
    homes_of,
    imbalance_of,
    lengths_of,
    mask_names,
    pack_in_order,
    placed_rows,
    planned,
    rows_of,
    work_of,
)
from strategies import (
    OWN_BYTES,
    SHAPE,
    Batch,
    Entry,
    batches,
    causal_batches,
    long_and_short,
    ranks,
    shard,
)

import distca
from distca.planning.api import place_and_plan
from distca.planning.placement import Placement, Shard
from distca.planning.plan import Plan
from distca.planning.policies import policy_of
from distca.planning.spans import as_ints


def rows_in(placement: Placement) -> list[list[Token]]:
    rows: list[list[Token]] = [[] for _ in range(placement.num_workers)]
    columns = (placement.worker, placement.document, placement.start, placement.stop)
    for worker, document, start, stop in zip(*(c.tolist() for c in columns), strict=True):
        rows[worker].extend((document, position) for position in range(start, stop))
    return rows


@given(ranks())
def test_a_placement_holds_what_the_ranks_hold(held: list[list[Entry]]) -> None:
    placement, rows = Placement.from_ranks(held), rows_of(held)
    assert rows_in(placement) == rows
    assert placement.tokens.tolist() == [len(tokens) for tokens in rows]
    assert placement.lengths.tolist() == lengths_of(rows)
    for worker, tokens in enumerate(rows):
        if tokens:
            document, position = as_ints(tokens).T
            assert placement.row_of(document, position).tolist() == list(range(len(tokens)))
            assert set(placement.home(document, position).tolist()) == {worker}


def test_documents_are_numbered_as_they_appear() -> None:
    placement = Placement.from_ranks([[shard(9, 3, 5), 4], [], [shard(2, 0, 1), shard(9, 0, 3)]])
    assert placement.lengths.tolist() == [5, 4, 1]
    assert placement.document.tolist() == [0, 1, 2, 0]
    assert placement.worker.tolist() == [0, 0, 2, 2]
    assert placement.tokens.tolist() == [6, 0, 4]


@given(st.lists(st.integers(1, 40), max_size=8), st.integers(1, 9))
def test_in_order_packs_equal_tokens(lengths: list[int], workers: int) -> None:
    placement = Placement.in_order(as_ints(lengths), workers)
    assert rows_in(placement) == pack_in_order(lengths, workers)
    assert np.ptp(placement.tokens) <= 1


@pytest.mark.parametrize(
    ("held", "message"),
    [
        ([], "no ranks at all"),
        ([[0]], "entry 0 of rank 0 is a document of 0 tokens: it needs >= 1"),
        ([[3], [4, -2]], "entry 1 of rank 1 is a document of -2 tokens"),
        ([[2.5]], r"entry 0 of rank 0 is 2\.5: it must be a whole number"),
        ([[True]], "must be a whole number"),
        ([["8"]], "must be a whole number"),
        ([[{"document": 0, "start": 0}]], "a shard has document, start and stop"),
        ([[{"document": 0, "start": 0, "stop": 4, "end": 4}]], "a shard has document, start"),
        ([[shard(0, 4, 4)]], r"spans \[4, 4\): it needs 0 <= start < stop"),
        ([[shard(0, -1, 4)]], "it needs 0 <= start < stop"),
        ([[shard(0, 0, 4)], [shard(0, 5, 9)]], r"tokens \[4, 5\) of document 0 are placed nowhere"),
        ([[shard(0, 1, 4)]], r"tokens \[0, 1\) of document 0 are placed nowhere"),
        ([[shard(0, 0, 4)], [shard(0, 3, 9)]], r"tokens \[3, 4\) of document 0 are placed twice"),
        ([[shard(0, 0, 4), shard(0, 0, 4)]], "placed twice"),
    ],
)
def test_wrong_ranks_are_refused(held: list[list[Entry]], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        Placement.from_ranks(held)


@pytest.mark.parametrize(
    ("lengths", "shards", "workers"),
    [
        ([4], [(0, 0, 0, 4)], 0),
        ([4], [(1, 0, 0, 4)], 1),
        ([4], [(-1, 0, 0, 4)], 2),
        ([4], [(0, 0, 0, 3)], 1),
        ([4], [(0, 0, 0, 5)], 1),
        ([4, 2], [(0, 0, 0, 4)], 1),
        ([4], [(0, 1, 0, 4)], 1),
        ([4], [(0, 0, 0, 4), (0, 0, 4, 4)], 1),
    ],
    ids=["no-worker", "worker-high", "worker-low", "short", "long", "lost", "unknown", "empty"],
)
def test_wrong_shards_are_refused(
    lengths: list[int], shards: list[tuple[int, int, int, int]], workers: int
) -> None:
    with pytest.raises(ValueError, match=r"\w+ \w+"):
        Placement.from_shards(as_ints(lengths), [Shard(*s) for s in shards], workers)


@given(ranks())
def test_shards_give_the_placement_back(held: list[list[Entry]]) -> None:
    placement = Placement.from_ranks(held)
    again = Placement.from_shards(placement.lengths, placement.shards(), placement.num_workers)
    for name in ("document", "start", "stop", "worker", "row", "tokens"):
        assert getattr(again, name).tolist() == getattr(placement, name).tolist()


# -- balanced placement --------------------------------------------------------------------------


def check_balanced(batch: Batch, plan: Plan) -> None:
    """Checks for the same tokens, equal counts up to one tile, and the bound or a shortfall."""
    given_rows, rows = rows_of(batch.ranks), placed_rows(plan)
    assert len(rows) == len(batch.ranks)
    tokens = [token for row in rows for token in row]
    assert sorted(tokens) == sorted(token for row in given_rows for token in row)
    assert len(set(tokens)) == len(tokens)
    counts = [len(row) for row in rows]
    assert max(counts) - min(counts) <= batch.options["tile"]
    names = mask_names(batch)
    worst = max(
        imbalance_of(work_of(plan, names, batch.options["cost"], backward=way), plan)
        for way in (False, True)
    )
    assert plan.shortfall or worst <= 1 + batch.tolerance + 1e-9


@given(batches(max_length=80))
def test_balanced_placement_of_anything(batch: Batch) -> None:
    plan = planned(batch, placement="balanced")
    if plan is not None:
        check_balanced(batch, plan)


@given(long_and_short())
@settings(max_examples=25)
def test_balanced_placement_moves_only_keys_among_enough_short_documents(batch: Batch) -> None:
    plan = batch.plan(placement="balanced")
    check_balanced(batch, plan)
    tile = batch.options["tile"]
    if not cut_positions(plan, lambda position: position % tile != 0):
        assert plan.meets_bound or len(plan.forward.moved)
    else:
        # The stated fallback: documents in order, or each dealt out by itself.
        lengths, workers = lengths_of(placed_rows(plan)), len(batch.ranks)
        assert homes_of(placed_rows(plan)) in (
            homes_of(pack_in_order(lengths, workers)),
            deal_documents(lengths, workers),
        )


def cut_positions(plan: Plan, wanted: Callable[[int], bool]) -> list[int]:
    """Returns the positions inside documents at which the home changes."""
    homes = homes_of(placed_rows(plan))
    return [
        position
        for (document, position), worker in homes.items()
        if position and homes[document, position - 1] != worker and wanted(position)
    ]


def deal_documents(lengths: list[int], workers: int) -> dict[Token, int]:
    homes: dict[Token, int] = {}
    for document, length in enumerate(lengths):
        tokens = [(document, position) for position in range(length)]
        homes |= homes_of(head_tail(tokens, workers))
    return homes


def many_short(seed: int, workers: int, context: int) -> list[int]:
    """A long document for every other worker and fillers of 1/20 of the context or less."""
    generator = np.random.default_rng(seed)
    long = generator.integers(context // 2, context, max(workers // 2, 1)).tolist()
    short: list[int] = []
    while sum(long) + sum(short) < workers * context:
        short.append(int(generator.integers(1, context // 20)))
    return [*long, *short]


@pytest.mark.parametrize("seed", range(3))
@pytest.mark.parametrize("workers", [4, 16])
def test_balanced_placement_of_a_training_batch(seed: int, workers: int) -> None:
    """Tokens and attention are even, cuts are multiples of the tile, and no query moves."""
    lengths = many_short(seed, workers, 16384)
    held = Placement.in_order(as_ints(lengths), workers)
    plan = place_and_plan(held, policy_of("distca", "balanced"), model="llama3-8b", cost="pairs")
    given_plan = distca.plan(held, model="llama3-8b", cost="pairs")
    assert plan.meets_bound
    assert plan.imbalance <= 1.02
    assert np.ptp(plan.placement.tokens) <= 128
    assert len(plan.forward.moved) == 0
    shards = [s for shards in plan.to_json()["placement"] for s in shards]
    for s in shards:
        assert s["start"] % 128 == 0
        assert s["stop"] % 128 == 0 or s["stop"] == lengths[s["document"]]
    # Only heads that even the token counts may leave a rest below one tile.
    pieces = [s for s in shards if (s["start"], s["stop"]) != (0, lengths[s["document"]])]
    tails = [s for s in pieces if s["stop"] - s["start"] < 128]
    assert all(s["stop"] == lengths[s["document"]] for s in tails)
    assert plan.traffic.total < 0.6 * given_plan.traffic.total


def test_balanced_placement_keeps_what_is_even() -> None:
    """Two equal documents on two ranks need no keys to be sent."""
    plan = Batch([[64], [64]], {"cost": "pairs", "tile": 4, "min_shard": 4}).plan(
        placement="balanced"
    )
    assert plan.traffic.total == 0
    assert plan.imbalance == 1.0


def test_balanced_placement_of_one_document_over_all_ranks() -> None:
    """Without short documents to fill up workers, tasks move as well, and the bound still holds."""
    options = {"cost": "pairs", "tile": 4, "min_shard": 4, "tolerance": 0.05}
    batch = Batch([[512], [], [], []], options)
    plan = batch.plan(placement="balanced")
    check_balanced(batch, plan)
    assert plan.meets_bound


def test_balanced_placement_fits_where_documents_in_order_do() -> None:
    """One worker and one server with memory for exactly its tokens: there is no other placement."""
    options = {"cost": "pairs", "tile": 1, "min_shard": 1, "servers": 1}
    batch = Batch([[26, 26]], {**options, "memory_bytes": 52 * OWN_BYTES})
    assert batch.plan().meets_bound
    assert batch.plan(placement="balanced").meets_bound


@pytest.mark.slow
@settings(max_examples=300)
@given(batches(max_ranks=8, max_documents=12, max_length=120))
def test_balanced_placement_of_anything_at_length(batch: Batch) -> None:
    plan = planned(batch, placement="balanced")
    if plan is not None:
        check_balanced(batch, plan)


@pytest.mark.slow
@settings(max_examples=200)
@given(causal_batches(max_ranks=8, max_documents=30, max_length=60))
def test_balanced_placement_of_plain_batches_at_length(batch: Batch) -> None:
    plan = planned(batch, placement="balanced")
    if plan is not None:
        check_balanced(batch, plan)


def test_the_shape_used_here_weighs_what_the_oracle_says() -> None:
    assert (SHAPE.q_bytes, SHAPE.kv_bytes) == (32, 16)
