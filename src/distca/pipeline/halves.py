"""Splits a batch into micro-batches and halves, whose documents belong to groups of workers."""

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

    A placer makes the tokens of all workers equal in each half.
    """
    sets, tokens = _sets(lengths, prefixes, micro_batches, num_halves), lengths - prefixes
    return [Members(members, assign_groups(tokens[members], dp)) for members in sets]


def groups_then_halves(
    lengths: Ints, prefixes: Ints, dp: int, micro_batches: int, num_halves: int
) -> list[Members]:
    """Splits documents into micro-batches, assigns those of each, and then splits each group.

    For documents that stay in their group: a long one in one half leaves few tokens to the other
    half of its group, and all groups have about equal tokens in both together.
    """
    if num_halves == 1 or dp == 1:  # the workers of one group have equal tokens in every half
        return halves_then_groups(lengths, prefixes, dp, micro_batches, num_halves)
    sets, halves = _sets(lengths, prefixes, micro_batches, num_halves), []
    for ping, pong in zip(sets[::2], sets[1::2], strict=True):
        both = np.union1d(ping, pong)
        group = assign_groups((lengths - prefixes)[both], dp)
        parts = _split_groups(lengths[both], prefixes[both], group)
        parts.sort(key=lambda part: _attention(lengths[both[part]], prefixes[both[part]]))
        halves += [Members(both[part], group[part]) for part in parts]
    return halves


def _sets(lengths: Ints, prefixes: Ints, micro_batches: int, num_halves: int) -> list[Ints]:
    """Splits documents into sets, two of about equal attention for each micro-batch of two halves.

    These are next to each other.
    """
    sets = split(lengths, micro_batches * num_halves, prefixes)
    if num_halves > 1:
        sets.sort(key=lambda members: _attention(lengths[members], prefixes[members]))
    return sets


def _split_groups(lengths: Ints, prefixes: Ints, group: Ints) -> list[Ints]:
    """Splits the documents of every group into two halves with about equal tokens.

    A half takes as long as the group with the most tokens in it, so groups should split alike: the
    longest document of every group is in the first half. Documents with a shared prefix are in one.
    """
    root, tokens = np.flatnonzero(prefixes == 0), lengths - prefixes
    tree = np.cumsum(prefixes == 0) - 1  # of each document
    order = np.argsort(-np.add.reduceat(tokens, root), kind="stable")
    bounds, where, size = [*root.tolist(), len(tree)], group.tolist(), tokens.tolist()
    ahead = [0] * (max(where) + 1)  # tokens of a group in the first half, less those in the second
    second = []  # trees in the second half
    for number in order.tolist():
        members, lead = range(bounds[number], bounds[number + 1]), 0
        for one in members:
            lead += ahead[where[one]] * size[one]
        sign = -1 if lead > 0 else 1
        for one in members:
            ahead[where[one]] += sign * size[one]
        if lead > 0:
            second.append(number)
    half_of = np.zeros(len(root), np.int64)
    half_of[second or order[1::2]] = 1  # every second tree if no group has two documents
    return [np.flatnonzero(half_of[tree] == half) for half in range(2)]


def _attention(lengths: Ints, prefixes: Ints) -> float:
    return float(np.sum(lengths**2.0 - prefixes**2.0))
