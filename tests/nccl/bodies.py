"""Functions that ranks on a shared GPU run: late exchanges, and many changing plans."""

from __future__ import annotations

import random
from collections.abc import Sequence
from typing import Any

import torch
import torch.distributed as dist
from attention.bodies import attend
from attention.tokens import SCALE, Tokens
from strategies import Batch
from torch import Tensor

from distca.attention.core import CoreAttention
from distca.dispatch.transports.base import Check, Wait
from distca.dispatch.transports.distributed import DistributedTransport
from distca.planning.plan import Plan

HEADS = (8, 2, 64)
CYCLES = 10_000_000  # about 5 ms


class Late:
    """Starts exchanges late on the device, each rank later than the one before.

    The receive buffer holds NaN until then, so what is read too early is noticed.
    """

    def __init__(self, transport: DistributedTransport) -> None:
        self.transport = transport
        self.stream = torch.cuda.Stream()

    def __getattr__(self, name: str) -> Any:
        return getattr(self.transport, name)

    def start(
        self,
        send: Tensor,
        recv: Tensor,
        send_bytes: Sequence[int],
        recv_bytes: Sequence[int],
        check: Check | None = None,
    ) -> Wait:
        self.stream.wait_stream(torch.cuda.current_stream())
        with torch.cuda.stream(self.stream):
            recv.fill_(255)  # NaN in every floating dtype
            torch.cuda._sleep(CYCLES * (1 + self.transport.rank))
            wait = self.transport.start(send, recv, send_bytes, recv_bytes, check)
        for tensor in (send, recv):
            tensor.record_stream(self.stream)
        return wait


def attended_late(
    group: dist.ProcessGroup, plan: Plan, tokens: Tokens, backend: str, late: bool
) -> list[Tensor]:
    """Returns out, dq, dk and dv of this rank, after two rounds through the same buffers."""
    transport = DistributedTransport(group)
    attention = CoreAttention(
        transport=Late(transport) if late else transport,
        backend=backend,
        scale=SCALE,
        deterministic=True,
    )
    for _ in range(2):
        found = attend(attention, plan, tokens, device="cuda")
    torch.cuda.synchronize()
    return [tensor.cpu() for tensor in found]


def memory_of_changing_plans(group: dist.ProcessGroup, steps: int, different: int) -> list[int]:
    """Returns the bytes allocated after each step; the plans of all steps repeat in turn."""
    attention = CoreAttention(group, backend="flash")
    num_ranks, allocated = dist.get_world_size(group), []
    for step in range(steps):
        draw = random.Random(step % different)
        long, short = [draw.randint(2000, 6000)], [draw.randint(1, 700) for _ in range(3)]
        plan = Batch([long, *[short] * (num_ranks - 1)]).plan(cost="pairs")
        _step(attention, plan)
        del plan
        torch.cuda.synchronize()
        allocated.append(torch.cuda.memory_allocated())
    return allocated


def _step(attention: CoreAttention, plan: Plan) -> None:
    rows = int(plan.placement.tokens[attention.transport.rank])
    q, k, v = (
        torch.randn(rows, heads, HEADS[2], dtype=torch.bfloat16, device="cuda").requires_grad_()
        for heads in (HEADS[0], HEADS[1], HEADS[1])
    )
    attention(q, k, v, plan).sum().backward()
