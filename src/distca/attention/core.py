"""``CoreAttention``: differentiable attention of packed tensors, computed as a plan says."""

import math
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import replace
from datetime import timedelta
from typing import Any, NamedTuple
from weakref import WeakKeyDictionary

import torch
import torch.distributed as dist
from torch import Tensor

from distca.attention.call_order import CallOrder
from distca.attention.chosen_backends import ChosenBackends
from distca.attention.inputs import Inputs, check_plan, num_tokens
from distca.attention.op import attend, register
from distca.attention.overlap import AsyncAttention
from distca.attention.passes import BackwardPass, ForwardPass
from distca.attention.prepared import PreparedLayout, PreparedLayouts, PreparedPlan, Watch
from distca.dispatch.agreement import Agreed, DisagreementError, Handshake, agree
from distca.dispatch.buffers import Buffers
from distca.dispatch.latent import Latent
from distca.dispatch.meter import Meter
from distca.dispatch.tensors import TensorSpec
from distca.dispatch.transports.base import Transport
from distca.dispatch.transports.distributed import DistributedTransport
from distca.planning.plan import Plan

_NOTHING = Handshake()


class _Ready(NamedTuple):
    """A prepared plan on which all ranks agreed."""

    handle: int
    plan: PreparedPlan
    wants_gradient: bool  # on any rank: then all of them join the backward exchange


