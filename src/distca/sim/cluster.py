"""The machines: nodes of GPUs, the links inside and between them, and what is not ideal.

A *lane* is one rank of a plan: the GPUs of one tensor-parallel group, which do the same thing at
the same time, each with its part of the heads. Lanes lie on nodes in order.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field

import numpy as np

from distca.pipeline.mesh import MeshShape
from distca.planning.spans import Floats, Ints


@dataclass(frozen=True)
class Link:
    """A GPU's port: so many bytes a second each way, after a while."""

    bytes_per_s: float
    latency_s: float = 0.0

    def __post_init__(self) -> None:
        if not (0 < self.bytes_per_s < np.inf and 0 <= self.latency_s < np.inf):
            raise ValueError(
                f"a link of {self.bytes_per_s} bytes/s and {self.latency_s} s:"
                " give a bandwidth above 0 and a latency of 0 or more, both finite"
            )

    def seconds(self, num_bytes: Floats) -> Floats:
        """0 where nothing is sent."""
        taken = self.latency_s + num_bytes / self.bytes_per_s
        return np.where(num_bytes > 0, taken, 0.0)


@dataclass(frozen=True)
class Cluster:
    """``jitter`` and ``link_jitter`` are standard deviations of every kernel's and every exchange's
    seconds, relative to them; ``slow`` gives GPUs a speed other than 1."""

    name: str
    gpus: int
    gpus_per_node: int
    memory_bytes: int
    inside: Link
    across: Link
    profile: str = "h200"  # kernels and linear layers: a shipped profile or a file
    slow: Mapping[int, float] = field(default_factory=dict)
    jitter: float = 0.0
    link_jitter: float = 0.0
    known: bool = True  # the planner is told the speeds of slow GPUs

    def __post_init__(self) -> None:
        if self.gpus < 1 or self.gpus_per_node < 1:
            raise ValueError(
                f"{self.gpus} GPUs, {self.gpus_per_node} in a node: give 1 or more of each"
            )
        for gpu, speed in self.slow.items():
            if not 0 <= gpu < self.gpus or not 0 < speed < np.inf:
                raise ValueError(
                    f"GPU {gpu} of speed {speed}: give a number below {self.gpus} and a speed"
                    " above 0"
                )
        for what, value in (("jitter", self.jitter), ("link_jitter", self.link_jitter)):
            if not 0 <= value < 1:
                raise ValueError(f"{what} = {value}: it must be at least 0 and below 1")

    @property
    def usable_bytes(self) -> int:
        """Of a GPU's memory; kernels, collectives and gaps take the rest."""
        return int(0.95 * self.memory_bytes)

    def check(self, parallel: MeshShape) -> None:
        parallel.check(self.gpus)
        if self.gpus_per_node % parallel.tp and self.gpus > self.gpus_per_node:
            raise ValueError(
                f"tp = {parallel.tp} with {self.gpus_per_node} GPUs in a node: tensor parallelism"
                " stays inside a node, so choose a divisor"
            )

    def lanes_per_node(self, tp: int) -> int:
        return max(self.gpus_per_node // tp, 1)

    def node(self, num_plan_ranks: int, tp: int) -> Ints:
        """[lanes]"""
        return np.arange(num_plan_ranks, dtype=np.int64) // self.lanes_per_node(tp)

    def speed(self, num_plan_ranks: int, tp: int) -> Floats:
        """[lanes] of the slowest of a lane's GPUs, which the others wait for."""
        speed = np.ones(num_plan_ranks * tp)
        for gpu, value in self.slow.items():
            speed[gpu] = value
        slowest: Floats = speed.reshape(num_plan_ranks, tp).min(axis=1)
        return slowest

    def group_link(self, members: int, per_node: int) -> Link:
        """Of a ring of neighbours: what a node lacks comes in once, over the ports of all members
        there. A group that does not divide a node may lie across two, with one port between."""
        if per_node % members == 0 or self.gpus <= self.gpus_per_node:
            return self.inside
        together = per_node if members % per_node == 0 else 1
        rate = min(self.inside.bytes_per_s, self.across.bytes_per_s * together)
        return Link(rate, self.across.latency_s)


GB = 10**9
PRESETS = {
    # NVLink as all-gathers reach it (of 450 GB/s), and 400 Gb/s a GPU across nodes.
    "h200": Cluster("h200", 64, 8, 141 * GB, Link(360e9, 10e-6), Link(50e9, 20e-6), profile="h200"),
    # The kernels of FlashAttention 2, about what published systems ran on.
    "h200-flash": Cluster(
        "h200-flash", 64, 8, 141 * GB, Link(360e9, 10e-6), Link(50e9, 20e-6), profile="h200-flash"
    ),
    # The same cards on 100 Gb/s a node.
    "h200-ethernet": Cluster(
        "h200-ethernet", 64, 8, 141 * GB, Link(360e9, 10e-6), Link(1.5625e9, 50e-6), profile="h200"
    ),
}


def cluster(name: str) -> Cluster:
    try:
        return PRESETS[name]
    except KeyError:
        raise ValueError(
            f"cluster {name!r} is unknown: choose one of {', '.join(PRESETS)}, and change its"
            " numbers as needed"
        ) from None
