"""Spans of tokens as arrays, and their algebra. Everything is int64 and half-open."""

from __future__ import annotations

from typing import NamedTuple

import numpy as np
import numpy.typing as npt

Ints = npt.NDArray[np.int64]
Floats = npt.NDArray[np.float64]
Bools = npt.NDArray[np.bool_]


class Spans(NamedTuple):
    """Many spans, each in a group (a document, or a document on a server)."""

    group: Ints
    start: Ints
    stop: Ints


class Overlaps(NamedTuple):
    """Where span ``left`` of one list meets span ``right`` of another, and on which tokens."""

    left: Ints
    right: Ints
    start: Ints
    stop: Ints


def as_ints(values: object) -> Ints:
    return np.asarray(values, dtype=np.int64)


def expand(starts: Ints, lengths: Ints) -> Ints:
    """The rows of all spans, one after the other: (5, 0), (2, 3) -> 5 6 0 1 2."""
    ends = np.cumsum(lengths)
    total = int(ends[-1]) if len(ends) else 0
    rows: Ints = np.arange(total, dtype=np.int64) + np.repeat(starts - (ends - lengths), lengths)
    return rows


def cumulative(lengths: Ints) -> Ints:
    """Offsets with a leading zero: (3, 4) -> 0 3 7."""
    return np.concatenate([np.zeros(1, np.int64), np.cumsum(lengths, dtype=np.int64)])


def union(spans: Spans) -> Spans:
    """The union inside each group, sorted by (group, start); touching spans become one."""
    group, start, stop = spans
    if not len(group):
        return spans
    order = np.lexsort((start, group))
    group, start, stop = group[order], start[order], stop[order]
    # A running maximum that restarts in each group: lift every group above the one before it.
    lift = (np.cumsum(np.diff(group, prepend=group[0]) != 0)) * (int(stop.max()) + 2)
    reach = np.maximum.accumulate(stop + lift)
    fresh = np.ones(len(group), dtype=bool)
    fresh[1:] = (start + lift)[1:] > reach[:-1]
    first = np.flatnonzero(fresh)
    last = np.append(first[1:], len(group)) - 1
    return Spans(group[first], start[first], reach[last] - lift[first])


def overlaps(left: Spans, right: Spans) -> Overlaps:
    """All meetings of two lists of spans; ``right`` is disjoint and sorted by (group, start)."""
    stride = int(max(left.stop.max(initial=0), right.stop.max(initial=0))) + 1
    first = np.searchsorted(
        right.group * stride + right.stop, left.group * stride + left.start, side="right"
    )
    last = np.searchsorted(
        right.group * stride + right.start, left.group * stride + left.stop, side="left"
    )
    counts = np.maximum(last - first, 0)
    i = np.repeat(np.arange(len(left.group)), counts)
    j = expand(first, counts)
    return Overlaps(
        i, j, np.maximum(left.start[i], right.start[j]), np.minimum(left.stop[i], right.stop[j])
    )
