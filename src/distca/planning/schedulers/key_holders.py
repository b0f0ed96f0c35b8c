"""Which other worker holds the most keys of each shard."""

from __future__ import annotations

from typing import NamedTuple

import numpy as np

from distca.planning.placement import Placement
from distca.planning.spans import Ints, Spans, overlaps


class KeyHolders(NamedTuple):
    """Shards of which other workers hold keys, [found]; of equal workers the first is named."""

    shard: Ints
    worker: Ints  # the other worker with the most keys
    num_keys: Ints  # that it holds
    num_own: Ints  # that the shard's own worker holds


def key_holders(placement: Placement, shard: Ints, keys: Spans) -> KeyHolders:
    """Lists which shards hold the keys of which.

    keys: what each of the shards needs; groups are documents.
    """
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
