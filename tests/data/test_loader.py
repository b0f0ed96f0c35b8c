"""Batches: nothing lost, nothing twice, the same again after a restart."""

import json
from collections.abc import Sequence
from dataclasses import dataclass
from itertools import pairwise
from pathlib import Path
from typing import Any, ClassVar

import numpy as np
import pytest
from hypothesis import assume, given
from hypothesis import strategies as st

from distca.data.documents import IGNORE, Batch, Document, Tree
from distca.data.loader import Loader
from distca.data.loader_state import Counts, DamagedStateError
from distca.data.shuffle import choose_held_out
from distca.data.sources import open_source
from distca.data.tokenizers import open_tokenizer


class Listed:
    """Documents of given lengths, no two tokens alike."""

    name = "listed"
    files: Sequence[Path] = ()
    settings: ClassVar[dict[str, int]] = {}

    def __init__(self, lengths: Sequence[int]) -> None:
        self.lengths = lengths
        self.asked: list[int] = []

    def __len__(self) -> int:
        return len(self.lengths)

    def document(self, index: int) -> Document:
        self.asked.append(index)
        tokens = index * 1000 + np.arange(self.lengths[index])
        return Document.from_tokens(tokens, num_prompt=index % 3, index=index)


@dataclass
class Case:
    lengths: list[list[int]]
    options: dict[str, Any]

    def loader(self, **changes: Any) -> Loader:
        return Loader([Listed(lengths) for lengths in self.lengths], **self.options | changes)

    def held_out(self) -> list[set[int]]:
        sizes = [len(lengths) for lengths in self.lengths]
        return [{*held.tolist()} for held in choose_held_out(sizes, self.options["held_out"])]

    def trained(self) -> list[set[int]]:
        """For each source the documents that an epoch must bring."""
        longest = self.options["context"] if self.options["overlong"] == "drop" else 1000
        return [
            {index for index, n in enumerate(lengths) if 0 < n <= longest and index not in held}
            for lengths, held in zip(self.lengths, self.held_out(), strict=True)
        ]


@st.composite
def cases(draw: st.DrawFn) -> Case:
    length = st.integers(0, 20)
    lengths = draw(st.lists(st.lists(length, min_size=2, max_size=8), min_size=1, max_size=3))
    context = draw(st.integers(1, 20))
    options = {
        "context": context,
        "tokens_per_step": draw(st.integers(context, 40)),
        "seed": draw(st.integers(0, 2**63 - 1)),
        "weights": [draw(st.sampled_from([0.1, 1, 3])) for _ in lengths],
        "overlong": draw(st.sampled_from(["split", "drop"])),
        "held_out": draw(st.sampled_from([0, 0.2, 1])),
    }
    case = Case(lengths, options)
    assume(all(case.trained()))
    return case


def counts_of(loader: Loader) -> list[Counts]:
    return [Counts(**counts) for counts in loader.state()["sources"]]


def draw_epochs(loader: Loader, epochs: int) -> list[Document]:
    """The pieces of batches, until each source has been gone through ``epochs`` times."""
    pieces: list[Document] = []
    while min(counts.epochs for counts in counts_of(loader)) < epochs:
        batch = loader.next_batch()
        assert batch.num_tokens == loader.tokens_per_step
        assert batch.lengths.max() <= loader.context
        pieces += batch.documents
    return pieces


def assert_same(one: Batch, other: Batch) -> None:
    assert len(one.documents) == len(other.documents)
    for a, b in zip(one.documents, other.documents, strict=True):
        assert (a.source, a.index, a.offset) == (b.source, b.index, b.offset)
        assert np.array_equal(a.tokens, b.tokens)
        assert np.array_equal(a.labels, b.labels)


@given(cases())
def test_nothing_is_lost_or_seen_twice_within_an_epoch(case: Case) -> None:
    pieces = draw_epochs(case.loader(), epochs=2)
    for number, expected in enumerate(case.trained()):
        mine = [piece for piece in pieces if piece.source == number]
        begun = [piece.index for piece in mine if piece.offset == 0]
        first, second = begun[: len(expected)], begun[len(expected) : 2 * len(expected)]
        assert set(first) == expected
        assert set(second) <= expected
        assert len(set(second)) == len(second)
        for before, after in pairwise(mine):  # a rest follows its beginning
            ended = before.offset + len(before) == case.lengths[number][before.index]
            assert (after.offset == 0) if ended else (after.index == before.index)
            assert ended or after.offset == before.offset + len(before)


