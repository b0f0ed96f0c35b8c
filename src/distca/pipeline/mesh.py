"""The sizes of a mesh: how many ranks lie on each axis, and how many only serve."""

from __future__ import annotations

from dataclasses import dataclass
from math import prod

AXES = ("pp", "dp", "cp", "tp")


@dataclass(frozen=True)
class MeshShape:
    """Sizes of the axes, and how many ranks only serve."""

    pp: int = 1
    dp: int = 1
    cp: int = 1
    tp: int = 1
    servers: int = 0
    keep_weights: bool = False  # gathered through a step, not once for each micro-batch and way

    def __post_init__(self) -> None:
        for axis in AXES:
            if getattr(self, axis) < 1:
                raise ValueError(f"{axis} = {getattr(self, axis)}: every axis needs 1 or more")
        if self.servers < 0 or self.servers % self.tp:
            raise ValueError(
                f"servers = {self.servers} with tp = {self.tp}: dedicated servers come in multiples"
                " of tp, one for each part of the heads"
            )

    @property
    def sizes(self) -> tuple[int, int, int, int]:
        return self.pp, self.dp, self.cp, self.tp

    @property
    def num_workers(self) -> int:
        return prod(self.sizes)

    @property
    def num_ranks(self) -> int:
        return self.num_workers + self.servers

    @property
    def num_plan_ranks(self) -> int:
        """Ranks of one tp index: those of a plan."""
        return self.num_ranks // self.tp

    @property
    def gathers_once(self) -> bool:
        """Weights are gathered and gradients reduced once a step, as pipelines always do."""
        return self.keep_weights or self.pp > 1

    @property
    def workers_per_stage(self) -> int:
        """Workers that a batch is placed on: those of one pipeline stage and tp index."""
        return self.dp * self.cp

    def check(self, world_size: int) -> None:
        if self.num_ranks != world_size:
            sizes = " x ".join(
                f"{axis} {size}" for axis, size in zip(AXES, self.sizes, strict=True)
            )
            raise ValueError(
                f"{sizes} and {self.servers} servers need {self.num_ranks} ranks, but"
                f" {world_size} were started: start {self.num_ranks}, or change the sizes"
            )
