"""Splits a batch into micro-batches and halves, whose documents belong to groups of workers."""

from collections import Counter
from typing import NamedTuple

import numpy as np

from distca.pipeline.packing import assign_groups, split
from distca.planning.spans import Ints


class Members(NamedTuple):
    """The documents of a half, and the group of workers that each of them is given to."""

    document: Ints
    group: Ints


def halves_then_groups(
    lengths: Ints, prefixes: Ints, dp: int, micro_batches: int, num_halves: int
) -> list[Members]:
    """Splits documents, and then assigns those of each half.

    A placer makes the tokens of all workers equal in each half. Halves of one micro-batch are next
    to each other, and have about equal attention.
    """
    sets = split(lengths, micro_batches * num_halves, prefixes)
    if num_halves > 1:
        sets.sort(key=lambda members: _attention(lengths[members], prefixes[members]))
    tokens = lengths - prefixes
    return [Members(members, assign_groups(tokens[members], dp)) for members in sets]


def groups_then_halves(
    lengths: Ints, prefixes: Ints, dp: int, micro_batches: int, num_halves: int
) -> list[Members]:
    """Splits documents into micro-batches, assigns those of each, and then splits each group.

    For documents that stay in their group: a long one in one half leaves few tokens to the other
    half of its group, and all groups have about equal tokens in both together.
    """
    sets = halves_then_groups(lengths, prefixes, dp, micro_batches, num_halves)
    if num_halves == 1 or dp == 1:  # the workers of one group have equal tokens in every half
        return sets
    halves = []
    for ping, pong in zip(sets[::2], sets[1::2], strict=True):
        both = np.union1d(ping.document, pong.document)
        group = assign_groups((lengths - prefixes)[both], dp)
        parts = _split_groups(lengths[both], prefixes[both], group)
        parts.sort(key=lambda part: _attention(lengths[both[part]], prefixes[both[part]]))
        halves += [Members(both[part], group[part]) for part in parts]
    return halves


def _split_groups(lengths: Ints, prefixes: Ints, group: Ints) -> list[Ints]:
    """Splits the documents of every group into two halves with about equal tokens.

    A half takes as long as the group with the most tokens in it, so groups should split alike: the
    longest document of every group is in the first half. Documents with a shared prefix are in one.
    """
    tree, tokens = np.cumsum(prefixes == 0) - 1, lengths - prefixes
    trees: list[Counter[int]] = [Counter() for _ in range(int(tree[-1]) + 1)]  # tokens by group
    for number, where, size in zip(tree.tolist(), group.tolist(), tokens.tolist(), strict=True):
        trees[number][where] += size
    order = np.argsort(-np.bincount(tree, tokens), kind="stable")
    half_of = np.zeros(len(trees), np.int64)
    filled: tuple[Counter[int], Counter[int]] = Counter(), Counter()
    for number in order.tolist():
        first, second = (
            sum(half[where] * size for where, size in trees[number].items()) for half in filled
        )
        half_of[number] = chosen = int(second < first)
        filled[chosen].update(trees[number])
    if not half_of.any():  # no group has two documents
        half_of[order[1::2]] = 1
    return [np.flatnonzero(half_of[tree] == half) for half in range(2)]


def _attention(lengths: Ints, prefixes: Ints) -> float:
    return float(np.sum(lengths**2.0 - prefixes**2.0))
