"""What every attention backend takes, gives and promises.

Legend: T tokens (Tq query rows, Tk key rows), H heads, G key/value heads, D head size. Query head
h reads key head h // (H // G).

Backends know nothing of autograd: forward and backward are two plain functions, so that a caller
may run the backward on another rank than the forward, with only q, k, v, out and lse in hand.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Iterable
from dataclasses import dataclass
from typing import ClassVar, NamedTuple

import torch
from torch import Tensor

from distca.dispatch.layout import Call
from distca.planning.masks import CAUSAL, FULL, Mask
from distca.planning.spans import Ints


@dataclass(frozen=True, eq=False)
class Packed:
    """One fused varlen call on a device: tasks of one mask kind, packed one after another.

    Causal and window are bottom-right aligned: a task's last query stands at its last key. A window
    of reach w shows a query its last w keys, ending with that of its own position; full shows all.
    """

    mask: Mask
    q_offsets: Tensor  # [tasks + 1], int32, on the device
    kv_offsets: Tensor  # [tasks + 1], int32, on the device
    q_bounds: tuple[int, ...]  # q_offsets on the host
    kv_bounds: tuple[int, ...]  # kv_offsets on the host
    max_queries: int
    max_keys: int

    @classmethod
    def of(cls, call: Call, device: torch.device | str) -> Packed:
        packed = cls(
            mask=call.mask,
            q_offsets=_to_device(call.q_offsets, torch.device(device)),
            kv_offsets=_to_device(call.kv_offsets, torch.device(device)),
            q_bounds=tuple(call.q_offsets.tolist()),
            kv_bounds=tuple(call.kv_offsets.tolist()),
            max_queries=call.max_queries,
            max_keys=call.max_keys,
        )
        for task, (queries, keys) in enumerate(packed.lengths):
            if queries and keys < (1 if call.mask.reach == FULL else queries):
                raise ValueError(
                    f"task {task} has {queries} queries and {keys} keys: under a {call.mask} mask "
                    "each query needs the key of its own position"
                )
        return packed

    @property
    def num_queries(self) -> int:  # Tq
        return self.q_bounds[-1]

    @property
    def num_keys(self) -> int:  # Tk
        return self.kv_bounds[-1]

    @property
    def lengths(self) -> list[tuple[int, int]]:
        """(queries, keys) of each task."""
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


class Attended(NamedTuple):
    """The output and, per query, the natural log of the sum of exp of its scaled scores."""

    out: Tensor  # [Tq, H, D], dtype of q
    lse: Tensor  # [Tq, H], float32, or float64 for float64 inputs


class Gradients(NamedTuple):
    dq: Tensor  # [Tq, H, D]
    dk: Tensor  # [Tk, G, D], a row for each packed key, also where tasks repeat a key
    dv: Tensor  # [Tk, G, D]


@dataclass(frozen=True)
class Traits:
    """What a backend is asked to do."""

    device: str  # "cpu" or "cuda"
    capability: tuple[int, int] | None  # of the CUDA device
    dtype: torch.dtype
    heads: int
    kv_heads: int
    head_dim: int
    masks: frozenset[str]  # of "causal", "full", "window"
    deterministic: bool = False

    @classmethod
    def of(
        cls, q: Tensor, k: Tensor, masks: Iterable[Mask], *, deterministic: bool = False
    ) -> Traits:
        """The traits of attention between q [Tq, H, D] and k [Tk, G, D]."""
        return cls(
            device=q.device.type,
            capability=torch.cuda.get_device_capability(q.device) if q.is_cuda else None,
            dtype=q.dtype,
            heads=q.shape[1],
            kv_heads=k.shape[1],
            head_dim=q.shape[2],
            masks=frozenset(kind_of(mask) for mask in masks),
            deterministic=deterministic,
        )


def kind_of(mask: Mask) -> str:
    return {CAUSAL: "causal", FULL: "full"}.get(mask.reach, "window")


class Backend(ABC):
    """One way to compute packed attention: ``forward`` and ``backward`` on plain tensors.

    All three masks are understood by each of them. Subclasses write ``_forward`` and ``_backward``,
    which see at least one query and never an autograd graph.
    """

    name: ClassVar[str]

    @abstractmethod
    def refusal(self, traits: Traits) -> str | None:
        """Why this backend cannot do it, as a sentence; None when it can."""

    def forward(self, q: Tensor, k: Tensor, v: Tensor, packed: Packed, scale: float) -> Attended:
        """Attention of q [Tq, H, D] to k, v [Tk, G, D]."""
        _check_shapes(q, k, v, packed)
        if not packed.num_queries:
            return Attended(torch.empty_like(q), q.new_empty(q.shape[:2], dtype=wide(q.dtype)))
        with torch.no_grad():
            return self._forward(q, k, v, packed, scale)

    def backward(
        self,
        grad_out: Tensor,
        q: Tensor,
        k: Tensor,
        v: Tensor,
        out: Tensor,
        lse: Tensor,
        packed: Packed,
        scale: float,
        deterministic: bool = False,
    ) -> Gradients:
        """Gradients from grad_out [Tq, H, D] and what ``forward`` took and gave."""
        _check_shapes(q, k, v, packed)
        for name, tensor, shape in (
            ("grad_out", grad_out, q.shape),
            ("out", out, q.shape),
            ("lse", lse, q.shape[:2]),
        ):
            if tensor.shape != shape:
                raise ValueError(f"{name} is {list(tensor.shape)}, not {list(shape)} as q says")
        if not packed.num_queries:
            return Gradients(torch.zeros_like(q), torch.zeros_like(k), torch.zeros_like(v))
        with torch.no_grad():
            return self._backward(grad_out, q, k, v, out, lse, packed, scale, deterministic)

    @abstractmethod
    def _forward(
        self, q: Tensor, k: Tensor, v: Tensor, packed: Packed, scale: float
    ) -> Attended: ...

    @abstractmethod
    def _backward(
        self,
        grad_out: Tensor,
        q: Tensor,
        k: Tensor,
        v: Tensor,
        out: Tensor,
        lse: Tensor,
        packed: Packed,
        scale: float,
        deterministic: bool,
    ) -> Gradients: ...


def wide(dtype: torch.dtype) -> torch.dtype:
    """The dtype to compute in where a backend computes in more than the inputs have."""
    return torch.float64 if dtype == torch.float64 else torch.float32


def grouping_refusal(traits: Traits) -> str | None:
    """The rule of grouped heads, which is the same for every backend."""
    if traits.kv_heads < 1 or traits.heads % traits.kv_heads:
        return f"{traits.heads} heads cannot share {traits.kv_heads} key/value heads evenly."
    return None


def _check_shapes(q: Tensor, k: Tensor, v: Tensor, packed: Packed) -> None:
    if q.shape[0] != packed.num_queries or k.shape[0] != packed.num_keys:
        raise ValueError(
            f"q has {q.shape[0]} and k {k.shape[0]} rows, "
            f"but the call packs {packed.num_queries} queries and {packed.num_keys} keys"
        )
    if k.shape != v.shape or q.shape[2] != k.shape[2]:
        raise ValueError(
            f"q {list(q.shape)}, k {list(k.shape)} and v {list(v.shape)} do not fit together: "
            "k and v have one shape, and all three one head size"
        )
    if not q.dtype == k.dtype == v.dtype:
        raise ValueError(f"q, k and v are {q.dtype}, {k.dtype} and {v.dtype}; give them one dtype")


def _to_device(offsets: Ints, device: torch.device) -> Tensor:
    tensor = torch.tensor(offsets, dtype=torch.int32, device="cpu")
    if device.type == "cuda":  # from pinned memory a copy does not wait for the device
        return tensor.pin_memory().to(device, non_blocking=True)
    return tensor.to(device)
