"""Functions that ranks run in the tests of transformers: Trainer, Accelerate, FSDP2."""

from __future__ import annotations

import os
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager, nullcontext
from typing import Any, NamedTuple

import torch
import torch.distributed as dist
from integrations.counting import counted
from integrations.tiny import batches, features, loss_of, model_of
from torch import Tensor
from torch.distributed.fsdp import FSDPModule, fully_shard
from torch.distributed.tensor import DTensor

from distca.integrations.shared.figures import PREFIX
from distca.integrations.transformers import register

# Documents in the order of the sampler, which gives two at a time to each rank.
DOCUMENTS = [500, 9, 33, 90, 450, 20, 300, 5, 64, 1, 200, 128, 40, 30]


class Trained(NamedTuple):
    """What a Trainer has logged, and the number of exchanges."""

    losses: list[float]
    evaluation: list[float]
    exchanges: int
    figures: list[dict[str, float]]  # of attention, for each loss


def mark(rank: int, size: int) -> None:
    """Sets the variables that a launcher sets."""
    os.environ |= {
        "RANK": str(rank),
        "LOCAL_RANK": str(rank),
        "WORLD_SIZE": str(size),
        "LOCAL_WORLD_SIZE": str(size),
        "MASTER_ADDR": "127.0.0.1",
        "MASTER_PORT": "29999",  # never used: the default group exists
        "ACCELERATE_USE_CPU": "true",
        "HF_HUB_DISABLE_PROGRESS_BARS": "1",
    }


def trained(
    group: dist.ProcessGroup,
    attention: str,
    ahead: bool,
    name: str,
    options: dict[str, Any],
    fsdp2: bool = False,
) -> Trained:
    from transformers import DataCollatorWithFlattening, Trainer, TrainingArguments

    mark(dist.get_rank(), dist.get_world_size())
    one = register(cost="pairs")
    with tempfile.TemporaryDirectory() as folder, counted() as sent:
        arguments = TrainingArguments(
            folder,
            per_device_train_batch_size=2,
            per_device_eval_batch_size=2,
            num_train_epochs=2,
            learning_rate=1e-2,
            lr_scheduler_type="constant",
            logging_steps=1,
            eval_strategy="epoch",
            save_strategy="no",
            report_to=[],
            disable_tqdm=True,
            use_cpu=True,
            **options,
        )
        trainer = Trainer(
            model_of(name, attention),
            arguments,
            train_dataset=features(DOCUMENTS),
            eval_dataset=features(DOCUMENTS[:5], seed=1),  # the last batch is short
            data_collator=DataCollatorWithFlattening(),
        )
        if ahead:
            one.adopt(trainer)
        with fsdp2_of(trainer) if fsdp2 else nullcontext():
            trainer.train()
        assert isinstance(trainer.model_wrapped, FSDPModule) == fsdp2
    logged = trainer.state.log_history
    return Trained(
        [entry["loss"] for entry in logged if "loss" in entry],
        [entry["eval_loss"] for entry in logged if "eval_loss" in entry],
        len(sent),
        [
            {name.removeprefix(PREFIX): value for name, value in entry.items() if PREFIX in name}
            for entry in logged
            if "loss" in entry
        ],
    )


@contextmanager
def fsdp2_of(trainer: Any) -> Iterator[None]:
    """Enables Accelerate's FSDP2 for a Trainer, which it otherwise does on GPUs only."""
    from accelerate.utils import DistributedType, FullyShardedDataParallelPlugin

    state, kind = trainer.accelerator.state, trainer.accelerator.state.distributed_type
    state.fsdp_plugin = FullyShardedDataParallelPlugin(
        fsdp_version=2,
        auto_wrap_policy="transformer_based_wrap",
        transformer_cls_names_to_wrap=[type(trainer.model.model.layers[0]).__name__],
        cpu_ram_efficient_loading=False,
    )
    state.distributed_type, trainer.is_fsdp_enabled = DistributedType.FSDP, True
    try:
        yield
    finally:  # all trainers in this process share the state
        state.distributed_type, state.fsdp_plugin = kind, None


def accelerated(
    group: dist.ProcessGroup, attention: str, flash: bool
) -> tuple[list[float], list[float], int]:
    """Returns losses of an Accelerate loop with gradient accumulation, then of an evaluation."""
    from accelerate import Accelerator, DataLoaderConfiguration
    from transformers import DataCollatorWithFlattening

    mark(dist.get_rank(), dist.get_world_size())
    one = register(cost="pairs")
    uneven = DataLoaderConfiguration(even_batches=False)
    accelerator = Accelerator(cpu=True, gradient_accumulation_steps=2, dataloader_config=uneven)
    model = model_of("llama", attention)
    collator = DataCollatorWithFlattening(return_flash_attn_kwargs=flash)
    loader: Any = torch.utils.data.DataLoader(features(DOCUMENTS), 2, collate_fn=collator)
    model, loader = accelerator.prepare(model, loader)
    optimizer = accelerator.prepare(torch.optim.SGD(model.parameters(), lr=0.1))
    loader = one.plan_ahead(loader)
    losses = []
    with counted() as sent:
        for batch in loader:  # 7 batches: the second rank has one less and gets a filler
            with accelerator.accumulate(model):
                loss = loss_of(model, batch | {"num_items_in_batch": 100})
                accelerator.backward(loss)
                optimizer.step()
                optimizer.zero_grad()
            losses.append(accelerator.reduce(loss.detach()).item())
        model.eval()
        with torch.no_grad():
            evaluation = [loss_of(model, batch).item() for batch in loader]
    return losses, evaluation, len(sent)


def sharded(
    group: dist.ProcessGroup, name: str, checkpointing: bool
) -> tuple[float, dict[str, Tensor]]:
    """Returns the loss of this rank and the gradients of all, with weights sharded by FSDP2."""
    register(cost="pairs")
    model = model_of(name, "distca")
    if checkpointing:
        model.gradient_checkpointing_enable({"use_reentrant": False})
    for layer in model.model.layers:
        fully_shard(layer)
    fully_shard(model)
    for module in (*model.model.layers, model):
        module.set_gradient_divide_factor(1.0)
        module.set_force_sum_reduction_for_comms(True)
    loss = loss_of(model, batches()[dist.get_rank()])
    loss.backward()
    grads = {
        parameter: p.grad.full_tensor() if isinstance(p.grad, DTensor) else p.grad
        for parameter, p in model.named_parameters()
    }
    return loss.item(), grads
