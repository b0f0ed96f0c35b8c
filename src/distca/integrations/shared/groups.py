"""Process groups of the ranks that share attention, and the nodes on which these ranks are."""

from __future__ import annotations

from collections.abc import Hashable, Sequence
from dataclasses import dataclass
from datetime import timedelta
from itertools import groupby
from math import gcd
from typing import Any

import torch.distributed as dist

from distca.dispatch.transports.distributed import DistributedTransport
from distca.dispatch.transports.exchange_group import new_exchange_group
from distca.runtime import mesh


@dataclass(frozen=True, eq=False)
class PlanGroups:
    """Groups of the same ranks, one for each purpose, in the order of the plan ranks.

    They are separate from the trainer's groups, so that the order in which the trainer issues its
    collectives never conflicts with these.
    """

    world: dist.ProcessGroup  # the default group at the time
    layers: dist.ProcessGroup  # exchanges of layers
    planning: DistributedTransport  # gathers documents, in a background thread
    ranks_per_node: int  # consecutive plan ranks that share a node

    @property
    def use_nccl(self) -> bool:
        """Whether layers exchange over NCCL."""
        return "nccl" in dist.get_backend(self.layers)

    @classmethod
    def make(
        cls, world: dist.ProcessGroup, group: dist.ProcessGroup | None, timeout: timedelta
    ) -> PlanGroups:
        """Makes the groups of this rank; a collective of the whole world.

        group: the ranks that share attention with this one; None is the whole world.
        """
        mine = tuple(dist.get_process_group_ranks(world if group is None else group))
        everyone: list[Any] = [mine] * dist.get_world_size(world)
        if group is not None:
            dist.all_gather_object(everyone, mine)
        # Every rank makes every group, in the same order, also those that it is not in.
        made = {
            ranks: (
                new_exchange_group(ranks),
                dist.new_group(ranks, backend="gloo", timeout=timeout),
            )
            for ranks in sorted({*everyone})
        }
        layers, planning = made[mine]
        nodes: list[Any] = [None] * len(mine)
        dist.all_gather_object(nodes, _node(dist.get_rank(world)), group=planning)
        return cls(world, layers, DistributedTransport(planning), node_size(nodes))


def node_size(nodes: Sequence[Hashable]) -> int:
    """Returns how many consecutive ranks share a node, given the node of every rank.

    Where nodes hold different numbers of these ranks, as in a pipeline stage that begins inside a
    node, it is the largest size of equal blocks that no node boundary cuts.
    """
    sizes = [sum(1 for _ in same) for _, same in groupby(nodes)]
    full, last = sizes[:-1], sizes[-1]
    if full and {*full} == {full[0]} and last <= full[0]:  # only the last node may be partly used
        return full[0]
    return gcd(*sizes)


def _node(rank: int) -> int | None:
    """Returns the node of this global rank as the launcher tells it; None if it does not.

    Ranks gather it instead of computing that of others, since all of them must plan alike even if
    the launcher started different numbers of ranks on the nodes.
    """
    local_size = mesh.ranks_per_node()
    return None if local_size is None else rank // local_size
