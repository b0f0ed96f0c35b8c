"""A transport over torch.distributed.

[Note: when data is sent] Every message is announced over the host (``distca.dispatch.peers``). On
CPU tensors a thread waits for the answer and then starts the collective, since a mismatch would
abort the process; meanwhile this rank computes what needs nothing from peers. One thread per group
keeps its collectives in order. On CUDA tensors the collective is launched at once, since a host
that waits for its peers no longer runs ahead of the device. A mismatch blocks the device there, or
moves wrong rows; the answer arrives a moment later, aborts the communicators, which frees the
device, and raises on every rank at its next start or wait. So such a message costs an entry in a
list: a thread sends them ten times a second and waits for the answers
(``distca.dispatch.transports.late_checks``). No rank is ever more than ``MAX_CHECKS`` ahead.
"""

from collections.abc import Callable, Sequence
from datetime import timedelta
from functools import partial
from weakref import WeakKeyDictionary

import torch
import torch.distributed as dist
from torch import Tensor

from distca.dispatch.background import DaemonExecutor, run_now
from distca.dispatch.peer_news import PeerLostError
from distca.dispatch.peers import Peers
from distca.dispatch.transports.abort import abort_communicators
from distca.dispatch.transports.base import Check, ExchangeError, Object, Records, Wait
from distca.dispatch.transports.exchange_group import timeout_of
from distca.dispatch.transports.late_checks import LateChecks

_num_transports: WeakKeyDictionary[dist.ProcessGroup, int] = WeakKeyDictionary()  # by group
_threads: WeakKeyDictionary[dist.ProcessGroup, DaemonExecutor] = WeakKeyDictionary()


class DistributedTransport:
    """The ranks of a process group, gloo or NCCL; all of them construct it at the same point.

    group: None is the default group.
    timeout: how long a rank waits for the announcement of another; that of the group by default.
    peers: over whom messages are announced; the ranks of the group by default.
    """

    _news_s = 1.0  # how long the news of a lost rank may take after a collective has failed

    def __init__(
        self,
        group: dist.ProcessGroup | None = None,
        timeout: timedelta | None = None,
        peers: Peers | None = None,
    ) -> None:
        self.group = dist.group.WORLD if group is None else group
        if self.group is None:
            raise ValueError(
                "there is no process group yet: call torch.distributed.init_process_group first"
            )
        # Not by ``dist.get_rank``: the group may have ranks that the default group does not have.
        self.rank = self.group.rank() if isinstance(self.group, dist.ProcessGroup) else -1
        if self.rank < 0:
            raise ValueError(
                f"rank {dist.get_rank()} is not in the group: only its ranks can attend"
            )
        self.num_ranks = dist.get_world_size(self.group)
        self.peers = Peers.of(self.group) if peers is None else peers
        self.number = _num_transports.get(self.group, 0)
        _num_transports[self.group] = self.number + 1
        self._devices = dist.get_backend_config(self.group)
        self._timeout_s = (timeout or timeout_of(self.group)).total_seconds()
        self._thread = _threads.setdefault(self.group, DaemonExecutor())
        self._checks: LateChecks | None = None
        if "cuda:" in self._devices:
            self._checks = LateChecks.of(self.peers, on_failure=abort_communicators)
            self.peers.on_loss(self._free_device)

    def note(self, record: str, device: torch.device) -> bool:
        if device.type == "cpu" or self._checks is None:
            return False
        self._checks.note(record, self._timeout_s)
        return True

    def announce(self, record: str) -> Callable[[], Records]:
        answer = self.peers.announce(record)
        self.peers.flush()
        return partial(self.peers.wait, answer, self._timeout_s)

    def start(
        self,
        send: Tensor,
        recv: Tensor,
        send_bytes: Sequence[int],
        recv_bytes: Sequence[int],
        check: Check | None = None,
    ) -> Wait:
        on_host = send.device.type == "cpu"
        if self._checks is not None:
            self._checks.raise_failure()

        def begin() -> dist.Work | None:
            if check is not None:
                check()
            work: dist.Work | None = dist.all_to_all_single(
                recv, send, list(recv_bytes), list(send_bytes), group=self.group, async_op=True
            )
            return work

        begun = run_now(begin) if check is None else self._thread.submit(begin)

        def wait() -> None:
            try:
                if (work := begun.result()) is not None:
                    self._finish(work, on_host=on_host)
            except RuntimeError as error:
                raise self._explain(error, recv_bytes) from error
            finally:
                if self._checks is not None:
                    self._checks.raise_failure()

        return wait

    def all_gather_object(self, mine: Object) -> list[Object]:
        everyone: list[Object] = [mine] * self.num_ranks
        dist.all_gather_object(everyone, mine, group=self.group)
        return everyone

    def refusal(self, device: torch.device) -> str | None:
        if f"{device.type}:" in self._devices:
            return None
        return f"the group ({self._devices}) does not move {device.type} tensors"

    def _finish(self, work: dist.Work, *, on_host: bool) -> None:
        work.wait()

    def _free_device(self, lost: PeerLostError) -> None:
        """Frees the device, which may wait for a lost rank in any of its groups."""
        abort_communicators()

    def _explain(self, error: RuntimeError, recv_bytes: Sequence[int]) -> RuntimeError:
        if isinstance(error, ExchangeError):
            return error
        if (lost := self.peers.lost_within(self._news_s)) is not None:
            return lost
        senders = [rank for rank, size in enumerate(recv_bytes) if size]
        what = f"for data of ranks {senders}" if senders else "until its data was sent"
        return ExchangeError(f"rank {self.rank} waited {what}: {error}")
