"""Runs Megatron-Core, which needs a GPU, on a CPU: its "cuda" becomes "cpu".

For trying things out only. It replaces functions of torch and of Megatron-Core.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager, nullcontext
from typing import Any
from unittest.mock import patch

import torch
from torch.overrides import TorchFunctionMode

_CPU = torch.device("cpu")
_until_the_end = ExitStack()


class _ForCuda(TorchFunctionMode):
    def __torch_function__(
        self,
        func: Any,
        types: Any,
        args: Sequence[Any] = (),
        kwargs: Mapping[str, Any] | None = None,
    ) -> Any:
        if func is torch.Tensor.cuda:
            return args[0]
        given = dict(kwargs or {})
        if str(given.get("device")).startswith("cuda"):
            given["device"] = _CPU
        given.pop("pin_memory", None)
        return func(*args, **given)


@contextmanager
def on_cpu() -> Iterator[None]:
    """Creates tensors on the CPU, skips synchronization and the random state of a GPU."""
    home = "megatron.core.tensor_parallel.random"
    with ExitStack() as stack:
        for name, stand_in in {
            "torch.cuda.current_device": lambda: _CPU,
            "torch.cuda.synchronize": lambda *_: None,
            f"{home}._get_cuda_rng_state": lambda *_, **__: torch.zeros(1),
            f"{home}._set_cuda_rng_state": lambda *_, **__: None,
            f"{home}.CudaRNGStatesTracker.fork": lambda *_: nullcontext(),
        }.items():
            stack.enter_context(patch(name, stand_in))
        stack.enter_context(_ForCuda())
        yield


def stay_on_cpu() -> None:
    """Does the same until this process ends."""
    _until_the_end.enter_context(on_cpu())
