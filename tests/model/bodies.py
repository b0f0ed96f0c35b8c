"""What ranks run in the tests; a module of its own, since processes import it."""

from __future__ import annotations

from collections import Counter
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from model.plain import attention, positions_of
from recorded import Collectives
from torch import Tensor
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.fsdp import FSDPModule, MixedPrecisionPolicy, fully_shard
from torch.distributed.tensor import DTensor, Replicate, Shard
from torch.distributed.tensor.parallel import (
    ColwiseParallel,
    PrepareModuleInput,
    RowwiseParallel,
    SequenceParallel,
    parallelize_module,
)

from distca.model.checkpoints import load, save
from distca.model.config import ModelConfig
from distca.model.initialize import initialize
from distca.model.llama import Arriving, Attend, Dispatch, Llama, on_meta, plainly

LENGTHS = (5, 3, 8)


def mesh_of(group: dist.ProcessGroup, shape: tuple[int, ...] = ()) -> DeviceMesh:
    """One axis from the group itself; two axes need all ranks of the world to make groups."""
    if len(shape) < 2:
        return DeviceMesh.from_group(group, "cpu")
    return init_device_mesh("cpu", shape, mesh_dim_names=("dp", "tp"))


def shard(model: Llama, mesh: DeviceMesh, dtype: torch.dtype | None = None) -> None:
    """Each seam a unit, computing in dtype; the ends together where they share a weight."""
    policy = MixedPrecisionPolicy(param_dtype=dtype, reduce_dtype=torch.float32)
    seams = model.seam_list
    units: list[Any] = [[seams[0], seams[-1]], *seams[1:-1]] if model.config.tied else [*seams]
    for unit in (*units, model):
        fully_shard(unit, mesh=mesh, mp_policy=policy)
    for module in model.modules():
        if isinstance(module, FSDPModule):
            module.set_gradient_divide_factor(1.0)
            module.set_force_sum_reduction_for_comms(True)  # gloo cannot divide


def split(model: Llama, mesh: DeviceMesh) -> None:
    """Tensor parallel with sequence parallel norms, by the plans of torch."""
    tokens, whole = Shard(0), Replicate()
    norm = SequenceParallel(sequence_dim=0)
    heads = SequenceParallel(sequence_dim=1, use_local_output=True)
    row = RowwiseParallel(output_layouts=tokens)
    gather = {"use_local_output": False}
    plan = {
        # Both ends are split by width, which tp divides; the vocabulary may be odd.
        "embed": ColwiseParallel(input_layouts=whole, output_layouts=tokens),
        "before.norm": norm,
        "before.qkv": PrepareModuleInput(
            input_layouts=(tokens, None), desired_input_layouts=(whole, None), **gather
        ),
        **{f"before.qkv.{w}": ColwiseParallel() for w in ("wq", "wk", "wv")},
        **{f"before.qkv.{n}": heads for n in ("q_norm", "k_norm")},
        "after.wo": row,
        "after.norm": norm,
        "after.ffn": PrepareModuleInput(
            input_layouts=(tokens,), desired_input_layouts=(whole,), **gather
        ),
        "after.ffn.w1": ColwiseParallel(),
        "after.ffn.w2": row,
        "after.ffn.w3": ColwiseParallel(),
        "head.norm": SequenceParallel(sequence_dim=0, use_local_output=True),
        "head.output": RowwiseParallel(input_layouts=tokens, output_layouts=tokens),
    }
    for seam in model.seam_list:
        present = {name for name, _ in seam.named_modules()}
        parallelize_module(seam, mesh, {k: v for k, v in plan.items() if k in present})
    if model.config.tied:
        model.tie()  # each module's weight was split on its own


def sharded(group: dist.ProcessGroup, config: ModelConfig, shape: tuple[int, ...]) -> Llama:
    """On meta, by (dp,) or by (dp, tp)."""
    mesh = mesh_of(group, shape)
    model = on_meta(config)
    if len(shape) == 2:
        split(model, mesh["tp"])
    shard(model, mesh["dp"] if len(shape) == 2 else mesh)
    return model


def gradients(model: Llama) -> dict[str, Tensor]:
    whole = {}
    for name, parameter in model.named_parameters():
        assert parameter.grad is not None, name
        grad = parameter.grad
        whole[name] = grad.full_tensor() if isinstance(grad, DTensor) else grad
    return whole


def weights(group: dist.ProcessGroup, config: ModelConfig, shape: tuple[int, ...]) -> Any:
    """Initialized after sharding, and put together again."""
    model = sharded(group, config, shape)
    initialize(model, seed=3)
    found = {}
    for name, parameter in model.named_parameters():
        assert isinstance(parameter, DTensor), name
        found[name] = parameter.full_tensor().detach()
    return found


def sharded_step(
    group: dist.ProcessGroup,
    config: ModelConfig,
    tokens: Tensor,
    labels: Tensor,
    dtype: torch.dtype | None = None,
) -> tuple[float, dict[str, Tensor], Counter[str]]:
    """FSDP over the group: two halves on every rank, each rank with tokens of its own."""
    model = on_meta(config)
    shard(model, mesh_of(group), dtype)
    initialize(model, seed=3)
    rank, positions = dist.get_rank(group), positions_of(LENGTHS)
    halves = [
        Arriving(t, positions, labels=wanted)
        for t, wanted in zip(tokens[rank], labels[rank], strict=True)
    ]
    with Collectives() as collectives:
        dispatch = turns(attention(LENGTHS, config.mask_of))
        leavings = model(halves, dispatch, recompute=True)
        total = sum(leaving.loss.total for leaving in leavings)
        total.backward()
    assert total.dtype == torch.float32
    return total.item(), gradients(model), collectives.counts


class Attended:
    """Attention that runs when it is dispatched, right after the linear layers of its half."""

    def __init__(self, out: Tensor) -> None:
        self.out = out

    def compute(self) -> None:
        pass

    def combine(self) -> Tensor:
        return self.out


def turns(attend: Attend) -> Dispatch:
    return lambda layer, half, q, k, v: Attended(attend(layer, q, k, v))


def split_step(
    group: dist.ProcessGroup, config: ModelConfig, tokens: Tensor, labels: Tensor
) -> tuple[float, dict[str, Tensor]]:
    """Tensor parallel over the group; labels are split as the tokens of the residual stream."""
    mesh = mesh_of(group)
    model = on_meta(config)
    split(model, mesh)
    initialize(model, seed=3)
    mine = labels.chunk(mesh.size())[dist.get_rank(group)]
    half = Arriving(tokens, positions_of(LENGTHS), labels=mine)
    (leaving,) = model([half], plainly(attention(LENGTHS, config.mask_of)))
    leaving.loss.total.backward()
    return leaving.loss.total.item(), gradients(model)


def copied(
    group: dist.ProcessGroup, config: ModelConfig, shape: tuple[int, ...], source: Path, to: Path
) -> None:
    """From a folder into shards, and from shards into another folder."""
    model = sharded(group, config, shape)
    load(model, source)
    save(model, to, max_file_bytes=9000)
    dist.barrier(group)
