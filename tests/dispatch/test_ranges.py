"""Names of what a rank does, in profiles."""

from __future__ import annotations

from contextlib import nullcontext
from typing import Any

import pytest
import torch
from torch.profiler import ProfilerActivity, profile

import distca
from distca.attention.core import CoreAttention
from distca.dispatch import ranges
from distca.dispatch.transports.local import LocalTransport, LocalWorld

STEPS = ("dispatch", "compute", "combine")


def test_without_a_profiler_nothing_is_done(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(ranges, "_wants_nvtx", lambda: False)
    assert isinstance(ranges.named("step 0"), nullcontext)


def test_nvtx_is_asked_for_by_a_variable(monkeypatch: pytest.MonkeyPatch) -> None:
    named: list[str] = []

    def record(name: str) -> Any:
        named.append(name)
        return nullcontext()

    monkeypatch.setattr(torch.cuda.nvtx, "range", record)
    for value, has_gpu, wanted in (("1", True, 1), ("0", True, 0), ("1", False, 0)):
        named.clear()
        ranges._wants_nvtx.cache_clear()
        monkeypatch.setenv("DISTCA_NVTX", value)
        monkeypatch.setattr(torch.cuda, "is_available", lambda has_gpu=has_gpu: has_gpu)
        with ranges.named("forward compute", "", "layer 3"):
            pass
        assert named == ["forward compute, layer 3"] * wanted
    ranges._wants_nvtx.cache_clear()


def test_a_half_is_named_if_there_are_two() -> None:
    assert ranges.place("layer", 3, half=1, num_halves=2) == "layer 3, pong"
    assert ranges.place("slot", 0, half=0, num_halves=1) == "slot 0"


def test_a_plain_call_has_three_steps_in_each_direction() -> None:
    plan = distca.plan([[8, 8]], heads=2, kv_heads=1, head_dim=8, cost="pairs")
    q, k, v = (torch.rand(16, n, 8, requires_grad=True) for n in (2, 1, 1))
    attention = CoreAttention(transport=LocalTransport(LocalWorld(1), 0))
    with profile(activities=[ProfilerActivity.CPU]) as profiler:
        attention(q, k, v, plan).sum().backward()
    names = [event.name for event in sorted(profiler.events(), key=lambda e: e.time_range.start)]
    found = [name for name in names if name.endswith(STEPS)]
    assert found == [f"{way} {step}" for way in ("forward", "backward") for step in STEPS]
