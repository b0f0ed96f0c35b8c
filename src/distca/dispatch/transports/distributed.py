"""A transport over torch.distributed."""

from collections.abc import Sequence
from typing import Any
from weakref import WeakKeyDictionary

import torch
import torch.distributed as dist
from torch import Tensor

from distca.dispatch.transports.base import ExchangeError, Object, Wait

_num_transports: WeakKeyDictionary[dist.ProcessGroup, int] = WeakKeyDictionary()  # by group


class DistributedTransport:
    """The ranks of a process group, gloo or NCCL.

    group: None is the default group.
    control: the same ranks in a group that moves CPU tensors, over which objects are gathered. By
        default it is the group itself, if it moves CPU tensors. If it does not and is the whole
        world, a gloo group is made; then all ranks must construct this transport.

    [Note: missing ranks] Before a gather, each rank sets a key in the store of the control group.
    When the gather fails, the missing keys tell on every rank who did not join. Gloo's
    ``monitored_barrier`` tells it on rank 0 alone, and nowhere if rank 0 is missing.
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
        self._control = _control_of(self.group, self._devices) if control is None else control
        number = _num_transports.get(self._control, 0)  # the same on all ranks
        _num_transports[self._control] = number + 1
        self._prefix = f"distca/{number}"
        self._num_gathers = 0

    def start(
        self, send: Tensor, recv: Tensor, send_bytes: Sequence[int], recv_bytes: Sequence[int]
    ) -> Wait:
        work = dist.all_to_all_single(
            recv, send, list(recv_bytes), list(send_bytes), group=self.group, async_op=True
        )

        def wait() -> None:
            try:
                if work is not None:
                    work.wait()
            except RuntimeError as error:
                senders = [rank for rank, size in enumerate(recv_bytes) if size]
                raise ExchangeError(
                    f"rank {self.rank} waited for data of ranks {senders}: {error}"
                ) from error

        return wait

    def all_gather_object(self, mine: Object) -> list[Object]:
        objects: list[Any] = [None] * self.num_ranks
        self._num_gathers += 1
        store = self._control.get_group_store()
        store.set(self._key(self.rank, self._num_gathers), "")  # [Note: missing ranks]
        try:
            dist.all_gather_object(objects, mine, group=self._control)
        except RuntimeError as error:
            raise ExchangeError(
                f"rank {self.rank} waited for all ranks before an exchange; {self._missing()}:"
                f" {error}"
            ) from error
        store.delete_key(self._key(self.rank, self._num_gathers - 1))  # all ranks are past it
        return objects

    def refusal(self, device: torch.device) -> str | None:
        if f"{device.type}:" in self._devices:
            return None
        return f"the group ({self._devices}) does not move {device.type} tensors"

    def _missing(self) -> str:
        store = self._control.get_group_store()
        try:
            missing = [
                rank
                for rank in range(self.num_ranks)
                if not store.check([self._key(rank, self._num_gathers)])
            ]
        except RuntimeError:
            return "which ranks are missing is unknown, since the store is gone"
        return f"ranks {missing} did not join" if missing else "all joined, but one was lost"

    def _key(self, rank: int, number: int) -> str:
        return f"{self._prefix}/{number}/{rank}"


def _control_of(group: dist.ProcessGroup, devices: str) -> dist.ProcessGroup:
    if "cpu:" in devices:
        return group
    if group != dist.group.WORLD:
        raise ValueError(
            f"the group ({devices}) cannot gather objects over the host: also give"
            " control=torch.distributed.new_group(ranks, backend='gloo')"
        )
    control: dist.ProcessGroup = dist.new_group(backend="gloo")
    return control
