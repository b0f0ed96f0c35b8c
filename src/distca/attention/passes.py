"""One rank's part of a layer's attention, as plain steps: launch, attend, finish.

Legend: T own token rows, H heads, G key/value heads, D head size. ``launch`` (the constructor)
sends what peers need; ``attend`` computes the tasks that need nothing from peers while data is
under way, then the others, and sends results home; ``finish`` takes in what comes home.

Nothing here knows of autograd, and servers keep nothing: the backward exchange carries all it
needs. Whoever runs the steps in one order on every rank gets exactly what one device would compute.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field

import torch
from torch import Tensor

from distca.attention.backends.base import Attended, Backend, Gradients, wide
from distca.attention.route import Route, RoutedCall, TensorSpec
from distca.dispatch.buffers import Buffers
from distca.dispatch.exchange import RoundTrip
from distca.dispatch.meter import Meter
from distca.dispatch.transports.base import Transport


@dataclass(frozen=True, eq=False)
class PreparedPlan:
    """One plan on one rank, ready to run layer after layer; None where it never goes that way."""

    forward: Route | None
    backward: Route | None
    kind: TensorSpec
    transport: Transport
    buffers: Buffers
    backend: Backend
    scale: float
    deterministic: bool = False
    meter: Meter = field(default_factory=Meter)  # "attention" and "exposed": what was not hidden

    def trip(self, route: Route) -> RoundTrip:
        return RoundTrip(route.itinerary, self.transport, self.buffers, self.meter)


def forward(execution: PreparedPlan, q: Tensor, k: Tensor, v: Tensor) -> Attended:
    """[T, H, D] and [T, G, D] in; out [T, H, D] and lse [T, H], all on this rank."""
    return ForwardPass(execution, q, k, v).finish()


def backward(
    execution: PreparedPlan, grad_out: Tensor, q: Tensor, k: Tensor, v: Tensor, attended: Attended
) -> Gradients:
    """Gradients of this rank's rows. dk and dv are added in float32, in a fixed order."""
    return BackwardPass(execution, grad_out, q, k, v, attended).finish()


class ForwardPass:
    """Queries and keys go to the servers that need them; outputs and log-sum-exp come home."""

    @torch.no_grad()
    def __init__(self, execution: PreparedPlan, q: Tensor, k: Tensor, v: Tensor) -> None:
        assert execution.forward is not None, "this execution only goes backward"
        self._execution, self._route = execution, execution.forward
        self._qkv = (q, k, v)
        self._result: Attended | None = None
        self._trip = execution.trip(self._route)
        self._trip.send(self._qkv)

    @torch.no_grad()
    def attend(self) -> None:
        self._result = self._attend_local()
        received = self._trip.receive() or [[], [], []]
        outs, lses = self._trip.replies() or ([], [])
        for call in self._route.remote:
            pieces = ([own, *theirs] for own, theirs in zip(self._qkv, received, strict=True))
            done = self._call(call, *pieces)
            _put(call, done, [self._result.out, *outs], [self._result.lse, *lses])
        self._trip.reply()

    @torch.no_grad()
    def finish(self) -> Attended:
        if self._result is None:
            self.attend()
        assert self._result is not None
        outs, lses = self._trip.collect() or ([], [])
        for rows, out, lse in zip(self._route.q_leaving, outs, lses, strict=True):
            rows.put(out, [self._result.out])
            rows.put(lse, [self._result.lse])
        self._trip.done()
        return self._result

    def _attend_local(self) -> Attended:
        q, k, v = self._qkv
        if self._route.at_home:
            return self._call(self._route.at_home, [q], [k], [v])
        lse = q.new_empty(q.shape[:2], dtype=wide(q.dtype))
        result = Attended(torch.empty_like(q), lse)  # every row is written once, here or later
        for call in self._route.local:
            _put(call, self._call(call, [q], [k], [v]), [result.out], [result.lse])
        return result

    def _call(
        self, call: RoutedCall, q: Sequence[Tensor], k: Sequence[Tensor], v: Sequence[Tensor]
    ) -> Attended:
        x = self._execution
        packed = (call.q.take(q), call.kv.take(k), call.kv.take(v))
        with x.meter.span("attention", packed[0].device):
            return x.backend.forward(*packed, call.packed, x.scale)


def _put(call: RoutedCall, done: Attended, outs: Sequence[Tensor], lses: Sequence[Tensor]) -> None:
    call.q.put(done.out, outs)
    call.q.put(done.lse, lses)


