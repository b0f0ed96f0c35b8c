"""What a kernel sees by itself: tasks, their chunks, and the keys behind their queries."""

from __future__ import annotations

from dataclasses import dataclass
from typing import NamedTuple

import numpy as np

from distca.planning.document_masks import DocumentMasks
from distca.planning.masks import BAND, CAUSAL, Mask
from distca.planning.spans import Bools, Ints, Spans, cumulative, expand
from distca.planning.tasks import Tasks


class Sequences(NamedTuple):
    """Queries and keys that a kernel sees by themselves: a task, or a chunk of one."""

    task: Ints
    queries: Ints
    keys: Ints


class QueriesWithKeysBehind(NamedTuple):
    """Queries [start, stop) of tasks that see the keys behind them, up to ``last``."""

    task: Ints
    start: Ints
    stop: Ints
    last: Ints

    def only(self, chosen: Bools) -> QueriesWithKeysBehind:
        return QueriesWithKeysBehind(*(column[chosen] for column in self))


@dataclass(frozen=True, eq=False)
class KeysBehind:
    """Queries of a call that see keys behind them, and these keys. [Note: keys behind]

    In the order of positions, the query of row r sees the keys from r on. Read backwards, both are
    a causal sequence that is bottom-right aligned, which every kernel supports. So everything here
    is in reverse order, from the last span of the call to its first.
    """

    mask: Mask  # causal, or a window of the nearest keys
    rows: Ints  # of the call's packed queries
    q_offsets: Ints  # [spans + 1]
    kv_offsets: Ints  # [spans + 1]


def sequences_of(tasks: Tasks, masks: DocumentMasks) -> Sequences:
    """Divides tasks at the ends of chunks, whose keys follow each other as their queries do."""
    reach = masks.reach[tasks.document]
    last = masks.last_key_up_to_own(tasks.document, tasks.q_stop)
    size = np.where(reach < 0, -reach, last - tasks.kv_start)
    count = -(-(last - tasks.kv_start) // size)
    task = np.repeat(np.arange(len(tasks)), count)
    start = tasks.kv_start[task] + expand(np.zeros_like(count), count) * size[task]
    stop = np.minimum(start + size[task], last[task])
    inside = stop - np.maximum(start, tasks.q_start[task])
    queries = np.where(count[task] == 1, tasks.queries[task], inside)
    return Sequences(task, queries, stop - start)


def queries_with_keys_behind(tasks: Tasks, masks: DocumentMasks) -> QueriesWithKeysBehind:
    """Returns the queries of tasks that see keys behind them: all but the last of a span.

    Under a band, these are all but the last of a document.
    """
    reach, length = masks.reach[tasks.document], masks.lengths[tasks.document]
    in_band = np.flatnonzero((reach > BAND) & (tasks.q_start < length - 1))
    stop = np.minimum(tasks.q_stop, length - 1)
    band = QueriesWithKeysBehind(
        in_band, tasks.q_start[in_band], stop[in_band], tasks.kv_stop[in_band]
    )
    if not masks.two_way.exist:
        return band
    shared = masks.two_way.shared_with(Spans(tasks.document, tasks.q_start, tasks.q_stop))
    last = masks.two_way.stop[shared.right]
    found = QueriesWithKeysBehind(
        shared.left, shared.start, np.minimum(shared.stop, last - 1), last
    )
    both = zip(band, found.only(found.start < found.stop), strict=True)
    return QueriesWithKeysBehind(*map(np.concatenate, both))


def mirrored(behind: QueriesWithKeysBehind, tasks: Tasks, chosen: Bools, reach: int) -> KeysBehind:
    """Returns the part of a call for the keys behind its queries. [Note: keys behind]"""
    first = np.zeros(len(tasks), np.int64)
    first[chosen] = cumulative(tasks.queries[chosen])[:-1]
    inside = first[behind.task] + behind.start - tasks.q_start[behind.task]
    num_queries, num_keys = behind.stop - behind.start, behind.last - behind.start - 1
    return KeysBehind(
        mask=Mask(reach - BAND if reach > BAND else CAUSAL),
        rows=expand(inside, num_queries)[::-1].copy(),
        q_offsets=cumulative(num_queries[::-1]),
        kv_offsets=cumulative(num_keys[::-1]),
    )
