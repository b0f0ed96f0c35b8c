"""Which other worker holds the most keys of each shard.

A document that is dealt over hundreds of workers has a shard or two on each of them, and a shard
needs keys of all those before it. There are too many of such pairs to list them, so the keys of
these documents are counted in tables of shards and workers.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import NamedTuple

import numpy as np

from distca.planning.placement import Placement
from distca.planning.spans import Ints, Spans, overlaps

MANY_SHARDS = 64  # of a document; with fewer of them, to list all pairs takes less time


class KeyHolders(NamedTuple):
    """Shards of which other workers hold keys, [found]; of equal workers the first is named."""

    shard: Ints
    worker: Ints  # the other worker with the most keys
    num_keys: Ints  # that it holds
    num_own: Ints  # that the shard's own worker holds


def key_holders(placement: Placement, shard: Ints, keys: Spans) -> KeyHolders:
    """keys: what each of the shards needs; groups are documents."""
    found = [KeyHolders(*np.zeros((4, 0), np.int64))]
    is_dealt = np.zeros(len(shard), bool)
    if not placement.prefixes.exist:
        num_shards = np.bincount(placement.document, minlength=placement.num_documents)
        is_dealt = (num_shards >= MANY_SHARDS)[keys.group]
    for chosen in _by_document(keys.group, np.flatnonzero(is_dealt)):
        found.append(_tabulated(placement, shard[chosen], _take(keys, chosen)))
    others = np.flatnonzero(~is_dealt)
    found.append(_listed(placement, shard[others], _take(keys, others)))
    return KeyHolders(*map(np.concatenate, zip(*found, strict=True)))


def _take(spans: Spans, chosen: Ints) -> Spans:
    return Spans(*(column[chosen] for column in spans))


def _by_document(document: Ints, chosen: Ints) -> Iterator[Ints]:
    """Yields the chosen rows of each document."""
    chosen = chosen[np.argsort(document[chosen], kind="stable")]
    ends = np.flatnonzero(np.diff(document[chosen])) + 1
    yield from np.split(chosen, ends) if len(chosen) else ()


def _tabulated(placement: Placement, shard: Ints, keys: Spans) -> KeyHolders:
    """Adds up what each worker holds of one document before each of its shards."""
    spans, document = placement.spans, keys.group[0]
    first, last = np.searchsorted(spans.group, [document, document + 1])
    start, stop = spans.start[first:last], spans.stop[first:last]
    workers, column = np.unique(
        placement.worker[placement.by_document[first:last]], return_inverse=True
    )
    before = np.zeros((len(start) + 1, len(workers)), np.int32)
    before[np.arange(1, len(before)), column] = stop - start
    before.cumsum(axis=0, out=before)
    # Whole shards that contain a key, less what they have before the first and behind the last key.
    low, high = stop.searchsorted(keys.start, side="right"), start.searchsorted(keys.stop)
    held, row = before[high] - before[low], np.arange(len(shard))
    held[row, column[low]] -= keys.start - start[low]
    held[row, column[high - 1]] -= stop[high - 1] - keys.stop
    own = row, workers.searchsorted(placement.worker[shard])
    num_own, held[own] = held[own], 0
    best = held.argmax(axis=1)
    most = held[row, best]
    found = KeyHolders(shard, workers[best], most.astype(np.int64), num_own.astype(np.int64))
    return KeyHolders(*(each[most > 0] for each in found))


def _listed(placement: Placement, shard: Ints, keys: Spans) -> KeyHolders:
    """Lists which shards hold the keys of which."""
    # 1. How many of the keys of each shard each worker holds.
    number, keys = placement.prefixes.owned(keys)
    found = overlaps(keys, placement.spans)
    worker = placement.worker[placement.by_document[found.right]]
    pair = number[found.left] * placement.num_workers + worker
    order = np.argsort(pair, kind="stable")  # hardly any work, because numbers are sorted
    first_of_pair = np.flatnonzero(np.diff(pair[order], prepend=-1))
    held = np.add.reduceat((found.stop - found.start)[order], first_of_pair)
    number, worker = np.divmod(pair[order[first_of_pair]], placement.num_workers)
    # 2. The other worker that holds the most; of equal ones the first.
    is_home = worker == placement.worker[shard[number]]
    num_own = np.zeros_like(shard)
    num_own[number[is_home]] = held[is_home]
    number, worker, held = number[~is_home], worker[~is_home], held[~is_home]
    most = np.zeros_like(shard)
    np.maximum.at(most, number, held)
    is_most = np.flatnonzero(held == most[number])
    number, best = np.unique(number[is_most], return_index=True)
    best = is_most[best]
    return KeyHolders(shard[number], worker[best], held[best], num_own[number])
