"""How bytes get from rank to rank through torch.distributed."""

from __future__ import annotations

from collections.abc import Sequence
from weakref import WeakKeyDictionary

import torch
import torch.distributed as dist
from torch import Tensor

from distca.dispatch.transports.base import NOTE_BYTES, ExchangeError, Wait

_made: WeakKeyDictionary[dist.ProcessGroup, int] = WeakKeyDictionary()  # transports, by group


class DistributedTransport:
    """Any process group of torch.distributed: gloo, NCCL.

    control: the same ranks in a group that moves CPU tensors, for notes. The group itself, where it
    does; one of its own for the whole world where it does not (then all ranks must make this
    transport, as they must any group).
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
            raise ValueError(f"rank {dist.get_rank()} is not in the group: only its ranks attend")
        self.num_ranks = dist.get_world_size(self.group)
        self._devices = dist.get_backend_config(self.group)
        self._control = _control_of(self.group, self._devices) if control is None else control
        number = _made.get(self._control, 0)  # the same on all ranks
        _made[self._control] = number + 1
        self._mark = f"distca/{number}"
        self._gathers = 0

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

    def gather(self, note: bytes) -> list[bytes]:
        mine = torch.zeros(NOTE_BYTES, dtype=torch.uint8, device="cpu")
        mine[: len(note)] = torch.frombuffer(bytearray(note), dtype=torch.uint8)
        notes = [torch.empty_like(mine) for _ in range(self.num_ranks)]
        self._gathers += 1
        store = self._control.get_group_store()
        store.set(self._key(self.rank), "")  # what peers look for if they wait in vain
        try:
            dist.all_gather(notes, mine, group=self._control)
        except RuntimeError as error:
            raise ExchangeError(
                f"rank {self.rank} waited for all ranks to come before an exchange;"
                f" {self._missing()}: {error}"
            ) from error
        store.delete_key(self._key(self.rank, before=1))  # all have come past that one
        return [bytes(note.tolist()).rstrip(b"\0") for note in notes]

    def refusal(self, device: torch.device) -> str | None:
        if f"{device.type}:" in self._devices:
            return None
        return f"the group ({self._devices}) does not move tensors of {device.type}"

    def _missing(self) -> str:
        store = self._control.get_group_store()
        try:
            missing = [r for r in range(self.num_ranks) if not store.check([self._key(r)])]
        except RuntimeError:
            return "who is missing cannot be told, since the store is gone"
        return f"ranks {missing} did not come" if missing else "all came, but one is gone"

    def _key(self, rank: int, before: int = 0) -> str:
        return f"{self._mark}/{self._gathers - before}/{rank}"


def _control_of(group: dist.ProcessGroup, devices: str) -> dist.ProcessGroup:
    if "cpu:" in devices:
        return group
    if group != dist.group.WORLD:
        raise ValueError(
            f"the group ({devices}) cannot carry notes between hosts: also give"
            " control=torch.distributed.new_group(ranks, backend='gloo')"
        )
    control: dist.ProcessGroup = dist.new_group(backend="gloo")
    return control
