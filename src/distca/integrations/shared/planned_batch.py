"""The documents of a batch, and the plans for its attention layers."""

from collections.abc import Sequence
from contextlib import nullcontext
from dataclasses import dataclass, replace
from threading import Lock

from distca.dispatch.tensors import TensorSpec
from distca.integrations.shared.documents import Documents, num_tokens, numbered, two_way_masks
from distca.integrations.shared.figures import AttentionFigures
from distca.planning.api import plan
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


class PlannedBatch:
    """The documents of all ranks in one micro-batch, and a plan for each kind of attention layer.

    Every rank makes its plans from the same documents and options, so they are the same on all
    ranks. They live as long as this object: keep it until the batch's backward pass is over.
    """

    def __init__(
        self,
        ranks: Sequence[Documents],
        rank: int,
        options: PlanOptions,
        scheduler: str,
        figures: AttentionFigures | None,
        *,
        local: bool,
    ) -> None:
        self.ranks = tuple(tuple(documents) for documents in ranks)
        self.is_local = local  # it has the documents of this rank only
        self.documents = self.ranks[rank]
        self.lengths = tuple(map(num_tokens, self.documents))  # on this rank
        self._options, self._scheduler, self._figures = options, scheduler, figures
        self._plans, self._lock = dict[AttentionSpec, Plan](), Lock()
        self._made = dict[tuple[AttentionSpec, bool], Plan]()  # by what they depend on
        self._used: list[Plan] = []
        self._placement = Placement.from_ranks(numbered(self.ranks))
        self._two_way_masks = two_way_masks(self.ranks)

    def plan(self, spec: AttentionSpec) -> Plan:
        """Returns the plan for such layers, made at the first request from any thread."""
        with self._lock:
            if spec not in self._plans:
                self._plans[spec] = self._plan_for(spec)
            return self._plans[spec]

    def use(self, spec: AttentionSpec) -> Plan:
        """Returns the plan for a layer that attends by it now."""
        planned = self.plan(spec)
        if self._figures is not None and not any(planned is one for one in self._used):
            self._used.append(planned)
            self._figures.add(planned)
        return planned

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
            with nullcontext() if self._figures is None else self._figures.timing("planning_s"):
                self._made[spec, two_way] = plan(placement, options, scheduler=self._scheduler)
        return self._made[spec, two_way]
