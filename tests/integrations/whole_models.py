"""Tiny models of every kind that are trained for some steps: experts, states, images.

The reference is one process with transformers' own attention, which is given the documents of all
ranks one by one. Both take the same steps of SGD.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import torch
import torch.distributed as dist
import torch.nn.functional as F
from integrations import both_ways
from integrations.family_models import model_of as family_model
from integrations.tiny import VOCAB
from torch import Tensor, nn
from torch.distributed.fsdp import FSDPModule, fully_shard

from distca.integrations.transformers import register

LENGTHS = ([150, 9], [33, 40, 20, 1])  # documents of each rank
RATE, IMAGE = 0.1, VOCAB - 1
EXPERTS = {"qwen3_moe"}  # their experts are divided among the ranks
Choices = list[Tensor]  # of each router in turn: the experts [tokens, k] of its tokens


def model_of(name: str, attention: str) -> Any:
    if name == "gemma3":
        return both_ways.model_of(name, attention)
    model = family_model(name, attention)
    model.config.use_cache = False
    return model


def documents_of(name: str, rank: int, step: int) -> list[dict[str, Tensor]]:
    """Returns the documents of a rank; those of Gemma 3 have an image of four tokens each."""
    draw = torch.Generator().manual_seed(1000 * rank + step % 2)
    documents = []
    for length in LENGTHS[rank]:
        tokens = torch.randint(3, VOCAB - 1, (1, length), generator=draw)
        batch = {"input_ids": tokens, "position_ids": torch.arange(length)[None]}
        if name == "gemma3" and length > 8:
            tokens[0, 2:6] = IMAGE
            batch["pixel_values"] = torch.randn(1, 3, 28, 28, generator=draw)
        if name == "gemma3":
            batch["token_type_ids"] = (tokens == IMAGE).long()
        documents.append(batch)
    return documents


def packed(documents: list[dict[str, Tensor]]) -> dict[str, Tensor]:
    names = dict.fromkeys(name for document in documents for name in document)
    axis = {"pixel_values": 0}
    return {
        name: torch.cat([one[name] for one in documents if name in one], axis.get(name, 1))
        for name in names
    }


def loss_of(model: Any, batch: dict[str, Any]) -> Tensor:
    """Returns the sum of the losses of all targets, divided by a number that is always the same."""
    logits, tokens = model(**batch).logits[0], batch["input_ids"][0]
    targets = torch.where(batch["position_ids"][0, 1:] == 0, -100, tokens[1:])
    return F.cross_entropy(logits[:-1], targets, reduction="sum") / sum(map(sum, LENGTHS))


def routers_of(model: nn.Module) -> list[nn.Module]:
    return [one for one in model.modules() if type(one).__name__.endswith("TopKRouter")]


def by_eager(name: str, steps: int) -> tuple[list[list[float]], list[Choices]]:
    """Returns [ranks, steps] losses, and the choices of the routers with each rank's tokens."""
    model = model_of(name, "eager")
    optimizer = torch.optim.SGD(model.parameters(), RATE)
    losses: list[list[float]] = [[] for _ in LENGTHS]
    choices: list[Choices] = [[] for _ in LENGTHS]
    found: Choices = []
    for router in routers_of(model):
        router.register_forward_hook(lambda _, __, output: found.append(output[2]))
    for step in range(steps):
        for rank in range(len(LENGTHS)):
            documents = documents_of(name, rank, step)
            total = sum(loss_of(model, document) for document in documents)
            total.backward()
            losses[rank].append(total.item())
            layers = len(found) // len(documents)
            choices[rank] += [torch.cat(found[layer::layers]) for layer in range(layers)]
            found.clear()
        optimizer.step()
        optimizer.zero_grad()
    return losses, choices


