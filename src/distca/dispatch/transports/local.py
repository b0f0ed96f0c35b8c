"""All ranks in one process, a thread each: the oracle for every other transport."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from threading import Condition
from typing import Any, TypeVar

import torch
from torch import Tensor

from distca.dispatch.transports.base import Check, ExchangeError, Object, Records, Wait

Result = TypeVar("Result")
_TIMEOUT_S = 60.0


class LocalWorld:
    """Ranks that are threads of this process; their collectives are numbered in order."""

    def __init__(self, num_ranks: int) -> None:
        self.num_ranks = num_ranks
        self._changed = Condition()
        self._posted: dict[tuple[int, int], Sequence[Any]] = {}  # (collective, sender) -> parts
        self._collected: dict[int, int] = {}  # collective -> how many ranks have collected
        self._failed = False

    def run(self, rank_function: Callable[[LocalTransport], Result]) -> list[Result]:
        """Calls the function once for every rank; an error on one rank ends all of them."""
        with ThreadPoolExecutor(self.num_ranks) as pool:
            ranks = [LocalTransport(self, rank) for rank in range(self.num_ranks)]
            results = [pool.submit(self._guarded, rank_function, rank) for rank in ranks]
        errors = [result.exception() for result in results]
        for error in sorted(filter(None, errors), key=lambda e: isinstance(e, ExchangeError)):
            raise error  # the original one before those of its peers
        return [result.result() for result in results]

    def post(self, collective: int, rank: int, parts: Sequence[Any]) -> None:
        """Hands over this rank's parts, one for each rank."""
        with self._changed:
            self._posted[collective, rank] = parts
            self._changed.notify_all()

    def collect(self, collective: int, rank: int) -> list[Any]:
        """Waits for all ranks, and returns the part of each of them for this rank."""
        senders = [(collective, sender) for sender in range(self.num_ranks)]
        with self._changed:
            arrived = self._changed.wait_for(
                lambda: self._failed or all(s in self._posted for s in senders), _TIMEOUT_S
            )
            if self._failed:
                raise ExchangeError(f"rank {rank} waited for a rank that failed")
            if not arrived:
                posted = [self._posted.get(sender) for sender in senders]
                missing = [number for number, parts in enumerate(posted) if parts is None]
                raise ExchangeError(
                    f"rank {rank} waited {_TIMEOUT_S:g} s for ranks {missing}",
                    [None if parts is None else parts[rank] for parts in posted],
                )
            parts = [self._posted[sender][rank] for sender in senders]
            self._collected[collective] = self._collected.get(collective, 0) + 1
            if self._collected[collective] == self.num_ranks:
                for sender in senders:
                    del self._posted[sender]
                del self._collected[collective]
            return parts

    def _guarded(
        self, rank_function: Callable[[LocalTransport], Result], transport: LocalTransport
    ) -> Result:
        try:
            return rank_function(transport)
        except BaseException:
            with self._changed:
                self._failed = True
                self._changed.notify_all()
            raise


class LocalTransport:
    def __init__(self, world: LocalWorld, rank: int) -> None:
        self.world, self.rank, self.num_ranks = world, rank, world.num_ranks
        self.number = 0
        self._num_collectives = 0

    def note(self, record: str, device: torch.device) -> bool:
        return False

    def announce(self, record: str) -> Callable[[], Records]:
        collective = self._post([record] * self.num_ranks)
        return lambda: self.world.collect(collective, self.rank)

    def start(
        self,
        send: Tensor,
        recv: Tensor,
        send_bytes: Sequence[int],
        recv_bytes: Sequence[int],
        check: Check | None = None,
    ) -> Wait:
        # A copy, since the sender may overwrite its buffer before a slow peer has read it.
        collective = self._post(torch.split(send.clone(), list(send_bytes)))

        def wait() -> None:
            if check is not None:
                check()
            parts = self.world.collect(collective, self.rank)
            sizes = [part.numel() for part in parts]
            if sizes != list(recv_bytes):
                raise ValueError(
                    f"rank {self.rank} expects {list(recv_bytes)} bytes but is sent {sizes}:"
                    " the ranks hold different plans"
                )
            torch.cat(parts, out=recv)

        return wait

    def all_gather_object(self, mine: Object) -> list[Object]:
        return self.world.collect(self._post([mine] * self.num_ranks), self.rank)

    def refusal(self, device: torch.device) -> str | None:
        return None

    def _post(self, parts: Sequence[Any]) -> int:
        """Starts this rank's next collective and returns its number."""
        collective = self._num_collectives
        self._num_collectives += 1
        self.world.post(collective, self.rank, parts)
        return collective
