"""Trees in JSON: a prompt with its completions, and conversations that branch.

``{"prompt": ..., "completions": [...]}`` is one row for each completion: the prompt without a loss,
then the completion. A completion is a text or a list of token ids, or an object that continues: it
may have a ``prompt``, then a ``completion``, which has a loss, and then ``completions`` of its own.
Each path from the outermost prompt to the end is a row, and rows are stored once as far as they
begin alike (``shared_prefixes``).
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Any, NamedTuple

import numpy as np

from distca.data.documents import IGNORE, Document, Tokens, Tree
from distca.data.readers import whole_numbers
from distca.data.shared_prefixes import pack_rows
from distca.data.tokenizers import Tokenizer


class Turn(NamedTuple):
    """A part of a row."""

    text: str | list[int]  # or token ids
    is_target: bool  # whether it has a loss


Turns = tuple[Turn, ...]
_KEYS = {"prompt", "completion", "completions"}


def read_tree(line: Mapping[str, Any], tokenizer: Tokenizer, where: str, index: int) -> Tree:
    """Reads a tree; ``where`` names its line in error messages."""
    rows, labels = [], []
    for turns in _rows(line, (), where):
        row, is_target = _tokens(turns, tokenizer, where)
        rows.append(row)
        labels.append(np.where(is_target, row, IGNORE))
    packed = pack_rows(rows, labels)
    documents, stop = [], 0
    for entry in packed.documents:
        given = {"length": entry, "prefix": 0} if isinstance(entry, int) else entry
        start, stop = stop, stop + given["length"]
        # Labels of pack_rows are those of their own place, and ours are those of the next one.
        following = np.append(packed.labels[start + 1 : stop], IGNORE)
        documents.append(
            Document(packed.tokens[start:stop], following, index=index, prefix=given["prefix"])
        )
    return Tree(tuple(documents), index=index)


def _rows(node: Any, before: Turns, where: str) -> Iterator[Turns]:
    """Yields the turns of each row below a node."""
    if isinstance(node, str | list):
        node = {"completion": node}
    if not isinstance(node, Mapping) or not node or node.keys() - _KEYS:
        raise ValueError(
            f"{where} has the completion {node!r}: it must be a text, a list of token ids, or an"
            ' object with "prompt", "completion" or "completions"'
        )
    for name in ("prompt", "completion"):
        if name in node:
            if not isinstance(node[name], str | list):
                raise ValueError(
                    f"{where} has the {name} {node[name]!r}: it must be a text or a list of token"
                    " ids"
                )
            before = (*before, Turn(node[name], name == "completion"))
    below = node.get("completions")
    if below is None:
        yield before
        return
    if not isinstance(below, list) or not below:
        raise ValueError(f"{where} has the completions {below!r}: it must be a list of one or more")
    for child in below:
        yield from _rows(child, before, where)


def _tokens(turns: Turns, tokenizer: Tokenizer, where: str) -> tuple[Tokens, Tokens]:
    """Returns the tokens of a row, and whether each is a target."""
    parts = [_encode(turn.text, tokenizer, where) for turn in turns]
    targets = [np.full(len(part), turn.is_target) for part, turn in zip(parts, turns, strict=True)]
    if tokenizer.add_bos and isinstance(turns[0].text, str):
        parts.insert(0, np.array([tokenizer.bos]))
        targets.insert(0, np.array([False]))
    if tokenizer.add_eos and isinstance(turns[-1].text, str):
        parts.append(np.array([tokenizer.eos]))
        targets.append(np.array([turns[-1].is_target]))
    row = np.concatenate(parts)
    if not len(row):
        raise ValueError(f"{where} has a row without tokens: leave it out")
    return row, np.concatenate(targets)


def _encode(text: str | list[int], tokenizer: Tokenizer, where: str) -> Tokens:
    if isinstance(text, str):
        return tokenizer.encode(text)
    row = whole_numbers(text, lambda place: f"token {place} of a turn in {where}")
    tokenizer.check_ids(row, f"a turn in {where}")
    return row.astype(np.int64)