def trained(
    group: dist.ProcessGroup, name: str, steps: int, choices: list[Choices], ahead: bool
) -> list[float]:
    """Returns the losses of this rank, with the routers' choices of the reference."""
    registered, rank = register(cost="pairs"), dist.get_rank(group)
    model = model_of(name, "distca")
    pin(model, iter(choices[rank]))
    divided = []
    if name in EXPERTS:
        for layer in model.model.layers:
            layer.mlp.experts = DividedExperts(layer.mlp.experts, group)
            divided += [*layer.mlp.experts.parameters()]
        for part in (*model.model.layers, model):
            fully_shard(part, ignored_params=set(divided))
            assert isinstance(part, FSDPModule)
            part.set_gradient_divide_factor(1.0)  # the loss is a sum
            part.set_force_sum_reduction_for_comms(True)  # for gloo
    optimizer = torch.optim.SGD(model.parameters(), RATE, foreach=False)
    batches: Any = (packed(documents_of(name, rank, step)) for step in range(steps))
    losses = []
    for batch in registered.plan_ahead(list(batches)) if ahead else batches:
        loss = loss_of(model, batch)
        loss.backward()
        losses.append(loss.item())
        for parameter in () if name in EXPERTS else model.parameters():
            if parameter.grad is None:
                parameter.grad = torch.zeros_like(parameter)
            dist.all_reduce(parameter.grad, group=group)
        optimizer.step()
        optimizer.zero_grad()
    return losses


def pin(model: nn.Module, choices: Iterator[Tensor]) -> None:
    """Gives routers their choices: rounding may change them, and then a loss is another one."""

    def choose(router: Any, _: Any, output: tuple[Tensor, ...]) -> tuple[Tensor, ...]:
        chosen = next(choices)
        scores = output[0].softmax(-1, dtype=torch.float).gather(1, chosen)
        if router.norm_topk_prob:
            scores = scores / scores.sum(-1, keepdim=True)
        return output[0], scores, chosen

    for router in routers_of(model):
        router.register_forward_hook(choose)


class DividedExperts(nn.Module):
    """A minimal expert parallelism: each rank has a part of the experts, and tokens travel."""

    def __init__(self, whole: Any, group: dist.ProcessGroup) -> None:
        super().__init__()
        self.group, self.act_fn = group, whole.act_fn
        self.own = whole.num_experts // group.size()
        part = slice(group.rank() * self.own, (group.rank() + 1) * self.own)
        self.gate_up_proj = nn.Parameter(whole.gate_up_proj.data[part].clone())
        self.down_proj = nn.Parameter(whole.down_proj.data[part].clone())

    def forward(self, hidden_states: Tensor, top_k_index: Tensor, top_k_weights: Tensor) -> Tensor:
        order = top_k_index.flatten().argsort(stable=True)
        token, expert = order // top_k_index.shape[1], top_k_index.flatten()[order]
        sent = (expert // self.own).bincount(minlength=self.group.size())
        counts = torch.empty_like(sent)
        dist.all_to_all_single(counts, sent, group=self.group)
        splits = sent.tolist(), counts.tolist()
        numbers = Exchange.apply(expert, *splits, self.group) % self.own
        arrived = Exchange.apply(hidden_states[token], *splits, self.group)
        result = torch.zeros_like(arrived)
        for number in range(self.own):
            rows = (numbers == number).nonzero().flatten()
            gate, up = F.linear(arrived[rows], self.gate_up_proj[number]).chunk(2, -1)
            computed = F.linear(self.act_fn(gate) * up, self.down_proj[number])
            result = result.index_add(0, rows, computed)
        back = Exchange.apply(result, *reversed(splits), self.group)
        weighted = back * top_k_weights.flatten()[order, None]
        return torch.zeros_like(hidden_states).index_add(0, token, weighted)


class Exchange(torch.autograd.Function):
    """An uneven all-to-all of rows, whose gradient is the one in the other direction."""

    @staticmethod
    def forward(
        ctx: Any, rows: Tensor, sent: list[int], received: list[int], group: dist.ProcessGroup
    ) -> Tensor:
        ctx.splits, ctx.group = (sent, received), group
        out = rows.new_empty(sum(received), *rows.shape[1:])
        dist.all_to_all_single(out, rows.contiguous(), received, sent, group=group)
        return out

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor | None, ...]:
        sent, received = ctx.splits
        out = grad.new_empty(sum(sent), *grad.shape[1:])
        dist.all_to_all_single(out, grad.contiguous(), sent, received, group=ctx.group)
        return out, None, None, None
