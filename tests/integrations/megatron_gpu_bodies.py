"""Functions that ranks of Megatron-Core run on a GPU that they share."""

from __future__ import annotations

import torch
import torch.distributed as dist
from integrations.megatron_bodies import (
    SCALE,
    Case,
    config_of,
    groups,
    loss_alone,
    micro_batches,
    model_of,
)
from megatron.core.tensor_parallel import model_parallel_cuda_manual_seed as seed_of_megatron
from torch import Tensor

from distca.integrations.megatron import DistcaDotProductAttention


def stepped_on_gpu(group: dist.ProcessGroup, case: Case) -> float:
    """Returns the largest relative difference in the first micro-batch, on one GPU."""
    own = _learned_on_gpu(group, case, None, torch.float32)
    attention = DistcaDotProductAttention.configured(cost="pairs")
    return max(_apart(_learned_on_gpu(group, case, attention, torch.float32), own))


def rounded_on_gpu(group: dist.ProcessGroup) -> tuple[float, float]:
    """Returns the mean difference of bfloat16 from float32, for distca and for Megatron."""
    case = Case(config={"kv_channels": 64})  # a head size that fast kernels support
    exact = _learned_on_gpu(group, case, None, torch.float32)
    kinds = (DistcaDotProductAttention.configured(), None)
    ours, own = (
        _apart(_learned_on_gpu(group, case, kind, torch.bfloat16), exact) for kind in kinds
    )
    return sum(ours) / len(ours), sum(own) / len(own)


def _apart(found: dict[str, Tensor], exact: dict[str, Tensor]) -> list[float]:
    return [((found[name] - x).norm() / x.norm()).item() for name, x in exact.items()]


def _learned_on_gpu(
    group: dist.ProcessGroup, case: Case, attention: type | None, dtype: torch.dtype
) -> dict[str, Tensor]:
    """Returns the loss of this rank and the gradients of all. None is Megatron's own attention."""
    rank, device = dist.get_rank(group), torch.device("cuda")
    with groups(case, "cuda"), device:
        seed_of_megatron(0)
        more = {} if attention is None else case.ours
        config = config_of(**case.config, **more, bf16=dtype == torch.bfloat16, params_dtype=dtype)
        model = model_of(config, attention).to(device, dtype)
        lengths = case.lengths[0][rank]
        if attention is None:
            losses = loss_alone(model, lengths, 0, rank)
        else:
            data = next(micro_batches(case, attention))
            losses = [model(**{name: x for name, x in data.items() if name != "scale"})]
        loss = sum(one.float().sum() for one in losses) / SCALE
        loss.backward()
        found = {name: p.grad.float().cpu() for name, p in model.named_parameters()}
        for grad in found.values():
            dist.all_reduce(grad, group=group)
        return found | {"loss": loss.detach().cpu()}
