"""Names for what a rank does, as profilers show them.

    step 20
      tick 3 F: F1
        forward dispatch, layer 4, ping
        forward compute, layer 4, ping
        forward combine, layer 4, ping

torch's profiler shows them whenever it is active, as with ``distca train --trace``. Nsight Systems
shows them as NVTX ranges if ``DISTCA_NVTX`` is 1. Otherwise a name costs about a microsecond.
"""

import os
from contextlib import AbstractContextManager, nullcontext
from functools import cache
from typing import Any

import torch
from torch._C._autograd import _profiler_enabled
from torch.profiler import record_function

from distca.pipeline.tick_program import HALF_NAMES

NVTX = "DISTCA_NVTX"  # environment variable: 1 for ranges in Nsight Systems

_NOTHING: AbstractContextManager[Any] = nullcontext()


def named(*words: str) -> AbstractContextManager[Any]:
    """Returns a context that has a name in profiles: the words that are not empty."""
    if _profiler_enabled():
        return record_function(", ".join(filter(None, words)))
    if _wants_nvtx():
        return torch.cuda.nvtx.range(", ".join(filter(None, words)))
    return _NOTHING


def place(kind: str, number: int, half: int, num_halves: int) -> str:
    """Returns the words for a layer or slot, and for its half if there are two."""
    return f"{kind} {number}, {HALF_NAMES[half]}" if num_halves > 1 else f"{kind} {number}"


@cache
def _wants_nvtx() -> bool:
    return os.environ.get(NVTX) == "1" and torch.cuda.is_available()
