"""Dynamic context parallelism: each document on a group of its own size, packed to even time.

Groups have a power of two of neighbouring workers, as in Megatron-Core and verl. Documents are
packed by falling size of their groups, so that the groups of all documents on a worker lie inside
each other: when a group starts, all its workers have done the same so far, and none of them waits.
"""

from __future__ import annotations

from dataclasses import dataclass
from math import inf

import numpy as np

from distca.planning.devices import UNLIMITED
from distca.planning.placement import Placement
from distca.planning.placers.head_tail import group_size
from distca.planning.problem import Problem
from distca.planning.spans import Ints, as_ints, cumulative

# The most work of one document on a worker, relative to the mean of all workers, that is tried.
LARGEST_SHARES = (inf, 1.0, 1 / 2, 1 / 4, 1 / 8, 1 / 16)
TOO_MUCH = np.iinfo(np.int64).max


@dataclass(frozen=True, eq=False)
class Groups:
    """The group of each document: the workers [first, first + size)."""

    first: Ints  # [documents] a multiple of ``size``
    size: Ints  # [documents] a power of two
    most_ps: int  # the work of the busiest worker
    fits: bool  # whether no worker has more than ``max_tokens``


def dynamic_groups(problem: Problem) -> Placement:
    """Places each document head-tail on the workers of its group."""
    groups = assign_groups(problem)
    placement = deal(problem.placement, groups.first, groups.size)
    problem.check_max_tokens(placement)
    return placement


def assign_groups(problem: Problem, *, max_piece: int = UNLIMITED) -> Groups:
    """Chooses the groups of all documents.

    The smallest groups with which the busiest worker is within the tolerance are taken, because
    they send least; if there are none, those with which the busiest worker has least to do.

    max_piece: the most tokens of one document on a worker, as far as groups can be large enough.
    """
    workers, work = problem.placement.num_workers, problem.document_ps
    mean = int(work.sum()) / workers
    best: Groups | None = None
    for share in LARGEST_SHARES:
        found = _pack(problem, work, _sizes(problem, work, share * mean, max_piece))
        if best is None or (not found.fits, found.most_ps) < (not best.fits, best.most_ps):
            best = found
        if best.fits and best.most_ps <= (1 + problem.tolerance) * mean:
            break
    assert best is not None
    return best


def _sizes(problem: Problem, work: Ints, largest_ps: float, max_piece: int) -> Ints:
    """[documents] Returns the smallest sizes with which neither work nor tokens are too many."""
    largest = group_size(problem)
    largest &= -largest  # the largest power of two that divides it, so that groups lie inside it
    size = np.ones(len(work), np.int64)
    for _ in range(largest.bit_length() - 1):
        too_large = (work > size * largest_ps) | (
            -(-problem.placement.lengths // size) > min(max_piece, problem.max_tokens)
        )
        size[too_large] = np.minimum(size[too_large] * 2, largest)
    return size


def _pack(problem: Problem, work: Ints, size: Ints) -> Groups:
    """Places documents, largest group and then most work first, on the group with least to do.

    A document goes to the group with the fewest tokens if no group has room for its tokens.
    """
    workers, limit = problem.placement.num_workers, problem.max_tokens
    each, tokens = -(-work // size), -(-problem.placement.lengths // size)
    first = np.zeros(len(work), np.int64)
    largest = int(size.max(initial=1))
    load, held = np.zeros((2, workers // largest), np.int64)  # of each group of one size
    for document in np.lexsort((-work, -size)).tolist():
        width = int(size[document])
        # The groups inside a larger one have its load and tokens.
        parts = workers // width // len(load)
        load, held = (np.repeat(one, parts) if parts > 1 else one for one in (load, held))
        room = held + tokens[document] <= limit
        chosen = int(np.argmin(np.where(room, load, TOO_MUCH) if room.any() else held))
        load[chosen] += each[document]
        held[chosen] += tokens[document]
        first[document] = chosen * width
    return Groups(first, size, int(load.max()), bool(held.max() <= limit))


def deal(placement: Placement, first: Ints, size: Ints) -> Placement:
    """Cuts documents into 2 x size equal chunks, of which worker i of a group takes two.

    They are the chunks i and 2 x size - 1 - i. A document on one worker is not cut.
    """
    lengths = placement.lengths
    chunks = np.where(size == 1, 1, 2 * size)
    document = np.repeat(np.arange(len(lengths)), chunks)
    chunk = np.arange(len(document)) - cumulative(chunks)[:-1][document]
    count = chunks[document]
    start, stop = (lengths[document] * end // count for end in (chunk, chunk + 1))
    worker = first[document] + np.minimum(chunk, count - 1 - chunk)
    full = np.flatnonzero(stop > start)
    order = full[np.argsort(worker[full], kind="stable")]
    return Placement(
        lengths,
        as_ints(document[order]),
        as_ints(start[order]),
        as_ints(stop[order]),
        as_ints(worker[order]),
        placement.num_workers,
        two_way=placement.two_way,
    )
