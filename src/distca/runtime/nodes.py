"""Which ranks of a run share a node."""

from __future__ import annotations

import socket
from collections.abc import Hashable, Sequence
from dataclasses import dataclass
from itertools import groupby
from math import gcd

import torch.distributed as dist

from distca.runtime.together import from_all_ranks


@dataclass(frozen=True)
class Nodes:
    """How ranks are spread over nodes.

    ranks_per_node: consecutive ranks that share a node, the same number on all of them.
    num_local: ranks on this node, which share its memory.
    """

    ranks_per_node: int
    num_local: int

    @classmethod
    def of_world(cls) -> Nodes:
        """Asks all ranks, because launchers may start different numbers of them on the nodes."""
        names = from_all_ranks(node_name())
        return cls(node_size(names), names.count(names[dist.get_rank()]))

    @classmethod
    def one(cls, num_ranks: int) -> Nodes:
        """Returns a single node with all ranks."""
        return cls(num_ranks, num_ranks)


def node_name() -> str:
    """Returns the name of this node, which no other node has."""
    return socket.gethostname()


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
