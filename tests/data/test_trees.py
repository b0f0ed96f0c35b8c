"""Prompts with completions in JSON lines: rows, targets, batches, and what is refused."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from distca.data.documents import IGNORE, Batch, Document
from distca.data.loader import Loader
from distca.data.sources import open_source
from distca.data.tokenizers import open_tokenizer
from distca.data.trees import read_tree

BYTES, IDS = open_tokenizer("bytes"), open_tokenizer("ids:1000")
TREES: list[dict[str, Any]] = [
    {"prompt": [*range(number, number + 20)], "completions": [[7], [8, 9], [1, 2, 3]]}
    for number in range(30)
]


def rows(documents: tuple[Document, ...]) -> dict[str, str]:
    """Returns each row as text, with what of it is a target."""
    found, before = {}, b""
    for document in documents:
        before = before[: document.prefix] + bytes(document.tokens.tolist())
        targets = document.labels[document.labels != IGNORE]
        found[before.decode()] = bytes(targets.tolist()).decode()
    return found


def source_of(path: Path, lines: list[dict[str, Any]]) -> Any:
    path.write_text("".join(json.dumps(line) + "\n" for line in lines))
    return open_source(path, IDS, context=100)


def test_a_conversation_that_branches() -> None:
    tokenizer = open_tokenizer("bytes", add_eos=False)
    second = {"prompt": "Q2", "completions": ["yes", "no"]}
    line = {"prompt": "Q1", "completions": ["a", {"completion": "b", "completions": [second]}]}
    tree = read_tree(line, tokenizer, "line 1", 5)
    assert rows(tree.documents) == {"Q1a": "a", "Q1bQ2yes": "byes", "Q1bQ2no": "bno"}
    assert tree.index == 5


def test_a_prompt_is_stored_once_but_for_its_last_token() -> None:
    line = {"prompt": "x" * 100, "completions": ["one", "two", "three"]}
    tree = read_tree(line, BYTES, "line 1", 0)
    assert [document.prefix for document in tree.documents] == [0, 99, 99]
    batch = Batch(tree.documents)
    assert batch.num_saved == 2 * 99
    assert batch.num_targets == len("onetwothree") + 3  # with the end of each document
    assert tree.longest_row == 100 + len("three") + 1


@pytest.mark.parametrize(
    ("line", "words"),
    [
        ({"prompt": "a", "completions": []}, r"line 1 .* completions \[\]: it must be a list"),
        ({"prompt": "a", "completions": "b"}, "completions 'b': it must be a list"),
        ({"prompt": "a", "completions": [3]}, "completion 3: it must be a text, a list"),
        ({"prompt": 1, "completions": ["b"]}, "prompt 1: it must be a text or a list"),
        ({"prompt": "a", "completions": [{"text": "b"}]}, "must be a text, a list of token ids"),
        ({"prompt": [5], "completions": [[2000]]}, "is 2000 but the vocabulary has 1000"),
        ({"prompt": [5], "completions": [["a"]]}, "is 'a': it must be a whole number"),
        ({"prompt": [], "completions": [[]]}, "a row without tokens"),
    ],
)
def test_what_is_no_tree_is_named(line: dict[str, Any], words: str) -> None:
    with pytest.raises(ValueError, match=words):
        read_tree(line, IDS, "line 1 of f.jsonl", 0)


def drawn(loader: Loader, count: int) -> list[list[int]]:
    return [
        [token for document in loader.next_batch().documents for token in document.tokens.tolist()]
        for _ in range(count)
    ]


def test_trees_are_not_cut_and_batches_continue(tmp_path: Path) -> None:
    source = source_of(tmp_path / "trees.jsonl", TREES)
    loader = Loader([source], tokens_per_step=100, context=40)
    length = len(source.document(0))
    for _ in range(3):
        batch = loader.next_batch()
        assert batch.num_tokens == 100 // length * length
        assert batch.prefixes.tolist() == [0, 19, 19] * (100 // length)
    state = json.loads(json.dumps(loader.state()))
    right = drawn(loader, 5)
    again = Loader([source], tokens_per_step=100, context=40)
    again.restore(state)
    assert drawn(again, 5) == right


def test_trees_beside_other_documents(tmp_path: Path) -> None:
    lines = [*TREES, *({"tokens": [5] * 50} for _ in range(30))]
    loader = Loader([source_of(tmp_path / "both.jsonl", lines)], tokens_per_step=100, context=40)
    for _ in range(20):
        batch = loader.next_batch()
        assert 0 < batch.num_tokens <= 100
        assert batch.num_tokens + batch.num_saved == batch.lengths.sum()
        assert batch.prefixes[0] == 0


@pytest.mark.parametrize(("tokens", "context"), [(100, 22), (25, 25)])
def test_trees_that_are_too_large(tmp_path: Path, tokens: int, context: int) -> None:
    source = source_of(tmp_path / "trees.jsonl", TREES)
    with pytest.raises(ValueError, match=r"28 tokens and a row of 23, .*overlong = .drop."):
        Loader([source], tokens_per_step=tokens, context=context).next_batch()
    dropping = Loader([source], tokens_per_step=tokens, context=context, overlong="drop")
    with pytest.raises(ValueError, match="has nothing to train on"):
        dropping.next_batch()


def test_evaluation_keeps_trees_whole(tmp_path: Path) -> None:
    source = source_of(tmp_path / "trees.jsonl", TREES)
    loader = Loader([source], tokens_per_step=100, context=40, held_out=4)
    batches = [*loader.evaluation(60)]
    assert [batch.num_tokens for batch in batches] == [56, 56]
    assert all(batch.prefixes.tolist() == [0, 19, 19] * 2 for batch in batches)
