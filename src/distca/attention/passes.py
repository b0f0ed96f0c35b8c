"""One rank's part of a layer's attention, as plain steps: dispatch, compute, combine.

Legend: T own token rows, H heads, G key/value heads, D head size of queries and keys, V that of
values and outputs. The constructor dispatches: it sends what peers need. ``compute`` first computes
the tasks that need nothing from peers, while data is under way, then the other tasks, and starts to
send their results home. ``combine`` waits for the results of this rank's own rows. Profiles name
each step, and where it is (``where``: its layer and half, if they are known).

The steps do not use autograd, and servers keep nothing: the backward dispatch carries everything
that it needs. If all ranks run the same steps in the same order, the results are those of one
device.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from contextlib import ExitStack
from functools import wraps
from typing import ParamSpec, TypeVar

import torch
from torch import Tensor

from distca.attention.backends.base import Attended, Gradients, Saved
from distca.attention.backends.packed import PackedCall
from distca.attention.calls import PreparedCall
from distca.attention.prepared import PreparedLayout, PreparedPlan
from distca.dispatch.latent import Latent, no_latent
from distca.dispatch.ranges import named
from distca.dispatch.tensors import wide

Parameters = ParamSpec("Parameters")
Result = TypeVar("Result")


def _in_given_dtypes(step: Callable[Parameters, Result]) -> Callable[Parameters, Result]:
    """Runs a step without gradients, and with the dtypes of its tensors instead of autocast's.

    Operators are called under the caller's autocast, which would compute float32 in bfloat16.
    """

    @wraps(step)
    def run(*args: Parameters.args, **options: Parameters.kwargs) -> Result:
        with ExitStack() as stack:
            stack.enter_context(torch.no_grad())
            for kind in filter(torch.is_autocast_enabled, ("cpu", "cuda")):
                stack.enter_context(torch.autocast(kind, enabled=False))
            return step(*args, **options)

    return run


class ForwardPass:
    """Queries and keys go to the servers that need them; outputs and log-sum-exp come home.

    number: of this pass among those of its attention; -1 if it is not known.
    """

    @_in_given_dtypes
    def __init__(
        self,
        plan: PreparedPlan,
        q: Tensor,
        k: Tensor,
        v: Tensor,
        latent: Latent | None = None,
        where: str = "",
    ) -> None:
        assert plan.forward is not None, "this plan was prepared for backward only"
        self._plan, self._prepared, self._where = plan, plan.forward, where
        self._result: Attended | None = None
        self.number = -1 if plan.order is None else plan.order.forward()
        with named("forward dispatch", where):
            self._qkv = _dense((q, k, v), self._prepared)
            self._latent = latent and Latent(*(each.contiguous() for each in latent))
            self._exchange = plan.exchange(self._prepared)
            self._exchange.dispatch(*_traveling(self._qkv, self._latent))

    @classmethod
    def without_rows(cls, plan: PreparedPlan, where: str = "") -> ForwardPass:
        """Takes part in a layer on a rank that has no tokens in it, and only serves."""
        return cls(plan, *plan.spec.empty(), no_latent(plan.spec), where)

    @_in_given_dtypes
    def compute(self) -> None:
        with named("forward compute", self._where):
            self._result = mine = self._compute_local()
            received = self._exchange.receive()
            leaving = self._exchange.results()
            if self._latent is not None and self._prepared.remote:
                assert self._prepared.latents is not None
                received, _ = self._prepared.latents.expand(received, self._latent.weight)
            for call in self._prepared.remote:
                call.scatter([*self._call(call, received), *mine, leaving])
            self._exchange.send_results()

    @_in_given_dtypes
    def combine(self) -> Attended:
        """Returns out [T, H, V] and lse [T, H] of this rank's rows."""
        if self._result is None:
            self.compute()
        assert self._result is not None
        with named("forward combine", self._where):
            self._prepared.messages.combine.move([*self._result, self._exchange.receive()])
            self._exchange.close()
        return self._result

    def _compute_local(self) -> Attended:
        if self._prepared.layout.is_one_call:
            return self._call(self._prepared.local[0])
        q, _, v = self._qkv
        result = Attended.empty(q, v)  # every row is written once, here or later
        for call in self._prepared.local:
            call.scatter([*self._call(call), *result])
        return result

    def _call(self, call: PreparedCall, received: Tensor | None = None) -> Attended:
        q, k, v = call.gather(self._qkv, received)
        plan = self._plan

        def forward(q: Tensor, k: Tensor, v: Tensor, call: PackedCall) -> Attended:
            return plan.backend.forward(q, k, v, call, plan.scale, plan.softcap)

        with plan.measured(self._prepared):
            attended = call.attend(q, k, v, forward)
        return Attended(*(each.contiguous() for each in attended))


