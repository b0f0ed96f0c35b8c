"""One rank's part of a layer's attention, as plain steps: launch, local, wait, remote, return.

Legend: T own token rows, H heads, G key/value heads, D head size. Received rows follow own rows.
Nothing here knows of autograd, and servers keep nothing: the backward exchange carries all it
needs.
Whoever calls the steps in this order on every rank gets exactly what one device would compute.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import NamedTuple

import torch
from torch import Tensor

from distca.attention.backend import Attended, Backend, Gradients, Packed
from distca.dispatch.layout import Call, Exchange, Layout
from distca.dispatch.message import Lane, Message
from distca.dispatch.transport import Promise, Transport
from distca.planning.spans import Ints


class OnDevice(NamedTuple):
    """A kernel call with its row indices on the device."""

    packed: Packed
    q_rows: Tensor
    kv_rows: Tensor


@dataclass(frozen=True, eq=False)
class Route:
    """One rank's layout with all indices on the device; made once per plan, used in every layer."""

    layout: Layout
    device: torch.device
    local: tuple[OnDevice, ...]
    remote: tuple[OnDevice, ...]
    q_rows: Tensor  # own rows that are sent, ordered by receiver
    kv_rows: Tensor

    @classmethod
    def of(cls, layout: Layout, device: torch.device) -> Route:
        def put(rows: Ints) -> Tensor:
            return torch.from_numpy(rows).to(device, non_blocking=True)

        def calls(chosen: Sequence[Call]) -> tuple[OnDevice, ...]:
            return tuple(
                OnDevice(Packed.of(call, device), put(call.q_rows), put(call.kv_rows))
                for call in chosen
            )

        return cls(
            layout=layout,
            device=device,
            local=calls(layout.local),
            remote=calls(layout.remote),
            q_rows=put(layout.q.send_rows),
            kv_rows=put(layout.kv.send_rows),
        )


class Sent(NamedTuple):
    """A message under way."""

    message: Message
    promise: Promise

    def wait(self) -> list[Tensor]:
        return self.message.unpack(self.promise())


def forward(
    route: Route,
    transport: Transport,
    backend: Backend,
    q: Tensor,
    k: Tensor,
    v: Tensor,
    scale: float,
) -> Attended:
    """[T, H, D] and [T, G, D] in; out [T, H, D] and lse [T, H], all on this rank."""
    sent = launch(route, transport, q, k, v)
    mine = attend_local(route, backend, q, k, v, scale)
    returned = attend_remote(route, transport, backend, sent, q, k, v, scale, mine)
    return collect(route, returned, mine)


def launch(route: Route, transport: Transport, q: Tensor, k: Tensor, v: Tensor) -> Sent:
    """Sends queries and keys to the servers that need them."""
    to_q, to_kv = route.layout.q, route.layout.kv
    tensors = [q[route.q_rows], k[route.kv_rows], v[route.kv_rows]]
    return _send(route, transport, tensors, [to_q, to_kv, to_kv])


def attend_local(
    route: Route, backend: Backend, q: Tensor, k: Tensor, v: Tensor, scale: float
) -> Attended:
    """Tasks that need nothing from peers; their rows of the result are written."""
    result = Attended(torch.zeros_like(q), _lse_like(q))
    for call in route.local:
        _attend(call, backend, q, k, v, scale, result)
    return result


def attend_remote(
    route: Route,
    transport: Transport,
    backend: Backend,
    sent: Sent,
    q: Tensor,
    k: Tensor,
    v: Tensor,
    scale: float,
    mine: Attended,
) -> Sent:
    """Tasks with received queries or keys; sends home what is not our own."""
    received = sent.wait()
    tokens = q.shape[0]
    all_q, all_k, all_v = (torch.cat(pair) for pair in zip((q, k, v), received, strict=True))
    result = Attended(torch.zeros_like(all_q), _lse_like(all_q))
    for call in route.remote:
        _attend(call, backend, all_q, all_k, all_v, scale, result)
        own = call.q_rows[call.q_rows < tokens]
        mine.out[own], mine.lse[own] = result.out[own], result.lse[own]
    back = _swap(route.layout.q)
    return _send(route, transport, [result.out[tokens:], result.lse[tokens:]], [back, back])


def collect(route: Route, returned: Sent, mine: Attended) -> Attended:
    """Writes the outputs that came home."""
    out, lse = returned.wait()
    mine.out[route.q_rows], mine.lse[route.q_rows] = out, lse
    return mine


def backward(
    route: Route,
    transport: Transport,
    backend: Backend,
    grad_out: Tensor,
    q: Tensor,
    k: Tensor,
    v: Tensor,
    attended: Attended,
    scale: float,
    *,
    deterministic: bool = False,
) -> Gradients:
    """Gradients of this rank's rows. dk and dv are added in float32, in a fixed order."""
    sent = launch_backward(route, transport, grad_out, q, k, v, attended)
    own = _Sums.of(q, k)
    rows = _Rows(q, k, v, attended.out, attended.lse, grad_out)
    for call in route.local:
        _attend_backward(call, backend, rows, scale, own, deterministic)
    returned = remote_backward(
        route, transport, backend, sent, rows, scale, own, deterministic=deterministic
    )
    return collect_backward(route, returned, own, k.dtype)


