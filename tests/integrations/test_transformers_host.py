"""What the host does in a training step of transformers, while a GPU could be waiting for it.

Here, the tensors of a batch, and all that is computed from them, stand for those on a GPU.
"""

from __future__ import annotations

import sys
from itertools import islice
from pathlib import Path
from threading import current_thread
from typing import Any

import pytest
from integrations.tiny import loss_of, model_of, packed
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode, _disable_current_modes
from torch.utils._pytree import tree_leaves

pytest.importorskip("transformers", reason="transformers is not installed")

import distca
from distca.integrations.shared.planned import PlannedAttention
from distca.integrations.transformers import register

BATCHES = 4
PACKAGE = str(Path(distca.__file__).parent)


class DeviceReads(TorchDispatchMode):
    """Records where the package reads values of device tensors, for which the host has to wait."""

    def __init__(self, batch: dict[str, Any]) -> None:
        super().__init__()
        self._kept: list[Tensor] = []  # so that no other tensor gets their memory
        self._on_device: set[int] = set()
        self.reads: list[str] = []
        self._mark([value for value in batch.values() if isinstance(value, Tensor)])

    def is_on_device(self, tensor: Tensor) -> bool:
        return tensor.untyped_storage()._cdata in self._on_device

    def read(self) -> None:
        frame: Any = sys._getframe(2)
        while frame is not None and not frame.f_code.co_filename.startswith(PACKAGE):
            frame = frame.f_back
        caller = frame and frame.f_code.co_name
        if caller not in (None, "within"):  # which calls the model
            self.reads.append(caller)

    def _mark(self, tensors: list[Tensor]) -> None:
        self._kept += tensors
        self._on_device |= {tensor.untyped_storage()._cdata for tensor in tensors}

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        given = [each for each in tree_leaves((args, kwargs)) if isinstance(each, Tensor)]
        on_device = any(map(self.is_on_device, given))
        if on_device and func._opname in ("_local_scalar_dense", "nonzero", "equal"):
            self.read()
        result = func(*args, **(kwargs or {}))
        if on_device:
            self._mark([each for each in tree_leaves(result) if isinstance(each, Tensor)])
        return result


@pytest.fixture
def reading(monkeypatch: pytest.MonkeyPatch) -> list[DeviceReads]:
    """Those of which the copies to the host are recorded too."""
    modes: list[DeviceReads] = []

    def on_host(name: str) -> None:
        method = getattr(Tensor, name)

        def read(tensor: Tensor, *args: Any, **options: Any) -> Any:
            if not any(mode.is_on_device(tensor) for mode in modes):
                return method(tensor, *args, **options)
            for mode in modes:
                mode.read()
            with _disable_current_modes():
                return method(tensor.clone(), *args, **options)

        monkeypatch.setattr(Tensor, name, read)

    for name in ("cpu", "numpy", "tolist"):
        on_host(name)
    return modes


@pytest.mark.parametrize("layers", [1, 4])
def test_a_packed_batch_is_read_once_however_many_layers(
    reading: list[DeviceReads], layers: int
) -> None:
    """The mask is compared with the documents that were planned, once in a forward pass."""
    one = register(cost="pairs")
    model = model_of("llama", "distca", num_hidden_layers=layers)
    loader = one.plan_ahead([packed([20, 30 + n]) for n in range(BATCHES)])
    for number, batch in enumerate(loader):
        with DeviceReads(batch) as mode:
            reading[:] = [mode]
            loss_of(model, batch).backward()
        if number:  # the first one finds out about the model
            assert mode.reads == ["read_parts"]


def test_a_batch_is_planned_while_the_device_computes_the_one_before(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Not while the forward pass is launched, from the same thread or another."""
    events: list[str] = []
    planning = PlannedAttention._plan_local

    def recorded(*args: Any) -> Any:
        events.append(f"planned in {current_thread().name}")
        return planning(*args)

    monkeypatch.setattr(PlannedAttention, "_plan_local", recorded)
    one = register(cost="pairs")
    model = model_of("llama", "distca")
    model.register_forward_hook(lambda *_: events.append("launched"))
    loader = one.plan_ahead([packed([9, n + 1]) for n in range(BATCHES + 1)])
    for batch in islice(loader, BATCHES):
        loss_of(model, batch).backward()
        one.attention.close()  # after the work that has started
    assert events == ["planned in distca", "launched"] * BATCHES + ["planned in distca"]
