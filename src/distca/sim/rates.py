"""How long each lane computes and sends: linear layers, weights, and the tasks of a plan."""

from __future__ import annotations

from dataclasses import dataclass
from functools import cached_property

import numpy as np

from distca.pipeline.mesh import MeshShape
from distca.planning.costs.base import PS, CostModel
from distca.planning.costs.profile import Profile
from distca.planning.costs.table import TableCost
from distca.planning.models import BYTES_PER_ELEMENT, ModelShape
from distca.planning.plan import Plan
from distca.planning.spans import Floats, Ints
from distca.planning.traffic import backward_flows, forward_flows, needs_peers
from distca.sim.cluster import Cluster
from distca.sim.streams import Exchange, count

BACKWARD_TIMES = 2  # of forward, for linear layers: by the input, and by the weight
GRADIENT_BYTES = 4  # of a parameter, where gradients are reduced
COPY_BYTES_PER_S = 4.2e12  # of an H200, where a profile says nothing
OPTIMIZER_BYTES = 40  # of a parameter: weight, gradient and two moments, read and written


@dataclass(frozen=True)
class Rates:
    """What a model's parts take on one lane of a cluster."""

    shape: ModelShape  # the whole model
    cluster: Cluster
    parallel: MeshShape
    recompute: bool = False

    @cached_property
    def share(self) -> ModelShape:
        return self.shape.share(self.parallel.tp)

    @cached_property
    def profile(self) -> Profile:
        try:
            return Profile.read(self.cluster.profile)
        except OSError:
            raise ValueError(
                f"profile {self.cluster.profile!r} is unknown: say h200, h200-flash, or the path of"
                " a file that distca profile wrote"
            ) from None

    @cached_property
    def cost(self) -> CostModel:
        return TableCost.from_profile(self.profile, self.share)

    @property
    def lanes(self) -> int:
        return self.parallel.num_plan_ranks

    # -- linear layers -------------------------------------------------------------------------

    def before(self, tokens: Floats, *, backward: bool = False) -> Floats:
        """Up to the attention: one layer's norm and projections."""
        s = self.share
        elements = s.hidden * (s.heads + 2 * s.kv_heads) * s.head_dim
        return self._linear(tokens, elements, 1, backward)

    def after(self, tokens: Floats, *, backward: bool = False) -> Floats:
        """From the attention on: output projection and feed-forward."""
        s = self.share
        elements = s.hidden * (s.heads * s.head_dim + 3 * s.ffn)
        return self._linear(tokens, elements, 3, backward)

    def head(self, tokens: Floats, *, backward: bool = False) -> Floats:
        """Logits and loss."""
        return self._linear(tokens, self.shape.end_elements / self.parallel.tp, 1, backward)

    def _linear(self, tokens: Floats, elements: float, exchanges: int, backward: bool) -> Floats:
        """Products with a matrix, and how often tensor parallelism gathers or scatters tokens."""
        once = tokens * (2 * elements / (self.cost.linear_tflops * 1e12))
        tp = self.parallel.tp
        moved = tokens * (self.shape.hidden * BYTES_PER_ELEMENT * (tp - 1) / tp)
        moving = exchanges * self.cluster.inside.seconds(moved)
        again = 1 if self.recompute else 0
        if not backward:
            return once + moving
        return (BACKWARD_TIMES + again) * once + (1 + again) * moving

    # -- weights -------------------------------------------------------------------------------

    def gathering(self, elements: int) -> Exchange | None:
        """Of a layer's weights, sharded over the workers of its stage."""
        return self._over_workers(elements * BYTES_PER_ELEMENT)

    def reducing(self, elements: int) -> Exchange | None:
        """Of its gradients."""
        return self._over_workers(elements * GRADIENT_BYTES)

    def _over_workers(self, num_bytes: int) -> Exchange | None:
        p, members = self.parallel, self.parallel.workers_per_stage
        if members == 1:
            return None
        group = np.full(self.lanes, -1)
        group[: p.pp * members] = np.repeat(np.arange(p.pp), members)
        moved = num_bytes / p.tp * (members - 1) / members
        seconds = self.collective_s(members, moved)
        return Exchange.within(group, np.full(self.lanes, seconds), int(moved * members * p.pp))

    def collective_s(self, members: int, num_bytes: float) -> float:
        """So many bytes received by every member of a group of neighbours."""
        link = self.cluster.group_link(members, self.cluster.lanes_per_node(self.parallel.tp))
        return float(link.seconds(np.asarray(num_bytes)))

    @property
    def optimizer_s(self) -> float:
        elements = self.shape.layers * self.shape.layer_elements + 2 * self.shape.end_elements
        own = elements / (self.parallel.num_workers)
        return own * OPTIMIZER_BYTES / (self.profile.copy_bytes_per_s or COPY_BYTES_PER_S)

    # -- attention -----------------------------------------------------------------------------

    def attention(self, plan: Plan, *, backward: bool) -> Attention:
        """One layer of one half on every lane."""
        tasks = plan.backward if backward else plan.forward
        pairs = tasks.pairs(plan.placement, plan.reach)
        price = self.cost.backward_ps if backward else self.cost.forward_ps
        seconds = price(tasks.queries, tasks.keys, pairs) / PS
        if plan.gather:
            out, back = self._gathered(plan, backward)
            remote = np.ones(len(tasks), bool)
        else:
            flows = (backward_flows if backward else forward_flows)(
                tasks, plan.placement, plan.shape
            )
            out = self._between(flows.source, flows.target, flows.out)
            back = self._between(flows.target, flows.source, flows.back)
            remote = needs_peers(tasks, plan.placement)
        local_s, remote_s = (
            count(tasks.server[chosen], seconds[chosen], self.lanes) for chosen in (~remote, remote)
        )
        return Attention(local_s, remote_s, out, back)

    def _gathered(self, plan: Plan, backward: bool) -> tuple[Exchange | None, Exchange | None]:
        """Context parallelism: all keys of a group, before the forward; their gradients, scattered
        after the backward. Keys are kept in between, as published systems do."""
        size, tokens = plan.gather, plan.placement.tokens
        if size == 1:
            return None, None
        num_bytes = tokens.reshape(-1, size).sum(axis=1) * plan.shape.kv_bytes * (size - 1) // size
        seconds = np.array([self.collective_s(size, float(n)) for n in num_bytes])
        group = np.arange(len(tokens)) // size
        both = Exchange.within(group, seconds[group], int(num_bytes.sum()) * size)
        return (None, both) if backward else (both, None)

    def passing_on(self, tokens: Ints, source: Ints, target: Ints) -> Exchange | None:
        """Activations of so many tokens from lanes to lanes."""
        num_bytes = tokens * (self.shape.hidden * BYTES_PER_ELEMENT) // self.parallel.tp
        return self._between(source, target, num_bytes)

    def _between(self, source: Ints, target: Ints, num_bytes: Ints) -> Exchange | None:
        cluster, tp = self.cluster, self.parallel.tp
        return Exchange.between(source, target, num_bytes, cluster, tp, self.lanes)


@dataclass(frozen=True, eq=False)
class Attention:
    """One layer of one half: tasks that need nothing from peers, the others, and what is sent."""

    local_s: Floats  # [lanes]
    remote_s: Floats
    out: Exchange | None
    back: Exchange | None
