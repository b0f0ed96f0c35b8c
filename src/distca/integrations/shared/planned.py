"""Attention inside a foreign trainer: lengths of all ranks in, one object for all layers.

What integrations share. A trainer brings packed batches of its own, a batch a rank; the ranks tell
each other their documents' lengths once per batch, and every rank makes the same plans from them.

    attention = PlannedAttention()              # of all ranks; groups are made when needed
    batch = attention.gather(documents)         # on every rank: the documents of all of them
    out = attention.attend(q, k, v, batch)      # in every layer, forward and recomputed
    batch = attention.alone(documents)          # instead: nobody else is asked, nothing moves

``submit`` gathers and plans in the background, in the order of its calls; ``ahead.Ahead`` does so
for a loader.

Legend: T tokens of this rank, H heads, G key/value heads, D head size.
"""

from __future__ import annotations

import logging
from collections.abc import Sequence
from concurrent.futures import Future
from dataclasses import dataclass, replace
from datetime import timedelta
from threading import Lock
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from distca.attention.agreement import gather_or_raise
from distca.attention.core import CoreAttention
from distca.dispatch.transports.distributed import DistributedTransport
from distca.dispatch.transports.local import LocalTransport, LocalWorld
from distca.integrations.shared.background import InOrder, at_once
from distca.integrations.shared.handshake import BatchHandshake
from distca.planning.api import plan
from distca.planning.masks import CAUSAL, Mask
from distca.planning.models import ModelShape
from distca.planning.options import PlanOptions
from distca.planning.placement import Entry, Placement
from distca.planning.plan import Plan
from distca.planning.policies import Policy, policy_of

Documents = Sequence[Entry]  # of a rank, in order: lengths, or shards of documents that span ranks

TIMEOUT_S = 600.0
_RESTLESS_S = 30.0  # after so long a rank says that it waits

_log = logging.getLogger(__name__)


@dataclass(frozen=True)
class Kind:
    """What the attention of a layer is like, as far as plans care."""

    mask: Mask
    heads: int
    kv_heads: int
    head_dim: int
    device: str  # "cpu" or "cuda"


class PlannedBatch:
    """The documents of all ranks in one micro-batch, and a plan for each kind of attention.

    Made from the same documents by the same rules, plans are the same on every rank. They live as
    long as this object does: keep it until the batch's backward is over.
    """

    def __init__(
        self,
        ranks: Sequence[Documents],
        rank: int,
        options: PlanOptions,
        policy: Policy,
        *,
        alone: bool,
    ) -> None:
        self.ranks = tuple(tuple(documents) for documents in ranks)
        self.alone = alone  # nobody else is in it
        self.lengths = tuple(_size(entry) for entry in self.ranks[rank])  # tokens on this rank
        self._options, self._policy = options, policy
        self._plans, self._lock = dict[Kind, Plan](), Lock()
        self._placement = Placement.from_ranks(self.ranks)

    def plan(self, kind: Kind) -> Plan:
        """Made when first asked for, here or in the background."""
        longest = int(self._placement.lengths.max(initial=0))
        if kind.mask.reach >= longest:  # a window that is nowhere too small
            kind = replace(kind, mask=Mask(CAUSAL))
        with self._lock:
            if kind not in self._plans:
                shape = ModelShape("layer", kind.heads, kind.kv_heads, kind.head_dim)
                options = self._options.for_device(kind.device)
                options = replace(options, model=shape, mask=kind.mask)
                self._plans[kind] = plan(self._placement, options, scheduler=self._policy.scheduler)
            return self._plans[kind]


Promise = Future[PlannedBatch | None]


