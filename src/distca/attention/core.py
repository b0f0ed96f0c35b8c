"""``CoreAttention``: the differentiable whole, from packed tensors and a plan."""

from __future__ import annotations

from typing import Any, NamedTuple
from weakref import WeakKeyDictionary

import torch
import torch.distributed as dist
from torch import Tensor

from distca.attention import passes
from distca.attention.agreement import Agreed, DisagreementError, Terms, agree
from distca.attention.backends.base import Traits
from distca.attention.backends.choice import choose
from distca.attention.op import attend, register
from distca.attention.overlap import AsyncAttention
from distca.attention.route import Route, TensorSpec
from distca.dispatch.buffers import Buffers
from distca.dispatch.meter import Meter
from distca.dispatch.transports.base import Transport
from distca.dispatch.transports.distributed import DistributedTransport
from distca.planning.masks import Mask
from distca.planning.plan import Plan


class _Ready(NamedTuple):
    """An execution that all ranks agreed to."""

    handle: int
    execution: passes.PreparedPlan
    wants_gradient: bool  # on any rank: then all of them join the backward exchange


class CoreAttention:
    """softmax(QK^T)V of this rank's packed documents, computed wherever the plan says.

    Every rank of the group calls it with the same plan, once per layer and in the same order; a
    rank without tokens passes empty tensors, and one without a model calls ``serve``. Outputs and
    gradients are those of one device. One object serves all layers of a model.

    group: the ranks of the plan, in order; None is the default group.
    control: the same ranks in a gloo group, over which they agree before a plan's first exchange;
        needed only where the group is a part of the world and moves CUDA tensors alone.
    backend: a name from ``distca.attention``, or ``auto`` for the fastest that fits.
    scale: of the scores; 1 / sqrt(D) by default.
    deterministic: gradients are equal bit by bit from run to run.
    buffer_bytes: what one exchange may send, and what it may receive, on this rank; by default
        buffers grow to the largest exchange that plans ask for.
    transport: instead of a group, another way to exchange.

    ``meter.take()`` says how many seconds this rank attended and waited for peers.
    """

    def __init__(
        self,
        group: dist.ProcessGroup | None = None,
        *,
        control: dist.ProcessGroup | None = None,
        backend: str = "auto",
        scale: float | None = None,
        deterministic: bool = False,
        buffer_bytes: int | None = None,
        transport: Transport | None = None,
    ) -> None:
        self.buffers, self.meter = Buffers(buffer_bytes), Meter()
        self.transport = DistributedTransport(group, control) if transport is None else transport
        self.backend, self.scale, self.deterministic = backend, scale, deterministic
        self._known: WeakKeyDictionary[Plan, dict[Any, _Ready]] = WeakKeyDictionary()
        self._served: WeakKeyDictionary[Plan, dict[bool, passes.PreparedPlan]] = WeakKeyDictionary()

    @torch.compiler.disable  # type: ignore[untyped-decorator]
    def __call__(self, q: Tensor, k: Tensor, v: Tensor, plan: Plan) -> Tensor:
        """q [T, H, D], k and v [T, G, D] -> [T, H, D]; T is what the plan places on this rank."""
        ready = self._prepare(q, k, v, plan)
        return attend(_joining(q, k, v, ready), k, v, ready.handle)

    @torch.compiler.disable  # type: ignore[untyped-decorator]
    def launch(self, q: Tensor, k: Tensor, v: Tensor, plan: Plan) -> AsyncAttention:
        """The same in three steps (see ``distca.attention.overlap``), for compute in between."""
        ready = self._prepare(q, k, v, plan)
        return AsyncAttention(ready.execution, _joining(q, k, v, ready), k, v)

    def serve(self, plan: Plan, *, layers: int, backward: int | None = None) -> None:
        """Takes this rank's part of a plan without tokens or weights of its own.

        Runs ``layers`` forward exchanges and then ``backward`` of them the other way: all by
        default, fewer where the first layers are frozen, 0 where the others are in no_grad.
        """
        backward = layers if backward is None else backward
        complaint = ""
        if not 0 <= backward <= layers:
            complaint = f"{backward} of {layers} layers backward: serve from none to all of them"
        known = self._served.setdefault(plan, {})
        learning = backward != 0
        if complaint or learning not in known:
            known[learning] = self._join(plan, learning, complaint)
        served = known[learning]
        for _ in range(layers):
            passes.serve_forward([served])
        for _ in range(backward):
            passes.serve_backward([served])

    def _prepare(self, q: Tensor, k: Tensor, v: Tensor, plan: Plan) -> _Ready:
        """Known already, or agreed upon now; raises on all ranks where one of them cannot."""
        key = (q.device, q.dtype, q.shape, k.shape, v.shape, torch.is_grad_enabled())
        known = self._known.setdefault(plan, {})
        if key not in known:
            execution, complaint = None, ""
            try:
                _check(q, k, v, plan, self.transport)
                execution = self.prepare(TensorSpec.of(q, k), plan, plan)
            except ValueError as error:
                complaint = str(error)
            heads, kv_heads, size = (q.shape[1], k.shape[1], q.shape[2]) if execution else (0, 0, 0)
            terms = Terms(
                plan=plan.fingerprint,
                heads=heads,
                kv_heads=kv_heads,
                head_size=size,
                dtype=str(q.dtype).removeprefix("torch."),
                device=q.device.type,
                scale=execution.scale if execution else None,
                grad_mode=torch.is_grad_enabled(),
                wants_gradient=_wants_gradient(q, k, v),
                complaint=complaint,
            )
            agreed = self._agree(terms)
            assert execution is not None  # without one there was a complaint
            known[key] = _Ready(register(execution), execution, agreed.wants_gradient)
        return known[key]

    def _join(self, plan: Plan, grad_mode: bool, complaint: str) -> passes.PreparedPlan:
        """A server takes the terms of those that bring tensors."""
        rank, execution = self.transport.rank, None
        if tokens := _tokens(plan, rank):
            complaint = f"the plan places {tokens} tokens on rank {rank}: it cannot only serve"
        mine = Terms(plan.fingerprint, grad_mode=grad_mode, complaint=complaint)
        terms = agree(self.transport, mine).terms
        if terms["heads"] is None:
            raise DisagreementError("every rank serves and none brings tensors: there is no work")
        kind = TensorSpec(
            heads=terms["heads"],
            kv_heads=terms["kv_heads"],
            head_dim=terms["head_size"],
            dtype=getattr(torch, terms["dtype"]),
            device=torch.empty(0, device=terms["device"]).device,  # with its number
        )
        try:
            execution = self.prepare(kind, plan, plan)
        except ValueError as error:
            complaint = str(error)
        agree(self.transport, Terms(plan.fingerprint, complaint=complaint))
        assert execution is not None  # without one there was a complaint
        return execution

    def _agree(self, terms: Terms) -> Agreed:
        agreed = agree(self.transport, terms)
        if agreed.some_serve:  # they learn the terms here, and may then find that they cannot
            agree(self.transport, Terms(terms.plan))
        return agreed

    def prepare(
        self, kind: TensorSpec, forward: Plan | None, backward: Plan | None
    ) -> passes.PreparedPlan:
        """This rank's part of a plan for each direction, which may be the same.

        Nothing is agreed here: the caller knows that all ranks run the same.
        """
        rank, (q, k, _) = self.transport.rank, kind.no_rows()
        reaches = {int(r) for plan in (forward, backward) if plan for r in plan.reach}
        masks = [Mask(reach) for reach in sorted(reaches)]
        traits = Traits.of(q, k, masks, deterministic=self.deterministic)
        execution = passes.PreparedPlan(
            forward=Route.of(forward, rank, kind, backward=False) if forward else None,
            backward=Route.of(backward, rank, kind, backward=True) if backward else None,
            kind=kind,
            transport=self.transport,
            buffers=self.buffers,
            backend=choose(self.backend, traits),
            scale=kind.head_dim**-0.5 if self.scale is None else self.scale,
            deterministic=self.deterministic,
            meter=self.meter,
        )
        for route in filter(None, (execution.forward, execution.backward)):
            for message in filter(None, (route.itinerary.out, route.itinerary.back)):
                self.buffers.check("send", message.outbox.num_bytes)
                self.buffers.check("receive", message.inbox.num_bytes)
        return execution


