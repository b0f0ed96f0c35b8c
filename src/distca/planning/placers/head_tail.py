"""Head-tail placement: of 2c equal chunks, worker i of c takes chunks i and 2c-1-i.

The causal attention of a token grows linearly along a document, so every such pair of chunks has
the same attention. In a packed sequence of several documents, only the tokens are equal.
"""

import numpy as np

from distca.planning.placement import Placement
from distca.planning.problem import Problem
from distca.planning.spans import Ints, Spans, as_ints, cumulative, overlaps


def per_document_placement(problem: Problem) -> Placement:
    """Places each document of a context-parallel group head-tail by itself."""
    return deal_each_document(problem.placement, group_size(problem))


def group_size(problem: Problem) -> int:
    """Returns ``cp``, the number of workers in a context-parallel group."""
    workers = problem.placement.num_workers
    if problem.cp < 1 or workers % problem.cp:
        raise ValueError(f"cp = {problem.cp} does not divide {workers} workers: choose a divisor")
    return problem.cp


def packed_sequence_placement(problem: Problem) -> Placement:
    """Places the packed sequence of each context-parallel group head-tail."""
    placement, cp = problem.placement, group_size(problem)
    size = placement.stop - placement.start
    group = placement.worker // cp
    tokens = np.bincount(group, size, minlength=placement.num_workers // cp).astype(np.int64)
    stream = cumulative(size)[:-1] - cumulative(tokens)[group]
    return _deal(placement, group, stream, np.arange(len(tokens)), tokens, cp)


def deal_each_document(placement: Placement, cp: int) -> Placement:
    """Deals what each group of ``cp`` workers holds of each document over the group."""
    document, group = placement.document, placement.worker // cp
    run = np.flatnonzero((np.diff(document, prepend=-1) != 0) | (np.diff(group, prepend=-1) != 0))
    size = placement.stop - placement.start
    tokens = np.add.reduceat(size, run) if len(run) else as_ints([])
    member = np.searchsorted(run, np.arange(len(document)), side="right") - 1
    stream = cumulative(size)[:-1] - cumulative(tokens)[:-1][member]
    return _deal(placement, member, stream, group[run], tokens, cp)


def _deal(
    placement: Placement, sequence: Ints, stream: Ints, group: Ints, tokens: Ints, cp: int
) -> Placement:
    """Cuts sequences of shards into 2 x cp equal chunks, and deals them head-tail over groups.

    sequence, stream: [shards] the sequence to which a shard belongs, and where in it it starts.
    group, tokens: [sequences] the group of workers over which it is dealt, and its length.
    """
    if cp == 1:  # a group of one holds it all already: a cut would only add a task
        return placement
    chunk = np.tile(np.arange(2 * cp), len(tokens))
    owner = np.repeat(np.arange(len(tokens)), 2 * cp)
    low, high = tokens[owner] * chunk // (2 * cp), tokens[owner] * (chunk + 1) // (2 * cp)
    member = np.minimum(chunk, 2 * cp - 1 - chunk)
    full = np.flatnonzero(high > low)
    left = Spans(sequence, stream, stream + placement.stop - placement.start)
    met = overlaps(left, Spans(owner[full], low[full], high[full]))
    shift = placement.start[met.left] - stream[met.left]
    worker = group[owner[full][met.right]] * cp + member[full][met.right]
    order = np.argsort(worker, kind="stable")
    return Placement(
        placement.lengths,
        placement.document[met.left][order],
        (met.start + shift)[order],
        (met.stop + shift)[order],
        worker[order],
        placement.num_workers,
        two_way=placement.two_way,
    )
