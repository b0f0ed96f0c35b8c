"""The documents of a batch, and the plans for its attention layers."""

from collections.abc import Sequence
from contextlib import nullcontext
from dataclasses import dataclass, replace
from threading import Lock

from distca.dispatch.tensors import TensorSpec
from distca.integrations.shared.documents import num_tokens, numbered, two_way_masks
from distca.integrations.shared.figures import AttentionFigures
from distca.planning.api import plan
from distca.planning.entries import Entry
from distca.planning.masks import Mask
from distca.planning.models import ModelShape
from distca.planning.options import PlanOptions
from distca.planning.placement import Placement
from distca.planning.plan import Plan
from distca.planning.two_way import TwoWaySpans


@dataclass(frozen=True)
class AttentionSpec:
    """What plans depend on in the attention of a layer."""

    mask: Mask
    tensors: TensorSpec

    @property
    def shape(self) -> ModelShape:
        t = self.tensors
        return ModelShape(
            "layer",
            t.heads,
            t.kv_heads,
            t.head_dim,
            v_head_dim=t.v_head_dim,
            latent_dim=t.latent_dim,
            rope_dim=t.rope_dim,
        )


@dataclass(frozen=True)
class RankBatch:
    """What one rank tells the others about its next batch, and about its attention so far."""

    documents: tuple[Entry, ...]
    done: bool  # this rank has no batch left, and these documents are a filler
    error: str  # why this rank cannot take part
    planned_s: float  # of the attention that has ended since the last batch, for speed 1
    measured_s: float  # of the same attention


class BatchPlans:
    """The plans for a micro-batch of all ranks, one for each kind of attention layer.

    Every rank makes them from the same documents and options, so they are the same on all ranks.
    """

    def __init__(
        self, ranks: tuple[tuple[Entry, ...], ...], options: PlanOptions, scheduler: str
    ) -> None:
        self.ranks = ranks  # the documents of each
        self._options, self._scheduler = options, scheduler
        self._plans, self._lock = dict[AttentionSpec, Plan](), Lock()
        self._made = dict[tuple[AttentionSpec, bool], Plan]()  # by what they depend on
        self._placement = Placement.from_ranks(numbered(self.ranks))
        self._two_way_masks = two_way_masks(self.ranks)

    def are_for(self, ranks: Sequence[Sequence[Entry]], options: PlanOptions) -> bool:
        """Returns whether these are the plans of a batch: only documents and speeds ever change."""
        before, now = (() if one.speed is None else one.speed for one in (self._options, options))
        return tuple(before) == tuple(now) and self.ranks == tuple(map(tuple, ranks))

    def plan(self, spec: AttentionSpec, figures: AttentionFigures | None) -> Plan:
        """Returns the plan for such layers, made at the first request from any thread."""
        with self._lock:
            if spec not in self._plans:
                with nullcontext() if figures is None else figures.timing("planning_s"):
                    self._plans[spec] = self._plan_for(spec)
            return self._plans[spec]

    def _plan_for(self, spec: AttentionSpec) -> Plan:
        """Returns a plan, which is shared by masks that are the same for these documents."""
        placement, named = self._placement, self._two_way_masks
        two_way = placement.two_way.exist and (named is None or str(spec.mask) in named)
        longest = int(placement.lengths.max(initial=0))
        spec = replace(spec, mask=spec.mask.within(longest))
        if (spec, two_way) not in self._made:
            if placement.two_way.exist and not two_way:
                placement = replace(placement, two_way=TwoWaySpans.none())
            options = self._options.for_device(spec.tensors.device.type)
            options = replace(options, model=spec.shape, mask=spec.mask)
            self._made[spec, two_way] = plan(placement, options, scheduler=self._scheduler)
        return self._made[spec, two_way]


class PlannedBatch:
    """The documents of all ranks in one micro-batch, and the plans for its attention layers.

    figures: what logs show of its plans; None: nothing.
    local: whether it has the documents of this rank only.
    """

    def __init__(
        self, plans: BatchPlans, rank: int, figures: AttentionFigures | None, *, local: bool
    ) -> None:
        self.ranks, self.documents, self.is_local = plans.ranks, plans.ranks[rank], local
        self.lengths = tuple(map(num_tokens, self.documents))  # on this rank
        self._plans, self._figures = plans, figures
        self._used: list[Plan] = []

    def plan(self, spec: AttentionSpec) -> Plan:
        """Returns the plan for such layers."""
        return self._plans.plan(spec, self._figures)

    def use(self, spec: AttentionSpec) -> Plan:
        """Returns the plan for a layer that attends by it now."""
        planned = self.plan(spec)
        if self._figures is not None and not any(planned is one for one in self._used):
            self._used.append(planned)
            self._figures.add(planned)
        return planned
