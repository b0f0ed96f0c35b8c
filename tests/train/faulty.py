"""Runs with faults, as ranks of the tests do them."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from functools import wraps
from typing import Any
from unittest.mock import patch

import torch.distributed as dist
from slow_rank import timed_attention

from distca.attention.overlap import SlotAttention
from distca.attention.passes import BackwardPass, ForwardPass
from distca.dispatch.exchange import Exchange
from distca.runtime.step import StepRunner
from distca.train import injector
from distca.train.config import Config
from distca.train.faults import Fault, parse_all
from distca.train.injector import fit_with_faults
from distca.train.trainer import Trainer

Events = list[tuple[Any, ...]]


def fit_slowed(
    group: dist.ProcessGroup, settings: list[str], texts: list[str]
) -> list[dict[str, Any]]:
    """The records of a run in which attention lasts as long as its pairs, unless it is slowed."""
    with timed_attention(pair_s=5e-7):
        return fit_with_faults(Trainer(Config.read(None, settings)), parse_all(texts))


def fit_faulty(
    group: dist.ProcessGroup, settings: list[str], texts: list[str]
) -> list[dict[str, Any]]:
    return fit_with_faults(Trainer(Config.read(None, settings)), parse_all(texts))


def places(group: dist.ProcessGroup, settings: list[str], texts: list[str]) -> Events:
    """What this rank did in a run, with faults among it that do nothing."""
    events: Events = []

    def strike(fault: Fault) -> None:
        events.append(("fault", str(fault)))

    with _events(events), patch.object(injector, "strike", strike):
        trainer = Trainer(Config.read(None, settings))
        if trainer.weights is not None:
            checkpoints = trainer.weights.checkpoints
            save = checkpoints.save

            def saving(step: int, extra: Any) -> None:
                events.append(("save", step))
                save(step, extra)
                checkpoints.wait()  # so that what it does in the background comes now

            checkpoints.save = saving  # type: ignore[method-assign]
        trainer._show = lambda record: events.append(("record", record["step"]))
        fit_with_faults(trainer, parse_all(texts))
    return events


@contextmanager
def _events(events: Events) -> Iterator[None]:
    """Writes down steps, evaluations, and the layer of each pass and the start of its exchange.

    A rank that only serves has no layers of its own: there, the layer is None.
    """
    layers: dict[int, int] = {}  # of the queries of a layer, by their address
    queue: list[int] = []

    call, forward, backward = SlotAttention.__call__, ForwardPass.__init__, BackwardPass.__init__

    def calling(self: SlotAttention, layer: int, half: int, *qkv: Any) -> Any:
        queue.append(layer)
        return call(self, layer, half, *qkv)

    def starting_forward(self: ForwardPass, plan: Any, q: Any, *others: Any) -> None:
        layer = queue.pop() if queue else None
        if layer is not None:
            layers[q.data_ptr()] = layer
        events.append(("forward", layer))
        forward(self, plan, q, *others)

    def starting_backward(
        self: BackwardPass, plan: Any, grad_out: Any, saved: Any, *others: Any
    ) -> None:
        events.append(("backward", layers.get(saved.q.data_ptr()) if len(saved.q) else None))
        backward(self, plan, grad_out, saved, *others)

    def told(kind: str, method: Any) -> Any:
        @wraps(method)
        def telling(*args: Any, **options: Any) -> Any:
            events.append((kind,))
            return method(*args, **options)

        return telling

    with (
        patch.object(SlotAttention, "__call__", calling),
        patch.object(ForwardPass, "__init__", starting_forward),
        patch.object(BackwardPass, "__init__", starting_backward),
        patch.object(Exchange, "dispatch", told("dispatch", Exchange.dispatch)),
        patch.object(StepRunner, "train", told("train", StepRunner.train)),
        patch.object(StepRunner, "losses", told("evaluate", StepRunner.losses)),
    ):
        yield
