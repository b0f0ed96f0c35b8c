"""Plans: the tasks of a batch on servers, for all ranks."""

from __future__ import annotations

import hashlib
import json
from collections.abc import Mapping
from dataclasses import asdict, dataclass
from functools import cached_property
from pathlib import Path
from typing import Any

from distca.planning import plan_json
from distca.planning.checks import verify
from distca.planning.costs.base import PS
from distca.planning.devices import Devices
from distca.planning.masks import Mask
from distca.planning.models import ModelShape
from distca.planning.placement import Placement
from distca.planning.spans import Floats, Ints
from distca.planning.tasks import Tasks
from distca.planning.traffic import Traffic, traffic


@dataclass(frozen=True, eq=False)
class Plan:
    """The rank that computes each query token of a batch, for one layer, forward and backward.

    A plan is immutable, saves as JSON, and reports its own quality (``summary``). ``backward`` is
    the same object as ``forward`` if one set of tasks meets the bound in both directions.
    """

    placement: Placement
    reach: Ints  # [documents] the mask of each document (see planning.masks)
    devices: Devices
    shape: ModelShape
    forward: Tasks
    backward: Tasks
    forward_load_ps: Ints  # [ranks] on a device of speed 1
    backward_load_ps: Ints  # [ranks] on a device of speed 1
    policy: str  # or the scheduler, if its placement and it do not make up a policy
    cost: str
    tolerance: float
    gather: int  # workers that all-gather keys as published; 0: none. distca sends needed keys only
    imbalance_before: float  # with every task at home and tokens placed as given
    bytes_lower_bound: int
    shortfall: str  # why the bound is not met; empty if it is met
    plan_s: float

    @property
    def seconds(self) -> tuple[Floats, Floats]:
        """[ranks] Finishing times in forward and in backward, including other work."""
        finish_ps = self.devices.finish_ps
        return finish_ps(self.forward_load_ps) / PS, finish_ps(self.backward_load_ps) / PS

    @property
    def imbalance(self) -> float:
        """The slowest rank's finishing time over the mean, the larger of forward and backward."""
        return max(
            self.devices.imbalance(self.forward_load_ps),
            self.devices.imbalance(self.backward_load_ps),
        )

    @property
    def meets_bound(self) -> bool:
        return not self.shortfall

    @cached_property
    def traffic(self) -> Traffic:
        """Bytes that each rank sends and receives in the forward pass of one layer."""
        return traffic(self.forward, self.placement, self.shape, self.devices.node)

    @cached_property
    def backward_traffic(self) -> Traffic:
        """Bytes that each rank sends and receives in the backward pass of one layer."""
        return traffic(self.backward, self.placement, self.shape, self.devices.node, backward=True)

    @cached_property
    def fingerprint(self) -> str:
        """A hash that is equal on two ranks if and only if they hold the same plan."""
        p, shape = self.placement, self.shape
        sizes: tuple[int, ...] = (p.num_workers, self.devices.num_ranks)
        sizes += (shape.heads, shape.kv_heads, shape.head_dim)
        if shape.v_head_dim or shape.latent_dim:
            sizes += (shape.v_head_dim, shape.latent_dim, shape.rope_dim)
        digest = hashlib.sha256(repr(sizes).encode())
        arrays = [p.lengths, p.document, p.start, p.stop, p.worker, self.reach]
        if p.prefixes.exist:
            arrays += [p.prefixes.parent, p.prefixes.length]
        if p.two_way.exist:
            arrays += [p.two_way.document, p.two_way.start, p.two_way.stop]
        for tasks in (self.forward, self.backward):
            arrays += vars(tasks).values()
        for array in arrays:
            digest.update(len(array).to_bytes(8, "big"))  # so that no two lists run together
            digest.update(array.tobytes())
        return digest.hexdigest()

    def summary(self) -> dict[str, Any]:
        """Returns the figures of the plan. Bytes: one layer, bf16, before tensor parallelism."""
        return {
            "policy": self.policy,
            "cost": self.cost,
            "ranks": self.devices.num_ranks,
            "servers": len(self.devices.serving),
            "tokens": int(self.placement.tokens.sum()),
            "documents": self.placement.num_documents,
            "tasks": len(self.forward),
            "tasks_moved": len(self.forward.moved),
            "tolerance": self.tolerance,
            "imbalance_before": self.imbalance_before,
            "imbalance": self.imbalance,
            "meets_bound": self.meets_bound,
            "shortfall": self.shortfall,
            "bytes_total": self.traffic.total,
            "bytes_send_max": int(self.traffic.send.max()),
            "bytes_recv_max": int(self.traffic.recv.max()),
            "bytes_cross_node": self.traffic.cross_node,
            "bytes_key_copies": self.traffic.key_copies,
            "bytes_backward": self.backward_traffic.total,
            "bytes_lower_bound": self.bytes_lower_bound,
            "plan_s": self.plan_s,
        }

    def to_json(self) -> dict[str, Any]:
        """Returns the plan as an object of JSON values."""
        same = self.backward is self.forward
        return {
            "placement": plan_json.of_placement(self.placement),
            "tasks": plan_json.of_tasks(self.forward),
            "backward_tasks": None if same else plan_json.of_tasks(self.backward),
            "two_way": plan_json.of_two_way(self.placement),
            "masks": [str(Mask(int(reach))) for reach in self.reach],
            "model": asdict(self.shape),
            "devices": plan_json.of_devices(self.devices),
            "forward_load_ps": self.forward_load_ps.tolist(),
            "backward_load_ps": self.backward_load_ps.tolist(),
            "gather": self.gather,
            "summary": self.summary(),
        }

    @classmethod
    def from_json(cls, data: Mapping[str, Any]) -> Plan:
        """Restores a plan from the result of ``to_json``; raises ``ValueError`` if it is wrong."""
        plan = cls(**plan_json.read(data))
        verify(plan)
        return plan

    def save(self, path: str | Path) -> None:
        """Writes the plan to a JSON file."""
        Path(path).write_text(json.dumps(self.to_json()) + "\n")

    @classmethod
    def load(cls, path: str | Path) -> Plan:
        """Reads a plan that ``save`` wrote."""
        try:
            return cls.from_json(json.loads(Path(path).read_text()))
        except (ValueError, RecursionError) as error:
            raise ValueError(f"{path}: {error}") from error
