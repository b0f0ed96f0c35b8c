"""Functions that the ranks of tests run, in a module that their processes can import."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
import torch.distributed as dist
from attention.tokens import SCALE, Tokens, expand
from ranks import IMPATIENT
from torch import Tensor

from distca.attention.backends.base import Saved
from distca.attention.core import CoreAttention
from distca.attention.inputs import Inputs
from distca.attention.passes import BackwardPass, ForwardPass
from distca.dispatch.latent import Latent
from distca.planning.plan import Plan

FACES = ("op", "async")


def attend(
    attention: CoreAttention,
    plan: Plan,
    tokens: Tokens,
    *,
    face: str = "op",
    device: str = "cpu",
    wanted: Sequence[bool] = (True, True, True),
) -> list[Tensor]:
    """Returns [out, dq, dk, dv] of this rank; gradients that are not wanted are zeros.

    The gradients of sinks, and of the matrix that expands latents, come last. They are always
    wanted.
    """
    rank = attention.transport.rank
    q, k, v, grad_out = (t.to(device) for t in tokens.of_rank(rank))
    shared = [t.to(device, copy=True).requires_grad_() for t in tokens.shared]
    if rank >= plan.placement.num_workers:
        attention.serve(plan, layers=1)
        none = [t[tokens.rows(rank)] for t in (tokens.grad_out, tokens.q, *tokens.factors)]
        return none + [torch.zeros_like(t) for t in shared]
    if face == "steps":  # without autograd, which has one thread per GPU, not one per rank
        return steps(attention, plan, tokens, Inputs(q, k, v), grad_out)
    mine = [q, *(t[tokens.rows(rank)].to(device) for t in tokens.factors)]
    leaves = [t.requires_grad_(want) for t, want in zip(mine, wanted, strict=True)]
    given, latent = leaves, None
    if tokens.latent is not None:
        latent = Latent(*leaves[1:], shared[-1])
        given = [leaves[0], *expand(latent, k.shape[1], q.shape[2])]
    options = {"sinks": None if tokens.sinks is None else shared[0], "latent": latent}
    if face == "op":
        out = attention(*given, plan, **options)
    else:
        pending = attention.dispatch(*given, plan, **options)
        pending.compute()
        out = pending.combine()
    if out.requires_grad:
        out.backward(grad_out)
    leaves += shared
    grads = [torch.zeros_like(t) if t.grad is None else t.grad for t in leaves]
    return [out.detach(), *grads]


def steps(
    attention: CoreAttention, plan: Plan, tokens: Tokens, inputs: Inputs, grad_out: Tensor
) -> list[Tensor]:
    """The same by hand: where latents travel, home adds what follows from its own dk and dv."""
    if tokens.latent is not None:
        rows = tokens.rows(attention.transport.rank)
        mine = (*(t[rows] for t in tokens.factors), tokens.latent.weight)
        inputs = inputs._replace(latent=Latent(*(t.to(grad_out.device) for t in mine)))
    q, k, v, _, latent = inputs
    prepared = attention._agree_on(inputs, plan)[1].plan
    attended = ForwardPass(prepared, q, k, v, latent).combine()
    saved = Saved(q, k, v, *attended)
    dq, dk, dv, *received = BackwardPass(prepared, grad_out, saved, latent).combine()
    if latent is None:
        return [attended.out, dq, dk, dv]
    own = latent.differentiate(dk, dv)
    return [attended.out, dq, *(a + b for a, b in zip(own, received, strict=True))]


def exact(
    group: dist.ProcessGroup, plan: Plan, tokens: Tokens, device: str, options: dict[str, Any]
) -> list[Tensor]:
    face = options.pop("face", "op")
    wanted = options.pop("wanted", None)
    attention = CoreAttention(group, scale=SCALE, softcap=tokens.softcap, **options)
    mine = (True,) * 3 if wanted is None else wanted[attention.transport.rank]
    found = attend(attention, plan, tokens, face=face, device=device, wanted=mine)
    return [t.cpu() for t in found]


def refused(group: dist.ProcessGroup, plans: list[Plan], what: str) -> str:
    """Returns the error on this rank when rank 1 does something else than the others."""
    odd = dist.get_rank(group) == 1
    plan = plans[1 if odd and what == "plan" else 0]
    changed = {"scale": {"scale": 0.5}, "softcap": {"softcap": 30.0}}.get(what, {}) if odd else {}
    attention = CoreAttention(IMPATIENT[group] if what == "absence" else group, **changed)
    q, k, v, _ = Tokens(plan, torch.float32).of_rank(attention.transport.rank)
    if odd:
        change = {
            "dtype": lambda t: t.double(),
            "shape": lambda t: t[1:],
            "device": lambda t: t.to("meta"),
        }.get(what, lambda t: t)
        q, k, v = (change(t) for t in (q, k, v))
    try:
        with torch.set_grad_enabled(not (odd and what == "grad mode")):
            if odd and what == "absence":
                dist.barrier(group)
            elif odd and what == "serving":
                attention.serve(plan, layers=1)
            else:
                attention(q, k, v, plan)
    except (ValueError, RuntimeError) as error:
        if what == "absence":
            dist.barrier(group)
        return f"{type(error).__name__}: {error}"
    return "nothing"


class Block(torch.nn.Module):
    """A layer with weights around the attention."""

    def __init__(self, attention: CoreAttention, heads: int = 4, kv_heads: int = 2, size: int = 8):
        super().__init__()
        width = heads * size
        self.shape = (heads, kv_heads, size)
        self.before = torch.nn.Linear(width, (heads + 2 * kv_heads) * size)
        self.after = torch.nn.Linear(width, width)
        self.attention = attention

    def forward(self, x: Tensor, plan: Plan) -> Tensor:
        heads, kv_heads, size = self.shape
        qkv = self.before(x).view(len(x), heads + 2 * kv_heads, size)
        q, k, v = qkv.split([heads, kv_heads, kv_heads], 1)  # not contiguous
        return x + self.after(self.attention(q, k, v, plan).flatten(1))


class Model(torch.nn.Module):
    def __init__(self, attention: CoreAttention, layers: int = 2):
        super().__init__()
        torch.manual_seed(0)
        self.layers = torch.nn.ModuleList(Block(attention) for _ in range(layers))

    def forward(self, x: Tensor, plan: Plan) -> Tensor:
        for layer in self.layers:
            x = layer(x, plan)
        return x


def model_gradients(
    group: dist.ProcessGroup, plan: Plan, x: Tensor, how: str
) -> tuple[float, dict[str, Tensor]]:
    """Returns the loss of a small model, summed over all ranks, and its gradients by parameter."""
    attention = CoreAttention(group)
    model: Any = Model(attention).to(x.dtype)
    rank = attention.transport.rank
    if how == "fsdp":
        from torch.distributed.device_mesh import DeviceMesh
        from torch.distributed.fsdp import fully_shard

        mesh = DeviceMesh.from_group(group, "cpu")
        for layer in model.layers:
            fully_shard(layer, mesh=mesh)
        fully_shard(model, mesh=mesh)
        for module in (*model.layers, model):
            module.set_force_sum_reduction_for_comms(True)
            module.set_gradient_divide_factor(1.0)
    run = torch.compile(model, backend="aot_eager") if how == "compile" else model
    rows = Tokens(plan, x.dtype).rows(rank)
    loss = run(x[rows], plan).square().sum()
    loss.backward()
    grads = {}
    for name, parameter in model.named_parameters():
        grad = parameter.grad
        if how == "fsdp":
            grad = grad.full_tensor()
        else:
            dist.all_reduce(grad, group=group)
        grads[name] = grad.detach()
    total = loss.detach().clone()
    dist.all_reduce(total, group=group)
    return total.item(), grads
