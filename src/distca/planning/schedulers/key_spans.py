"""Spans of keys that ranks have of one document, and of all documents that span ranks."""

from __future__ import annotations

from collections.abc import Iterable
from typing import NamedTuple

import numpy as np

from distca.planning.problem import Problem
from distca.planning.spans import Span, Spans, union
from distca.planning.tasks import Tasks

KeySpans = dict[int, list[Span]]  # rank -> disjoint spans of one document's keys


class KeysOnRanks(NamedTuple):
    """Who has which keys of documents that are not whole on one rank."""

    spans: Spans  # sorted; groups are (document, rank)
    num_ranks: int

    @classmethod
    def of_tasks(cls, tasks: Tasks, problem: Problem) -> KeysOnRanks:
        """Returns the keys that the servers of tasks need, and those that live on their homes."""
        placement, num_ranks = problem.placement, problem.devices.num_ranks
        number, keys = placement.prefixes.owned(tasks.key_spans)
        moved = tasks.only(tasks.moved)  # the others need their own keys
        parts = (
            Spans(keys.group * num_ranks + tasks.server[number], keys.start, keys.stop),
            Spans(moved.document * num_ranks + moved.home, moved.q_start, moved.q_stop),
        )
        return cls(union(Spans(*map(np.concatenate, zip(*parts, strict=True)))), num_ranks)

    def of(self, document: int) -> KeySpans:
        """Returns who has the document's own keys, without those of its prefix."""
        (group, start, stop), ranks = self.spans, self.num_ranks
        rows = slice(*group.searchsorted([document * ranks, (document + 1) * ranks]))
        held: KeySpans = {}
        columns = (column[rows].tolist() for column in (group, start, stop))
        for one, low, high in zip(*columns, strict=True):
            held.setdefault(one % ranks, []).append((low, high))
        return held


def joined(parts: Iterable[tuple[KeySpans, Span]]) -> KeySpans:
    """Returns what ranks have of each part, together; parts are in order, as spans are."""
    result: KeySpans = {}
    for held, (low, high) in parts:
        for rank, spans in held.items():
            for start, stop in spans:
                start, stop = max(start, low), min(stop, high)
                if start < stop:
                    before = result.setdefault(rank, [])
                    if before and before[-1][1] == start:
                        start = before.pop()[0]
                    before.append((start, stop))
    return result
