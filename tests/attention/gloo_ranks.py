"""What each process of the gloo test runs; a module of its own, since processes import it."""

from __future__ import annotations

import os
import tempfile

import torch
import torch.distributed as dist
import torch.multiprocessing as mp
from torch import Tensor

from distca.attention.backend import Traits
from distca.attention.choice import choose
from distca.attention.steps import Route, backward, forward
from distca.dispatch.layout import Layout
from distca.dispatch.transport import DistributedTransport
from distca.planning.plan import Plan

Inputs = tuple[Tensor, Tensor, Tensor, Tensor]  # q, k, v, grad_out of one rank


def run_ranks(plan: Plan, inputs: list[Inputs], scale: float) -> list[list[Tensor]]:
    """[out, dq, dk, dv] of every rank, each computed in a process of its own."""
    with tempfile.TemporaryDirectory() as folder:
        mp.spawn(_rank, (plan, inputs, scale, folder), nprocs=len(inputs))
        return [torch.load(os.path.join(folder, f"{rank}.pt")) for rank in range(len(inputs))]


def _rank(rank: int, plan: Plan, inputs: list[Inputs], scale: float, folder: str) -> None:
    torch.set_num_threads(1)
    store = f"file://{folder}/store"
    dist.init_process_group("gloo", init_method=store, rank=rank, world_size=len(inputs))
    q, k, v, grad_out = inputs[rank]
    transport = DistributedTransport()
    backend = choose("reference", Traits.of(q, k, [], deterministic=True))
    routes = [Route.of(Layout.of(plan, rank, backward=way), q.device) for way in (False, True)]
    attended = forward(routes[0], transport, backend, q, k, v, scale)
    grads = backward(routes[1], transport, backend, grad_out, q, k, v, attended, scale)
    torch.save([attended.out, *grads], os.path.join(folder, f"{rank}.pt"))
    dist.destroy_process_group()