class BackwardPass:
    """q, k, v, o, log-sum-exp and do go to the servers; dq, dk and dv come home."""

    @torch.no_grad()
    def __init__(
        self,
        execution: PreparedPlan,
        grad_out: Tensor,
        q: Tensor,
        k: Tensor,
        v: Tensor,
        attended: Attended,
    ) -> None:
        assert execution.backward is not None, "this execution only goes forward"
        self._execution, self._route = execution, execution.backward
        # In the order of the message. Kernels want rows in one piece; autograd does not promise it.
        self._rows = (q, k, v, attended.out, attended.lse, grad_out.contiguous())
        self._grads: Gradients | None = None  # dk and dv in float32 or more, to be added up
        self._trip = execution.trip(self._route)
        self._trip.send(self._rows)

    @torch.no_grad()
    def attend(self) -> None:
        self._grads = mine = self._attend_local()
        received = self._trip.receive() or [[]] * len(self._rows)
        dqs, dks, dvs = self._trip.replies() or ([], [], [])
        sums_k, sums_v = (_Sums(parts, self._route) for parts in (dks, dvs))
        for call in self._route.remote:
            pieces = [[own, *theirs] for own, theirs in zip(self._rows, received, strict=True)]
            grads = self._call(call, pieces)
            call.q.put(grads.dq, [mine.dq, *dqs])
            call.kv.add(grads.dk, [mine.dk, *sums_k.totals])
            call.kv.add(grads.dv, [mine.dv, *sums_v.totals])
        sums_k.write()
        sums_v.write()
        self._trip.reply()

    @torch.no_grad()
    def finish(self) -> Gradients:
        if self._grads is None:
            self.attend()
        assert self._grads is not None
        mine = self._grads
        dqs, dks, dvs = self._trip.collect() or ([], [], [])
        for rows, dq in zip(self._route.q_leaving, dqs, strict=True):
            rows.put(dq, [mine.dq])
        for rows, dk, dv in zip(self._route.kv_leaving, dks, dvs, strict=True):  # server by server
            rows.add(dk, [mine.dk])
            rows.add(dv, [mine.dv])
        self._trip.done()
        dtype = self._rows[1].dtype
        return Gradients(mine.dq, mine.dk.to(dtype), mine.dv.to(dtype))

    def _attend_local(self) -> Gradients:
        q, k, *_ = self._rows
        own = [[rows] for rows in self._rows]
        if self._route.at_home:
            return self._call(self._route.at_home, own)
        result = Gradients(torch.empty_like(q), _zeros(k), _zeros(k))
        for call in self._route.local:
            grads = self._call(call, own)
            call.q.put(grads.dq, [result.dq])
            call.kv.add(grads.dk, [result.dk])
            call.kv.add(grads.dv, [result.dv])
        return result

    def _call(self, call: RoutedCall, pieces: Sequence[Sequence[Tensor]]) -> Gradients:
        x = self._execution
        chosen = (call.q, call.kv, call.kv, call.q, call.q, call.q)
        q, k, v, out, lse, grad_out = (
            rows.take(piece) for rows, piece in zip(chosen, pieces, strict=True)
        )
        with x.meter.span("attention", q.device):
            return x.backend.backward(
                grad_out, q, k, v, out, lse, call.packed, x.scale, x.deterministic
            )


def serve_forward(halves: Sequence[PreparedPlan]) -> None:
    """One layer on a rank without tokens, in the order of ranks with some: all halves are sent,
    then computed in turn."""
    flying = [ForwardPass(execution, *execution.kind.no_rows()) for execution in halves]
    for half in flying:
        half.attend()
    for half in flying:
        half.finish()


def serve_backward(halves: Sequence[PreparedPlan]) -> None:
    """The same in reverse: the last half comes first."""
    returning = []
    for execution in reversed(halves):
        q, k, v = execution.kind.no_rows()
        lse = q.new_empty(q.shape[:2], dtype=wide(q.dtype))
        returning.append(BackwardPass(execution, q, q, k, v, Attended(q, lse)))
    for half in returning:
        half.attend()
    for half in returning:
        half.finish()


class _Sums:
    """Gradients of received keys, each added up here and sent home once.

    Where no key is in two tasks there is nothing to round, and the reply itself takes them.
    """

    def __init__(self, parts: Sequence[Tensor], route: Route) -> None:
        self._parts = parts
        once = all(call.kv.disjoint for call in route.remote)
        self.totals = [part.zero_() if once else _zeros(part) for part in parts]

    def write(self) -> None:
        for part, total in zip(self._parts, self.totals, strict=True):
            if part is not total:
                part.copy_(total)


def _zeros(like: Tensor) -> Tensor:
    return torch.zeros_like(like, dtype=wide(like.dtype))
