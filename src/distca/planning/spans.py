"""Half-open spans of token positions and their algebra, over arrays and over short lists.

Arrays serve whole batches at once. Lists serve the scheduler, which keeps a few spans for each
document and rank and changes one of them at a time.
"""

import bisect
from collections.abc import Sequence
from typing import NamedTuple, TypeVar

import numpy as np
import numpy.typing as npt

Ints = npt.NDArray[np.int64]
Floats = npt.NDArray[np.float64]
Bools = npt.NDArray[np.bool_]
IntOrInts = TypeVar("IntOrInts", int, Ints)

Span = tuple[int, int]  # [start, stop)


class Spans(NamedTuple):
    """Many spans as int64 arrays, each in a group (a document, or a document on a server)."""

    group: Ints
    start: Ints
    stop: Ints


class Overlaps(NamedTuple):
    """Tokens [start, stop) that span ``left`` of one list shares with span ``right`` of another."""

    left: Ints
    right: Ints
    start: Ints
    stop: Ints


def as_ints(values: object) -> Ints:
    """Returns ``values`` as an int64 array."""
    return np.asarray(values, dtype=np.int64)


def expand(starts: Ints, lengths: Ints) -> Ints:
    """Returns the rows of all spans, one after the other: (5, 0), (2, 3) -> 5 6 0 1 2."""
    ends = np.cumsum(lengths)
    total = int(ends[-1]) if len(ends) else 0
    rows: Ints = np.arange(total, dtype=np.int64) + np.repeat(starts - (ends - lengths), lengths)
    return rows


def cumulative(lengths: Ints) -> Ints:
    """Returns cumulative sums with a leading zero: (3, 4) -> 0 3 7."""
    return np.concatenate([np.zeros(1, np.int64), np.cumsum(lengths, dtype=np.int64)])


def union(spans: Spans) -> Spans:
    """Returns the union inside each group, sorted by (group, start); touching spans are merged."""
    group, start, stop = spans
    if not len(group):
        return spans
    order = np.lexsort((start, group))
    group, start, stop = group[order], start[order], stop[order]
    # A running maximum that restarts in each group: offset every group above the one before it.
    offset = (np.cumsum(np.diff(group, prepend=group[0]) != 0)) * (int(stop.max()) + 2)
    reach = np.maximum.accumulate(stop + offset)
    begins = np.ones(len(group), dtype=bool)
    begins[1:] = (start + offset)[1:] > reach[:-1]
    first = np.flatnonzero(begins)
    last = np.append(first[1:], len(group)) - 1
    return Spans(group[first], start[first], reach[last] - offset[first])


def overlaps(left: Spans, right: Spans) -> Overlaps:
    """Returns all overlaps of two lists; ``right`` is disjoint and sorted by (group, start)."""
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


def covered(spans: Spans, others: Spans) -> Ints:
    """[spans] Returns how much of each span others of its group cover, added up over all of them.

    There may be very many overlaps, so they are not listed: of points p, sum(min(x, p)) is found by
    cumulative sums, and others [start, stop) cover sum(min(x, stop) - min(x, start)) before x.
    """
    stride = int(max(spans.stop.max(initial=0), others.stop.max(initial=0))) + 1
    first = spans.group * stride
    is_new = np.append(True, first[1:] != first[:-1])[: len(first)]
    of_group, group = first[is_new], np.cumsum(is_new) - 1  # neighbours in a group share a search

    def sum_of_least(points: Ints) -> Ints:
        key = np.sort(others.group * stride + points)
        total = cumulative(key % stride)
        begin, end = key.searchsorted(of_group)[group], key.searchsorted(of_group + stride)[group]
        below = [key.searchsorted(first + x) for x in (spans.start, spans.stop)]
        low, high = (
            total[index] - total[begin] + x * (end - index)
            for index, x in zip(below, (spans.start, spans.stop), strict=True)
        )
        between: Ints = high - low
        return between

    return sum_of_least(others.stop) - sum_of_least(others.start)


def cover_error(spans: Spans, first: Ints, last: Ints) -> str:
    """Returns which tokens sorted spans do not cover exactly once; empty if there are none.

    first, last: the tokens [first, last) of each group, all of which are to be covered.
    """
    # An empty span at the end of each group stands for its last token.
    group = np.append(spans.group, np.arange(len(last)))
    start, stop = np.append(spans.start, last), np.append(spans.stop, last)
    order = np.argsort(group, kind="stable")
    group, start, stop = group[order], start[order], stop[order]
    covered = np.where(np.diff(group, prepend=-1) != 0, first[group], np.roll(stop, 1))
    wrong = np.flatnonzero(start != covered)
    if not len(wrong):
        return ""
    low, high = sorted((int(start[wrong[0]]), int(covered[wrong[0]])))
    what = "twice" if start[wrong[0]] < covered[wrong[0]] else "nowhere"
    return f"tokens [{low}, {high}) of document {group[wrong[0]]} are placed {what}"


def meet(spans: Sequence[Span], other: Span) -> bool:
    """Returns whether some spans share tokens with another span; no span is empty."""
    return any(start < other[1] and other[0] < stop for start, stop in spans)


def gaps(spans: Sequence[Span], other: Span) -> list[Span]:
    """Returns the parts of another span that disjoint spans, sorted, do not cover."""
    position, stop = other
    found = []
    for low, high in spans:
        if high > position:
            if low >= stop:
                break
            if low > position:
                found.append((position, low))
            position = high
    return [*found, (position, stop)] if position < stop else found


def with_span(spans: list[Span], other: Span) -> list[Span]:
    """Returns the union of disjoint spans, sorted, and another span; touching spans are merged."""
    start, stop = other
    first, last = bisect.bisect_left(spans, (start,)), bisect.bisect_left(spans, (stop + 1,))
    if first and spans[first - 1][1] >= start:
        first -= 1
    if first < last:  # the spans that it meets
        start, stop = min(start, spans[first][0]), max(stop, spans[last - 1][1])
    return [*spans[:first], (start, stop), *spans[last:]]
