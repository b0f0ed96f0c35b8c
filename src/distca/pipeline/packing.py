"""Packs whole documents into micro-batches and onto groups of workers, before they are planned.

No document is dropped or split over two sets, so the sum of all gradients does not depend on how a
batch is split. A document's number is its position in the list of lengths. A document with a prefix
continues the one before it, and is in the same set: lengths count the prefix, which is stored with
the other document.
"""

import heapq

import numpy as np

from distca.planning.placement import Placement, Shard
from distca.planning.prefixes import NO_PARENT, Prefixes
from distca.planning.spans import Floats, Ints, as_ints, cumulative, expand

FILLER = 128  # most tokens of a filler document: one tile of a kernel


def split(lengths: Ints, count: int, prefixes: Ints | None = None) -> list[Ints]:
    """Splits documents into sets with about equal tokens and about equal attention.

    The sets are micro-batches, or the two halves of a ping-pong step. Documents keep their order.
    """
    lengths = as_ints(lengths)
    prefix = np.zeros_like(lengths) if prefixes is None else as_ints(prefixes)
    tree = np.cumsum(prefix == 0) - 1  # of each document: those with a prefix stay together
    num_trees = int(tree[-1]) + 1 if len(tree) else 0
    if count < 1:
        raise ValueError(f"{count} sets of documents: give 1 or more")
    if num_trees < count:
        raise ValueError(
            f"{num_trees} documents cannot be split into {count} sets of whole documents: take"
            " more tokens per step, shorter documents, fewer micro-batches, or ping-pong off"
        )
    # The weight of a document is its share of the attention plus its share of the tokens. Long
    # documents come first and balance the attention; the short ones then balance the tokens.
    pairs, tokens = (lengths * (lengths + 1) - prefix * (prefix + 1)) / 2, lengths - prefix
    shares = pairs / pairs.sum() + tokens / tokens.sum()
    weight = np.bincount(tree, shares).astype(np.float64)
    set_of = _spread(weight, count)[tree]
    return [np.flatnonzero(set_of == number) for number in range(count)]


def assign_groups(tokens: Ints, dp: int) -> Ints:
    """[documents] Assigns each document to a group of workers; groups get about equal tokens."""
    return _spread(tokens.astype(np.float64), dp)


def pack_in_groups(
    lengths: Ints,
    dp: int,
    cp: int = 1,
    *,
    multiple: int = 1,
    prefixes: Ints | None = None,
    group: Ints | None = None,
) -> Placement:
    """Places each document on one group of ``cp`` workers, as packed data parallelism does.

    Inside a group, documents are packed in order over its workers. Filler documents, numbered after
    the real ones, make the tokens of every worker a multiple of ``multiple``.

    group: of each document; by default as in ``assign_groups``.
    """
    if dp < 1 or cp < 1 or multiple < 1:
        raise ValueError(f"dp {dp}, cp {cp}, multiple {multiple}: each must be 1 or more")
    lengths = as_ints(lengths)
    known = _of_documents_before(lengths, prefixes)
    tokens = lengths - known.length
    # 1. The documents of each group in order, and the row of its tokens where each begins.
    group = assign_groups(tokens, dp) if group is None else group
    document = np.argsort(group, kind="stable")
    group, size = group[document], tokens[document]
    total = np.zeros(dp, np.int64)
    np.add.at(total, group, size)
    row = cumulative(size)[:-1] - cumulative(total)[group]
    # 2. A shard for each worker that a document is on.
    per_worker = (-(-total // (cp * multiple)) * multiple)[group]
    first, last = row // per_worker, (row + size - 1) // per_worker
    count = last - first + 1
    document, group, row, size, per_worker = (
        np.repeat(column, count) for column in (document, group, row, size, per_worker)
    )
    worker = expand(first, count)
    start = np.maximum(worker * per_worker - row, 0) + known.length[document]
    stop = np.minimum((worker + 1) * per_worker - row, size) + known.length[document]
    shards = np.stack([group * cp + worker, document, start, stop], axis=1)
    return pad_to_multiple(Placement.from_shards(lengths, shards, dp * cp, known), multiple)


def pad_to_multiple(placement: Placement, multiple: int) -> Placement:
    """Adds filler documents, so that the tokens of every worker are a multiple of ``multiple``."""
    missing = (-placement.tokens) % multiple
    if not missing.any():
        return placement
    shards, lengths = placement.shards(), placement.lengths.tolist()
    for worker, count in enumerate(missing.tolist()):
        for start in range(0, count, FILLER):
            size = min(FILLER, count - start)
            shards.append(Shard(worker, len(lengths), 0, size))
            lengths.append(size)
    prefixes = Prefixes.none(len(lengths) - placement.num_documents).behind(placement.prefixes)
    return Placement.from_shards(as_ints(lengths), shards, placement.num_workers, prefixes)


def _of_documents_before(lengths: Ints, prefixes: Ints | None) -> Prefixes:
    """Returns the prefixes of documents, each of which continues the one before it, if any."""
    if prefixes is None:
        return Prefixes.none(len(lengths))
    length = as_ints(prefixes)
    return Prefixes(np.where(length > 0, np.arange(len(length)) - 1, NO_PARENT), length)


def _spread(weight: Floats, count: int) -> Ints:
    """[documents] Assigns documents, largest weight first, to the lightest of ``count`` sets."""
    heap = [(0.0, number) for number in range(count)]
    order = np.argsort(-weight, kind="stable")
    chosen = []
    for one in weight[order].tolist():
        load, number = heap[0]
        heapq.heapreplace(heap, (load + one, number))
        chosen.append(number)
    set_of = np.empty(len(weight), np.int64)
    set_of[order] = chosen
    return set_of
