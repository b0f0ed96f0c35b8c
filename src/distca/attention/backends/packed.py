"""Tasks that one kernel call computes together."""

from __future__ import annotations

from dataclasses import dataclass
from functools import cached_property
from typing import NamedTuple

import numpy as np
import torch
from torch import Tensor

from distca.attention.backends.alike import alike
from distca.dispatch.tensors import to_device
from distca.planning.masks import FULL, Mask
from distca.planning.spans import Ints


@dataclass(frozen=True, eq=False)
class PackedCall:
    """One fused varlen call on a device: tasks of one mask kind, packed one after another.

    Causal and window masks are bottom-right aligned: the last query of a task has the position of
    its last key. A window of reach w shows a query the last w keys up to its own position; a full
    mask shows all keys.
    """

    mask: Mask
    q_offsets: Tensor  # [tasks + 1], int32, on the device
    kv_offsets: Tensor  # [tasks + 1], int32, on the device
    q_bounds: tuple[int, ...]  # q_offsets on the host
    kv_bounds: tuple[int, ...]  # kv_offsets on the host
    max_queries: int
    max_keys: int

    @classmethod
    def of(
        cls, mask: Mask, q_offsets: Ints, kv_offsets: Ints, device: torch.device | str
    ) -> PackedCall:
        """Copies the cumulative lengths [tasks + 1] of queries and keys to the device."""
        queries, keys = np.diff(q_offsets), np.diff(kv_offsets)
        least = np.minimum(queries, 1) if mask.reach == FULL else queries
        if len(wrong := np.flatnonzero(keys < least)):
            task = wrong[0]
            raise ValueError(
                f"task {task} has {queries[task]} queries and {keys[task]} keys: under a {mask}"
                " mask each query needs the key of its own position"
            )
        return cls(
            mask=mask,
            q_offsets=to_device(q_offsets, torch.int32, torch.device(device)),
            kv_offsets=to_device(kv_offsets, torch.int32, torch.device(device)),
            q_bounds=tuple(q_offsets.tolist()),
            kv_bounds=tuple(kv_offsets.tolist()),
            max_queries=int(queries.max(initial=0)),
            max_keys=int(keys.max(initial=0)),
        )

    @cached_property
    def groups(self) -> list[PackedGroup]:
        """Consecutive tasks with similar numbers of keys; none if all tasks have similar ones.

        [Note: empty blocks]
        """
        q, kv = np.array(self.q_bounds), np.array(self.kv_bounds)
        ends = alike(np.diff(kv))
        if len(ends) == 1:  # a call that referred to itself would stay until garbage is collected
            return []
        return [
            PackedGroup(
                slice(self.q_bounds[first], self.q_bounds[last]),
                slice(self.kv_bounds[first], self.kv_bounds[last]),
                self._group(q[first : last + 1], kv[first : last + 1]),
            )
            for first, last in ends
        ]

    def _group(self, q_bounds: Ints, kv_bounds: Ints) -> PackedCall:
        device = self.q_offsets.device
        return PackedCall.of(self.mask, q_bounds - q_bounds[0], kv_bounds - kv_bounds[0], device)

    @property
    def num_queries(self) -> int:  # Tq
        return self.q_bounds[-1]

    @property
    def num_keys(self) -> int:  # Tk
        return self.kv_bounds[-1]

    @property
    def lengths(self) -> list[tuple[int, int]]:
        """The numbers of queries and of keys of each task."""
        q, kv = self.q_bounds, self.kv_bounds
        return [(q[i + 1] - q[i], kv[i + 1] - kv[i]) for i in range(len(q) - 1)]

    @property
    def window(self) -> tuple[int, int]:
        """Keys to the left and right of the diagonal, as flash kernels take them; -1 is all."""
        if self.mask.reach == FULL:
            return -1, -1
        if self.mask.reach >= self.max_keys:  # also keeps a huge window within the kernels' int32
            return -1, 0
        return self.mask.reach - 1, 0


class PackedGroup(NamedTuple):
    """Some tasks of a call, as a call of their own."""

    queries: slice  # rows of the whole call
    keys: slice
    call: PackedCall
