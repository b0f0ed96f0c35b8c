"""A plan on one rank, ready for tensors of one shape, dtype and device.

It is made once per plan and used in every layer.
"""

from __future__ import annotations

from contextlib import AbstractContextManager
from dataclasses import dataclass, replace
from typing import Protocol
from weakref import WeakKeyDictionary

import torch

from distca.attention.backends.base import Backend
from distca.attention.call_order import CallOrder
from distca.attention.calls import PreparedCall
from distca.dispatch.agreement import Handshake
from distca.dispatch.buffers import Buffers
from distca.dispatch.exchange import Exchange
from distca.dispatch.latent_buffers import LatentBuffers
from distca.dispatch.layout import Layout
from distca.dispatch.meter import Meter
from distca.dispatch.tensors import TensorSpec
from distca.dispatch.transports.base import Transport
from distca.dispatch.wire import Messages
from distca.planning.costs.base import PS
from distca.planning.plan import Plan


@dataclass(frozen=True, eq=False)
class PreparedLayout:
    """One direction of a plan on one rank: its calls on the device, and its two messages.

    planned_s: the seconds of each call on a device of speed 1: an equal share of the rank's load.
    latents: between what travels and what kernels read, where latents travel.
    handshakes: what this rank announces before each message; None: nothing.
    """

    layout: Layout
    local: tuple[PreparedCall, ...]
    remote: tuple[PreparedCall, ...]
    messages: Messages
    planned_s: float
    latents: LatentBuffers | None = None
    handshakes: tuple[Handshake, Handshake] | None = None

    @classmethod
    def of(cls, plan: Plan, layout: Layout, spec: TensorSpec, *, backward: bool) -> PreparedLayout:
        """layout: of the plan in this direction."""
        messages = Messages.of(layout, spec, backward=backward)
        received, home, latents = messages.dispatch.recv, messages.combine.send, None
        if spec.latent_dim:
            latents = LatentBuffers.of(layout, messages, spec, backward=backward)
            received, home = latents.here, latents.home if backward else home

        calls = (*layout.local, *layout.remote)
        prepared = tuple(
            PreparedCall.of(call, received, home, spec.expanded, backward=backward, summed=before)
            for call, before in zip(calls, layout.read_before, strict=False)
        )
        local, remote = prepared[: len(layout.local)], prepared[len(layout.local) :]
        load_ps = plan.backward_load_ps if backward else plan.forward_load_ps
        planned_s = float(load_ps[layout.rank]) / PS / max(len(calls), 1)
        return cls(layout, local, remote, messages, planned_s, latents)

    def announced(self, handshake: Handshake) -> PreparedLayout:
        """Returns the same layout, whose messages are announced."""
        dispatch, combine = (replace(handshake, message=name) for name in ("dispatch", "combine"))
        return replace(self, handshakes=(dispatch, combine))


class PreparedLayouts:
    """The layouts of plans on one rank: made once, for all layers, as long as the plan lives.

    A thread that plans makes them ahead of the step, which then finds them here.
    """

    def __init__(self, rank: int) -> None:
        self._rank = rank
        self._made: WeakKeyDictionary[Plan, dict[tuple[TensorSpec, bool], PreparedLayout]] = (
            WeakKeyDictionary()
        )
        self._layouts: WeakKeyDictionary[Plan, dict[bool, Layout]] = WeakKeyDictionary()

    def of(self, plan: Plan, spec: TensorSpec, *, backward: bool) -> PreparedLayout:
        made = self._made.setdefault(plan, {})
        if (spec, backward) not in made:
            layout = self._layout(plan, backward=backward)
            made[spec, backward] = PreparedLayout.of(plan, layout, spec, backward=backward)
        return made[spec, backward]

    def _layout(self, plan: Plan, *, backward: bool) -> Layout:
        """Returns what tensors of any kind have in common: also both directions of equal tasks."""
        backward = backward and plan.backward is not plan.forward
        layouts = self._layouts.setdefault(plan, {})
        if backward not in layouts:
            layouts[backward] = Layout.of(plan, self._rank, backward=backward)
        return layouts[backward]


class Watch(Protocol):
    """What is told of the attention of this rank, as it happens: fault injection is."""

    def dispatch(self) -> None:
        """Is called before the attention of a layer and half is dispatched, in any direction."""
        ...

    def kernels(
        self, timed: AbstractContextManager[None], device: torch.device
    ) -> AbstractContextManager[None]:
        """Surrounds a kernel call; what it does inside ``timed`` is measured with the call."""
        ...


@dataclass(frozen=True, eq=False)
class PreparedPlan:
    """A plan on one rank, ready to run layer after layer; None for a direction that is not used."""

    forward: PreparedLayout | None
    backward: PreparedLayout | None
    spec: TensorSpec
    backend: Backend
    scale: float
    softcap: float  # 0: none
    handshake: Handshake  # what the messages of both directions have in common
    deterministic: bool
    transport: Transport
    buffers: Buffers
    order: CallOrder | None  # None where ranks serve, which do not know it, or compare whole steps
    meter: Meter  # of "attention", and of "exposed" communication, which no computation hides
    watch: Watch | None = None

    def exchange(self, prepared: PreparedLayout, backward_order: int = 0) -> Exchange:
        """Returns the exchange of one layer, which holds the buffers from now on."""
        if self.watch is not None:
            self.watch.dispatch()
        handshakes = prepared.handshakes
        if handshakes is not None and backward_order:
            dispatch, combine = (replace(h, backward_order=backward_order) for h in handshakes)
            handshakes = dispatch, combine
        return Exchange(
            prepared.messages,
            handshakes,
            self.spec.device,
            self.transport,
            self.buffers,
            self.meter,
        )

    def measured(self, prepared: PreparedLayout) -> AbstractContextManager[None]:
        """Measures one kernel call of a layout."""
        timed = self.meter.time("attention", self.spec.device, prepared.planned_s)
        return timed if self.watch is None else self.watch.kernels(timed, self.spec.device)
