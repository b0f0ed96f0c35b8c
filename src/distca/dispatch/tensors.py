"""The shapes, dtypes and device of the tensors that attention exchanges.

Legend: T own token rows, H heads, G key/value heads, D head size of queries and keys, V that of
values and outputs. Latents have rank R, and E elements of a key are rotary (``attention.latent``).
"""

from __future__ import annotations

from dataclasses import dataclass, replace

import torch
from torch import Tensor

from distca.planning.spans import Ints


@dataclass(frozen=True)
class TensorSpec:
    """The sizes, dtype and device of q [T, H, D], k [T, G, D] and v [T, G, V] on every rank.

    latent_dim, rope_dim: R and E, if latents travel instead of keys and values; 0 if they do not.
    """

    heads: int
    kv_heads: int
    head_dim: int
    v_head_dim: int
    dtype: torch.dtype
    device: torch.device
    latent_dim: int = 0
    rope_dim: int = 0

    @classmethod
    def of(cls, q: Tensor, k: Tensor, v: Tensor) -> TensorSpec:
        return cls(q.shape[1], k.shape[1], q.shape[2], v.shape[2], q.dtype, q.device)

    @property
    def expanded(self) -> TensorSpec:
        """The same tensors, of which keys and values travel."""
        return replace(self, latent_dim=0, rope_dim=0)

    @property
    def expansion(self) -> tuple[int, int]:
        """The shape of the matrix that expands latents: rows are by head, of its key and value."""
        return self.kv_heads * (self.head_dim - self.rope_dim + self.v_head_dim), self.latent_dim

    @property
    def latents_save_bytes(self) -> bool:
        """Whether the latent of a key is smaller than the key and its value."""
        return self.latent_dim + self.rope_dim < self.kv_heads * (self.head_dim + self.v_head_dim)

    def empty(self) -> tuple[Tensor, Tensor, Tensor]:
        """Returns q, k and v of a rank without tokens."""
        sizes = (self.heads, self.head_dim), (self.kv_heads, self.head_dim)
        q, k, v = (
            torch.empty(0, *size, dtype=self.dtype, device=self.device)
            for size in (*sizes, (self.kv_heads, self.v_head_dim))
        )
        return q, k, v


def wide(dtype: torch.dtype) -> torch.dtype:
    """Returns the dtype to accumulate in: float32, or float64 for float64 inputs."""
    return torch.float64 if dtype == torch.float64 else torch.float32


def to_device(values: Ints, dtype: torch.dtype, device: torch.device) -> Tensor:
    """Copies integers to a device, without synchronizing with it."""
    tensor = torch.tensor(values, dtype=dtype, device="cpu")
    if device.type == "cuda":  # from pinned memory, a copy does not synchronise
        return tensor.pin_memory().to(device, non_blocking=True)
    return tensor.to(device)
