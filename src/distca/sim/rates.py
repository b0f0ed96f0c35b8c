"""Seconds of linear layers, of weights and gradients, and of the attention of a plan."""

from __future__ import annotations

from dataclasses import dataclass
from functools import cached_property, lru_cache

import numpy as np

from distca.pipeline.mesh import MeshShape
from distca.planning.costs.base import BACKWARD_TIMES, PS, CostModel
from distca.planning.costs.profile import Profile
from distca.planning.costs.published import SCALED
from distca.planning.costs.table import table_cost
from distca.planning.models import BYTES_PER_ELEMENT, ModelShape
from distca.planning.plan import Plan
from distca.planning.spans import Floats, Ints
from distca.planning.traffic import flows, needs_peers
from distca.sim.cluster import Cluster, Link
from distca.sim.streams import Transfer, count

GRADIENT_BYTES = 4  # per parameter in gradient reduction
COPY_BYTES_PER_S = 4.2e12  # of an H200, for profiles without a copy rate
OPTIMIZER_BYTES = 40  # per parameter: weight, gradient and two moments, read and written


# A search makes thousands of Rates of one profile.
_profile = lru_cache(maxsize=8)(Profile.read)


@lru_cache(maxsize=64)
def _table_cost(profile: str, share: ModelShape) -> CostModel:
    return table_cost(_profile(profile), share)


