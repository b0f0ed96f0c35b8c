"""Functions that ranks run in the tests of transformers: layers, loops and generation."""

from __future__ import annotations

import time
from functools import partial
from typing import Any

import torch
import torch.distributed as dist
from integrations.counting import counted, recorded_devices
from integrations.tiny import (
    LENGTHS,
    batches,
    features,
    gradients,
    loss_of,
    model_of,
    packed,
)
from torch import Tensor
from torch.utils.checkpoint import create_selective_checkpoint_contexts

from distca.dispatch.transports.base import ExchangeError
from distca.integrations.transformers import collate_shared, register
from distca.integrations.transformers.leaks import Leak, find_leaks

SELECTIVE = partial(create_selective_checkpoint_contexts, [torch.ops.distca.core_attention.default])
CHECKPOINTING: dict[str, dict[str, Any]] = {
    "reentrant": {"use_reentrant": True},
    "plain": {"use_reentrant": False},
    "selective": {"use_reentrant": False, "context_fn": SELECTIVE},
}


def summed(model: Any, group: dist.ProcessGroup) -> dict[str, Tensor]:
    """Returns the sum of the gradients of all ranks; a missing gradient counts as zeros."""
    grads = {}
    for name, p in model.named_parameters():
        if p.requires_grad:
            grads[name] = torch.zeros_like(p) if p.grad is None else p.grad.clone()
            dist.all_reduce(grads[name], group=group)
    return grads


def learned(
    group: dist.ProcessGroup, name: str, checkpointing: str | None = None, use_cache: bool = False
) -> tuple[float, dict[str, Tensor], int]:
    """Returns the loss of this rank, the gradients of all ranks and the exchanges of a step."""
    register(cost="pairs")
    model = model_of(name, "distca")
    if checkpointing:
        model.gradient_checkpointing_enable(CHECKPOINTING[checkpointing])
    with counted() as sent:
        loss = loss_of(model, batches()[dist.get_rank(group)], use_cache=use_cache)
        loss.backward()
    return loss.item(), summed(model, group), len(sent)


def learned_rollouts(
    group: dist.ProcessGroup, ranks: list[list[dict[str, list[int]]]], ahead: bool
) -> tuple[float, dict[str, Tensor]]:
    """Returns the loss of this rank's rows, and the gradients of all ranks."""
    registered = register(cost="pairs")
    model = model_of("llama", "distca")
    batch = collate_shared(ranks[dist.get_rank(group)])
    if ahead:
        (batch,) = registered.plan_ahead([batch])
    loss = model(**batch).loss
    loss.backward()
    return loss.item(), summed(model, group)


def devices_of(group: dist.ProcessGroup, options: dict[str, Any]) -> list[dict[str, list[Any]]]:
    """Returns the devices of the plans of a step, with one rank on each node."""
    with recorded_devices(ranks_per_node=1) as found:
        register(cost="pairs", **options)
        loss_of(model_of("llama", "distca"), batches()[dist.get_rank(group)])
    return found


def frozen(
    group: dist.ProcessGroup, attention: str, checkpointing: str | None
) -> dict[str, Tensor]:
    """Returns the gradients of low-rank adapters in the last layer."""
    register(cost="pairs")
    model = model_of("llama", attention).requires_grad_(False)
    if checkpointing:
        model.gradient_checkpointing_enable(CHECKPOINTING[checkpointing])
        model.enable_input_require_grads()
    adapt(model.model.layers[-1].self_attn)
    for batch in batches() if attention == "sdpa" else [batches()[dist.get_rank(group)]]:
        loss_of(model, batch).backward()
    return gradients(model) if attention == "sdpa" else summed(model, group)


def adapt(attention: Any) -> None:
    for name in ("q_proj", "v_proj"):
        setattr(attention, name, Adapted(getattr(attention, name)))


class Adapted(torch.nn.Module):
    """LoRA: a frozen linear layer and a trained one of low rank."""

    def __init__(self, base: torch.nn.Linear) -> None:
        super().__init__()
        self.base = base
        draw = torch.Generator().manual_seed(1)
        self.down = torch.nn.Parameter(torch.randn(2, base.in_features, generator=draw))
        self.up = torch.nn.Parameter(torch.randn(base.out_features, 2, generator=draw))

    def forward(self, x: Tensor) -> Tensor:
        return self.base(x) + x @ self.down.T @ self.up.T


def collated(group: dist.ProcessGroup, options: dict[str, bool]) -> float:
    """Returns the loss of a batch of transformers' own collator."""
    from transformers import DataCollatorWithFlattening

    register(cost="pairs")
    rank = dist.get_rank(group)
    batch = DataCollatorWithFlattening(**options)(features(LENGTHS[rank], rank))
    return loss_of(model_of("llama", "distca"), batch).item()


def planned_ahead(
    group: dist.ProcessGroup, lengths: list[list[list[int]]], learn: bool
) -> tuple[list[float], dict[str, Tensor], int]:
    """Returns losses, gradients and exchanges; each rank has its own number of batches."""
    one = register(cost="pairs")
    model = model_of("llama", "distca")
    own = lengths[dist.get_rank(group)]
    loader = one.plan_ahead([packed(documents, seed) for seed, documents in enumerate(own)])
    losses = []
    with torch.set_grad_enabled(learn), counted() as sent:
        for batch in loader:
            loss = loss_of(model, batch)
            losses.append(loss.item())
            if learn:
                loss.backward()
    return losses, summed(model, group), len(sent)