class BackwardPass:
    """q, k, v, out, log-sum-exp and grad_out go to the servers; dq, dk and dv come home.

    Where latents travel, dk and dv are those of own tasks, and the gradients of latents come home.

    number: of the forward pass; -1: ranks do not compare in which order they run backward.
    """

    @_in_given_dtypes
    def __init__(
        self,
        plan: PreparedPlan,
        grad_out: Tensor,
        saved: Saved,
        latent: Latent | None = None,
        where: str = "",
        number: int = -1,
    ) -> None:
        assert plan.backward is not None, "this plan was prepared for forward only"
        self._plan, self._prepared, self._where = plan, plan.backward, where
        self._grads: Gradients | None = None  # dk and dv in float32 or float64, to be added up
        self._dweight: Tensor | None = None  # of received latents
        order = 0 if plan.order is None or number < 0 else plan.order.backward(number)
        with named("backward dispatch", where):
            # In the order of the message. Kernels need contiguous rows, which autograd does not
            # promise.
            self._tensors = _dense((*saved, grad_out.contiguous()), self._prepared)
            self._latent = latent and Latent(*(each.contiguous() for each in latent))
            self._exchange = plan.exchange(self._prepared, order)
            self._exchange.dispatch(*_traveling(self._tensors, self._latent))

    @classmethod
    def without_rows(cls, plan: PreparedPlan, where: str = "") -> BackwardPass:
        """Takes part in a layer on a rank that has no tokens in it, and only serves."""
        q, k, v = plan.spec.empty()
        attended = Attended.empty(q, v)
        return cls(plan, attended.out, Saved(q, k, v, *attended), no_latent(plan.spec), where)

    @_in_given_dtypes
    def compute(self) -> None:
        with named("backward compute", self._where):
            self._grads = self._compute_local()
            received = self._exchange.receive()
            leaving = self._exchange.results()
            if self._latent is not None and self._prepared.remote:
                self._compute_remote_latents(received, leaving, self._latent.weight)
            else:
                self._compute_remote(received, leaving)
            self._exchange.send_results()

    def _compute_remote(self, received: Tensor, leaving: Tensor) -> None:
        assert self._grads is not None
        dq, dk, dv = self._grads
        sent = leaving.view(self._plan.spec.dtype)
        for call in self._prepared.remote:
            call.scatter([*self._call(call, received), dk, dv, dq, sent])

    def _compute_remote_latents(self, received: Tensor, leaving: Tensor, weight: Tensor) -> None:
        latents = self._prepared.latents
        assert latents is not None
        expanded, latent = latents.expand(received, weight)
        home = received.new_empty(latents.home.num_bytes)
        self._compute_remote(expanded, home)
        self._dweight = latents.contract(home, latent, leaving)

    @_in_given_dtypes
    def combine(self) -> tuple[Tensor, ...]:
        """Returns the gradients of this rank's rows: dq, dk and dv, and those of the latent.

        dk and dv are added in float32 or float64: what this rank computed, then what each server
        sent in the order of ranks. The gradient of the matrix that expands latents is that of the
        keys which this rank received, and of those that a server without weights received.
        """
        if self._grads is None:
            self.compute()
        assert self._grads is not None
        mine, result = self._grads, tuple[Tensor, ...](self._grads)
        with named("backward combine", self._where):
            returned = self._exchange.receive()
            if self._latent is not None:
                result = self._combine_latents(mine, returned, self._latent)
            elif not self._prepared.layout.is_one_call:
                _, k, v, *_ = self._tensors
                result = mine.dq, torch.empty_like(k), torch.empty_like(v)
                self._add_returned(returned, (mine.dk, mine.dv), result)
            self._exchange.close()
        return result

    def _combine_latents(
        self, mine: Gradients, returned: Tensor, latent: Latent
    ) -> tuple[Tensor, ...]:
        latents = self._prepared.latents
        assert latents is not None
        grads = mine.dq, torch.empty_like(latent.latent), torch.empty_like(latent.rotary)
        self._add_returned(returned, grads[1:], grads)  # own tasks have no gradients of latents
        dweight = latents.sum_weights(self._dweight, returned)
        keys = mine.dk, mine.dv
        if not self._prepared.layout.is_one_call:
            keys = latents.rounded(*keys)
        return mine.dq, *keys, *grads[1:], dweight

    def _add_returned(
        self, returned: Tensor, sums: Sequence[Tensor], results: Sequence[Tensor]
    ) -> None:
        """Writes dq, and the sums of two gradients of keys with what servers sent."""
        values = returned.view(self._plan.spec.dtype)
        self._prepared.messages.combine.move([values, values, values, *sums, *results])

    def _compute_local(self) -> Gradients:
        if self._prepared.layout.is_one_call:
            return self._call(self._prepared.local[0])
        q, k, v, *_ = self._tensors
        # The first call that reads a key stores its gradients, here or later.
        sums = (torch.empty_like(each, dtype=wide(each.dtype)) for each in (k, v))
        result = Gradients(torch.empty_like(q), *sums)
        for call in self._prepared.local:
            call.scatter([*self._call(call), result.dk, result.dv, result.dq])
        return result

    def _call(self, call: PreparedCall, received: Tensor | None = None) -> Gradients:
        *saved, grad_out = call.gather(self._tensors, received)
        plan = self._plan
        options = plan.scale, plan.deterministic, plan.softcap

        def backward(grad_out: Tensor, saved: Saved, call: PackedCall) -> Gradients:
            return plan.backend.backward(grad_out, saved, call, *options)

        with plan.measured(self._prepared):
            grads = call.differentiate(grad_out, Saved(*saved), backward)
        return Gradients(*(each.contiguous() for each in grads))


def _traveling(tensors: Sequence[Tensor], latent: Latent | None) -> Sequence[Tensor]:
    """Returns the tensors of a dispatch: latents replace k and v, and their matrix is the last."""
    if latent is None:
        return tensors
    q, _, _, *others = tensors
    return [q, latent.latent, latent.rotary, *others, latent.weight]


def _dense(tensors: Sequence[Tensor], prepared: PreparedLayout) -> tuple[Tensor, ...]:
    """Returns contiguous tensors; of those whose rows are not moved, only heads have to be.

    Kernels take any strides of rows and heads, but read the numbers of a head one after the other.
    """
    if prepared.layout.is_one_call:
        return tuple(t if t.stride(-1) == 1 else t.contiguous() for t in tensors)
    return tuple(tensor.contiguous() for tensor in tensors)
