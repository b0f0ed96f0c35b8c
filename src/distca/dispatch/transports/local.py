"""All ranks in one process, a thread each: the oracle for every other transport."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from threading import Condition
from typing import Any, TypeVar

import torch
from torch import Tensor

from distca.dispatch.transports.base import ExchangeError, Wait

Result = TypeVar("Result")
_PATIENCE_S = 60.0


class LocalHub:
    """Where the ranks of one process meet."""

    def __init__(self, num_ranks: int) -> None:
        self.num_ranks = num_ranks
        self._news = Condition()
        self._posted: dict[tuple[int, int], Sequence[Any]] = {}  # (meeting, sender) -> parts
        self._taken: dict[int, int] = {}  # meeting -> how many ranks have collected
        self._failed = False

    def run(self, rank_function: Callable[[LocalTransport], Result]) -> list[Result]:
        """Calls the function once for every rank; an error on one of them ends all."""
        with ThreadPoolExecutor(self.num_ranks) as pool:
            ranks = [LocalTransport(self, rank) for rank in range(self.num_ranks)]
            results = [pool.submit(self._guarded, rank_function, rank) for rank in ranks]
        errors = [result.exception() for result in results]
        for error in sorted(filter(None, errors), key=lambda e: isinstance(e, ExchangeError)):
            raise error  # the original one before those of its peers
        return [result.result() for result in results]

    def post(self, meeting: int, rank: int, parts: Sequence[Any]) -> None:
        """One part for each rank."""
        with self._news:
            self._posted[meeting, rank] = parts
            self._news.notify_all()

    def collect(self, meeting: int, rank: int) -> list[Any]:
        """Every rank's part for this one."""
        senders = [(meeting, sender) for sender in range(self.num_ranks)]
        with self._news:
            arrived = self._news.wait_for(
                lambda: self._failed or all(s in self._posted for s in senders), _PATIENCE_S
            )
            if self._failed:
                raise ExchangeError(f"rank {rank} waited for a rank that failed")
            if not arrived:
                missing = [sender for _, sender in senders if (meeting, sender) not in self._posted]
                raise ExchangeError(f"rank {rank} waited {_PATIENCE_S:g} s for ranks {missing}")
            parts = [self._posted[sender][rank] for sender in senders]
            self._taken[meeting] = self._taken.get(meeting, 0) + 1
            if self._taken[meeting] == self.num_ranks:
                for sender in senders:
                    del self._posted[sender]
                del self._taken[meeting]
            return parts

    def _guarded(
        self, rank_function: Callable[[LocalTransport], Result], transport: LocalTransport
    ) -> Result:
        try:
            return rank_function(transport)
        except BaseException:
            with self._news:
                self._failed = True
                self._news.notify_all()
            raise


class LocalTransport:
    """One rank of a hub."""

    def __init__(self, hub: LocalHub, rank: int) -> None:
        self.hub, self.rank, self.num_ranks = hub, rank, hub.num_ranks
        self._meetings = 0

    def start(
        self, send: Tensor, recv: Tensor, send_bytes: Sequence[int], recv_bytes: Sequence[int]
    ) -> Wait:
        # Copied, since the sender may go on before a slow peer has looked.
        meeting = self._meet(torch.split(send.clone(), list(send_bytes)))

        def wait() -> None:
            parts = self.hub.collect(meeting, self.rank)
            sizes = [part.numel() for part in parts]
            if sizes != list(recv_bytes):
                raise ValueError(
                    f"rank {self.rank} expects {list(recv_bytes)} bytes but is sent {sizes}:"
                    " the ranks hold different plans"
                )
            torch.cat(parts, out=recv)

        return wait

    def gather(self, note: bytes) -> list[bytes]:
        return self.hub.collect(self._meet([note] * self.num_ranks), self.rank)

    def refusal(self, device: torch.device) -> str | None:
        return None

    def _meet(self, parts: Sequence[Any]) -> int:
        meeting = self._meetings
        self._meetings += 1
        self.hub.post(meeting, self.rank, parts)
        return meeting
