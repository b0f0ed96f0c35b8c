"""Several tensors in one uneven all-to-all: lanes of rows, packed peer by peer into bytes.

A lane is one tensor whose rows go to peers in order (queries, keys, log-sum-exp, ...). All lanes
of a message share one buffer and one collective: for each peer, first its rows of lane 0, then of
lane 1, and so on, each part padded to a boundary that every dtype and kernel can read at. Split
sizes are known on the host, so nothing waits for the device.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property
from math import prod

import torch
from torch import Tensor

from distca.planning.spans import Ints

ALIGNMENT = 128  # bytes


@dataclass(frozen=True)
class Lane:
    """Rows of one shape and dtype; how many go to, and come from, each peer."""

    shape: tuple[int, ...]  # of a row
    dtype: torch.dtype
    send_rows: tuple[int, ...]
    recv_rows: tuple[int, ...]

    @classmethod
    def of(cls, shape: Sequence[int], dtype: torch.dtype, send: Ints, recv: Ints) -> Lane:
        return cls(tuple(shape), dtype, tuple(send.tolist()), tuple(recv.tolist()))

    def returning(self, dtype: torch.dtype | None = None) -> Lane:
        """The way back: what was received is sent, and what was sent is received."""
        return Lane(self.shape, dtype or self.dtype, self.recv_rows, self.send_rows)


class Box:
    """One side of a message: where each lane's rows of each peer lie in the buffer."""

    def __init__(self, lanes: Sequence[Lane], rows: Sequence[tuple[int, ...]]) -> None:
        self.bytes_of_peer: list[int] = []
        self._parts: list[tuple[int, int, int, int]] = []  # lane, first byte, bytes, rows
        offset = 0
        for peer_rows in zip(*rows, strict=True):
            start = offset
            for index, (lane, count) in enumerate(zip(lanes, peer_rows, strict=True)):
                size = count * prod(lane.shape) * lane.dtype.itemsize
                if count:
                    self._parts.append((index, offset, size, count))
                offset += -(-size // ALIGNMENT) * ALIGNMENT
            self.bytes_of_peer.append(offset - start)
        self.num_bytes = offset
        self._lanes = tuple(lanes)

    def open(self, buffer: Tensor) -> list[list[Tensor]]:
        """For each lane the parts [rows, *shape] of those peers that have any, in place."""
        opened: list[list[Tensor]] = [[] for _ in self._lanes]
        for index, offset, size, count in self._parts:
            lane = self._lanes[index]
            part = buffer[offset : offset + size].view(lane.dtype)
            opened[index].append(part.view(count, *lane.shape))
        return opened


@dataclass(frozen=True)
class Message:
    """The layout of one exchange, the same for sender and receiver."""

    lanes: tuple[Lane, ...]

    @cached_property
    def outbox(self) -> Box:
        return Box(self.lanes, [lane.send_rows for lane in self.lanes])

    @cached_property
    def inbox(self) -> Box:
        return Box(self.lanes, [lane.recv_rows for lane in self.lanes])
