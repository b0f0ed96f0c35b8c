"""A model over the mesh: tensor parallel with sequence parallel, then sharded seam by seam.

Between seams tokens are split over tp (each rank holds T / tp rows of x); inside ``qkv`` and
``ffn`` they are whole, and heads and widths are split. The rest is local.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.fsdp import FSDPModule, MixedPrecisionPolicy, fully_shard
from torch.distributed.tensor import Replicate, Shard
from torch.distributed.tensor.parallel import (
    ColwiseParallel,
    ParallelStyle,
    PrepareModuleInput,
    RowwiseParallel,
    SequenceParallel,
    parallelize_module,
)

from distca.model.config import ModelConfig
from distca.model.llama import EMBEDDING, Llama
from distca.runtime.mesh import RankContext


@dataclass(frozen=True)
class Precision:
    """Weights are kept in float32; what is computed and what is added up over ranks."""

    compute: torch.dtype = torch.float32
    reduce: torch.dtype = torch.float32


def parallelize(
    model: Llama, context: RankContext, precision: Precision, *, compile: bool = False
) -> None:
    """In place, on a model without memory yet (``on_meta``)."""
    check(model.config, context.parallel.tp)
    if compile and context.device.type != "cuda":
        raise ValueError("compile = true on a CPU: it pays on GPUs only; leave it out")
    if context.tp_mesh is not None:
        _split(model, context.tp_mesh)
    for seam in model.in_order if compile else ():
        for module in filter(None, (seam.before, seam.after)):
            module.compile()  # before sharding, so that gathering stays outside
    policy = MixedPrecisionPolicy(param_dtype=precision.compute, reduce_dtype=precision.reduce)
    shard_mesh = context.shard_mesh
    first, *inner, last = model.in_order
    # A tied embedding belongs to both ends, so they are gathered as one.
    tied = model.config.tied and model.is_whole
    units: list[list[nn.Module]] = [[first, last]] if tied else [[first], [last]]
    units += [[seam] for seam in inner]
    units.append([model])
    # Kept gathered through the step, for all micro-batches; else let go after each use.
    keep = False if context.parallel.gathers_once else None
    for unit in units:
        fully_shard(unit, mesh=shard_mesh, mp_policy=policy, reshard_after_forward=keep)
    for module in model.modules():
        if isinstance(module, FSDPModule):
            # Gradients are summed: the loss is divided by the targets of all ranks already.
            module.set_gradient_divide_factor(1.0)
            module.set_force_sum_reduction_for_comms(True)
            if keep is False:
                module.set_reshard_after_backward(False)


def last_backward(model: Llama, context: RankContext, last: bool) -> None:
    """Before a backward. Where weights are kept, gradients are too, whole, up to the ``last`` one
    of a step; else each backward reduces its own, and only this rank's share is added up."""
    if context.parallel.gathers_once:
        model.set_requires_gradient_sync(last)  # type: ignore[operator]
        model.set_is_last_backward(last)  # type: ignore[operator]


def reshard(model: Llama, context: RankContext) -> None:
    """After a step: lets go of what was kept gathered.

    Not in its last backward, where FSDP would gather again what it takes to come next.
    """
    if context.parallel.gathers_once:
        for module in model.modules():
            if isinstance(module, FSDPModule):
                module.reshard()


def add_tied(model: Llama, context: RankContext) -> None:
    """Gradients of a tied embedding that lies in two stages: both get the sum."""
    if not model.config.tied or model.is_whole or context.ends is None:
        return
    name = EMBEDDING if model.start == 0 else model.output_name
    parameter = model.get_parameter(name)
    if parameter.requires_grad:
        assert parameter.grad is not None
        dist.all_reduce(parameter.grad.to_local(), group=context.ends)  # type: ignore[attr-defined]


def check(config: ModelConfig, tp: int) -> None:
    for what, size in (("heads", config.heads), ("kv_heads", config.kv_heads), ("ffn", config.ffn)):
        if size % tp:
            raise ValueError(
                f"{what} = {size} cannot be split over tp = {tp}: take a tp that divides"
                f" {config.heads} heads, {config.kv_heads} kv heads and ffn {config.ffn}"
            )


def _split(model: Llama, mesh: DeviceMesh) -> None:
    rows, whole = Shard(0), Replicate()
    norm = SequenceParallel(sequence_dim=0)
    heads = SequenceParallel(sequence_dim=1, use_local_output=True)  # a rank's own
    back = RowwiseParallel(output_layouts=rows)
    plan: dict[str, ParallelStyle] = {
        # Both ends are split by width, which tp divides; the vocabulary may be odd.
        "embed": ColwiseParallel(input_layouts=whole, output_layouts=rows),
        "before.norm": norm,
        "before.qkv": _gathered(rows, None),
        **{f"before.qkv.{name}": ColwiseParallel() for name in ("wq", "wk", "wv")},
        **{f"before.qkv.{name}": heads for name in ("q_norm", "k_norm")},
        "after.wo": back,
        "after.norm": norm,
        "after.ffn": _gathered(rows),
        "after.ffn.w1": ColwiseParallel(),
        "after.ffn.w2": back,
        "after.ffn.w3": ColwiseParallel(),
        "head.norm": SequenceParallel(sequence_dim=0, use_local_output=True),
        "head.output": RowwiseParallel(input_layouts=rows, output_layouts=rows),
    }
    for seam in model.in_order:
        present = {name for name, _ in seam.named_modules()}
        parallelize_module(seam, mesh, {name: plan[name] for name in plan if name in present})
    model.tie()  # each module's weight was split on its own


def _gathered(*layouts: Shard | None) -> PrepareModuleInput:
    """Rows of all ranks, gathered once for all matrices of a module."""
    whole = tuple(None if layout is None else Replicate() for layout in layouts)
    return PrepareModuleInput(
        input_layouts=layouts, desired_input_layouts=whole, use_local_output=False
    )
