"""What was written down while something ran: events in order, and collectives counted."""

from __future__ import annotations

import threading
from collections import Counter
from collections.abc import Hashable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import replace
from typing import Any
from unittest.mock import patch

from torch.utils._python_dispatch import TorchDispatchMode

from distca.attention.core import CoreAttention
from distca.attention.prepared import PreparedLayout, PreparedPlan
from distca.dispatch.transports.base import Transport, Wait

# What ("start" or "wait" of an exchange, "compute"), and which half.
Events = list[tuple[str, Any]]


def exposed(events: Sequence[tuple[str, Hashable]]) -> list[int]:
    """Which exchanges, in order of their start, have no compute of the other half inside."""
    found, number = [], 0
    for at, (what, half) in enumerate(events):
        if what != "start":
            continue
        end = next(i for i in range(at, len(events)) if events[i] == ("wait", half))
        if not any(e[0] == "compute" and e[1] != half for e in events[at:end]):
            found.append(number)
        number += 1
    return found


class RecordedAttention(CoreAttention):
    """Records the exchanges and kernel calls of one half."""

    def __init__(self, transport: Transport, half: Any, events: Events, **options: Any) -> None:
        super().__init__(transport=RecordedTransport(transport, half, events), **options)
        self.half, self.events = half, events

    def prepare(self, *args: Any, **plans: Any) -> PreparedPlan:
        prepared = super().prepare(*args, **plans)
        return replace(prepared, backend=RecordedBackend(prepared.backend, self.half, self.events))


class RecordedTransport:
    def __init__(self, transport: Transport, half: Any, events: Events) -> None:
        self.transport, self.half, self.events = transport, half, events

    def __getattr__(self, name: str) -> Any:
        return getattr(self.transport, name)

    def start(self, *args: Any) -> Wait:
        self.events.append(("start", self.half))
        wait = self.transport.start(*args)

        def recorded() -> None:
            wait()
            self.events.append(("wait", self.half))

        return recorded


class RecordedBackend:
    def __init__(self, backend: Any, half: Any, events: Events) -> None:
        self.backend, self.half, self.events = backend, half, events

    def forward(self, *args: Any) -> Any:
        self.events.append(("compute", self.half))
        return self.backend.forward(*args)

    def backward(self, *args: Any) -> Any:
        self.events.append(("compute", self.half))
        return self.backend.backward(*args)


@contextmanager
def preparing_threads() -> Iterator[Counter[str]]:
    """Counts the layouts that are made, by the name of the thread."""
    of, counts = PreparedLayout.of, Counter[str]()

    def counted(*args: Any, **options: Any) -> PreparedLayout:
        counts[threading.current_thread().name] += 1
        return of(*args, **options)

    with patch.object(PreparedLayout, "of", counted):
        yield counts


class Collectives(TorchDispatchMode):
    def __init__(self) -> None:
        super().__init__()
        self.counts: Counter[str] = Counter()

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if func.namespace == "c10d":
            self.counts[func._opname] += 1
        return func(*args, **(kwargs or {}))