@given(cases())
def test_every_piece_is_what_the_source_has(case: Case) -> None:
    for piece in draw_epochs(case.loader(), epochs=1):
        whole = Listed(case.lengths[piece.source]).document(piece.index)
        span = slice(piece.offset, piece.offset + len(piece))
        assert np.array_equal(piece.tokens, whole.tokens[span])
        assert np.array_equal(piece.labels, whole.labels[span])


@given(cases(), st.integers(0, 12), st.booleans())
def test_the_same_batches_follow_from_a_state(case: Case, before: int, used: bool) -> None:
    loader, other = case.loader(), case.loader()
    for _ in range(before):
        loader.next_batch()
    if used:
        other.next_batch()
    state = json.loads(json.dumps(loader.state()))
    other.restore(state)
    assert other.state() == loader.state() == state
    for _ in range(8):
        assert_same(loader.next_batch(), other.next_batch())
    assert other.state() == loader.state()


@given(cases())
def test_held_out_documents_are_evaluated_and_never_trained_on(case: Case) -> None:
    loader = case.loader()
    held = case.held_out()
    assert loader.num_held_out == sum(map(len, held))
    seen = draw_epochs(loader, epochs=1)
    assert all(piece.index not in held[piece.source] for piece in seen)
    if not loader.num_held_out:
        return
    state, num_tokens = loader.state(), loader.context + 3
    batches = [*loader.evaluation(num_tokens)]
    assert loader.state() == state
    for batch, following in pairwise(batches):
        assert batch.num_tokens <= num_tokens < batch.num_tokens + following.lengths[0]
    pieces = [piece for batch in batches for piece in batch.documents]
    longest = loader.context if loader.overlong == "drop" else 1000
    expected = [
        (number, index, offset)
        for number, indices in enumerate(held)
        for index in sorted(indices)
        if case.lengths[number][index] <= longest
        for offset in range(0, case.lengths[number][index], loader.context)
    ]
    assert [(piece.source, piece.index, piece.offset) for piece in pieces] == expected
    for piece in pieces:
        left = case.lengths[piece.source][piece.index] - piece.offset
        assert len(piece) == min(loader.context, left)


@given(cases())
def test_no_source_is_ahead_of_its_weight_by_more_than_a_document(case: Case) -> None:
    loader, weights = case.loader(), case.options["weights"]
    for _ in range(60):
        loader.next_batch()
        tokens = [counts.tokens for counts in counts_of(loader)]
        for weight, mine, lengths in zip(weights, tokens, case.lengths, strict=True):
            assert mine <= weight / sum(weights) * sum(tokens) + max(lengths) + 1e-6
    assert sum(tokens) == 60 * loader.tokens_per_step


def test_weights_are_shares_of_the_tokens() -> None:
    """Not of the documents, which are a hundred times longer in one source."""
    sources = [Listed([500] * 20), Listed([5] * 20), Listed([50, 70])]
    loader = Loader(sources, tokens_per_step=1000, context=500, weights=[0.5, 0.3, 0.2])
    for _ in range(200):
        loader.next_batch()
    tokens = [counts.tokens for counts in counts_of(loader)]
    assert np.allclose(tokens, [100_000, 60_000, 40_000], rtol=0, atol=500)


@given(cases())
def test_counts_add_up(case: Case) -> None:
    loader = case.loader()
    draw_epochs(loader, epochs=2)
    context, drop = loader.context, loader.overlong == "drop"
    for counts, lengths, held in zip(counts_of(loader), case.lengths, case.held_out(), strict=True):
        there = [n for index, n in enumerate(lengths) if index not in held]
        drawn = counts.epochs * len(there) + counts.cursor
        assert counts.documents + counts.dropped + counts.empty == drawn
        if not counts.cursor:
            long = sum(n > context for n in there)
            assert counts.empty == counts.epochs * there.count(0)
            assert counts.dropped == counts.epochs * long * drop
            assert counts.split == counts.epochs * long * (not drop)


