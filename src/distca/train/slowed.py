"""A device that computes slower than it can, as a fault of ``distca.train.injector``.

A GPU is slowed on the GPU: two small kernels around a call read its clock, and the second one runs
until the call has taken as long as it should. The host of a slow GPU launches ahead as that of any
other, and so it must here. If it waited for the end of each call instead, the collectives that
other ranks have launched in the meantime would wait for this rank on their SMs, and where ranks
share a GPU, nothing may be left of it for what this rank waits for: the run would stand still.
"""

import time
from collections.abc import Iterator
from contextlib import contextmanager

import torch


@contextmanager
def slowed(speed: float, device: torch.device) -> Iterator[None]:
    """Lets what is launched inside take as long as it would on a device of this relative speed.

    What the device had to do before is not slowed.
    """
    if device.type == "cuda":
        from distca.train.slow_kernels import slow_down  # needs Triton

        with slow_down(speed, device):
            yield
        return
    start = time.perf_counter()
    yield
    time.sleep((time.perf_counter() - start) * (1 / speed - 1))


def prepare(device: torch.device) -> None:
    """Loads the kernels of ``slowed``: in the middle of a step, that may wait for other ranks.

    Raises ValueError if there are none for this device.
    """
    try:
        with slowed(0.5, device):
            pass
    except ImportError as error:
        raise ValueError(
            f"--inject 'slow ...' needs Triton on a GPU ({error}): pip install triton"
        ) from None
    if device.type == "cuda":
        torch.cuda.synchronize(device)