def evaluated(group: dist.ProcessGroup, num_batches: list[int]) -> list[float]:
    """Evaluates a different number of batches on each rank, without gradients."""
    register(cost="pairs")
    model = model_of("llama", "distca").eval()
    with torch.no_grad(), counted() as sent:
        losses = [
            loss_of(model, packed([50, 20], seed)).item()
            for seed in range(num_batches[dist.get_rank(group)])
        ]
    assert not sent
    return losses


def generated(group: dist.ProcessGroup, name: str, attention: str) -> list[list[int]] | None:
    """Generates greedily on the first rank only; one of two prompts is padded on its left."""
    register(cost="pairs")
    if dist.get_rank(group):
        return None
    model = model_of(name, attention)
    prompts = packed([130, 130])["input_ids"].view(2, 130)
    mask = torch.ones_like(prompts)
    mask[1, :60] = 0
    options = {"max_new_tokens": 8, "do_sample": False}
    tokens = model.generate(prompts, attention_mask=mask, **options)
    single = model.generate(prompts[:1], **options)
    return [*tokens[:, 130:].tolist(), *single[:, 130:].tolist()]


def padded_on_one(group: dist.ProcessGroup, ahead: bool) -> tuple[str, float]:
    """Returns the error of this rank and its seconds, if the second rank's batch is padded."""
    one = register(cost="pairs")
    model = model_of("llama", "distca")
    batch = batches()[dist.get_rank(group)]
    if dist.get_rank(group):
        batch["attention_mask"] = torch.ones_like(batch["input_ids"])
        batch["attention_mask"][:, -3:] = 0
    began = time.monotonic()
    try:
        for given in one.plan_ahead([batch]) if ahead else [batch]:
            loss_of(model, given)
    except ValueError as error:
        return str(error), time.monotonic() - began
    return "", 0.0


def missing(group: dist.ProcessGroup) -> str:
    """Returns the error of the first rank, if the second one does not call its model again."""
    register(cost="pairs", timeout_s=2)
    model = model_of("llama", "distca")
    loss_of(model, packed([200]))
    words = ""
    if dist.get_rank(group) == 0:
        try:
            loss_of(model, packed([200]))
        except ExchangeError as error:
            words = str(error)
    dist.barrier(group)
    return words


def planned_once(group: dist.ProcessGroup, ahead: bool) -> tuple[int, int, int]:
    """Counts gatherings, plans and handshakes of two checkpointed steps with two kinds of masks."""
    from distca.attention import core
    from distca.integrations.shared import planned, planned_batch

    counts = {"gather_or_raise": 0, "plan": 0, "agree": 0}

    def counting(home: Any, name: str) -> Any:
        called = getattr(home, name)

        def call(*args: Any, **kwargs: Any) -> Any:
            counts[name] += 1
            return called(*args, **kwargs)

        setattr(home, name, call)
        return lambda: setattr(home, name, called)

    one = register(cost="pairs")
    model = model_of("gemma3", "distca")
    model.gradient_checkpointing_enable(CHECKPOINTING["plain"])
    own = LENGTHS[dist.get_rank(group)]
    loader: Any = [packed([*own, length]) for length in (3, 4)]  # equal ones share plans
    homes = {"gather_or_raise": planned, "plan": planned_batch, "agree": core}
    undo = [counting(home, name) for name, home in homes.items()]
    for batch in one.plan_ahead(loader) if ahead else loader:
        loss_of(model, batch).backward()
    for back in undo:
        back()
    return counts["gather_or_raise"], counts["plan"], counts["agree"]


def leaking(group: dist.ProcessGroup, name: str) -> list[Leak]:
    """Finds leaks in training, with parts of documents moved."""
    register(cost="pairs")
    lengths = [[400, 30, 1, 90], [20, 7, 1, 12]][dist.get_rank(group)]
    with counted() as sent:
        leaks = find_leaks(model_of(name, "distca"), lengths, gradients=True)
    assert sent
    return leaks


def loss_of_rows(group: dist.ProcessGroup, batch: dict[str, Tensor]) -> float:
    register(cost="pairs")
    return loss_of(model_of("llama", "distca"), batch).item()


def learned_on_gpu(
    group: dist.ProcessGroup, name: str, ahead: bool
) -> tuple[float, dict[str, Tensor]]:
    """Returns the loss of this rank and the gradients of all ranks, in float32 on one GPU."""
    one = register()
    model = model_of(name, "distca").cuda()
    loader = [batches()[dist.get_rank(group)]]
    losses = []
    for batch in one.plan_ahead(loader) if ahead else loader:
        moved = {key: x.cuda() if isinstance(x, Tensor) else x for key, x in batch.items()}
        loss = loss_of(model, moved)
        loss.backward()
        losses.append(loss.item())
    grads = {key: grad.cpu() for key, grad in gradients(model).items()}
    for grad in grads.values():
        dist.all_reduce(grad, group=group)
    return losses[0], grads
