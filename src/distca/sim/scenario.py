"""What is asked of the simulator: a model, machines, data, and ways to train on them."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

import numpy as np

from distca.data.lengths import distribution
from distca.pipeline.mesh import MeshShape
from distca.planning.models import ModelShape
from distca.planning.policies import POLICIES
from distca.planning.spans import Ints
from distca.sim.cluster import Cluster

DISAGGREGATED = ("distca", "greedy")

Batch = list[Ints]  # sequences of ``context`` tokens: the lengths of their documents


@dataclass(frozen=True)
class Scenario:
    """The same global batches for every way to train."""

    model: ModelShape
    cluster: Cluster
    context: int
    sequences: int  # of ``context`` tokens, in a global batch
    lengths: str | Ints = "pretrain"  # a distribution, or documents in order of arrival
    mask: str = "causal"
    recompute: bool = True  # of everything but attention, in backward
    seed: int = 0

    def __post_init__(self) -> None:
        for what in ("context", "sequences"):
            if getattr(self, what) < 1:
                raise ValueError(f"{what} = {getattr(self, what)}: give 1 or more")

    @property
    def tokens(self) -> int:
        return self.context * self.sequences

    def batches(self, count: int) -> Iterator[Batch]:
        """Documents in order; what is left of one at the end of a sequence begins the next."""
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
class Way:
    """One way to train: a policy with its sizes."""

    policy: str
    parallel: MeshShape
    micro_batches: int = 1
    placement: str = "given"  # or balanced; for the disaggregated policies
    ping_pong: bool = True  # likewise
    tolerance: float = 0.02  # likewise

    def __post_init__(self) -> None:
        if self.policy not in POLICIES:
            raise ValueError(
                f"policy {self.policy!r} is unknown: choose one of {', '.join(POLICIES)}"
            )
        if self.parallel.servers and self.policy != "distca":
            raise ValueError(f"policy {self.policy} knows no dedicated servers: leave them out")
        if self.policy == "colocated" and self.parallel.cp > 1:
            raise ValueError(
                f"policy colocated with cp = {self.parallel.cp}: every sequence stays on one"
                " worker, so take cp = 1"
            )

    @property
    def disaggregated(self) -> bool:
        return self.policy in DISAGGREGATED

    @property
    def name(self) -> str:
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
        p = self.parallel
        axes = zip(("pp", "dp", "cp", "tp"), p.sizes, strict=True)
        words = [f"{axis} {size}" for axis, size in axes if size > 1] or ["1 GPU"]
        if self.parallel.keep_weights:
            words.append("weights kept")
        if self.micro_batches > 1:
            words.append(f"{self.micro_batches} micro-batches")
        return " x ".join(words)
