"""The shapes, dtypes and device of the tensors that attention exchanges.

Legend: T own token rows, H heads, G key/value heads, D head size.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from distca.planning.spans import Ints


@dataclass(frozen=True)
class TensorSpec:
    """The sizes, dtype and device of q [T, H, D] and of k and v [T, G, D] on every rank."""

    heads: int
    kv_heads: int
    head_dim: int
    dtype: torch.dtype
    device: torch.device

    @classmethod
    def of(cls, q: Tensor, k: Tensor) -> TensorSpec:
        return cls(q.shape[1], k.shape[1], q.shape[2], q.dtype, q.device)

    def empty(self) -> tuple[Tensor, Tensor, Tensor]:
        """Returns q, k and v of a rank without tokens."""
        q = torch.empty(0, self.heads, self.head_dim, dtype=self.dtype, device=self.device)
        k = torch.empty(0, self.kv_heads, self.head_dim, dtype=self.dtype, device=self.device)
        return q, k, k


def wide(dtype: torch.dtype) -> torch.dtype:
    """Returns the dtype to accumulate in: float32, or float64 for float64 inputs."""
    return torch.float64 if dtype == torch.float64 else torch.float32


def to_device(values: Ints, dtype: torch.dtype, device: torch.device) -> Tensor:
    """Copies integers to a device, without synchronizing with it."""
    tensor = torch.tensor(values, dtype=dtype, device="cpu")
    if device.type == "cuda":  # from pinned memory, a copy does not synchronise
        return tensor.pin_memory().to(device, non_blocking=True)
    return tensor.to(device)
