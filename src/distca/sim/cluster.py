"""Clusters: nodes of GPUs, links inside and between nodes, and how they deviate from ideal ones.

The simulator follows plan ranks. A plan rank stands for the GPUs of one tensor-parallel group,
which do the same thing at the same time, each with its share of the heads. Plan ranks are assigned
to nodes in order.
"""

from collections.abc import Mapping
from dataclasses import dataclass, field, replace

import numpy as np

from distca.pipeline.mesh import MeshShape
from distca.planning.devices import FASTEST
from distca.planning.spans import Floats, Ints
from distca.schema import choose


@dataclass(frozen=True)
class Link:
    """The network port of a GPU: its bandwidth in each direction, and its latency."""

    bytes_per_s: float
    latency_s: float = 0.0

    def __post_init__(self) -> None:
        if not (0 < self.bytes_per_s < np.inf and 0 <= self.latency_s < np.inf):
            raise ValueError(
                f"a link of {self.bytes_per_s} bytes/s and {self.latency_s} s:"
                " give a bandwidth above 0 and a latency of 0 or more, both finite"
            )

    def seconds(self, num_bytes: Floats) -> Floats:
        """Returns the seconds to send so many bytes; 0 where nothing is sent."""
        taken = self.latency_s + num_bytes / self.bytes_per_s
        return np.where(num_bytes > 0, taken, 0.0)


@dataclass(frozen=True)
class Cluster:
    """GPUs, nodes and links.

    jitter, link_jitter: relative standard deviations of the seconds of kernels and of transfers.
    transfer_sms: share of a GPU's SMs that a transfer occupies while it is under way or waits for
        its partners, so that kernels beside it have the rest.
    """

    name: str
    gpus: int
    gpus_per_node: int
    memory_bytes: int
    inside: Link  # of a GPU to its own node
    across: Link  # of a GPU to other nodes
    profile: str = "h200"  # a shipped profile of kernels, or the path of a file
    slow: Mapping[int, float] = field(default_factory=dict)  # speeds of GPUs other than 1
    jitter: float = 0.0
    link_jitter: float = 0.0
    transfer_sms: float = 0.0
    known: bool = True  # whether the planner knows the speeds of slow GPUs

    def __post_init__(self) -> None:
        if self.gpus < 1 or self.gpus_per_node < 1:
            raise ValueError(
                f"{self.gpus} GPUs, {self.gpus_per_node} in a node: give 1 or more of each"
            )
        for gpu, speed in self.slow.items():
            if not 0 <= gpu < self.gpus or not 1 / FASTEST <= speed <= FASTEST:
                raise ValueError(
                    f"GPU {gpu} of speed {speed}: give a number below {self.gpus} and a speed from"
                    f" {1 / FASTEST:g} to {FASTEST:g}"
                )
        for what in ("jitter", "link_jitter", "transfer_sms"):
            if not 0 <= (value := getattr(self, what)) < 1:
                raise ValueError(f"{what} = {value}: it must be at least 0 and below 1")

    @property
    def usable_bytes(self) -> int:
        """Memory of a GPU for a step; kernels, collectives and fragmentation need the rest."""
        return int(0.95 * self.memory_bytes)

    def check(self, parallel: MeshShape) -> None:
        """Raises ValueError if a mesh does not fit this cluster."""
        parallel.check(self.gpus)
        if self.gpus_per_node % parallel.tp and self.gpus > self.gpus_per_node:
            raise ValueError(
                f"tp = {parallel.tp} with {self.gpus_per_node} GPUs in a node: tensor parallelism"
                " stays inside a node, so choose a divisor"
            )

    def ranks_per_node(self, tp: int) -> int:
        """Returns how many plan ranks share a node."""
        return max(self.gpus_per_node // tp, 1)

    def node(self, num_plan_ranks: int, tp: int) -> Ints:
        """Returns the node of each plan rank."""
        return np.arange(num_plan_ranks, dtype=np.int64) // self.ranks_per_node(tp)

    def speed(self, num_plan_ranks: int, tp: int) -> Floats:
        """Returns the speed of each plan rank: that of the slowest GPU of its group."""
        speed = np.ones(num_plan_ranks * tp)
        for gpu, value in self.slow.items():
            speed[gpu] = value
        slowest: Floats = speed.reshape(num_plan_ranks, tp).min(axis=1)
        return slowest

    def group_link(self, members: int, per_node: int) -> Link:
        """Returns the effective link of a ring collective of neighbouring plan ranks.

        In a group that fills whole nodes, the data from other nodes enters a node once, over the
        ports of all its members. Any other group larger than a node's share has one port between
        two nodes.
        """
        if per_node % members == 0 or self.gpus <= self.gpus_per_node:
            return self.inside
        together = per_node if members % per_node == 0 else 1
        rate = min(self.inside.bytes_per_s, self.across.bytes_per_s * together)
        return Link(rate, self.across.latency_s)


GB = 10**9
# NVLink at the bandwidth that all-gathers reach (of 450 GB/s), 400 Gb/s per GPU across nodes.
_H200 = Cluster("h200", 64, 8, 141 * GB, Link(360e9, 10e-6), Link(50e9, 20e-6))
_CLUSTERS = (
    _H200,
    # The kernels of FlashAttention 2, with which published systems were measured.
    replace(_H200, name="h200-flash", profile="h200-flash"),
    # The same GPUs with 100 Gb/s per node.
    replace(_H200, name="h200-ethernet", across=Link(1.5625e9, 50e-6)),
)
# Other GPUs by their published rates (``costs.published``). Links have the same share of theirs as
# NVLink has above: 300, 450 and 900 GB/s, and 32 GB/s of PCIe 4 for the L40S. Across nodes, A100s
# have 200 Gb/s per GPU, L40S 400 Gb/s per node, and the others 400 Gb/s per GPU.
_PUBLISHED = (
    replace(_H200, name="h100", memory_bytes=80 * GB, profile="h100"),
    Cluster("a100", 64, 8, 80 * GB, Link(240e9, 10e-6), Link(25e9, 20e-6), profile="a100"),
    Cluster("b200", 64, 8, 180 * GB, Link(720e9, 10e-6), Link(50e9, 20e-6), profile="b200"),
    Cluster("gb200", 72, 72, 186 * GB, Link(720e9, 10e-6), Link(50e9, 20e-6), profile="gb200"),
    Cluster("l40s", 64, 8, 48 * GB, Link(25.6e9, 20e-6), Link(6.25e9, 20e-6), profile="l40s"),
)
PRESETS = {cluster.name: cluster for cluster in _CLUSTERS} | {
    cluster.name: replace(cluster, name=f"{cluster.name} by published rates")
    for cluster in _PUBLISHED
}


def cluster(name: str) -> Cluster:
    """Returns a preset by name."""
    return choose(PRESETS, name, "cluster", ", and change its numbers as needed")