@dataclass(frozen=True)
class Rates:
    """Times the parts of a model on the plan ranks of a cluster."""

    shape: ModelShape  # the whole model
    cluster: Cluster
    parallel: MeshShape
    recompute: bool = False  # of linear layers in the backward pass

    @cached_property
    def share(self) -> ModelShape:
        """The share of one tensor-parallel rank."""
        return self.shape.share(self.parallel.tp)

    @cached_property
    def profile(self) -> Profile:
        try:
            return _profile(self.cluster.profile)
        except OSError:
            raise ValueError(
                f"profile {self.cluster.profile!r} does not exist: give h200, h200-flash, a file of"
                f" distca profile, scaled:TFLOPS:GB, or {', '.join(SCALED)} (scaled from h200)"
            ) from None

    @cached_property
    def cost(self) -> CostModel:
        _ = self.profile  # reports a missing one
        return _table_cost(self.cluster.profile, self.share)

    @property
    def num_ranks(self) -> int:
        return self.parallel.num_plan_ranks

    # -- linear layers -------------------------------------------------------------------------

    def before(self, tokens: Floats, *, backward: bool = False) -> Floats:
        """Returns seconds of a layer before its attention: norm and projections."""
        return self._linear(tokens, self.share.elements_before, 1, backward)

    def after(self, tokens: Floats, *, backward: bool = False) -> Floats:
        """Returns seconds of a layer after its attention: output projection and feed-forward."""
        return self._linear(tokens, self.share.elements_after, 3, backward)

    def head(self, tokens: Floats, *, backward: bool = False) -> Floats:
        """Returns seconds of logits and loss."""
        return self._linear(tokens, self.shape.end_elements / self.parallel.tp, 1, backward)

    def seams(self, tokens: Floats, layers: int, *, head: bool, backward: bool) -> list[Floats]:
        """Returns seconds of each seam of some layers, in the order of execution.

        head: whether the output head is behind these layers.
        """
        before, after = (part(tokens, backward=backward) for part in (self.before, self.after))
        enter, leave = (after, before) if backward else (before, after)
        seconds = [np.zeros_like(tokens) for _ in range(layers + 1)]
        for seam in range(layers):
            seconds[seam] += enter
            seconds[seam + 1] += leave
        if head:
            seconds[0 if backward else layers] += self.head(tokens, backward=backward)
        return seconds

    def layer_and_head_s(self, tokens: float) -> tuple[float, float]:
        """Returns seconds of a layer and of the head on one rank, forward and backward together."""
        each = np.array([float(tokens)])
        layer, head = (
            sum(float(part(each, backward=way)[0]) for part in parts for way in (False, True))
            for parts in ((self.before, self.after), (self.head,))
        )
        return layer, head

    @property
    def token_s(self) -> float:
        """Seconds of a token in one layer and its part of the head, forward and backward."""
        many = 1 << 20  # so that latencies of collectives do not count
        layer, head = self.layer_and_head_s(many)
        return (layer + head / self.shape.layers) / many

    def _linear(self, tokens: Floats, elements: float, collectives: int, backward: bool) -> Floats:
        """Returns seconds of matrix products and of tensor parallelism's collectives of tokens."""
        once = tokens * (2 * elements / (self.cost.linear_tflops * 1e12))
        tp = self.parallel.tp
        moved = tokens * (self.shape.hidden * BYTES_PER_ELEMENT * (tp - 1) / tp)
        moving = collectives * self.cluster.inside.seconds(moved)
        again = 1 if self.recompute else 0
        if not backward:
            return once + moving
        return (BACKWARD_TIMES + again) * once + (1 + again) * moving

    # -- weights -------------------------------------------------------------------------------

    def gather_weights(self, elements: int) -> Transfer | None:
        """Returns the all-gather of weights that are sharded over the workers of a stage."""
        return self._over_workers(elements * BYTES_PER_ELEMENT)

    def reduce_gradients(self, elements: int) -> Transfer | None:
        """Returns the reduce-scatter of the gradients of such weights."""
        return self._over_workers(elements * GRADIENT_BYTES)

    def _over_workers(self, num_bytes: int) -> Transfer | None:
        p, members = self.parallel, self.parallel.workers_per_stage
        if members == 1:
            return None
        group = np.full(self.num_ranks, -1)
        group[: p.pp * members] = np.repeat(np.arange(p.pp), members)
        moved = num_bytes / p.tp * (members - 1) / members
        seconds = self.collective_s(members, moved)
        return Transfer.within(group, np.full(self.num_ranks, seconds), int(moved * members * p.pp))

    def collective_s(self, members: int, num_bytes: float) -> float:
        """Returns seconds in which every member of a group of neighbours receives some bytes."""
        return float(self._group_link(members).seconds(np.asarray(num_bytes)))

    def _group_link(self, members: int) -> Link:
        return self.cluster.group_link(members, self.cluster.ranks_per_node(self.parallel.tp))

    @property
    def optimizer_s(self) -> float:
        """Seconds of the optimizer step."""
        elements = self.shape.layers * self.shape.layer_elements + 2 * self.shape.end_elements
        own = elements / (self.parallel.num_workers)
        return own * OPTIMIZER_BYTES / (self.profile.copy_bytes_per_s or COPY_BYTES_PER_S)

    # -- attention -----------------------------------------------------------------------------

    def attention(self, plan: Plan, *, backward: bool) -> Attention:
        """Returns the attention of one layer and half on every rank."""
        tasks = plan.backward if backward else plan.forward
        seconds = tasks.ps(plan.placement, plan.reach, self.cost.of(backward=backward)) / PS
        if plan.gather:
            dispatch, combine = self._all_gather(plan, backward)
            remote = np.ones(len(tasks), bool)
        else:
            sent = flows(tasks, plan.placement, plan.shape, backward=backward)
            dispatch = self._between(sent.source, sent.target, sent.out)
            combine = self._between(sent.target, sent.source, sent.back)
            remote = needs_peers(tasks, plan.placement)
        local_s, remote_s = (
            count(tasks.server[chosen], seconds[chosen], self.num_ranks)
            for chosen in (~remote, remote)
        )
        return Attention(local_s, remote_s, dispatch, combine)

    def ring_attention(self, plan: Plan, group_size: Ints, *, backward: bool) -> Attention:
        """Returns the attention of groups that pass their keys around in a ring.

        group_size: [ranks] workers of each rank's group of neighbours. The keys that a rank needs
            next are sent while it computes with those it has, so all of it is hidden behind the
            attention, as far as that takes as long. Backward passes on gradients as well.
        """
        tasks = plan.backward if backward else plan.forward
        seconds = tasks.ps(plan.placement, plan.reach, self.cost.of(backward=backward)) / PS
        ranks = np.arange(self.num_ranks)
        group = ranks - ranks % group_size
        tokens = count(group, plan.placement.tokens, self.num_ranks)[group]
        num_bytes = tokens * plan.shape.kv_bytes * (1 + backward) * (group_size - 1) / group_size
        moving = np.zeros(self.num_ranks)
        for size in np.unique(group_size):
            link = self._group_link(int(size))
            moving = np.where(group_size == size, link.seconds(num_bytes), moving)
        ring = Transfer.within(
            np.where(num_bytes > 0, group, -1), moving, round(float(num_bytes.sum()))
        )
        computing = count(tasks.server, seconds, self.num_ranks)
        return Attention(computing, np.zeros(self.num_ranks), ring, None)

    def _all_gather(self, plan: Plan, backward: bool) -> tuple[Transfer | None, Transfer | None]:
        """Returns the dispatch and combine of context parallelism.

        Keys and values are gathered before the forward pass and kept, as in published systems;
        their gradients are scattered after the backward pass.
        """
        size, tokens = plan.gather, plan.placement.tokens
        if size == 1:
            return None, None
        num_bytes = tokens.reshape(-1, size).sum(axis=1) * plan.shape.kv_bytes * (size - 1) // size
        seconds = np.array([self.collective_s(size, float(n)) for n in num_bytes])
        group = np.arange(len(tokens)) // size
        both = Transfer.within(group, seconds[group], int(num_bytes.sum()) * size)
        return (None, both) if backward else (both, None)

    def send_activations(self, tokens: Ints, source: Ints, target: Ints) -> Transfer | None:
        """Returns the transfer of the activations of some tokens between pairs of ranks."""
        num_bytes = tokens * (self.shape.hidden * BYTES_PER_ELEMENT) // self.parallel.tp
        return self._between(source, target, num_bytes)

    def _between(self, source: Ints, target: Ints, num_bytes: Ints) -> Transfer | None:
        cluster, tp = self.cluster, self.parallel.tp
        return Transfer.between(source, target, num_bytes, cluster, tp, self.num_ranks)


@dataclass(frozen=True, eq=False)
class Attention:
    """The attention of one layer and half on every rank."""

    local_s: Floats  # [ranks] seconds of the tasks that need nothing from other ranks
    remote_s: Floats  # [ranks] seconds of the other tasks
    dispatch: Transfer | None  # None if nothing is sent
    combine: Transfer | None