def test_overlong_documents_are_split_or_dropped_and_counted() -> None:
    sources = [Listed([25, 4, 30, 0, 6])]
    split = Loader(sources, tokens_per_step=65, context=10)
    batch = split.next_batch()
    assert sorted(batch.lengths.tolist()) == [4, 5, 6, *[10] * 5]
    (counts,) = counts_of(split)
    assert (counts.epochs, counts.documents, counts.tokens) == (1, 4, 65)
    assert (counts.split, counts.dropped, counts.empty) == (2, 0, 1)
    drop = Loader(sources, tokens_per_step=10, context=10, overlong="drop")
    assert sorted(drop.next_batch().lengths.tolist()) == [4, 6]
    drop.next_batch()
    (counts,) = counts_of(drop)
    assert (counts.split, counts.documents, counts.tokens) == (0, 4, 20)
    assert 2 <= counts.dropped <= 4


def test_a_document_that_the_batch_cuts_goes_on_in_the_next() -> None:
    loader = Loader([Listed([7])], tokens_per_step=5, context=5)
    pieces = [document for _ in range(3) for document in loader.next_batch().documents]
    assert [(piece.offset, len(piece)) for piece in pieces] == [
        (0, 5),
        (5, 2),
        (0, 3),
        (3, 4),
        (0, 1),
    ]
    assert [piece.labels[-1] for piece in pieces] == [5, IGNORE, 3, IGNORE, 1]


def test_epochs_and_seeds_have_orders_of_their_own() -> None:
    def orders(seed: int) -> set[tuple[int, ...]]:
        loader = Loader([Listed([1] * 30)] * 2, tokens_per_step=60, context=1, seed=seed)
        batches = [loader.next_batch().documents for _ in range(4)]
        return {
            tuple(document.index for document in batch if document.source == source)
            for batch in batches
            for source in (0, 1)
        }

    assert len(orders(0) | orders(1)) == 16  # two seeds, four epochs, two sources


def test_documents_are_read_one_by_one() -> None:
    source = Listed([10] * 1000)
    loader = Loader([source], tokens_per_step=25, context=10, held_out=0.1)
    loader.next_batch()
    loader.next_batch()
    assert len(source.asked) == 5  # the rest of the third is still there


def test_a_step_and_a_context_of_another_size_go_on_from_a_state() -> None:
    case = Case([[9, 5, 12, 7]], {"tokens_per_step": 10, "context": 10})
    loader, other = case.loader(), case.loader(tokens_per_step=23, context=8)
    first = loader.next_batch()
    other.restore(loader.state())
    second = other.next_batch()
    assert first.num_tokens + second.num_tokens == 33
    assert (
        len({token for batch in (first, second) for d in batch.documents for token in d.tokens})
        == 33
    )


def test_text_to_batches() -> None:
    source = open_source("stdlib", open_tokenizer(), context=4096)
    loader = Loader([source], tokens_per_step=1 << 15, context=4096, held_out=0.02)
    batch = loader.next_batch()
    assert batch.num_tokens == 1 << 15
    assert 0.99 < batch.num_targets / batch.num_tokens < 1
    assert sum(batch.num_targets for batch in loader.evaluation(1 << 15)) > 1000


LISTED = [Listed([5, 6]), Listed([7, 8])]


@pytest.mark.parametrize(
    ("options", "said"),
    [
        ({"context": 9}, "a context of 9 tokens in a step of 8: .* tokens_per_step >= context"),
        ({"context": 0}, "a context of 0 tokens"),
        ({"seed": -1}, "seed = -1: it must be a whole number from 0"),
        ({"sources": []}, "no sources: give one or more; stdlib is always available"),
        ({"weights": [1]}, "1 weights for 2 sources: give one for each source"),
        ({"weights": [1, 0]}, "listed has weight 0: it must be above 0; remove a source"),
        ({"weights": [1, float("nan")]}, "listed has weight nan"),
        ({"held_out": 4}, "held_out = 4 of 4 documents: give a share"),
        ({"held_out": 3}, "listed has 2 documents, all of them held out: .* hold out fewer"),
    ],
)
def test_what_cannot_work_is_refused(options: dict[str, Any], said: str) -> None:
    arguments = {"sources": LISTED, "tokens_per_step": 8, "context": 8} | options
    with pytest.raises(ValueError, match=said):
        Loader(**arguments)


