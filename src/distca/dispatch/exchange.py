"""One layer's exchange: rows go out to servers (dispatch), and their results come home (combine).

Where the plan moves nothing on any rank, no rank joins the collective; every rank knows that from
the plan. Other messages are announced, and sent after all ranks have announced the same, unless
they belong to a step that all ranks have compared as a whole.
"""

import torch
from torch import Tensor

from distca.dispatch.agreement import Handshake, announce
from distca.dispatch.buffers import Buffers
from distca.dispatch.meter import Meter
from distca.dispatch.transports.base import Check, Transport, Wait
from distca.dispatch.wire import Message, Messages

_NO_BYTES = torch.empty(0, dtype=torch.uint8, device="cpu")


class Exchange:
    """The exchange in progress: dispatch, receive, results, send_results, receive, close, in order.

    It holds the buffers from its construction until ``close``. The steps return bytes, laid out as
    the messages say: what was received is valid until the next step but ``results``, and the buffer
    of ``results`` must be written before ``send_results``.

    messages, handshakes: of the dispatch and of the combine; handshakes None: not announced.
    """

    def __init__(
        self,
        messages: Messages,
        handshakes: tuple[Handshake, Handshake] | None,
        device: torch.device,
        transport: Transport,
        buffers: Buffers,
        meter: Meter,
    ) -> None:
        self._dispatch, self._combine = messages
        self._device, self._transport, self._buffers = device, transport, buffers
        self._meter = meter
        self._handshakes = handshakes or (None, None)
        self._wait: Wait | None = None
        self._arriving = _NO_BYTES
        buffers.acquire(self)
        self._check = self._announce(self._dispatch, self._handshakes[0])

    def dispatch(self, *tensors: Tensor) -> None:
        """Copies the rows of each tensor that servers need, and starts to send them."""
        self._dispatch.move([*tensors, self._outgoing(self._dispatch)])
        self._start(self._dispatch)

    def results(self) -> Tensor:
        """Announces the combine, and returns the buffer to which this rank writes its results."""
        self._check = self._announce(self._combine, self._handshakes[1])
        return self._outgoing(self._combine)

    def send_results(self) -> None:
        """Starts the combine: sends the results home."""
        self._start(self._combine)

    def receive(self) -> Tensor:
        """Waits for the rows of peers after a dispatch, or for own results after a combine."""
        wait, self._wait = self._wait, None
        if wait is not None:
            try:
                with self._meter.time("exposed", self._device):
                    wait()
            except Exception:
                self.close()  # for the next exchange, after a mistake that was caught
                raise
        return self._arriving

    def close(self) -> None:
        self._arriving = _NO_BYTES
        self._buffers.release()

    def _announce(self, message: Message, handshake: Handshake | None) -> Check | None:
        if handshake is None or not message.moves:
            return None
        return announce(self._transport, handshake, self._device)

    def _outgoing(self, message: Message) -> Tensor:
        if not message.moves:
            return _NO_BYTES
        return self._buffers.send(message.send.num_bytes, self._device)

    def _start(self, message: Message) -> None:
        if not message.moves:
            self._arriving = _NO_BYTES
            return
        send = self._outgoing(message)
        self._arriving = recv = self._buffers.recv(message.recv.num_bytes, self._device)
        self._wait = self._transport.start(
            send, recv, message.send.rank_bytes, message.recv.rank_bytes, self._check
        )
