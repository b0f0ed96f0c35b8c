"""Rows of a tensor that lies in several blocks, as runs of consecutive rows, and their places.

Documents are packed in order, so the rows of a task are a few long runs. Rows say which ones;
places say where those lie in memory, which is what ``distca.dispatch.moves`` copies and adds.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass
from functools import cached_property
from itertools import starmap
from typing import NamedTuple

import numpy as np

from distca.planning.spans import Bools, Ints, Spans, as_ints, cumulative, overlaps, union


class Places(NamedTuple):
    """Stretches of memory in order: the ``size`` units from ``offset`` of a numbered memory.

    Units are bytes where values are copied, and elements where they are added. A memory of -1 is
    none.
    """

    memory: Ints
    offset: Ints
    size: Ints

    @classmethod
    def packed(cls, memory: int, start: int, size: Ints) -> Places:
        """Returns places one after the other."""
        return cls(np.full_like(size, memory), start + cumulative(size)[:-1], size)

    @classmethod
    def parts(cls, memory: int, starts: Ints, size: Ints, count: Ints) -> Places:
        """Returns parts of ``count`` places, which lie one after the other from each start on."""
        before = cumulative(size)
        first = before[cumulative(count)[:-1]]
        offset = before[:-1] + np.repeat(starts - first, count)
        return cls(np.full_like(size, memory), offset, size)

    @classmethod
    def joined(cls, parts: Iterable[Places]) -> Places:
        return cls(*map(np.concatenate, zip(_NO_PLACES, *parts, strict=True)))


_NO_PLACES = Places(*as_ints([[], [], []]))


class Run(NamedTuple):
    """The rows [start, stop) of one block."""

    block: int
    start: int
    stop: int


@dataclass(frozen=True)
class Rows:
    """Some rows in order. Block 0 holds a rank's own rows, each further block what one peer sent.

    Prints as slices of the blocks: ``0[2:6] 1[0:4]``.
    """

    runs: tuple[Run, ...]

    @classmethod
    def of(cls, block: Ints, start: Ints, stop: Ints) -> Rows:
        """Returns the rows of these spans, none of them empty; adjacent spans become one run."""
        joined = (block[1:] == block[:-1]) & (start[1:] == stop[:-1])
        first = np.flatnonzero(np.append(True, ~joined)[: len(block)])
        last = np.append(first[1:], len(block))[: len(first)] - 1
        columns = (block[first].tolist(), start[first].tolist(), stop[last].tolist())
        return cls(tuple(map(Run, *columns)))

    @classmethod
    def first(cls, num_rows: int) -> Rows:
        """Returns the first of a rank's own rows."""
        return cls((Run(0, 0, num_rows),) if num_rows else ())

    def __str__(self) -> str:
        return " ".join(f"{block}[{start}:{stop}]" for block, start, stop in self.runs)

    def __len__(self) -> int:
        return sum(stop - start for _, start, stop in self.runs)

    def places(
        self, width: int, own: int, buffer: int | None = None, starts: Ints | None = None
    ) -> Places:
        """Returns where the runs lie.

        width: units of a row.
        own: the memory of block 0.
        buffer, starts: the memory of the other blocks, and where each of them starts in it.
        """
        block, start, stop = self._columns
        first = np.append(0, [] if starts is None else starts).astype(np.int64)
        memory = np.where(block > 0, own if buffer is None else buffer, own)
        return Places(memory, first[block] + start * width, (stop - start) * width)

    def own(self) -> Spans:
        """Returns which of a rank's own rows are among these: disjoint spans in order."""
        block, start, stop = self._columns[:, self._columns[0] == 0]
        return union(Spans(block, start, stop))

    def split(self, chosen: Spans) -> tuple[Rows, Bools, Ints]:
        """Returns the same rows in runs of chosen rows and of others.

        Also returns which of these runs are chosen, and of which former run each of them is a part.

        chosen: own rows, as ``own`` returns them; rows of other blocks are not chosen.
        """
        block, start, stop = self._columns
        end = int(max(stop.max(initial=0), chosen.stop.max(initial=0)))
        bounds = np.unique(np.concatenate([chosen.start, chosen.stop, as_ints([0, end])]))
        others = np.unique(block[block > 0])
        parts = Spans(
            np.concatenate([np.zeros_like(bounds[1:]), others]),
            np.concatenate([bounds[:-1], np.zeros_like(others)]),
            np.concatenate([bounds[1:], np.full_like(others, end)]),
        )
        found = overlaps(Spans(block, start, stop), parts)
        runs = zip(*(x.tolist() for x in (block[found.left], found.start, found.stop)), strict=True)
        is_chosen = np.isin(parts.start, chosen.start) & (parts.group == 0)
        return Rows(tuple(starmap(Run, runs))), is_chosen[found.right], found.left

    @cached_property
    def _columns(self) -> Ints:
        """[3, runs] The runs as an array, which every tensor with these rows needs."""
        return as_ints(self.runs).reshape(-1, 3).T
