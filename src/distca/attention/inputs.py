"""The tensors that a layer gives to ``CoreAttention`` on one rank, and their checks.

Legend: T own token rows, H heads, G key/value heads, D head size of queries and keys, V that of
values and outputs.
"""

from __future__ import annotations

from collections.abc import Hashable
from dataclasses import replace
from typing import NamedTuple

import torch
from torch import Tensor
from torch.autograd.forward_ad import unpack_dual

from distca.attention import sinks as with_sinks
from distca.dispatch import latent as latents
from distca.dispatch.latent import Latent
from distca.dispatch.tensors import TensorSpec
from distca.dispatch.transports.base import Transport
from distca.planning.plan import Plan


class Inputs(NamedTuple):
    q: Tensor  # [T, H, D]
    k: Tensor  # [T, G, D]
    v: Tensor  # [T, G, V]
    sinks: Tensor | None = None  # [H]
    latent: Latent | None = None  # the factors of k and v

    @property
    def spec(self) -> TensorSpec:
        """The kind of tensors that kernels and messages are prepared for."""
        spec = TensorSpec.of(self.q, self.k, self.v)
        if self.latent is None:
            return spec
        latent_dim, rope_dim = self.latent.latent.shape[1], self.latent.rotary.shape[1]
        return replace(spec, latent_dim=latent_dim, rope_dim=rope_dim)

    @property
    def kind(self) -> Hashable:
        """What a prepared plan depends on; also of tensors that are wrong."""
        kinds = tuple((each.shape, each.dtype, each.device) for each in self._given)
        return torch.is_grad_enabled(), self.sinks is None, self.latent is None, kinds

    @property
    def wants_gradient(self) -> bool:
        return torch.is_grad_enabled() and any(tensor.requires_grad for tensor in self._given)

    @property
    def _given(self) -> tuple[Tensor, ...]:
        sinks = () if self.sinks is None else (self.sinks,)
        return (self.q, self.k, self.v, *sinks, *(self.latent or ()))

    def joining(self) -> Inputs:
        """Returns the same with q as a new leaf, if peers need a gradient and this rank does not.

        Autograd then runs the backward exchange on this rank too; without it, peers would deadlock.
        """
        if self.wants_gradient or not torch.is_grad_enabled():
            return self
        q, k, v = (t.clone() if t.is_inference() else t for t in self[:3])  # which autograd refuses
        return self._replace(q=q.detach().requires_grad_(), k=k, v=v)

    def check_kinds(self, plan: Plan) -> None:
        """Raises ``ValueError`` for what is no plan, or no dense tensor.

        Also for forward-mode derivatives, which would silently be zero.
        """
        check_plan(plan)
        named = dict(zip(self._fields, self[:3], strict=False)) | {"sinks": self.sinks}
        for name, given in named.items():
            if given is None and name == "sinks":
                continue
            if not isinstance(given, Tensor) or given.layout != torch.strided:
                kind = given.layout if isinstance(given, Tensor) else type(given).__name__
                raise ValueError(f"{name} is a {kind}: give a dense tensor")
            if hasattr(given, "to_local"):  # asked by name, since importing DTensor takes a second
                raise ValueError(f"{name} is a {type(given).__name__}: give {name}.to_local()")
        if self.latent is not None and not latents.is_latent(self.latent):
            raise ValueError(latents.NO_LATENT)
        duals = map(unpack_dual, self._given)
        if any(dual.tangent is not None for dual in duals):
            raise ValueError(
                "core attention has no forward-mode derivative (torch.func.jvp,"
                " torch.autograd.forward_ad): use the backward pass, or another attention"
            )

    def check(self, plan: Plan, transport: Transport) -> None:
        """Raises ``ValueError`` if these are not the tensors of a plan's tokens on this rank."""
        q, k, v = self.q, self.k, self.v
        rank, ranks = transport.rank, transport.num_ranks
        if plan.devices.num_ranks != ranks:
            raise ValueError(
                f"the plan is for {plan.devices.num_ranks} ranks but the group has {ranks}:"
                " plan for the ranks of the group"
            )
        if refusal := transport.refusal(q.device):
            raise ValueError(f"{refusal}: move q, k and v, or use another group")
        tokens = num_tokens(plan, rank)
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
        fits = k.shape[1] == v.shape[1] and q.shape[2] == k.shape[2]
        if not fits or not q.shape[1] * v.shape[2] or q.shape[1] % max(k.shape[1], 1):
            raise ValueError(
                f"q {tuple(q.shape)}, k {tuple(k.shape)}, v {tuple(v.shape)}: k and v must have the"
                " same number of heads, and q the head size of k and a multiple of their heads"
            )
        if self.sinks is not None and (refusal := with_sinks.refusal(self.sinks, q)):
            raise ValueError(refusal)
        spec = TensorSpec.of(q, k, v)
        if self.latent is not None and (refusal := latents.refusal(self.latent, spec, tokens)):
            raise ValueError(refusal)

    def check_expansion(self) -> None:
        """Raises ``ValueError`` if the first key is not what its latent expands to.

        It waits for the device.
        """
        if self.latent is None or not len(self.k):
            return
        if refusal := latents.difference(self.latent, self.spec, self.k, self.v):
            raise ValueError(refusal)


def check_plan(plan: object) -> None:
    """Raises ``ValueError`` for what is no plan."""
    if not isinstance(plan, Plan):
        raise ValueError(
            f"the plan is a {type(plan).__name__}: give what distca.plan or Plan.load returns"
        )


def num_tokens(plan: Plan, rank: int) -> int:
    """Returns the tokens that a plan places on a rank; 0 for a dedicated server."""
    return int(plan.placement.tokens[rank]) if rank < plan.placement.num_workers else 0
