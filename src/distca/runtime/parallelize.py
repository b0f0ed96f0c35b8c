"""Applies tensor and sequence parallelism to a model, then shards it with FSDP2 seam by seam.

Between seams, tokens are split over tp: each rank holds T / tp rows of x. Inside ``qkv`` and
``ffn`` a rank has all rows, and heads and widths are split.
"""

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

from distca.model.llama import EMBEDDING, Llama
from distca.runtime.mesh import RankContext


@dataclass(frozen=True)
class Precision:
    """The dtypes of computation and of gradient reduction; sharded weights are float32."""

    compute: torch.dtype = torch.float32
    reduce: torch.dtype = torch.float32

    @classmethod
    def named(cls, name: str, device: torch.device) -> "Precision":
        """Returns that of ``parallel.precision``: a dtype, or auto, which is bfloat16 on a GPU."""
        if name == "auto":
            name = "bfloat16" if device.type == "cuda" else "float32"
        return cls(compute=getattr(torch, name))


def parallelize(
    model: Llama, context: RankContext, precision: Precision, *, compile: bool = False
) -> None:
    """Parallelizes a model on the meta device (``on_meta``) in place."""
    model.config.shape.share(context.parallel.tp)  # raises if tp cannot split it evenly
    check_compile(compile, context.device)
    if context.tp_mesh is not None:
        _split(model, context.tp_mesh)
    for seam in model.seam_list if compile else ():
        for module in filter(None, (seam.before, seam.after)):
            module.compile()  # before sharding, so that all-gathers stay outside of the graph
    policy = MixedPrecisionPolicy(param_dtype=precision.compute, reduce_dtype=precision.reduce)
    shard_mesh = context.shard_mesh
    first, *inner, last = model.seam_list
    # A tied embedding belongs to the first and the last seam, so they are one FSDP unit.
    tied = model.config.tied and model.is_whole
    units: list[list[nn.Module]] = [[first, last]] if tied else [[first], [last]]
    units += [[seam] for seam in inner]
    units.append([model])
    # Parameters stay gathered through the step, for all micro-batches, or are freed after each use.
    reshard_after_forward = False if context.parallel.gathers_once else None
    for unit in units:
        fully_shard(
            unit, mesh=shard_mesh, mp_policy=policy, reshard_after_forward=reshard_after_forward
        )
    for module in model.modules():
        if isinstance(module, FSDPModule):
            # Gradients are summed, since the loss is already divided by the targets of all ranks.
            module.set_gradient_divide_factor(1.0)
            module.set_force_sum_reduction_for_comms(True)
            if context.parallel.gathers_once:
                module.set_reshard_after_backward(False)


def check_compile(wanted: bool, device: torch.device) -> None:
    if wanted and device.type != "cuda":
        raise ValueError(
            "compile = true works on GPUs only and this rank runs on a CPU: leave it out"
        )


def set_last_backward(model: Llama, context: RankContext, last: bool) -> None:
    """Tells FSDP before a backward pass whether it is the last one of the step.

    If weights stay gathered through a step, gradients are accumulated unsharded and reduced in the
    last backward pass. Otherwise each backward pass reduces its own gradients.
    """
    if context.parallel.gathers_once:
        model.set_requires_gradient_sync(last)  # type: ignore[operator]
        model.set_is_last_backward(last)  # type: ignore[operator]


def reshard(model: Llama, context: RankContext) -> None:
    """Frees the parameters that stayed gathered through a step.

    This is not done in the last backward pass, where FSDP would prefetch, and so gather again, the
    parameters of the seams that it expects next.
    """
    if context.parallel.gathers_once:
        for module in model.modules():
            if isinstance(module, FSDPModule):
                module.reshard()


def add_tied_gradients(model: Llama, context: RankContext) -> None:
    """Adds the gradients of the two copies of a tied embedding in the first and last stage."""
    if not model.config.tied or model.is_whole or context.tied_group is None:
        return
    name = EMBEDDING if model.start == 0 else model.output_name
    parameter = model.get_parameter(name)
    if parameter.requires_grad:
        assert parameter.grad is not None
        gradient = parameter.grad.to_local()  # type: ignore[attr-defined]
        dist.all_reduce(gradient, group=context.tied_group)


def _split(model: Llama, mesh: DeviceMesh) -> None:
    rows, whole = Shard(0), Replicate()
    norm = SequenceParallel(sequence_dim=0)
    heads = SequenceParallel(sequence_dim=1, use_local_output=True)  # the heads of one rank
    back = RowwiseParallel(output_layouts=rows)
    plan: dict[str, ParallelStyle] = {
        # Embedding and head are split by width, since tp need not divide the vocabulary.
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
    for seam in model.seam_list:
        present = {name for name, _ in seam.named_modules()}
        parallelize_module(seam, mesh, {name: plan[name] for name in plan if name in present})
    model.tie()  # parallelize_module replaced the weights


def _gathered(*layouts: Shard | None) -> PrepareModuleInput:
    """Returns a style that gathers the rows of all ranks once for all matrices of a module."""
    whole = tuple(None if layout is None else Replicate() for layout in layouts)
    return PrepareModuleInput(
        input_layouts=layouts, desired_input_layouts=whole, use_local_output=False
    )
