"""Who is who: ranks as workers on axes pp, dp, cp, tp, and dedicated servers behind them.

Workers are ranks 0..W-1, tp innermost; dedicated servers follow. Attention of one tp index is one
group over all of pp, dp and cp, with the servers of that index at its end: what a plan calls its
ranks. All ranks make every group, in the same order.

The device mesh has dp and cp as one axis, ``shard``: weights are sharded over both, and only the
placement of tokens tells them apart.
"""

from __future__ import annotations

import os
from dataclasses import dataclass

import torch
import torch.distributed as dist
from torch.distributed.device_mesh import DeviceMesh

from distca.pipeline.mesh import MeshShape


@dataclass(frozen=True, eq=False)
class RankContext:
    """This rank's place."""

    parallel: MeshShape
    rank: int
    device: torch.device
    mesh: DeviceMesh | None  # of the workers; None on a rank that only serves
    attention: dist.ProcessGroup  # the ranks of a plan
    control: dist.ProcessGroup  # the same over the host
    everyone: dist.ProcessGroup  # all ranks, over the host
    workers: dist.ProcessGroup | None  # all workers, over the host
    saving: dist.ProcessGroup | None  # the same again, for checkpoints that are written meanwhile
    ends: dist.ProcessGroup | None  # this place in the first and the last stage, if it is in one

    @property
    def serves_only(self) -> bool:
        return self.mesh is None

    @property
    def plan_rank(self) -> int:
        """This rank in a plan."""
        return dist.get_rank(self.attention)

    @property
    def stage(self) -> int | None:
        """Of the pipeline; None on a rank that only serves."""
        return None if self.mesh is None else self.mesh.get_local_rank("pp")

    @property
    def worker(self) -> int:
        """This rank among the workers of its stage and tp index."""
        return self.plan_rank % self.parallel.workers_per_stage

    def of_stage(self, stage: int) -> int:
        """The rank at this place in another stage."""
        assert self.stage is not None
        return self.rank + (stage - self.stage) * self.parallel.workers_per_stage * self.parallel.tp

    @property
    def pipeline(self) -> dist.ProcessGroup:
        """The ranks at this place in all stages."""
        assert self.mesh is not None
        return self.mesh.get_group("pp")

    @property
    def shard_mesh(self) -> DeviceMesh:
        """dp x cp in one: what weights are sharded over."""
        assert self.mesh is not None
        return self.mesh["shard"]

    @property
    def tp_mesh(self) -> DeviceMesh | None:
        return self.mesh["tp"] if self.mesh is not None and self.parallel.tp > 1 else None


def ranks_per_node(tp: int = 1) -> int | None:
    """Returns how many ranks of one tp index share a node, as the launcher tells; None if it does
    not."""
    local = os.environ.get("LOCAL_WORLD_SIZE")
    return None if local is None else max(int(local) // tp, 1)


def join_mesh(parallel: MeshShape, device: torch.device) -> RankContext:
    """Makes all groups; a collective of the whole world."""
    parallel.check(dist.get_world_size())
    rank, workers = dist.get_rank(), parallel.num_workers
    ranks = torch.arange(workers).view(parallel.pp, parallel.workers_per_stage, parallel.tp)
    mesh = DeviceMesh(device.type, ranks, mesh_dim_names=("pp", "shard", "tp"))
    servers = range(workers, parallel.num_ranks)
    attention, control = None, None
    for index in range(parallel.tp):
        members = [*ranks[..., index].flatten().tolist(), *servers[index :: parallel.tp]]
        groups = [dist.new_group(members), dist.new_group(members, backend="gloo")]
        if rank in members:
            attention, control = groups
    ends = None
    for place in range(parallel.workers_per_stage * parallel.tp if parallel.pp > 1 else 0):
        members = ranks.view(parallel.pp, -1)[[0, -1], place].tolist()
        group = dist.new_group(members)
        ends = group if rank in members else ends
    everyone = dist.new_group(backend="gloo")
    over_host, saving = (dist.new_group(list(range(workers)), backend="gloo") for _ in range(2))
    assert attention is not None
    assert control is not None
    return RankContext(
        parallel=parallel,
        rank=rank,
        device=device,
        mesh=mesh if rank < workers else None,
        attention=attention,
        control=control,
        everyone=everyone,
        workers=over_host if rank < workers else None,
        saving=saving if rank < workers else None,
        ends=ends,
    )