def test_a_source_without_a_document_to_train_on_is_refused() -> None:
    loader = Loader([Listed([0, 9, 8])], tokens_per_step=8, context=7, overlong="drop")
    with pytest.raises(
        ValueError, match=r"all of its 3 documents are empty or longer than the con"
    ):
        loader.next_batch()


def test_what_cannot_be_evaluated_is_refused() -> None:
    with pytest.raises(ValueError, match="there are no held-out documents: set held_out"):
        Loader(LISTED, tokens_per_step=8, context=8).evaluation(8)
    with pytest.raises(ValueError, match="batches of 7 tokens with a context of 8: a batch must"):
        Loader(LISTED, tokens_per_step=8, context=8, held_out=1).evaluation(7)


def test_held_out_documents_without_a_target_are_refused() -> None:
    lengths = [1] * 40
    held = Loader([Listed(lengths)], tokens_per_step=8, context=8, held_out=5)._held_out[0]
    lengths[held[-1]] = 3  # of which up to two are a prompt
    loader = Loader([Listed(lengths)], tokens_per_step=8, context=8, held_out=5)
    loader.check_evaluation(5)
    with pytest.raises(ValueError, match=r"^the first 4 tokens of held-out documents have no targ"):
        loader.check_evaluation(4)
    long = Listed([9] * 4)
    longest = Loader([long], tokens_per_step=8, context=8, held_out=2, overlong="drop")
    with pytest.raises(ValueError, match=r"^the first 0 tokens of .*; hold out more documents, or"):
        longest.check_evaluation(100)
    with pytest.raises(ValueError, match="there are no held-out documents: set held_out"):
        Loader(LISTED, tokens_per_step=8, context=8).check_evaluation(8)


def test_a_state_of_other_data_is_refused() -> None:
    case = Case([[5, 6, 7], [7, 8]], {"tokens_per_step": 8, "context": 8})
    loader = case.loader()
    loader.next_batch()
    state = loader.state()
    for other, said in (
        (
            case.loader(seed=1),
            "has seed = 0 but this run has 1: set the same value, or",
        ),
        (case.loader(held_out=1), r"has held_out = 0\.0 but this run has 1"),
        (case.loader(weights=[1, 2]), r"has weights = \[1, 1\] but this run has \[1, 2\]"),
        (
            Case([[5, 6], [7]], case.options).loader(),
            r"has documents = \[3, 2\] but this run has \[2, 1",
        ),
        (
            Case([[9] * 3, [9] * 2], case.options).loader(),
            r"of listed has 9 tokens but had \d when",
        ),
    ):
        with pytest.raises(ValueError, match=said):
            other.restore(state)
        assert all(counts.tokens == 0 for counts in counts_of(other))  # nothing half restored
    with pytest.raises(ValueError, match="changed since the checkpoint: it was other and is liste"):
        loader.restore({**state, "data": [{"name": "other"}] * 2})
    assert loader.state() == state


ONE = Case([[25, 4, 30, 6]], {"tokens_per_step": 10, "context": 10, "held_out": 1})