class PlannedAttention:
    """Core attention of a trainer's layers, planned over all ranks once per batch.

    group: the ranks that share their attention; None is the whole world. Without a world, or in a
        group of one, every batch is alone.
    backend, deterministic: as ``CoreAttention`` takes them.
    policy: ``distca``, ``colocated`` or ``greedy``; a trainer's tokens stay where they are.
    timeout_s: how long a rank waits for the others to come with a batch.
    plan_options: options of ``distca.plan`` by name, such as ``tolerance`` and ``cost``.

    The exchange, the agreement before it and the gathering of lengths have a group each, so that
    nothing that a trainer has under way in its own groups can get between them. For the world they
    are made at the first batch, or by ``connect``. Where a group is given, they are made at once:
    then all ranks of the world construct this object at the same point, each with its own group.
    """

    def __init__(
        self,
        group: dist.ProcessGroup | None = None,
        *,
        backend: str = "auto",
        deterministic: bool = False,
        policy: str = "distca",
        timeout_s: float = TIMEOUT_S,
        **plan_options: Any,
    ) -> None:
        self._group, self._timeout = group, timedelta(seconds=timeout_s)
        self._options, self._policy = PlanOptions.of(None, plan_options), policy_of(policy)
        self._core_options: dict[str, Any] = {"backend": backend, "deterministic": deterministic}
        self._cores: dict[tuple[bool, float | None], CoreAttention] = {}
        self._kinds: dict[Kind, None] = {}  # that layers have asked for, in order
        self._links: _Links | None = None
        self._in_order = InOrder()
        if group is not None:
            self.connect()

    def connect(self) -> None:
        """Makes the groups now, on all ranks of the world at the same point."""
        self._link()

    def alone(self, documents: Documents) -> PlannedBatch:
        """A batch of this rank, whatever the others do: nothing is exchanged."""
        return PlannedBatch([documents], 0, self._options, self._policy, alone=True)

    def gather(self, documents: Documents, complaint: str = "") -> PlannedBatch:
        """The batch of all ranks, of which these are this rank's documents, packed in this order.

        Every rank of the group calls it at the same point; one without documents gives none. With a
        ``complaint`` on one rank, all of them raise it.
        """
        batch = self.wait(self.submit(documents, complaint=complaint))
        assert batch is not None, "this rank has one"
        return batch

    def submit(self, documents: Documents, *, done: bool = False, complaint: str = "") -> Promise:
        """The same in the background, with plans for the kinds of attention known so far.

        A rank that is ``done`` has no batch left, and joins with fillers until all ranks are: then
        nobody gets a batch, but None.
        """
        mine, links = BatchHandshake(tuple(documents), done, complaint), self._link()
        if links is None:
            return at_once(lambda: self._by_myself(mine))
        return self._in_order.submit(lambda: self._with_all(links, mine))

    def wait(self, promise: Promise) -> PlannedBatch | None:
        try:
            return promise.result(_RESTLESS_S)
        except TimeoutError:
            if not promise.done():
                _log.warning(
                    "waiting for %.0f s for the documents of all ranks, for up to %.0f: each of"
                    " them must call the model as often as the others",
                    _RESTLESS_S,
                    self._timeout.total_seconds(),
                )
            return promise.result()

    def attend(
        self,
        q: Tensor,
        k: Tensor,
        v: Tensor,
        batch: PlannedBatch,
        *,
        mask: str | Mask = "causal",
        scale: float | None = None,
    ) -> Tensor:
        """q [T, H, D], k and v [T, G, D] -> [T, H, D], on every rank of the batch.

        Differentiable. v may have another head size than q and k, and its output then has that;
        under autocast all are cast, as torch's own attention does.
        """
        scale = q.shape[-1] ** -0.5 if scale is None else scale
        size = v.shape[-1]
        q, k, v = _one_head_size(*_autocast(q, k, v))
        kind = Kind(Mask.parse(mask), q.shape[1], k.shape[1], q.shape[2], q.device.type)
        self._kinds.setdefault(kind)
        out: Tensor = self._core(batch.alone, scale)(q, k, v, batch.plan(kind))
        return out if out.shape[-1] == size else out[..., :size]

    def take_seconds(self) -> dict[str, float]:
        """Of "attention" and of "exposed" waiting on this rank, since it was last asked."""
        total: dict[str, float] = {}
        for core in self._cores.values():
            for name, seconds in core.meter.take().items():
                total[name] = total.get(name, 0.0) + seconds
        return total

    def close(self) -> None:
        """Ends the background thread, after what it was given; another call starts it again."""
        self._in_order.close()

    def _by_myself(self, mine: BatchHandshake) -> PlannedBatch | None:
        if mine.error:
            raise ValueError(mine.error)
        return None if mine.done else self.alone(mine.documents)

    def _with_all(self, links: _Links, mine: BatchHandshake) -> PlannedBatch | None:
        handshakes = gather_or_raise(links.planning, mine)
        if all(one.done for one in handshakes):
            return None
        ranks = [one.documents for one in handshakes]
        batch = PlannedBatch(ranks, links.planning.rank, self._options, self._policy, alone=False)
        for kind in list(self._kinds):
            batch.plan(kind)
        return batch

    def _core(self, alone: bool, scale: float) -> CoreAttention:
        if (alone, scale) not in self._cores:
            options = self._core_options | {"scale": scale}
            if alone:
                core = CoreAttention(transport=LocalTransport(LocalWorld(1), 0), **options)
            else:
                links = self._link()
                assert links is not None, "a batch of all ranks came without them"
                core = CoreAttention(links.group, control=links.control, **options)
            self._cores[alone, scale] = core
        return self._cores[alone, scale]

    def _link(self) -> _Links | None:
        """Groups of the ranks, made by all of them at the same point; None without others."""
        world = dist.group.WORLD if dist.is_available() and dist.is_initialized() else None
        if world is None or dist.get_world_size(world) == 1:
            return None
        if self._links is None or self._links.world is not world:  # new, or another than before
            self._links = _Links.make(world, self._group, self._timeout)
            self._cores = {key: core for key, core in self._cores.items() if key[0]}
        return None if self._links.planning.num_ranks == 1 else self._links


