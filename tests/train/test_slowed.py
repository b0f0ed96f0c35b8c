"""A device that is slower than it can be."""

from __future__ import annotations

from contextlib import nullcontext
from statistics import median

import pytest
import torch

from distca.train.slowed import prepare, slowed

CYCLES = 20_000_000  # about 10 ms: a kernel that needs no power, so that clocks stay the same


@pytest.mark.gpu
@pytest.mark.parametrize("speed", [0.5, 0.2])
def test_a_gpu_takes_longer_and_its_host_does_not_wait(speed: float) -> None:
    device = torch.device("cuda")
    prepare(device)

    def milliseconds(speed: float) -> float:
        torch.cuda._sleep(CYCLES)  # what the device had to do before is not slowed
        start, stop = (torch.cuda.Event(enable_timing=True) for _ in range(2))
        start.record()
        with slowed(speed, device) if speed < 1 else nullcontext():
            torch.cuda._sleep(CYCLES)
        stop.record()
        assert not stop.query()  # the host is ahead of the device
        stop.synchronize()
        return start.elapsed_time(stop)

    ratios = [milliseconds(speed) / milliseconds(1.0) for _ in range(5)]
    assert median(ratios) == pytest.approx(1 / speed, rel=0.03)
