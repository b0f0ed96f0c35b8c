"""The inputs of the simulator: scenarios (model, cluster and data) and strategies to train."""

from collections.abc import Iterator
from dataclasses import dataclass

import numpy as np

from distca.data.lengths import distribution
from distca.pipeline.mesh import MeshShape
from distca.planning.models import ModelShape
from distca.planning.policies import POLICIES, policy_of
from distca.planning.spans import Ints
from distca.sim.cluster import Cluster

Batch = list[Ints]  # for each sequence of ``context`` tokens, the lengths of its documents


@dataclass(frozen=True)
class Scenario:
    """A model, a cluster and data: global batches that are the same for every strategy."""

    model: ModelShape
    cluster: Cluster
    context: int
    sequences: int  # of ``context`` tokens in a global batch
    lengths: str | Ints = "pretrain"  # a distribution, or document lengths in order of arrival
    mask: str = "causal"
    recompute: bool = True  # of everything but attention in the backward pass
    seed: int = 0

    def __post_init__(self) -> None:
        for what in ("context", "sequences"):
            if getattr(self, what) < 1:
                raise ValueError(f"{what} = {getattr(self, what)}: give 1 or more")

    @property
    def tokens(self) -> int:
        """The tokens of a global batch."""
        return self.context * self.sequences

    def batches(self, count: int) -> Iterator[Batch]:
        """Yields global batches; documents are cut at the end of a sequence."""
        needed = self.tokens * count
        if isinstance(self.lengths, str):
            lengths = distribution(self.lengths, self.context).batch(needed, self.seed)
        else:
            lengths = self.lengths
        if lengths.sum() < needed:
            raise ValueError(
                f"{lengths.sum()} tokens of documents for {count} batches of {self.tokens}: give"
                " more documents, or ask for fewer batches or sequences"
            )
        ends = np.unique(
            np.concatenate([np.cumsum(lengths), np.arange(0, needed + 1, self.context)])
        )
        ends = ends[ends <= needed]
        pieces, starts = np.diff(ends), ends[:-1]
        borders = np.arange(self.context, needed, self.context)
        of_sequence = np.split(pieces, np.searchsorted(starts, borders))
        for first in range(0, len(of_sequence), self.sequences):
            yield of_sequence[first : first + self.sequences]


@dataclass(frozen=True)
class Strategy:
    """One way to train: a policy with the sizes of its mesh, micro-batches and ping-pong.

    placement, ping_pong, tolerance: options of the disaggregated policies.
    """

    policy: str
    parallel: MeshShape
    micro_batches: int = 1
    placement: str = "given"
    ping_pong: bool = True
    tolerance: float = 0.02

    def __post_init__(self) -> None:
        policy_of(self.policy, self.placement)  # raises ValueError for unknown names
        if self.parallel.servers and self.policy != "distca":
            raise ValueError(f"policy {self.policy} has no dedicated servers: leave them out")
        if POLICIES[self.policy].keeps_tasks_home and self.parallel.cp > 1:
            raise ValueError(
                f"policy {self.policy} with cp = {self.parallel.cp}: every sequence stays on one"
                " worker, so set cp = 1"
            )

    @property
    def disaggregated(self) -> bool:
        return POLICIES[self.policy].disaggregated

    @property
    def name(self) -> str:
        """The policy and its options."""
        if not self.disaggregated:
            return self.policy
        words = [self.policy, self.placement]
        if self.parallel.servers:
            words.append(f"{self.parallel.servers} servers")
        if not self.ping_pong:
            words.append("no ping-pong")
        return ", ".join(words)

    @property
    def sizes(self) -> str:
        """The sizes of the mesh and the number of micro-batches, in words."""
        p = self.parallel
        axes = zip(("pp", "dp", "cp", "tp"), p.sizes, strict=True)
        words = [f"{axis} {size}" for axis, size in axes if size > 1] or ["1 GPU"]
        if self.parallel.keep_weights:
            words.append("weights kept")
        if self.micro_batches > 1:
            words.append(f"{self.micro_batches} micro-batches")
        return " x ".join(words)
