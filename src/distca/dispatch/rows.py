"""Rows of a tensor that comes in several pieces, taken and put as whole runs.

Documents are packed in order, so the rows of a task are a few long runs: a handful of slices moves
them, in one pass, without index tensors on the device. A single run is a view and moves nothing.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from itertools import pairwise
from typing import NamedTuple

import numpy as np
import torch
from torch import Tensor

from distca.planning.spans import Ints


class Run(NamedTuple):
    piece: int
    start: int
    stop: int


@dataclass(frozen=True)
class Rows:
    """Which rows, in order. The pieces (own rows, then what each peer sent) lie end to end."""

    runs: tuple[Run, ...]

    @classmethod
    def of(cls, rows: Ints, piece_sizes: Sequence[int]) -> Rows:
        """From indices into all pieces laid end to end."""
        ends = np.cumsum(np.asarray(piece_sizes, dtype=np.int64))
        piece = np.searchsorted(ends, rows, side="right")
        breaks = np.flatnonzero((np.diff(rows) != 1) | (np.diff(piece) != 0)) + 1
        first = np.concatenate([[0], breaks, [len(rows)]]) if len(rows) else [0]
        offset = np.concatenate([[0], ends])
        return cls(
            tuple(
                Run(int(at), int(start := rows[a] - offset[at]), int(start) + int(b - a))
                for a, b in pairwise(first)
                for at in (piece[a],)
            )
        )

    @property
    def disjoint(self) -> bool:
        """No row is named twice."""
        return all(a.piece != b.piece or a.stop <= b.start for a, b in pairwise(sorted(self.runs)))

    def is_all_of(self, num_rows: int) -> bool:
        """The first piece as it is, and nothing else."""
        return self.runs == ((0, 0, num_rows),)

    def take(self, pieces: Sequence[Tensor], out: Tensor | None = None) -> Tensor:
        """The rows; a view where one run holds them all and no ``out`` is given."""
        slices = [pieces[run.piece][run.start : run.stop] for run in self.runs]
        if not slices:
            return pieces[0][:0] if out is None else out
        if out is None:
            return slices[0] if len(slices) == 1 else torch.cat(slices)
        return torch.cat(slices, out=out)

    def put(self, values: Tensor, pieces: Sequence[Tensor]) -> None:
        """Writes the rows; those of pieces are named once."""
        for target, part in self._matched(values, pieces):
            target.copy_(part)

    def add(self, values: Tensor, pieces: Sequence[Tensor]) -> None:
        """Adds to the rows, run after run: where a row is named twice, in this order."""
        for target, part in self._matched(values, pieces):
            target.add_(part)

    def _matched(self, values: Tensor, pieces: Sequence[Tensor]) -> list[tuple[Tensor, Tensor]]:
        matched, first = [], 0
        for run in self.runs:
            size = run.stop - run.start
            matched.append((pieces[run.piece][run.start : run.stop], values[first : first + size]))
            first += size
        return matched
