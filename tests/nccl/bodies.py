"""Functions that ranks on a shared GPU run: late and early exchanges, and many changing plans."""

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
from torch.nn.attention import SDPBackend, sdpa_kernel
from torch.nn.functional import scaled_dot_product_attention

from distca.attention.core import CoreAttention
from distca.dispatch.transports.base import Check, Wait
from distca.dispatch.transports.distributed import DistributedTransport
from distca.dispatch.transports.exchange_group import new_exchange_group
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


def attention_before_exchange(group: dist.ProcessGroup) -> float:
    """Returns the share of a call of attention after which an exchange ends, launched after it."""
    exchanges = new_exchange_group(range(dist.get_world_size(group)))
    q = torch.randn(1, 8, 131072, 128, dtype=torch.bfloat16, device="cuda")
    sent, beside = torch.ones(1024, device="cuda"), torch.cuda.Stream()
    began, computed, exchanged = (torch.cuda.Event(enable_timing=True) for _ in range(3))
    with sdpa_kernel(SDPBackend.FLASH_ATTENTION):
        for _ in range(2):  # connects and loads kernels
            dist.all_reduce(sent, group=exchanges)
            torch.cuda.synchronize()
            with torch.cuda.stream(beside):
                began.record()
                scaled_dot_product_attention(q, q, q, is_causal=True)
                computed.record()
            work = dist.all_reduce(sent, group=exchanges, async_op=True)  # on NCCL's own stream
            work.wait()
            exchanged.record()
            torch.cuda.synchronize()
    return began.elapsed_time(exchanged) / began.elapsed_time(computed)


def disagreeing(group: dist.ProcessGroup, plans: list[Plan]) -> str:
    """Returns the error of a rank when rank 1 goes on with another plan than the others."""
    attention, rank = CoreAttention(group, backend="flash"), dist.get_rank(group)
    for plan in plans:
        _step(attention, plan)
    try:
        for _ in range(50):
            _step(attention, plans[rank == 1])
        torch.cuda.synchronize()
    except Exception as error:
        return f"{type(error).__name__}: {error}"
    return "nothing"
