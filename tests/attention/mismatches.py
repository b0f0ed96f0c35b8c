"""Ranks that do something else than the others, long after a plan's first use."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace

import torch
import torch.distributed as dist
from attention.tokens import SCALE, Tokens
from ranks import IMPATIENT
from torch import Tensor

from distca.attention.core import CoreAttention
from distca.planning.plan import Plan

Layer = Callable[..., Tensor]


class Ranks:
    """One rank with two attentions, as ping and pong have, for which both plans are known."""

    def __init__(
        self, group: dist.ProcessGroup, plans: list[Plan], face: str, *, impatient: bool = False
    ) -> None:
        group = IMPATIENT[group] if impatient else group
        self.halves = [CoreAttention(group, scale=SCALE, backend="reference") for _ in range(2)]
        self.rank, self.plans, self.face = dist.get_rank(group), plans, face
        self.odd = self.rank == 1
        for attention in self.halves:
            for number in (0, 1):
                self.layer(number, attention=attention).sum().backward()
                with torch.no_grad():
                    self.layer(number, attention=attention)

    def inputs(self, number: int, dtype: torch.dtype = torch.float64) -> list[Tensor]:
        tokens = Tokens(self.plans[number], dtype).of_rank(self.rank)[:3]
        return [t.requires_grad_(torch.is_grad_enabled()) for t in tokens]

    def layer(
        self,
        number: int = 0,
        *,
        attention: CoreAttention | None = None,
        change: Callable[[Tensor], Tensor] = lambda t: t,
        sinks: Tensor | None = None,
    ) -> Tensor:
        """Returns the output of one layer by plan ``number``."""
        attention = self.halves[0] if attention is None else attention
        qkv = [change(t) for t in self.inputs(number)]
        if self.face == "op":
            return attention(*qkv, self.plans[number], sinks=sinks)
        pending = attention.dispatch(*qkv, self.plans[number], sinks=sinks)
        pending.compute()
        return pending.combine()


def plan(ranks: Ranks) -> None:
    ranks.layer(1 if ranks.odd else 0)


def new_plan(ranks: Ranks) -> None:
    """Rank 1 makes the same plan again, which it then uses for the first time."""
    known = ranks.plans[0]
    if ranks.odd:
        ranks.plans[0] = replace(known)
    try:
        ranks.layer()
    finally:
        ranks.plans[0] = known


def plan_in_backward(ranks: Ranks) -> None:
    outs = [ranks.layer(number) for number in (0, 1)]
    outs[1 if ranks.odd else 0].sum().backward()


def backward_order(ranks: Ranks) -> None:
    """Both layers send messages of the same sizes by the same plan."""
    first, second = ranks.layer(), ranks.layer()
    for out in (first, second) if ranks.odd else (second, first):
        out.sum().backward()


def dtype(ranks: Ranks) -> None:
    ranks.layer(change=lambda t: t.float() if ranks.odd else t)


def heads(ranks: Ranks) -> None:
    ranks.layer(change=lambda t: t.repeat(1, 2, 1) if ranks.odd else t)


def head_dim(ranks: Ranks) -> None:
    ranks.layer(change=lambda t: t.repeat(1, 1, 2) if ranks.odd else t)


def grad_mode(ranks: Ranks) -> None:
    with torch.set_grad_enabled(not ranks.odd):
        ranks.layer()


def sinks(ranks: Ranks) -> None:
    ranks.layer(sinks=torch.zeros(4) if ranks.odd else None)


def shape_of_sinks(ranks: Ranks) -> None:
    ranks.layer(sinks=torch.zeros(3 if ranks.odd else 4))


def shape(ranks: Ranks) -> None:
    ranks.layer(change=lambda t: t[1:] if ranks.odd else t)


def no_tensor(ranks: Ranks) -> None:
    ranks.layer(change=lambda t: t.tolist() if ranks.odd else t)


def layers(ranks: Ranks) -> None:
    out = ranks.layer()
    if ranks.odd:
        out.sum().backward()
    else:
        ranks.layer()


def half(ranks: Ranks) -> None:
    for attention in ranks.halves[::-1] if ranks.odd else ranks.halves:
        ranks.layer(attention=attention)


def order(ranks: Ranks) -> None:
    """Rank 1 computes ping before it dispatches pong."""
    ping = ranks.halves[0].dispatch(*ranks.inputs(0), ranks.plans[0])
    if ranks.odd:
        ping.compute()
    pong = ranks.halves[1].dispatch(*ranks.inputs(0), ranks.plans[0])
    if not ranks.odd:
        ping.compute()
    ping.combine()
    pong.combine()


def absence(ranks: Ranks) -> None:
    if not ranks.odd:
        ranks.layer()


def absence_in_backward(ranks: Ranks) -> None:
    out = ranks.layer()
    if not ranks.odd:
        out.sum().backward()


def told(
    group: dist.ProcessGroup, plans: list[Plan], what: Callable[[Ranks], None], face: str
) -> tuple[str, list[Tensor]]:
    """Returns the error on this rank, and then an output and a gradient of both plans."""
    absent = what.__name__.startswith("absence")
    ranks = Ranks(group, plans, face, impatient=absent)
    error = "nothing"
    try:
        what(ranks)
    except (ValueError, RuntimeError) as problem:
        error = f"{type(problem).__name__}: {problem}"
    after = []
    if what not in (order, absence, absence_in_backward):
        for number in (0, 1):
            q, k, v = ranks.inputs(number)
            out = ranks.halves[0](q, k, v, plans[number])
            after += [out.detach(), *torch.autograd.grad(out.sum(), q)]
    return error, after


def served(group: dist.ProcessGroup, plan: Plan, layers: int, backward: int) -> str:
    """Returns the error on this rank when workers run two layers, after a step that was right."""
    attention = CoreAttention(group, scale=SCALE, backend="reference")
    rank = dist.get_rank(group)

    def step(layers: int, backward: int) -> None:
        if rank >= plan.placement.num_workers:
            attention.serve(plan, layers=layers, backward=backward)
            return
        x, k, v = (t.requires_grad_() for t in Tokens(plan, torch.float64).of_rank(rank)[:3])
        for _ in range(2):
            x = attention(x, k, v, plan)
        x.sum().backward()

    step(2, 2)
    try:
        step(layers, backward)
        step(2, 2)  # a server that left too early comes with its next step
    except (ValueError, RuntimeError) as error:
        return f"{type(error).__name__}: {error}"
    return "nothing"
