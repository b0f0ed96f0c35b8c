"""A deliberately naive oracle, and the test body of every backend.

The oracle knows nothing of tasks as separate problems: it writes one mask over all packed queries
and keys, takes one softmax in float64, and lets autograd find the gradients.
"""

from dataclasses import dataclass

import numpy as np
import torch
from torch import Tensor

from distca.attention.backends.base import Attended, Backend, Gradients, Saved
from distca.attention.backends.packed import PackedCall
from distca.planning.masks import CAUSAL, FULL, Mask


@dataclass(frozen=True)
class Case:
    tasks: tuple[tuple[int, int], ...]  # (queries, keys)
    mask: str = "causal"
    heads: int = 4
    kv_heads: int = 2
    head_dim: int = 8
    scale: float = 0.3
    seed: int = 0
    softcap: float = 0.0
    v_head_dim: int = 0  # 0: head_dim

    def call(self, device: torch.device | str = "cpu") -> PackedCall:
        offsets = (np.cumsum(column) for column in zip((0, 0), *self.tasks, strict=True))
        return PackedCall.of(Mask.parse(self.mask), *offsets, device)


@dataclass(frozen=True)
class Inputs:
    q: Tensor  # [Tq, H, D]
    k: Tensor  # [Tk, G, D]
    v: Tensor  # [Tk, G, V]
    grad_out: Tensor  # [Tq, H, V]


def inputs_of(case: Case, dtype: torch.dtype, device: str = "cpu") -> Inputs:
    generator = torch.Generator().manual_seed(case.seed)

    def draw(tokens: int, heads: int, size: int) -> Tensor:
        drawn = torch.randn(tokens, heads, size, generator=generator, dtype=torch.float64)
        return drawn.to(device, dtype)

    queries, keys = (sum(column) for column in zip((0, 0), *case.tasks, strict=True))
    size, values = case.head_dim, case.v_head_dim or case.head_dim
    return Inputs(
        draw(queries, case.heads, size),
        draw(keys, case.kv_heads, size),
        draw(keys, case.kv_heads, values),
        draw(queries, case.heads, values),
    )


def visible(case: Case) -> Tensor:
    """Returns the mask [Tq, Tk], written pair by pair from the definition."""
    reach = Mask.parse(case.mask).reach
    rows = []
    for task, (queries, keys) in enumerate(case.tasks):
        for i in range(queries):
            own = keys - queries + i  # the last query has the position of the last key
            for other, (_, others) in enumerate(case.tasks):
                j = torch.arange(others)
                if other != task:
                    rows.append(j < 0)
                elif reach == FULL:
                    rows.append(j >= 0)
                elif reach == CAUSAL:
                    rows.append(j <= own)
                else:
                    rows.append((j <= own) & (own - j < reach))
    total = sum(queries for queries, _ in case.tasks)
    return torch.cat(rows).view(total, -1) if total else torch.ones(0, 0, dtype=torch.bool)


def expected(case: Case, inputs: Inputs) -> tuple[Attended, Gradients]:
    """Returns exact results in float64, from the same inputs as the backend."""
    q, k, v = (x.detach().double().requires_grad_() for x in (inputs.q, inputs.k, inputs.v))
    group = case.heads // case.kv_heads
    scores = torch.einsum("qhd,khd->hqk", q, k.repeat_interleave(group, 1)) * case.scale
    if case.softcap:
        scores = case.softcap * torch.tanh(scores / case.softcap)
    scores = scores.masked_fill(~visible(case).to(q.device), float("-inf"))
    out = torch.einsum("hqk,khd->qhd", scores.softmax(-1), v.repeat_interleave(group, 1))
    lse = scores.exp().sum(-1).log().t()
    grads = torch.autograd.grad(out, (q, k, v), inputs.grad_out.double())
    return Attended(out.detach(), lse.detach()), Gradients(*grads)


def run(
    backend: Backend, case: Case, inputs: Inputs, deterministic: bool = False
) -> tuple[Attended, Gradients]:
    call, qkv = case.call(inputs.q.device), (inputs.q, inputs.k, inputs.v)
    attended = backend.forward(*qkv, call, case.scale, case.softcap)
    saved = Saved(*qkv, *attended)
    return attended, backend.backward(
        inputs.grad_out, saved, call, case.scale, deterministic, case.softcap
    )


def error(got: Tensor, want: Tensor, typical: float = 0.0) -> float:
    """Returns the error relative to the norm, or to a ``typical`` size where terms cancel."""
    size = max(want.norm().item(), typical * want.numel() ** 0.5)
    return (got.double() - want).norm().item() / size if size else 0.0


def check(
    backend: Backend,
    case: Case,
    dtype: torch.dtype,
    tolerance: float,
    device: str = "cpu",
    lse_tolerance: float | None = None,
    deterministic: bool = False,
) -> None:
    """Compares forward, log-sum-exp and all gradients with the oracle."""
    inputs = inputs_of(case, dtype, device)
    got, grads = run(backend, case, inputs, deterministic)
    want, want_grads = expected(case, inputs)
    assert got.lse.dtype == (torch.float64 if dtype == torch.float64 else torch.float32)
    errors = {"lse": error(got.lse, want.lse, 1.0) / (lse_tolerance or tolerance) * tolerance}
    terms = 0.1 * case.scale * case.head_dim**0.5  # of dq and dk, whose sum is 0 for a lone key
    for name, x, y, typical in (
        ("out", got.out, want.out, 0.0),
        ("dq", grads.dq, want_grads.dq, terms),
        ("dk", grads.dk, want_grads.dk, terms),
        ("dv", grads.dv, want_grads.dv, 0.0),
    ):
        assert (x.dtype, x.shape) == (dtype, y.shape), name
        errors[name] = error(x, y, typical)
    assert got.lse.shape == want.lse.shape
    assert all(e <= tolerance for e in errors.values()), errors
