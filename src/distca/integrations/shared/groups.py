"""Process groups of the ranks that share attention, and the nodes on which these ranks are."""

from __future__ import annotations

from dataclasses import dataclass
from datetime import timedelta
from typing import Any

import torch.distributed as dist

from distca.dispatch.transports.distributed import DistributedTransport
from distca.dispatch.transports.exchange_group import new_exchange_group
from distca.runtime.nodes import node_name, node_size


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
        dist.all_gather_object(nodes, node_name(), group=planning)
        return cls(world, layers, DistributedTransport(planning), node_size(nodes))
