"""Several tensors in one uneven all-to-all: lanes of rows, packed peer by peer into bytes.

A lane is one tensor whose rows go to peers in order (queries, keys, log-sum-exp, ...). All lanes
of a message share one buffer and one collective: for each peer, first its rows of lane 0, then of
lane 1, and so on, each part padded to a boundary that every dtype can be read at. Split sizes are
known on the host, so nothing waits for the device.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from math import prod

import torch
from torch import Tensor

from distca.planning.spans import Ints

ALIGNMENT = 16  # bytes


@dataclass(frozen=True)
class Lane:
    """Rows of one shape and dtype; how many go to, and come from, each peer."""

    shape: tuple[int, ...]  # of a row
    dtype: torch.dtype
    send_splits: tuple[int, ...]
    recv_splits: tuple[int, ...]

    @classmethod
    def of(cls, shape: Sequence[int], dtype: torch.dtype, send: Ints, recv: Ints) -> Lane:
        return cls(tuple(shape), dtype, tuple(send.tolist()), tuple(recv.tolist()))

    def part_bytes(self, rows: int) -> int:
        """What some rows take in the buffer."""
        size = rows * prod(self.shape) * self.dtype.itemsize
        return -(-size // ALIGNMENT) * ALIGNMENT

    def part(self, buffer: Tensor, offset: int, rows: int) -> Tensor:
        """[rows, *shape] of the buffer, in place."""
        flat = buffer[offset : offset + self.part_bytes(rows)].view(self.dtype)
        return flat[: rows * prod(self.shape)].view(rows, *self.shape)


@dataclass(frozen=True)
class Message:
    """The layout of one buffer, the same for sender and receiver."""

    lanes: tuple[Lane, ...]

    @property
    def send_bytes(self) -> list[int]:
        """For each peer."""
        return self._bytes([lane.send_splits for lane in self.lanes])

    @property
    def recv_bytes(self) -> list[int]:
        return self._bytes([lane.recv_splits for lane in self.lanes])

    def pack(self, tensors: Sequence[Tensor], device: torch.device) -> Tensor:
        """[bytes] for the exchange, from one tensor per lane, its rows ordered by receiver."""
        buffer = torch.empty(sum(self.send_bytes), dtype=torch.uint8, device=device)
        first = [0] * len(self.lanes)
        offset = 0
        for peer in range(len(self.lanes[0].send_splits)):
            for index, (lane, tensor) in enumerate(zip(self.lanes, tensors, strict=True)):
                rows = lane.send_splits[peer]
                if rows:
                    chosen = tensor[first[index] : first[index] + rows]
                    lane.part(buffer, offset, rows).copy_(chosen)
                    first[index] += rows
                    offset += lane.part_bytes(rows)
        return buffer

    def unpack(self, buffer: Tensor) -> list[Tensor]:
        """One tensor per lane, its rows ordered by sender; fresh memory, so that it may be kept."""
        parts: list[list[Tensor]] = [[] for _ in self.lanes]
        offset = 0
        for peer in range(len(self.lanes[0].recv_splits)):
            for index, lane in enumerate(self.lanes):
                rows = lane.recv_splits[peer]
                if rows:
                    parts[index].append(lane.part(buffer, offset, rows))
                    offset += lane.part_bytes(rows)
        return [
            torch.cat(part)
            if part
            else torch.empty((0, *lane.shape), dtype=lane.dtype, device=buffer.device)
            for lane, part in zip(self.lanes, parts, strict=True)
        ]

    def _bytes(self, splits: Sequence[tuple[int, ...]]) -> list[int]:
        return [
            sum(lane.part_bytes(rows) for lane, rows in zip(self.lanes, peer, strict=True))
            for peer in zip(*splits, strict=True)
        ]
