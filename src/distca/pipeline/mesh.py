"""The sizes of the mesh axes, and the number of dedicated servers."""

from dataclasses import dataclass
from math import prod

AXES = ("pp", "dp", "cp", "tp")


@dataclass(frozen=True)
class MeshShape:
    """The number of ranks on each axis, and the number of dedicated servers.

    keep_weights: weights stay gathered through a step, instead of being gathered again for every
        micro-batch and direction.
    """

    pp: int = 1
    dp: int = 1
    cp: int = 1
    tp: int = 1
    servers: int = 0
    keep_weights: bool = False

    def __post_init__(self) -> None:
        for axis in AXES:
            if getattr(self, axis) < 1:
                raise ValueError(f"{axis} = {getattr(self, axis)}: every axis needs 1 or more")
        if self.servers < 0 or self.servers % self.tp:
            raise ValueError(
                f"servers = {self.servers} with tp = {self.tp}: give a multiple of tp, since each"
                " tensor-parallel index has servers of its own"
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
        """The ranks of a plan: those with one tensor-parallel index."""
        return self.num_ranks // self.tp

    @property
    def gathers_once(self) -> bool:
        """Whether weights are gathered and gradients reduced once a step; always with pp > 1."""
        return self.keep_weights or self.pp > 1

    @property
    def workers_per_stage(self) -> int:
        """Workers of one pipeline stage and tensor-parallel index, on which a batch is placed."""
        return self.dp * self.cp

    def check(self, world_size: int) -> None:
        """Raises ValueError if the mesh does not have ``world_size`` ranks."""
        if self.num_ranks != world_size:
            sizes = " x ".join(
                f"{axis} {size}" for axis, size in zip(AXES, self.sizes, strict=True)
            )
            raise ValueError(
                f"{sizes} and {self.servers} servers need {self.num_ranks} ranks, but"
                f" {world_size} were started: start {self.num_ranks}, or change the sizes"
            )
