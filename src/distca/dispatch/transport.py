"""How bytes get from rank to rank: in one process (the oracle), or through torch.distributed.

A transport starts an uneven all-to-all and hands back a promise; between the two, the caller
computes what needs nothing from peers.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from threading import Condition
from typing import Protocol, TypeVar

import torch
import torch.distributed as dist
from torch import Tensor

Promise = Callable[[], Tensor]  # waits, and gives what was received
Result = TypeVar("Result")


class Transport(Protocol):
    @property
    def rank(self) -> int: ...

    @property
    def num_ranks(self) -> int: ...

    def start(self, send: Tensor, send_bytes: Sequence[int], recv_bytes: Sequence[int]) -> Promise:
        """Sends consecutive parts of a byte buffer to the ranks, and receives one from each."""
        ...


class DistributedTransport:
    """Any process group of torch.distributed: gloo, NCCL."""

    def __init__(self, group: dist.ProcessGroup | None = None) -> None:
        self.group = group
        self.rank = dist.get_rank(group)
        self.num_ranks = dist.get_world_size(group)

    def start(self, send: Tensor, send_bytes: Sequence[int], recv_bytes: Sequence[int]) -> Promise:
        received = torch.empty(sum(recv_bytes), dtype=torch.uint8, device=send.device)
        work = dist.all_to_all_single(
            received, send, list(recv_bytes), list(send_bytes), group=self.group, async_op=True
        )

        def wait() -> Tensor:
            if work is not None:
                work.wait()
            return received

        return wait


class LocalHub:
    """All ranks in one process, a thread each: the oracle for every other transport."""

    def __init__(self, num_ranks: int) -> None:
        self.num_ranks = num_ranks
        self._news = Condition()
        self._posted: dict[tuple[int, int], list[Tensor]] = {}  # (exchange, sender) -> parts
        self._failed = False

    def run(self, rank_function: Callable[[LocalTransport], Result]) -> list[Result]:
        """Calls the function once for every rank; an error on one of them ends all."""
        with ThreadPoolExecutor(self.num_ranks) as pool:
            ranks = [LocalTransport(self, rank) for rank in range(self.num_ranks)]
            results = [pool.submit(self._guarded, rank_function, rank) for rank in ranks]
        errors = [result.exception() for result in results]
        for error in sorted(filter(None, errors), key=lambda e: isinstance(e, PeerFailedError)):
            raise error  # the original one before those of its peers
        return [result.result() for result in results]

    def post(self, exchange: int, rank: int, parts: list[Tensor]) -> None:
        with self._news:
            self._posted[exchange, rank] = parts
            self._news.notify_all()

    def collect(self, exchange: int, rank: int) -> list[Tensor]:
        """Every rank's part for this one."""
        senders = [(exchange, sender) for sender in range(self.num_ranks)]
        with self._news:
            self._news.wait_for(lambda: self._failed or all(s in self._posted for s in senders))
            if self._failed:
                raise PeerFailedError(f"rank {rank} waited for a rank that failed")
            return [self._posted[sender][rank] for sender in senders]

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


class PeerFailedError(RuntimeError):
    """Another rank ended with an error, which is the one to look at."""


class LocalTransport:
    """One rank of a hub."""

    def __init__(self, hub: LocalHub, rank: int) -> None:
        self.hub, self.rank, self.num_ranks = hub, rank, hub.num_ranks
        self._exchanges = 0

    def start(self, send: Tensor, send_bytes: Sequence[int], recv_bytes: Sequence[int]) -> Promise:
        exchange = self._exchanges
        self._exchanges += 1
        self.hub.post(exchange, self.rank, list(torch.split(send, list(send_bytes))))

        def wait() -> Tensor:
            parts = self.hub.collect(exchange, self.rank)
            sizes = [part.numel() for part in parts]
            if sizes != list(recv_bytes):
                raise ValueError(
                    f"rank {self.rank} expects {list(recv_bytes)} bytes but is sent {sizes}:"
                    " the ranks hold different plans"
                )
            return torch.cat(parts)

        return wait
