"""What was written down while something ran: events in order, and collectives counted."""

from __future__ import annotations

from collections import Counter
from collections.abc import Hashable, Sequence
from typing import Any

from torch.utils._python_dispatch import TorchDispatchMode

Events = list[tuple[str, int]]  # what ("start" or "wait" of an exchange, "compute"), and which half


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


class Collectives(TorchDispatchMode):
    def __init__(self) -> None:
        super().__init__()
        self.counts: Counter[str] = Counter()

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if func.namespace == "c10d":
            self.counts[func._opname] += 1
        return func(*args, **(kwargs or {}))
