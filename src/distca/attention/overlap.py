"""Launch, compute and wait as three differentiable steps, so that two halves can take turns.

    ping = core_attention.launch(q, k, v, plan)     sends what peers need
    ...                                             compute of the other half
    ping.compute()                                  own tasks, then those of peers; sends results
    ...                                             compute of the other half
    out = ping.wait()                               takes in what came home

Backward runs the same three steps in reverse order, each where its node stands in the graph: the
engine takes the newest node first, so what was interleaved stays interleaved. Use these between
checkpointed regions, not inside one, where they would exchange twice.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from distca.attention.backends.base import Attended
from distca.attention.passes import BackwardPass, ForwardPass, PreparedPlan


class AsyncAttention:
    """One layer's attention under way."""

    def __init__(self, execution: PreparedPlan, q: Tensor, k: Tensor, v: Tensor) -> None:
        self.execution = execution
        self.forward: ForwardPass | None = None
        self.backward: BackwardPass | None = None
        self._qkv: tuple[Tensor, Tensor, Tensor] | None = (q, k, v)
        self._computed = False
        # Its node knows this flight: held beyond ``wait``, it would keep both, and the graph.
        self._token: Tensor | None = _Launch.apply(self, q, k, v)  # type: ignore[no-untyped-call]

    def compute(self) -> None:
        """Attends; at the latest ``wait`` does."""
        if self._computed:
            raise RuntimeError("this flight was computed already: compute once, then wait")
        self._token = _Compute.apply(self, self._token)  # type: ignore[no-untyped-call]
        self._computed = True

    def wait(self) -> Tensor:
        """The output [T, H, D]."""
        if self._qkv is None:
            raise RuntimeError("this flight has ended: wait once")
        if not self._computed:
            self.compute()
        token, self._token = self._token, None
        qkv, self._qkv = self._qkv, None
        out: Tensor = _Wait.apply(self, token, *qkv)  # type: ignore[no-untyped-call]
        return out


class _Launch(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, flight: AsyncAttention, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        ctx.flight = flight
        flight.forward = ForwardPass(flight.execution, q, k, v)
        return q.new_empty(0)  # a thread through the graph, no data

    @staticmethod
    def backward(ctx: Any, _: Tensor) -> tuple[Tensor | None, ...]:
        assert ctx.flight.backward is not None
        grads = ctx.flight.backward.finish()
        ctx.flight.backward = None
        return None, *grads


class _Compute(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, flight: AsyncAttention, token: Tensor) -> Tensor:
        ctx.flight = flight
        assert flight.forward is not None
        flight.forward.attend()
        return token.new_empty(0)

    @staticmethod
    def backward(ctx: Any, token: Tensor) -> tuple[Tensor | None, ...]:
        ctx.flight.backward.attend()
        return None, token


class _Wait(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any, flight: AsyncAttention, token: Tensor, q: Tensor, k: Tensor, v: Tensor
    ) -> Tensor:
        assert flight.forward is not None
        attended = flight.forward.finish()
        flight.forward = None
        ctx.flight = flight
        ctx.save_for_backward(q, k, v, *attended)
        return attended.out

    @staticmethod
    def backward(ctx: Any, grad_out: Tensor) -> tuple[Tensor | None, ...]:
        q, k, v, out, lse = ctx.saved_tensors
        flight = ctx.flight
        attended = Attended(out, lse)
        flight.backward = BackwardPass(flight.execution, grad_out, q, k, v, attended)
        return None, q.new_empty(0), None, None, None
