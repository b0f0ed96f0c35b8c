"""Runs torchtitan, which needs a GPU, on a CPU. It must be imported before torchtitan.

For trying things out only: it replaces functions of torch and of torchtitan.
"""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import torch
import torch._utils

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


def stay_on_cpu() -> None:
    """Replaces what torchtitan needs and gloo does not support, until this process ends."""
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
