"""Runs torchtitan on a CPU, for tests only. It must be imported before torchtitan.

``python torchtitan_on_cpu.py EXAMPLE.py`` runs an example unchanged.

torch's varlen kernel has no CPU version, and torchtitan casts to bfloat16 for it. So
``OwnAttention`` replaces it by ``scaled_dot_product_attention`` of one document after another, and
leaves the rest of torchtitan as it is.
"""

from __future__ import annotations

import runpy
import sys
from dataclasses import dataclass
from itertools import pairwise
from types import SimpleNamespace
from typing import Any

import torch
import torch._utils
from torch import Tensor
from torch.nn.functional import scaled_dot_product_attention

_GIB = 1 << 30


def _none(*_: Any, **__: Any) -> None:
    return None


if not torch.cuda.is_available():
    torch._utils._get_available_device_type = lambda: "cpu"  # type: ignore[assignment]
    for name, value in {
        "get_device_name": lambda *_: "CPU",
        "get_device_properties": lambda *_: SimpleNamespace(total_memory=_GIB),
        "reset_peak_memory_stats": _none,
        "empty_cache": _none,
        "memory_stats": lambda *_: {},
    }.items():
        setattr(torch.cpu, name, value)
    torch.autograd.set_multithreading_enabled(False)  # as in torchtitan

from torchtitan.config.override import derive, override  # noqa: E402
from torchtitan.models.common.attention import (  # noqa: E402
    ScaledDotProductAttention,
    VarlenAttention,
    VarlenMetadata,
)


def shim() -> None:
    """Replaces what torchtitan needs and gloo does not support."""
    from torch.distributed.fsdp import FSDPModule
    from torch.distributed.pipelining.schedules import PipelineScheduleSingle
    from torchtitan.distributed import fsdp, utils

    def sum_gradients(model: torch.nn.Module) -> None:
        for module in model.modules():
            if isinstance(module, FSDPModule):
                module.set_gradient_divide_factor(1.0)
                module.set_force_sum_reduction_for_comms(True)

    fsdp.disable_fsdp_gradient_division = sum_gradients
    utils.set_pg_timeouts = _none  # it calls a barrier on a device
    PipelineScheduleSingle.step = step_of(PipelineScheduleSingle.step)  # type: ignore[method-assign]


def step_of(step: Any) -> Any:
    """Adapts torchtitan 0.3, which splits micro-batches, to torch 2.13, which splits them too."""

    def stepping(self: Any, *args: Any, arg_mbs: Any = None, **given: Any) -> Any:
        if "kwarg_mbs" not in given:
            return step(self, *args, **given)
        self._stage.has_backward = self._has_backward
        self._stage.clear_runtime_states()
        names = ("kwarg_mbs", "target_mbs", "losses", "return_outputs")
        options = {"loss_kwargs": given["loss_kwargs"]}
        return self._step_microbatches(arg_mbs, *(given[name] for name in names), **options)

    return stepping


class OwnAttention(VarlenAttention):  # type: ignore[misc]
    """torchtitan's own layer with a slow and simple kernel."""

    @dataclass(kw_only=True, slots=True)
    class Config(VarlenAttention.Config):  # type: ignore[misc]
        pass

    def forward(
        self,
        q_BLNH: Tensor,
        k_BLNH: Tensor,
        v_BLNH: Tensor,
        *,
        attention_masks: VarlenMetadata,
        scale: float | None = None,
        **_: Any,
    ) -> Tensor:
        flat = [x.flatten(0, 1).transpose(0, 1) for x in (q_BLNH, k_BLNH, v_BLNH)]  # [N, T, H]
        outs = [
            scaled_dot_product_attention(
                *(x[:, start:stop] for x in flat),
                attn_mask=_seen(stop - start, self.window_size),
                scale=scale,
                enable_gqa=True,
            )
            for start, stop in pairwise(attention_masks.cu_seq_q.tolist())
        ]
        return torch.cat(outs, 1).transpose(0, 1).unflatten(0, q_BLNH.shape[:2])


def _seen(length: int, window: tuple[int, int]) -> Tensor:
    q, k = torch.arange(length)[:, None], torch.arange(length)[None]
    left, right = (length if side < 0 else side for side in window)
    return (k >= q - left) & (k <= q + right)


@override(target=VarlenAttention.Config)
def own_attention(config: Any) -> Any:
    return derive(config, OwnAttention.Config)


@override(target=VarlenAttention.Config)
def sdpa_attention(config: Any) -> Any:
    """Uses torchtitan's own attention for rows that are one document each."""
    return derive(config, ScaledDotProductAttention.Config)


if __name__ == "__main__":
    shim()
    torch.set_num_threads(1)
    runpy.run_path(sys.argv[1], run_name="__main__")