def _check(q: Tensor, k: Tensor, v: Tensor, plan: Plan, transport: Transport) -> None:
    rank, ranks = transport.rank, transport.num_ranks
    if plan.devices.num_ranks != ranks:
        raise ValueError(
            f"the plan is for {plan.devices.num_ranks} ranks but the group has {ranks}:"
            " plan for the ranks of the group"
        )
    if refusal := transport.refusal(q.device):
        raise ValueError(f"{refusal}: move q, k and v, or use another group")
    tokens = _tokens(plan, rank)
    for name, tensor in (("q", q), ("k", k), ("v", v)):
        if tensor.ndim != 3 or tensor.shape[0] != tokens:
            raise ValueError(
                f"{name} has shape {tuple(tensor.shape)} on rank {rank}, where the plan places"
                f" {tokens} tokens: it must be [{tokens}, heads, head size]"
            )
        if tensor.dtype != q.dtype or tensor.device != q.device:
            raise ValueError(
                f"{name} is {tensor.dtype} on {tensor.device} but q is {q.dtype} on {q.device}:"
                " all three must agree"
            )
    if k.shape != v.shape or q.shape[2] != k.shape[2] or q.shape[1] % max(k.shape[1], 1):
        raise ValueError(
            f"q {tuple(q.shape)}, k {tuple(k.shape)}, v {tuple(v.shape)}: k and v must agree,"
            " and q have the same head size and a multiple of their heads"
        )


def _tokens(plan: Plan, rank: int) -> int:
    return int(plan.placement.tokens[rank]) if rank < plan.placement.num_workers else 0


def _wants_gradient(q: Tensor, k: Tensor, v: Tensor) -> bool:
    return torch.is_grad_enabled() and (q.requires_grad or k.requires_grad or v.requires_grad)


def _joining(q: Tensor, k: Tensor, v: Tensor, ready: _Ready) -> Tensor:
    """q; as a leaf of its own where peers want a gradient and this rank does not.

    Autograd then comes by in backward here too, and no peer waits for it in vain.
    """
    if ready.wants_gradient and torch.is_grad_enabled() and not _wants_gradient(q, k, v):
        return q.detach().requires_grad_()
    return q