@dataclass(frozen=True, eq=False)
class _Links:
    world: dist.ProcessGroup
    group: dist.ProcessGroup  # for what layers exchange
    control: dist.ProcessGroup  # for agreement before it
    planning: DistributedTransport  # for lengths, in a thread of its own

    @classmethod
    def make(
        cls, world: dist.ProcessGroup, group: dist.ProcessGroup | None, timeout: timedelta
    ) -> _Links:
        mine = tuple(dist.get_process_group_ranks(world if group is None else group))
        everyone: list[Any] = [mine] * dist.get_world_size(world)
        if group is not None:
            dist.all_gather_object(everyone, mine)
        gloo: dict[str, Any] = {"backend": "gloo", "timeout": timeout}
        # Every rank makes every group, in the same order, also those that it is not in.
        made = {
            ranks: [dist.new_group(ranks, **options) for options in ({}, gloo, gloo)]
            for ranks in sorted({*everyone})
        }
        layers, control, planning = made[mine]
        return cls(world, layers, control, DistributedTransport(planning))


def _size(entry: Entry) -> int:
    return entry if isinstance(entry, int) else entry["stop"] - entry["start"]


def _autocast(q: Tensor, k: Tensor, v: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    device = q.device.type
    if not torch.is_autocast_enabled(device):
        return q, k, v
    dtype = torch.get_autocast_dtype(device)
    return q.to(dtype), k.to(dtype), v.to(dtype)


def _one_head_size(q: Tensor, k: Tensor, v: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    """Zeros beyond the smaller of two head sizes change neither scores nor outputs."""
    size = max(q.shape[-1], v.shape[-1])
    q, k, v = (_widened(x, size) for x in (q, k, v))
    return q, k, v


def _widened(x: Tensor, size: int) -> Tensor:
    return x if x.shape[-1] == size else torch.nn.functional.pad(x, (0, size - x.shape[-1]))
