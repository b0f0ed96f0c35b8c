"""One exchange of a layer: rows go out to peers, and what peers made of them comes back.

Where the plan moves nothing, on no rank, nobody joins and nothing is waited for: every rank knows
that from the plan.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from distca.dispatch.buffers import Buffers
from distca.dispatch.meter import Meter
from distca.dispatch.rows import Rows
from distca.dispatch.transports.base import Transport, Wait
from distca.dispatch.wire import Message

Parts = list[list[Tensor]]  # by lane, then by peer, of the peers that have rows


@dataclass(frozen=True, eq=False)
class Itinerary:
    """What goes out and what comes back; None where no rank has anything to move."""

    device: torch.device
    out: Message | None
    back: Message | None
    leaving: tuple[tuple[Rows, ...], ...]  # by lane of ``out`` and receiver: own rows to send


class RoundTrip:
    """The steps in order: send, receive, reply, collect. Buffers are held from first to last.

    Parts lie in the buffers: those of ``receive`` are valid until ``reply``, those of ``replies``
    are written before it, and those of ``collect`` are valid until ``done``.
    """

    def __init__(
        self, itinerary: Itinerary, transport: Transport, buffers: Buffers, meter: Meter
    ) -> None:
        self._itinerary, self._transport, self._buffers = itinerary, transport, buffers
        self._meter = meter
        self._wait: Wait | None = None
        self._received: Parts = []
        buffers.hold(self)

    def send(self, tensors: Sequence[Tensor]) -> None:
        """Gathers the rows that peers need and starts the exchange."""
        out = self._itinerary.out
        if out is None:
            return
        for tensor, rows, parts in zip(
            tensors, self._itinerary.leaving, self._outgoing(out), strict=True
        ):
            for chosen, part in zip(rows, parts, strict=True):
                chosen.take([tensor], out=part)
        self._start(out)

    def receive(self) -> Parts:
        return self._arrived(self._itinerary.out)

    def replies(self) -> Parts:
        """Where to write what goes back."""
        back = self._itinerary.back
        return [] if back is None else self._outgoing(back)

    def reply(self) -> None:
        if self._itinerary.back is not None:
            self._start(self._itinerary.back)

    def collect(self) -> Parts:
        return self._arrived(self._itinerary.back)

    def done(self) -> None:
        self._received = []
        self._buffers.let_go()

    def _outgoing(self, message: Message) -> Parts:
        device = self._itinerary.device
        return message.outbox.open(self._buffers.send(message.outbox.num_bytes, device))

    def _start(self, message: Message) -> None:
        device = self._itinerary.device
        outbox, inbox = message.outbox, message.inbox
        recv = self._buffers.recv(inbox.num_bytes, device)
        send = self._buffers.send(outbox.num_bytes, device)
        self._received = inbox.open(recv)
        self._wait = self._transport.start(send, recv, outbox.bytes_of_peer, inbox.bytes_of_peer)

    def _arrived(self, message: Message | None) -> Parts:
        if message is None:
            return []
        assert self._wait is not None, "nothing was sent"
        with self._meter.span("exposed", self._itinerary.device):
            self._wait()
        self._wait = None
        return self._received
