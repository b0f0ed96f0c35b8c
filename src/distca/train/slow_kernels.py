"""Kernels that make a call on a GPU take longer. See ``distca.train.slowed``."""

from collections.abc import Iterator
from contextlib import contextmanager

import torch
import triton
import triton.language as tl
from triton.language.extra.cuda import globaltimer


@contextmanager
def slow_down(speed: float, device: torch.device) -> Iterator[None]:
    """Lets what is launched inside, on the current stream, take 1 / ``speed`` of its time."""
    start_ns = torch.empty(1, dtype=torch.int64, device=device)
    with torch.cuda.device(device):
        _read_clock[(1,)](start_ns)
    yield
    with torch.cuda.device(device):
        _wait[(1,)](start_ns, 1 / speed)


@triton.jit
def _read_clock(start_ns):  # type: ignore[no-untyped-def]
    tl.store(start_ns, globaltimer())


@triton.jit
def _wait(start_ns, factor):  # type: ignore[no-untyped-def]
    start = tl.load(start_ns)
    now = globaltimer()
    stop = start + ((now - start).to(tl.float32) * factor).to(tl.int64)
    while now < stop:
        now = globaltimer()