@pytest.mark.parametrize(
    ("damage", "said"),
    [
        ({"seed": "x"}, r"loader\.seed = 'x': it must be a whole number"),
        ({"seed": None}, r"loader\.seed = None"),
        ({"held_out": "x"}, r"loader\.held_out = 'x': it must be a number"),
        ({"weights": "x"}, r"loader\.weights = 'x': it must be a whole number"),
        ({"data": []}, r"loader\.data has 0 values for 1 sources"),
        ({"data": [{}]}, r"loader\.data has a source without a fingerprint"),
        ({"data": [3]}, r"loader\.data = 3: it must be a section"),
        ({"sources": []}, r"loader\.sources has 0 values for 1 sources"),
        ({"sources": [{"cursor": -1}]}, r"sources\.cursor = -1: it must be from 0 to below 4"),
        ({"sources": [{"cursor": 3}]}, "cursor 3 of 3 documents"),
        ({"sources": [{"cursor": 4}]}, r"sources\.cursor = 4: it must be from 0 to below 4"),
        ({"sources": [{"cursor": "x"}]}, r"sources\.cursor = 'x': it must be a whole number"),
        ({"sources": [{"cursor": 1.5}]}, r"sources\.cursor = 1\.5: it must be a whole number"),
        ({"sources": [{"cursor": True}]}, r"sources\.cursor = True: it must be a whole number"),
        ({"sources": [{"epochs": -1}]}, r"sources\.epochs = -1: it must be from 0"),
        ({"sources": [{"epochs": 10**30}]}, r"sources\.epochs = 10+: it must be from 0"),
        ({"sources": [{"tokens": "x"}]}, r"sources\.tokens = 'x': it must be a whole number"),
        ({"sources": [{"tokens": float("nan")}]}, r"sources\.tokens = nan"),
        ({"rest": []}, r"loader\.rest has 0 values: it must have 4"),
        ({"rest": "x"}, r"loader\.rest has 1 values: it must have 4"),
        ({"rest": [7, 99, 0, 5]}, r"loader\.rest = \[7, 99, 0, 5\] is no part of a document"),
        ({"rest": [0, 4, 0, 5]}, "is no part of a document"),
        ({"rest": [0, 0, -5, 30]}, "is no part of a document"),
        ({"rest": [0, 0, 30, -5]}, "is no part of a document"),
        ({"surplus": 1}, r"loader\.surplus is unknown"),
    ],
)
def test_a_damaged_state_is_said_to_be(damage: dict[str, Any], said: str) -> None:
    loader = ONE.loader()
    loader.next_batch()
    state = loader.state()
    if len(changes := damage.get("sources", ())) == 1:
        damage = {"sources": [{**state["sources"][0], **changes[0]}]}
    with pytest.raises(DamagedStateError, match=said):
        loader.check({**state, **damage})
    with pytest.raises(DamagedStateError, match=r"loader\.sources\.epochs is missing"):
        loader.check({**state, "sources": [{"cursor": 0}]})
    for name in state.keys() - {"rest"}:
        with pytest.raises(DamagedStateError, match=rf"loader\.{name} is missing"):
            loader.check({key: value for key, value in state.items() if key != name})
    for values in (None, [], "x"):
        with pytest.raises(DamagedStateError, match="it must be a section"):
            loader.check(values)


def test_a_context_of_another_size_changes_random_documents_but_not_those_of_files(
    tmp_path: Path,
) -> None:
    (tmp_path / "text.txt").write_text("Some text " * 40)

    def opened(name: str, context: int, ids: int = 300) -> Loader:
        tokenizer = open_tokenizer("bytes" if name.endswith(".txt") else f"ids:{ids}")
        source = open_source(name, tokenizer, context=context)
        return Loader([source], tokens_per_step=64, context=context)

    opened(str(tmp_path / "text.txt"), 32).check(opened(str(tmp_path / "text.txt"), 64).state())
    state = opened("pretrain", 64).state()
    opened("pretrain", 64).check(state)
    with pytest.raises(ValueError, match=r"lengths were drawn for data\.context = 64, which is 32"):
        opened("pretrain", 32).check(state)
    with pytest.raises(ValueError, match="drawn from 300 ids, which are 200 now"):
        opened("pretrain", 64, ids=200).check(state)
    state["data"] = [{"name": "pretrain"}]  # of an earlier version
    opened("pretrain", 32).check(state)


def test_a_tree_that_has_become_too_long_is_left_out() -> None:
    """It would be the rest of every batch, and none of them would have a token."""

    class Trees(Listed):
        def document(self, index: int) -> Any:
            return Tree((super().document(index),), index=index)

    options = {"tokens_per_step": 20, "context": 20, "overlong": "drop"}
    loader = Loader([Trees([12])], **options)
    loader.next_batch()
    assert "rest" in loader.state()
    other = Loader([Trees([12])], **options | {"tokens_per_step": 10, "context": 10})
    other.restore(loader.state())
    assert "rest" not in other.state()
