"""A transport over torch.distributed.

[Note: when data is sent] A message is sent after all ranks have announced it. On CPU tensors a
thread waits for that, so that this rank can already compute what needs nothing from peers; one
thread per group keeps its collectives in order. On CUDA tensors the host itself waits: it runs
ahead of the device, and collectives of all groups have to be launched in one order. Announcements
have a group of their own, since the order of both kinds differs from rank to rank.
"""

import pickle
from collections.abc import Callable, Sequence
from datetime import timedelta
from typing import Any
from weakref import WeakKeyDictionary

import torch
import torch.distributed as dist
from torch import Tensor

from distca.dispatch.background import DaemonExecutor, run_now
from distca.dispatch.transports.base import RECORD_BYTES, Check, ExchangeError, Object, Wait

_num_transports: WeakKeyDictionary[dist.ProcessGroup, int] = WeakKeyDictionary()  # by group
_controls: WeakKeyDictionary[dist.ProcessGroup, Any] = WeakKeyDictionary()
_senders: WeakKeyDictionary[dist.ProcessGroup, DaemonExecutor] = WeakKeyDictionary()


class DistributedTransport:
    """The ranks of a process group, gloo or NCCL.

    group: None is the default group.
    control: the same ranks in another group that moves CPU tensors, for announcements and objects.
        By default gloo connects them once more, with the timeout of the group; then all ranks of
        the group must construct this transport.
    """

    def __init__(
        self, group: dist.ProcessGroup | None = None, control: dist.ProcessGroup | None = None
    ) -> None:
        self.group = dist.group.WORLD if group is None else group
        if self.group is None:
            raise ValueError(
                "there is no process group yet: call torch.distributed.init_process_group first"
            )
        self.rank = dist.get_rank(self.group)
        if self.rank < 0:
            raise ValueError(
                f"rank {dist.get_rank()} is not in the group: only its ranks can attend"
            )
        self.num_ranks = dist.get_world_size(self.group)
        self._devices = dist.get_backend_config(self.group)
        self._control = _control_of(self.group, control)
        self.number = _num_transports.get(self.group, 0)
        _num_transports[self.group] = self.number + 1
        self._sender = _senders.setdefault(self.group, DaemonExecutor())

    def announce(self, record: bytes) -> Callable[[], list[bytes]]:
        assert len(record) == RECORD_BYTES
        return self._tell(record, [RECORD_BYTES] * self.num_ranks)

    def start(
        self,
        send: Tensor,
        recv: Tensor,
        send_bytes: Sequence[int],
        recv_bytes: Sequence[int],
        check: Check | None = None,
    ) -> Wait:
        def begin() -> dist.Work | None:
            if check is not None:
                check()
            work: dist.Work | None = dist.all_to_all_single(
                recv, send, list(recv_bytes), list(send_bytes), group=self.group, async_op=True
            )
            return work

        # [Note: when data is sent]
        late = check is not None and send.device.type == "cpu"
        begun = self._sender.submit(begin) if late else run_now(begin)

        def wait() -> None:
            work = begun.result()
            try:
                if work is not None:
                    work.wait()
            except RuntimeError as error:
                senders = [rank for rank, size in enumerate(recv_bytes) if size]
                what = f"for data of ranks {senders}" if senders else "until its data was sent"
                raise ExchangeError(f"rank {self.rank} waited {what}: {error}") from error

        return wait

    def all_gather_object(self, mine: Object) -> list[Object]:
        data = pickle.dumps(mine)
        sizes = self.announce(len(data).to_bytes(RECORD_BYTES, "big"))()
        objects = self._tell(data, [int.from_bytes(size, "big") for size in sizes])()
        return [pickle.loads(data) for data in objects]

    def refusal(self, device: torch.device) -> str | None:
        if f"{device.type}:" in self._devices:
            return None
        return f"the group ({self._devices}) does not move {device.type} tensors"

    def _tell(self, mine: bytes, sizes: Sequence[int]) -> Callable[[], list[bytes]]:
        """Starts to send the same bytes to all ranks over the host, which send so many back."""
        if self._control is None:
            return lambda: [mine]
        send = torch.frombuffer(bytearray(mine * self.num_ranks), dtype=torch.uint8)
        recv = torch.zeros(sum(sizes), dtype=torch.uint8, device="cpu")
        work = self._control.alltoall_base(
            recv, send, list(sizes), [len(mine)] * self.num_ranks, dist.AllToAllOptions()
        )

        def split() -> list[bytes]:
            return [part.numpy().tobytes() for part in torch.split(recv, list(sizes))]

        def wait() -> list[bytes]:
            try:
                work.wait()
            except RuntimeError as error:  # ranks that have not come left zeros
                arrived = [data.rstrip(b"\0") for data in split()]
                raise ExchangeError(str(error), arrived) from error
            return split()

        return wait


def _control_of(group: dist.ProcessGroup, given: dist.ProcessGroup | None) -> Any:
    """Returns the gloo backend over which ranks announce; None where there are no peers.

    If none is given it is made at the first request, on all ranks of the group. Not by
    ``new_group``, which is a collective of the whole world.
    """
    rank, size = dist.get_rank(group), dist.get_world_size(group)
    if given is not None:
        _check_control(group, given)
        return given._get_backend(torch.device("cpu"))
    if group not in _controls and size > 1:
        store = dist.distributed_c10d.PrefixStore("distca", group.get_group_store())
        _controls[group] = dist.ProcessGroupGloo(store, rank, size, _timeout(group))
    return _controls.get(group)


def _check_control(group: dist.ProcessGroup, control: dist.ProcessGroup) -> None:
    ranks, others = (dist.get_process_group_ranks(one) for one in (group, control))
    if control == group or ranks != others or "cpu:" not in dist.get_backend_config(control):
        raise ValueError(
            f"a control group of ranks {others} for a group of ranks {ranks}: give another group"
            " of the same ranks, made with backend='gloo', or none"
        )


def _timeout(group: dist.ProcessGroup) -> timedelta:
    device = "cpu" if "cpu:" in dist.get_backend_config(group) else "cuda"
    timeout: timedelta = group._get_backend(torch.device(device)).options._timeout
    return timeout