def launch_backward(
    route: Route,
    transport: Transport,
    grad_out: Tensor,
    q: Tensor,
    k: Tensor,
    v: Tensor,
    attended: Attended,
) -> Sent:
    """Servers kept nothing: q, o, do, log-sum-exp, k and v travel."""
    to_q, to_kv = route.layout.q, route.layout.kv
    rows = route.q_rows
    tensors = [q[rows], k[route.kv_rows], v[route.kv_rows]]
    tensors += [attended.out[rows], attended.lse[rows], grad_out[rows]]
    return _send(route, transport, tensors, [to_q, to_kv, to_kv, to_q, to_q, to_q])


def remote_backward(
    route: Route,
    transport: Transport,
    backend: Backend,
    sent: Sent,
    own: _Rows,
    scale: float,
    sums: _Sums,
    *,
    deterministic: bool,
) -> Sent:
    """Gradients of tasks with received rows; sends home what is not our own."""
    tokens = own.q.shape[0]
    rows = _Rows(*(torch.cat(pair) for pair in zip(own, sent.wait(), strict=True)))
    total = _Sums.of(rows.q, rows.k)
    for call in route.remote:
        _attend_backward(call, backend, rows, scale, total, deterministic)
        mine = call.q_rows[call.q_rows < tokens]
        sums.dq[mine] = total.dq[mine]
    sums.dk.add_(total.dk[:tokens])
    sums.dv.add_(total.dv[:tokens])
    back_q, back_kv = _swap(route.layout.q), _swap(route.layout.kv)
    dtype = own.k.dtype
    tensors = [total.dq[tokens:], total.dk[tokens:].to(dtype), total.dv[tokens:].to(dtype)]
    return _send(route, transport, tensors, [back_q, back_kv, back_kv])


def collect_backward(route: Route, returned: Sent, sums: _Sums, dtype: torch.dtype) -> Gradients:
    """Adds the key gradients that came home, server after server."""
    dq, dk, dv = returned.wait()
    sums.dq[route.q_rows] = dq
    first = 0
    for count in route.layout.kv.send_splits.tolist():
        part = slice(first, first + count)
        # A server returns each row once, so that one index_add never meets a row twice.
        sums.dk.index_add_(0, route.kv_rows[part], dk[part].to(sums.dk.dtype))
        sums.dv.index_add_(0, route.kv_rows[part], dv[part].to(sums.dv.dtype))
        first += count
    return Gradients(sums.dq, sums.dk.to(dtype), sums.dv.to(dtype))


class _Rows(NamedTuple):
    """In the order in which the backward message carries them."""

    q: Tensor
    k: Tensor
    v: Tensor
    out: Tensor
    lse: Tensor
    grad_out: Tensor


class _Sums(NamedTuple):
    """dq is written once per row; dk and dv are added up in at least float32."""

    dq: Tensor
    dk: Tensor
    dv: Tensor

    @classmethod
    def of(cls, q: Tensor, k: Tensor) -> _Sums:
        wide = torch.promote_types(k.dtype, torch.float32)
        return cls(
            torch.zeros_like(q), torch.zeros_like(k, dtype=wide), torch.zeros_like(k, dtype=wide)
        )


def _attend(
    call: OnDevice,
    backend: Backend,
    q: Tensor,
    k: Tensor,
    v: Tensor,
    scale: float,
    result: Attended,
) -> None:
    done = backend.forward(q[call.q_rows], k[call.kv_rows], v[call.kv_rows], call.packed, scale)
    result.out[call.q_rows], result.lse[call.q_rows] = done.out, done.lse


def _attend_backward(
    call: OnDevice, backend: Backend, rows: _Rows, scale: float, sums: _Sums, deterministic: bool
) -> None:
    q_rows, kv_rows = call.q_rows, call.kv_rows
    done = backend.backward(
        rows.grad_out[q_rows],
        rows.q[q_rows],
        rows.k[kv_rows],
        rows.v[kv_rows],
        rows.out[q_rows],
        rows.lse[q_rows],
        call.packed,
        scale,
        deterministic,
    )
    sums.dq[q_rows] = done.dq
    # Tasks of one document share keys; index_put adds in a fixed order, index_add does not.
    for total, part in ((sums.dk, done.dk), (sums.dv, done.dv)):
        total.index_put_((kv_rows,), part.to(total.dtype), accumulate=True)


def _send(
    route: Route, transport: Transport, tensors: list[Tensor], routes: list[Exchange]
) -> Sent:
    lanes = [
        Lane.of(tensor.shape[1:], tensor.dtype, exchange.send_splits, exchange.recv_splits)
        for tensor, exchange in zip(tensors, routes, strict=True)
    ]
    message = Message(tuple(lanes))
    buffer = message.pack(tensors, route.device)
    return Sent(message, transport.start(buffer, message.send_bytes, message.recv_bytes))


def _swap(exchange: Exchange) -> Exchange:
    """The way back: what was received is sent, and what was sent is received."""
    return Exchange(exchange.send_rows, exchange.recv_splits, exchange.send_splits)


def _lse_like(q: Tensor) -> Tensor:
    dtype = torch.promote_types(q.dtype, torch.float32)
    return torch.zeros(q.shape[:2], dtype=dtype, device=q.device)
