"""Rows of a tensor that lies in several blocks, as runs of consecutive rows.

Documents are packed in order, so the rows of a task are a few long runs. Slices copy them in one
pass, without index tensors on the device; a single run is a view and copies nothing. This is the
only place where rows are gathered and scattered.

Legend: T rows of all blocks together; R rows that are named.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from itertools import pairwise
from typing import TYPE_CHECKING, NamedTuple

import numpy as np

from distca.planning.spans import Ints

if TYPE_CHECKING:  # layouts are made of rows, and a layout needs no torch
    from torch import Tensor


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

    def __str__(self) -> str:
        return " ".join(f"{block}[{start}:{stop}]" for block, start, stop in self.runs)

    def __len__(self) -> int:
        return sum(stop - start for _, start, stop in self.runs)

    @property
    def disjoint(self) -> bool:
        """Whether no row is named twice."""
        return all(a.block != b.block or a.stop <= b.start for a, b in pairwise(sorted(self.runs)))

    def take(self, blocks: Sequence[Tensor], out: Tensor | None = None) -> Tensor:
        """Returns the rows [R, ...]; a view if they are one run and no ``out`` is given."""
        import torch

        slices = [blocks[block][start:stop] for block, start, stop in self.runs]
        if not slices:
            return blocks[0][:0] if out is None else out
        if out is None:
            return slices[0] if len(slices) == 1 else torch.cat(slices)
        return torch.cat(slices, out=out)

    def put(self, values: Tensor, blocks: Sequence[Tensor]) -> None:
        """Writes values [R, ...] to the rows, which are disjoint."""
        for target, part in self._pairs(values, blocks):
            target.copy_(part)

    def add(self, values: Tensor, blocks: Sequence[Tensor]) -> None:
        """Adds values [R, ...] to the rows, run by run: the order of the sum is fixed."""
        for target, part in self._pairs(values, blocks):
            target.add_(part)

    def _pairs(self, values: Tensor, blocks: Sequence[Tensor]) -> Iterator[tuple[Tensor, Tensor]]:
        """Yields the rows of each run in the blocks and in the values."""
        first = 0
        for block, start, stop in self.runs:
            last = first + stop - start
            yield blocks[block][start:stop], values[first:last]
            first = last
