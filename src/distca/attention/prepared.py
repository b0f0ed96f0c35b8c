"""A plan on one rank, ready for tensors of one shape, dtype and device.

It is made once per plan and used in every layer.
"""

from __future__ import annotations

from dataclasses import dataclass, replace

import torch

from distca.attention.backends.base import Backend, PackedCall
from distca.dispatch.agreement import Handshake
from distca.dispatch.buffers import Buffers
from distca.dispatch.exchange import Exchange
from distca.dispatch.layout import Call, Layout
from distca.dispatch.meter import Meter
from distca.dispatch.tensors import TensorSpec
from distca.dispatch.transports.base import Transport
from distca.dispatch.wire import Messages
from distca.planning.plan import Plan


@dataclass(frozen=True, eq=False)
class PreparedLayout:
    """One direction of a plan on one rank: its calls on the device, and its two messages.

    handshakes: what this rank announces before each message; None: nothing.
    """

    layout: Layout
    local: tuple[tuple[Call, PackedCall], ...]
    remote: tuple[tuple[Call, PackedCall], ...]
    messages: Messages
    handshakes: tuple[Handshake, Handshake] | None

    @classmethod
    def of(
        cls,
        plan: Plan,
        rank: int,
        spec: TensorSpec,
        handshake: Handshake | None,
        *,
        backward: bool,
    ) -> PreparedLayout:
        layout = Layout.of(plan, rank, backward=backward)
        handshakes = None
        if handshake is not None:
            direction = "backward" if backward else "forward"
            said = replace(handshake, plan=plan.fingerprint, direction=direction)
            handshakes = replace(said, message="dispatch"), replace(said, message="combine")
        return cls(
            layout=layout,
            local=tuple((call, _packed(call, spec.device)) for call in layout.local),
            remote=tuple((call, _packed(call, spec.device)) for call in layout.remote),
            messages=Messages.of(layout, spec, backward=backward),
            handshakes=handshakes,
        )


@dataclass(frozen=True, eq=False)
class PreparedPlan:
    """A plan on one rank, ready to run layer after layer; None for a direction that is not used."""

    forward: PreparedLayout | None
    backward: PreparedLayout | None
    spec: TensorSpec
    backend: Backend
    scale: float
    handshake: Handshake  # what the messages of both directions have in common
    deterministic: bool
    transport: Transport
    buffers: Buffers
    meter: Meter  # of "attention", and of "exposed" communication, which no computation hides

    def exchange(self, prepared: PreparedLayout) -> Exchange:
        """Returns the exchange of one layer, which holds the buffers from now on."""
        return Exchange(
            prepared.messages,
            prepared.handshakes,
            self.spec.device,
            self.transport,
            self.buffers,
            self.meter,
        )


def _packed(call: Call, device: torch.device) -> PackedCall:
    return PackedCall.of(call.mask, call.q_offsets, call.kv_offsets, device)
