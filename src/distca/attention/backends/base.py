"""What every attention backend takes, returns and guarantees.

Legend: T tokens (Tq query rows, Tk key rows), H heads, G key/value heads, D head size of queries
and keys, V head size of values and outputs. Query head h reads key head h // (H // G).

Backends do not use autograd: forward and backward are two plain functions, so that the backward
may run on another rank than the forward, from the saved tensors alone.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from typing import ClassVar, NamedTuple

import torch
from torch import Tensor

from distca.attention.backends.packed import PackedCall
from distca.dispatch.tensors import TensorSpec, wide
from distca.planning.masks import CAUSAL, FULL, Mask


class Attended(NamedTuple):
    """The output and, per query, the natural log of the sum of exp of its scaled scores."""

    out: Tensor  # [Tq, H, V], dtype of q
    lse: Tensor  # [Tq, H], float32, or float64 for float64 inputs

    @classmethod
    def empty(cls, q: Tensor, v: Tensor) -> Attended:
        out = q.new_empty(*q.shape[:2], v.shape[2])
        return cls(out, q.new_empty(q.shape[:2], dtype=wide(q.dtype)))

    def merge(self, other: Attended) -> Attended:
        """Returns attention to the keys of both, from attention to each of them."""
        lse = torch.logaddexp(self.lse, other.lse)
        mine, others = ((one.lse - lse).exp_()[..., None] for one in (self, other))
        return Attended((self.out * mine + other.out * others).to(self.out.dtype), lse)


class Saved(NamedTuple):
    """What a backward needs besides the gradient: the inputs of the forward, and its results."""

    q: Tensor  # [Tq, H, D]
    k: Tensor  # [Tk, G, D]
    v: Tensor  # [Tk, G, V]
    out: Tensor  # [Tq, H, V]
    lse: Tensor  # [Tq, H]

    def map(self, queries: Callable[[Tensor], Tensor], keys: Callable[[Tensor], Tensor]) -> Saved:
        """Applies one function to what has a row per query, and another to k and v."""
        q, k, v, out, lse = self
        return Saved(queries(q), keys(k), keys(v), queries(out), queries(lse))


class Gradients(NamedTuple):
    dq: Tensor  # [Tq, H, D]
    dk: Tensor  # [Tk, G, D], a row for each packed key, also where tasks repeat a key
    dv: Tensor  # [Tk, G, V]


class Scoring(NamedTuple):
    """How scores follow from queries and keys: scale * q k', and then capped, if that is asked for.

    A soft cap replaces a score s by softcap * tanh(s / softcap), which lies within +-softcap, as in
    Gemma 2. The log-sum-exp is that of capped scores.
    """

    scale: float
    softcap: float = 0.0  # 0 does not cap them


@dataclass(frozen=True)
class Traits:
    """What a backend is asked to compute."""

    device: str  # "cpu" or "cuda"
    capability: tuple[int, int] | None  # of the CUDA device
    dtype: torch.dtype
    heads: int
    kv_heads: int
    head_dim: int
    masks: frozenset[str]  # of "causal", "full", "window"
    deterministic: bool = False
    softcap: bool = False
    v_head_dim: int = 0  # 0: head_dim

    @classmethod
    def of(
        cls,
        spec: TensorSpec,
        masks: Iterable[Mask],
        *,
        deterministic: bool = False,
        softcap: bool = False,
    ) -> Traits:
        device, kinds = spec.device, frozenset(kind_of(mask) for mask in masks)
        capability = torch.cuda.get_device_capability(device) if device.type == "cuda" else None
        sizes = (spec.heads, spec.kv_heads, spec.head_dim)
        return cls(
            device.type, capability, spec.dtype, *sizes, kinds, deterministic, softcap,
            spec.v_head_dim,
        )  # fmt: skip

    @property
    def value_dim(self) -> int:
        """The head size of values."""
        return self.v_head_dim or self.head_dim

    def cuda_refusal(self, capability: tuple[int, int]) -> str | None:
        """Returns why 16-bit kernels for CUDA devices from a compute capability on do not fit."""
        if self.device != "cuda":
            return f"it needs a CUDA device, not {self.device}."
        if self.capability is None or self.capability < capability:
            needed, found = (".".join(map(str, one or ())) for one in (capability, self.capability))
            return f"it needs compute capability {needed} or newer, not {found or 'none'}."
        if self.dtype not in (torch.bfloat16, torch.float16):
            return f"it takes bfloat16 and float16, not {str(self.dtype).removeprefix('torch.')}."
        return None


def kind_of(mask: Mask) -> str:
    """Returns the kernel that a mask needs; a chunk is causal by itself (``dispatch.layout``)."""
    if mask.reach < 0:
        return "causal"
    if mask.reach > CAUSAL:  # two windows, of which one is read backwards
        return "window"
    return {CAUSAL: "causal", FULL: "full"}.get(mask.reach, "window")


class Backend(ABC):
    """One way to compute packed attention: ``forward`` and ``backward`` on plain tensors.

    Every backend supports all three masks. Subclasses implement ``_refusal``, and ``_forward`` and
    ``_backward``, which are called with at least one query and without autograd.
    """

    name: ClassVar[str]
    caps_scores: ClassVar[bool] = False  # whether it supports soft caps

    def refusal(self, traits: Traits) -> str | None:
        """Returns why this backend cannot compute it, as a sentence; None if it can."""
        refusal = self._refusal(traits) or _grouping_refusal(traits)
        if not refusal and traits.softcap and not self.caps_scores:
            refusal = "its kernels do not cap scores, forward and backward (softcap)."
        return refusal or self._library_refusal()

    def forward(
        self,
        q: Tensor,
        k: Tensor,
        v: Tensor,
        call: PackedCall,
        scale: float,
        softcap: float = 0.0,
    ) -> Attended:
        """Computes the attention of q [Tq, H, D] to k [Tk, G, D] and v [Tk, G, V]."""
        _check_shapes(q, k, v, call)
        if not call.num_queries:
            return Attended.empty(q, v)
        with torch.no_grad():
            return self._forward(q, k, v, call, Scoring(scale, softcap))

    def backward(
        self,
        grad_out: Tensor,
        saved: Saved,
        call: PackedCall,
        scale: float,
        deterministic: bool = False,
        softcap: float = 0.0,
    ) -> Gradients:
        """Computes the gradients of q, k and v from grad_out [Tq, H, V]."""
        q, k, v, out, lse = saved
        _check_shapes(q, k, v, call)
        of_out = (*q.shape[:2], v.shape[2])
        for name, tensor, shape in (
            ("grad_out", grad_out, of_out),
            ("out", out, of_out),
            ("lse", lse, q.shape[:2]),
        ):
            if tensor.shape != shape:
                raise ValueError(
                    f"{name} is {list(tensor.shape)}, not {list(shape)}, which follows from q and v"
                )
        if not call.num_queries:
            return Gradients(torch.zeros_like(q), torch.zeros_like(k), torch.zeros_like(v))
        with torch.no_grad():
            return self._backward(grad_out, saved, call, Scoring(scale, softcap), deterministic)

    @abstractmethod
    def _refusal(self, traits: Traits) -> str | None:
        """Returns why the kernels do not support the traits; None if they do."""

    def _library_refusal(self) -> str | None:
        """Returns why the kernels cannot be called here; None if they can."""
        return None

    @abstractmethod
    def _forward(
        self, q: Tensor, k: Tensor, v: Tensor, call: PackedCall, scoring: Scoring
    ) -> Attended: ...

    @abstractmethod
    def _backward(
        self,
        grad_out: Tensor,
        saved: Saved,
        call: PackedCall,
        scoring: Scoring,
        deterministic: bool,
    ) -> Gradients: ...


def _grouping_refusal(traits: Traits) -> str | None:
    if traits.kv_heads < 1 or traits.heads % traits.kv_heads:
        return f"{traits.heads} heads cannot share {traits.kv_heads} key/value heads evenly."
    return None


def _check_shapes(q: Tensor, k: Tensor, v: Tensor, call: PackedCall) -> None:
    if q.shape[0] != call.num_queries or k.shape[0] != call.num_keys:
        raise ValueError(
            f"q has {q.shape[0]} and k {k.shape[0]} rows, "
            f"but the call packs {call.num_queries} queries and {call.num_keys} keys"
        )
    if k.shape[:2] != v.shape[:2] or q.shape[2] != k.shape[2]:
        raise ValueError(
            f"q {list(q.shape)}, k {list(k.shape)} and v {list(v.shape)} do not fit together: "
            "k and v must have the same rows and heads, and q and k one head size"
        )
    if not q.dtype == k.dtype == v.dtype:
        raise ValueError(f"q, k and v are {q.dtype}, {k.dtype} and {v.dtype}; give them one dtype")