class CoreAttention:
    """softmax(QK^T)V of this rank's packed documents, computed on the ranks that the plan assigns.

    Every rank of the group calls it with the same plan, once per layer and in the same order; a
    rank without tokens passes empty tensors, and a rank without a model calls ``serve``. Outputs
    and gradients are those of one device. One object serves all layers of a model.

    group: the ranks of the plan, in order; None is the default group. All of them construct this
        object at the same point.
    timeout: how long a rank waits for the announcement of another; that of the group by default.
    backend: a name from ``distca.attention.backends``, or ``auto`` for the fastest that fits.
    scale: factor of the scores; 1 / sqrt(D) by default.
    softcap: bound of the scores: softcap * tanh(score / softcap) replaces a score. 0 is no bound.
    deterministic: whether gradients are bitwise equal from run to run.
    buffer_bytes: how much one exchange may send, and how much it may receive, on this rank; by
        default, buffers grow to the largest exchange.
    transport: another way to exchange, instead of a group.

    ``meter.take()`` returns how many seconds this rank has computed attention, how many were
    planned for that on a device of speed 1, and how many it has waited for peers.
    """

    def __init__(
        self,
        group: dist.ProcessGroup | None = None,
        *,
        timeout: timedelta | None = None,
        backend: str = "auto",
        scale: float | None = None,
        softcap: float = 0.0,
        deterministic: bool = False,
        buffer_bytes: int | None = None,
        transport: Transport | None = None,
    ) -> None:
        if scale is not None and not 0.0 < _number(scale) < math.inf:
            raise ValueError(f"scale {scale}: give a positive number, or None for 1 / sqrt(D)")
        if not 0.0 <= _number(softcap) < math.inf:
            raise ValueError(f"softcap {softcap}: give a positive number, or 0 for no soft cap")
        self.buffers, self.meter, self._order = Buffers(buffer_bytes), Meter(), CallOrder()
        self.watch: Watch | None = None  # of all plans that are prepared from then on
        self.transport = DistributedTransport(group, timeout) if transport is None else transport
        self.layouts = PreparedLayouts(self.transport.rank)
        self.deterministic = deterministic
        self.scale, self.softcap = scale, float(softcap)
        self._backends = ChosenBackends(backend, softcap=softcap, deterministic=deterministic)
        self._expansion_checked = False  # once, since it waits for the device
        self._ready: WeakKeyDictionary[Plan, dict[Any, _Ready]] = WeakKeyDictionary()
        self._served: WeakKeyDictionary[Plan, dict[bool, PreparedPlan]] = WeakKeyDictionary()
        self._agreed: set[Handshake] = set()  # kinds of tensors on which the ranks have agreed

    @torch.compiler.disable  # type: ignore[untyped-decorator]
    def __call__(
        self,
        q: Tensor,
        k: Tensor,
        v: Tensor,
        plan: Plan,
        *,
        sinks: Tensor | None = None,
        latent: Latent | None = None,
    ) -> Tensor:
        """q [T, H, D], k [T, G, D], v [T, G, V] -> [T, H, V]; the plan places T tokens here.

        sinks: [H] a score of each head that takes part in the softmax and has no value. Ranks may
            have different ones, as tensor parallelism does; each gets the gradient of its own rows.
        latent: the factors of k and v in latent attention, which travel instead of them; a server
            expands them. The gradient of ``latent.weight`` is summed over all ranks, each of which
            gets that of the keys that it received: reduce it as data parallelism does.
        """
        inputs, ready = self._agree_on(Inputs(q, k, v, sinks, latent), plan)
        return attend(*inputs[:3], ready.handle, sinks, latent)

    @torch.compiler.disable  # type: ignore[untyped-decorator]
    def dispatch(
        self,
        q: Tensor,
        k: Tensor,
        v: Tensor,
        plan: Plan,
        *,
        sinks: Tensor | None = None,
        latent: Latent | None = None,
    ) -> AsyncAttention:
        """Dispatches the same attention without waiting, so that other work overlaps with it.

        Call ``compute()`` and then ``combine()`` of the result; see ``distca.attention.overlap``.
        """
        inputs, ready = self._agree_on(Inputs(q, k, v, sinks, latent), plan)
        return AsyncAttention(ready.plan, *inputs)

    def serve(self, plan: Plan, *, layers: int, backward: int | None = None) -> None:
        """Takes this rank's part of a plan without tokens or weights of its own.

        Joins ``layers`` forward exchanges and then ``backward`` backward exchanges: as many by
        default, fewer where the first layers are frozen, 0 where the other ranks are in no_grad.
        """
        backward = layers if backward is None else backward
        error = ""
        if not isinstance(layers, int) or layers < 0:
            error = f"{layers} layers to serve: give a whole number, 0 or more"
        elif not isinstance(backward, int) or not 0 <= backward <= layers:
            error = f"{backward} of {layers} layers backward: give a number from 0 to {layers}"
        try:
            check_plan(plan)
        except ValueError as wrong:
            agree(self.transport, Handshake(error=str(wrong)))  # which raises it on all ranks
            raise
        served, grad_mode = self._served.setdefault(plan, {}), backward != 0
        if error or grad_mode not in served:
            served[grad_mode] = self._join(plan, grad_mode, error)
        for _ in range(layers):
            ForwardPass.without_rows(served[grad_mode]).combine()
        for _ in range(backward):
            BackwardPass.without_rows(served[grad_mode]).combine()

    def prepare(
        self,
        spec: TensorSpec,
        *,
        forward: Plan | None = None,
        backward: Plan | None = None,
        grad_mode: bool | None = None,
        sinks: bool | None = None,
        announce: bool = True,
    ) -> PreparedPlan:
        """Returns this rank's part of a plan for each direction, which may be the same plan.

        Ranks do not tell each other here whether they can.

        sinks: whether the layers have sinks, which ranks only compare; None if it is not known.
        announce: whether ranks compare every message before it is sent. Not needed where they have
            compared a whole step, in which every message has its place.
        """
        plans = [plan for plan in (forward, backward) if plan]
        announce = announce and self.transport.num_ranks > 1  # one rank has no other to tell
        scale = spec.head_dim**-0.5 if self.scale is None else self.scale
        handshake = Handshake(
            heads=spec.heads,
            kv_heads=spec.kv_heads,
            head_dim=spec.head_dim,
            v_head_dim=spec.v_head_dim,
            latent_dim=spec.latent_dim,
            rope_dim=spec.rope_dim,
            dtype=str(spec.dtype).removeprefix("torch."),
            device=spec.device.type,
            scale=scale,
            softcap=self.softcap,
            sinks=sinks,
            grad_mode=grad_mode,
            attention=self.transport.number,
        )

        def part(plan: Plan | None, *, backward: bool) -> PreparedLayout | None:
            if plan is None:
                return None
            layout = self.layouts.of(plan, spec, backward=backward)
            if not announce:
                return layout
            direction = "backward" if backward else "forward"
            said = replace(handshake, plan=plan.fingerprint, direction=direction)
            return layout.announced(said)

        prepared = PreparedPlan(
            forward=part(forward, backward=False),
            backward=part(backward, backward=True),
            spec=spec,
            backend=self._backends.of(
                spec, plans, scale, backward=backward is not None and grad_mode is not False
            ),
            scale=scale,
            softcap=self.softcap,
            handshake=handshake,
            deterministic=self.deterministic,
            transport=self.transport,
            buffers=self.buffers,
            order=None,
            meter=self.meter,
            watch=self.watch,
        )
        for layout in filter(None, (prepared.forward, prepared.backward)):
            for message in layout.messages:
                self.buffers.check("send", message.send.num_bytes)
                self.buffers.check("receive", message.recv.num_bytes)
        return prepared

    def _agree_on(self, inputs: Inputs, plan: Plan) -> tuple[Inputs, _Ready]:
        """Prepares the plan once for tensors like these; if one rank cannot, all ranks raise.

        Returns the tensors that take part in autograd as the ranks have agreed.
        """
        try:
            inputs.check_kinds(plan)
        except ValueError as error:
            if self._is_awaited(plan):
                agree(self.transport, Handshake(error=str(error)))  # which raises it on all ranks
            raise
        made = self._ready.setdefault(plan, {})
        if inputs.kind not in made:
            with self._raising_on_all(plan):
                inputs.check(plan, self.transport)
                if not self._expansion_checked:
                    inputs.check_expansion()
                    self._expansion_checked = inputs.latent is not None
                prepared = self.prepare(
                    inputs.spec,
                    forward=plan,
                    backward=plan,
                    grad_mode=torch.is_grad_enabled(),
                    sinks=inputs.sinks is not None,
                )
            agreed = self._compare_first_use(inputs, plan, prepared.handshake)
            if not agreed.some_serve:
                prepared = replace(prepared, order=self._order)
            wants_gradient = agreed.common.wants_gradient
            made[inputs.kind] = _Ready(register(prepared), prepared, wants_gradient)
        ready = made[inputs.kind]
        return inputs.joining() if ready.wants_gradient else inputs, ready

    def _is_awaited(self, plan: object) -> bool:
        """Returns whether other ranks wait for this one, as far as it knows: not where a plan that
        all of them know moves nothing.
        """
        known = self._ready.get(plan) if isinstance(plan, Plan) else None
        layouts = [ready.plan.forward for ready in (known or {}).values()]
        return not layouts or any(one.messages.dispatch.moves for one in layouts if one)

    def _compare_first_use(self, inputs: Inputs, plan: Plan, handshake: Handshake) -> Agreed:
        """Compares the first use of a plan with other ranks.

        Where messages are compared late, the host does not wait for the others if they have once
        agreed on such tensors, unless it depends on their answer: a rank without a gradient joins
        those that want one, and servers have to prepare the plan.
        """
        first_use = replace(_first_use(plan, handshake), wants_gradient=inputs.wants_gradient)
        alone = Agreed(first_use, some_serve=False)
        if self.transport.num_ranks == 1:
            return alone
        known = handshake in self._agreed
        needs_no_answer = inputs.wants_gradient or not torch.is_grad_enabled()
        late = known and needs_no_answer and _all_have_tokens(plan)
        if late and self.transport.note(first_use.record, inputs.q.device):
            return alone
        agreed = agree(self.transport, first_use)
        if agreed.some_serve:  # servers prepare the plan now, and may find that they cannot
            agree(self.transport, _first_use(plan))
        self._agreed.add(handshake)
        return agreed

    def _join(self, plan: Plan, grad_mode: bool, error: str) -> PreparedPlan:
        """Prepares a plan on a server for the tensors of the other ranks."""
        rank = self.transport.rank
        if (tokens := num_tokens(plan, rank)) and not error:
            error = f"the plan places {tokens} tokens on rank {rank}: it cannot only serve"
        mine = Handshake(grad_mode=grad_mode, error=error)
        common = agree(self.transport, _first_use(plan, mine)).common
        if common.heads is None or common.kv_heads is None or common.head_dim is None:
            raise DisagreementError("every rank serves and none has tensors: there is no work")
        assert common.dtype is not None
        spec = TensorSpec(
            heads=common.heads,
            kv_heads=common.kv_heads,
            head_dim=common.head_dim,
            v_head_dim=common.v_head_dim or common.head_dim,
            latent_dim=common.latent_dim or 0,
            rope_dim=common.rope_dim or 0,
            dtype=getattr(torch, common.dtype),
            device=torch.empty(0, device=common.device).device,  # with its index
        )
        with self._raising_on_all(plan):
            prepared = self.prepare(
                spec, forward=plan, backward=plan, grad_mode=grad_mode, sinks=common.sinks
            )
        agree(self.transport, _first_use(plan))
        return prepared

    @contextmanager
    def _raising_on_all(self, plan: Plan) -> Iterator[None]:
        """Raises a ValueError of this rank on all ranks, in the handshake that they are in."""
        try:
            yield
        except ValueError as error:
            agree(self.transport, _first_use(plan, Handshake(error=str(error))))
            raise


def _number(value: object) -> float:
    """Returns a number as it is, and NaN for anything else."""
    return float(value) if isinstance(value, int | float) else math.nan


def _all_have_tokens(plan: Plan) -> bool:
    """Returns whether no rank of a plan may only serve."""
    all_work = plan.placement.num_workers == plan.devices.num_ranks
    return all_work and bool(plan.placement.tokens.all())


def _first_use(plan: Plan, handshake: Handshake = _NOTHING) -> Handshake:
    return replace(handshake, plan=plan.fingerprint, direction="forward")
