"""The role of each rank: a worker on the axes pp, dp, cp and tp, or a dedicated server.

Workers are ranks 0 to W - 1 with tp as the innermost axis, followed by the dedicated servers. The
ranks with one tp index, over all of pp, dp and cp, form one group for attention, with the servers
of that index at its end: these are the ranks of a plan.

The device mesh has one axis ``shard`` for dp and cp: weights are sharded over both, and only the
placement of tokens distinguishes them.
"""

from collections.abc import Sequence
from dataclasses import dataclass

import torch
import torch.distributed as dist
from torch.distributed.device_mesh import DeviceMesh

from distca.dispatch.peers import Peers
from distca.dispatch.transports.exchange_group import new_exchange_group
from distca.pipeline.mesh import MeshShape
from distca.runtime.host_ranks import HostRanks


@dataclass(frozen=True, eq=False)
class RankContext:
    """This rank's role, device and process groups.

    parallel: the sizes of the mesh axes.
    mesh: the device mesh of the workers; None on a dedicated server.
    attention_group: the ranks of a plan, which exchange attention.
    world_group: all ranks over gloo, for what they compare before the first step.
    servers: the global ranks of the dedicated servers, of which each tp index has every tp-th.
    host: all ranks, as they talk to each other between steps.
    checkpoint_group: all workers over gloo, only for checkpoints, which are written in the
        background; None on a dedicated server.
    tied_group: this rank's position in the first and the last stage, which each hold a copy of a
        tied embedding; None on other ranks and without a pipeline.
    """

    parallel: MeshShape
    rank: int
    device: torch.device
    mesh: DeviceMesh | None
    attention_group: dist.ProcessGroup
    world_group: dist.ProcessGroup
    servers: tuple[int, ...]
    host: HostRanks
    checkpoint_group: dist.ProcessGroup | None
    tied_group: dist.ProcessGroup | None

    @property
    def only_serves(self) -> bool:
        return self.mesh is None

    @property
    def plan_rank(self) -> int:
        return self.attention_group.rank()

    @property
    def stage(self) -> int | None:
        """The pipeline stage of this rank; None on a dedicated server."""
        return None if self.mesh is None else self.mesh.get_local_rank("pp")

    @property
    def worker(self) -> int:
        """The number of this rank among the workers of its stage and tp index."""
        return self.plan_rank % self.parallel.workers_per_stage

    def rank_in_stage(self, stage: int) -> int:
        """Returns the rank at this rank's position in another stage."""
        assert self.stage is not None
        return self.rank + (stage - self.stage) * self.parallel.workers_per_stage * self.parallel.tp

    @property
    def pipeline_group(self) -> dist.ProcessGroup:
        """The ranks at this rank's position in all stages."""
        assert self.mesh is not None
        return self.mesh.get_group("pp")

    @property
    def shard_mesh(self) -> DeviceMesh:
        """The mesh over dp and cp, over which weights are sharded."""
        assert self.mesh is not None
        return self.mesh["shard"]

    @property
    def tp_mesh(self) -> DeviceMesh | None:
        """The tensor-parallel mesh; None with tp = 1 and on a dedicated server."""
        return self.mesh["tp"] if self.mesh is not None and self.parallel.tp > 1 else None


def join_mesh(parallel: MeshShape, device: torch.device, *, survives: bool = False) -> RankContext:
    """Creates all process groups; every rank of the world must call it.

    Every rank creates every group, in the same order, as ``torch.distributed.new_group`` requires.

    survives: whether the run goes on without dedicated servers that are lost.
    """
    parallel.check(dist.get_world_size())
    rank, workers = dist.get_rank(), parallel.num_workers
    ranks = torch.arange(workers).view(parallel.pp, parallel.workers_per_stage, parallel.tp)
    mesh = DeviceMesh(device.type, ranks, mesh_dim_names=("pp", "shard", "tp"))
    servers = tuple(range(workers, parallel.num_ranks))
    attention_group = _attention_group(parallel)
    tied_group = None
    for position in range(parallel.workers_per_stage * parallel.tp if parallel.pp > 1 else 0):
        members = ranks.view(parallel.pp, -1)[[0, -1], position].tolist()
        group = dist.new_group(members)
        tied_group = group if rank in members else tied_group
    world_group = dist.new_group(backend="gloo")
    checkpoint_group = dist.new_group(list(range(workers)), backend="gloo")
    assert dist.group.WORLD is not None
    context = RankContext(
        parallel=parallel,
        rank=rank,
        device=device,
        mesh=mesh if rank < workers else None,
        attention_group=attention_group,
        world_group=world_group,
        servers=servers,
        host=HostRanks(world_group, Peers.of(dist.group.WORLD) if survives else None),
        checkpoint_group=checkpoint_group if rank < workers else None,
        tied_group=tied_group,
    )
    groups = [attention_group, tied_group]
    if context.mesh is not None:
        groups += [context.mesh.get_group(axis) for axis in ("pp", "shard", "tp")]
    _connect(groups, device)
    return context


def _attention_group(parallel: MeshShape) -> dist.ProcessGroup:
    """Returns the ranks of this rank's tp index; all ranks create all such groups."""
    mine: dist.ProcessGroup | None = None
    for index in range(parallel.tp):
        members = list(range(index, parallel.num_ranks, parallel.tp))
        group = new_exchange_group(members)
        mine = group if dist.get_rank() in members else mine
    assert mine is not None
    return mine


def _connect(groups: Sequence[dist.ProcessGroup | None], device: torch.device) -> None:
    """Creates the NCCL communicators of groups, each by a first collective.

    NCCL creates a communicator at its first use, in which all its ranks must take part. The first
    transfers between pipeline stages are not such a use: only two stages have something to pass on.
    """
    if device.type != "cuda":
        return
    one = torch.ones((), device=device)
    for group in groups:
        if group is not None:
            dist.all_reduce(one, group=group)
    torch.cuda.synchronize(device)
