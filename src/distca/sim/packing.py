"""Packs the documents of a step without disaggregation, and plans their attention.

A *bin* is one micro-batch of one group of ``cp`` workers, or of one worker if groups are dynamic.
Bins do not depend on each other, so they have virtual workers of their own: bin b has the workers
[b * width, (b + 1) * width).
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from distca.planning.api import place, place_and_plan, plan
from distca.planning.devices import UNLIMITED
from distca.planning.options import PlanOptions
from distca.planning.placement import Placement
from distca.planning.placers.dynamic_groups import assign_groups, deal
from distca.planning.plan import Plan
from distca.planning.policies import POLICIES, policy_of
from distca.planning.spans import Ints, as_ints
from distca.sim.rates import Rates

# Policies that keep the documents of a sequence together.
KEEP_SEQUENCES = tuple(
    name for name, policy in POLICIES.items() if not (policy.disaggregated or policy.repacks)
)


@dataclass(frozen=True, eq=False)
class PackedPlan:
    """The plan of all bins of a step."""

    plan: Plan
    order: Ints  # [micro_batches, groups] the bin of each micro-batch and group
    width: int  # workers of a bin
    largest_tokens: int  # of a worker in one micro-batch
    group_size: Ints | None = None  # [bins] with dynamic groups: the workers of a bin's group

    @property
    def tokens(self) -> Ints:
        """The tokens of each bin, [bins]."""
        total: Ints = self.plan.placement.tokens.reshape(-1, self.width).sum(axis=1)
        return total


def pack(
    rates: Rates,
    sequences: Sequence[Ints],
    policy: str,
    micro_batches: int,
    *,
    mask: str = "causal",
    tolerance: float = 0.02,
) -> PackedPlan:
    """Packs sequences into bins, and plans their attention.

    sequences: the lengths of the documents in each sequence, in order of arrival.
    tolerance: how even dynamic groups are, relative to the mean time of the workers.
    """
    p, lengths = rates.parallel, as_ints(np.concatenate(sequences))
    options = PlanOptions(
        model=rates.share,
        cost=rates.cost,
        cp=p.cp,
        mask=mask,
        token_s=rates.token_s,
        tolerance=tolerance,
    )
    if POLICIES[policy].has_dynamic_groups:
        return _in_dynamic_groups(lengths, rates, micro_batches, options)
    if policy == "kk":
        return _by_karmarkar_karp(lengths, p.dp, micro_batches, options)
    bins = p.dp * micro_batches
    if len(sequences) % bins and policy in KEEP_SEQUENCES:
        raise ValueError(
            f"{len(sequences)} sequences over dp {p.dp} x {micro_batches} micro-batches: they must"
            " divide evenly, so choose a smaller dp and a larger cp, or other micro-batches"
        )
    if len(lengths) < bins:
        raise ValueError(
            f"{len(lengths)} documents for dp {p.dp} x {micro_batches} micro-batches: each needs"
            " one or more, so choose a smaller dp, or fewer micro-batches"
        )
    owner = np.zeros(len(lengths), np.int64)
    if policy in KEEP_SEQUENCES:
        counts = [len(sequence) for sequence in sequences]
        owner = np.repeat(np.arange(len(sequences)) * bins // len(sequences), counts)
    given = _whole(lengths, owner * p.cp, bins * p.cp)
    made = place_and_plan(given, policy_of(policy), options)
    order = np.arange(bins).reshape(micro_batches, p.dp)
    if policy not in KEEP_SEQUENCES:  # bins with about the same work run at the same time
        work = (made.forward_load_ps + made.backward_load_ps).reshape(bins, p.cp).sum(axis=1)
        order = np.argsort(work, kind="stable").reshape(micro_batches, p.dp)
        # The group with the lightest bin gets the heaviest one next.
        order[1::2] = order[1::2, ::-1]
    return PackedPlan(made, as_ints(order), p.cp, int(made.placement.tokens.max()))


def _whole(lengths: Ints, worker: Ints, workers: int) -> Placement:
    """Returns a placement of whole documents."""
    order = np.argsort(worker, kind="stable")
    start = np.zeros_like(order)
    return Placement(lengths, order, start, lengths[order], as_ints(worker[order]), workers)


def _by_karmarkar_karp(
    lengths: Ints, workers: int, micro_batches: int, options: PlanOptions
) -> PackedPlan:
    """Distributes documents over workers, and then those of each worker over its micro-batches.

    The micro-batches of a worker come by falling time, so that those of all workers that run at
    the same time are about alike. A worker with few documents has empty ones.
    """
    if len(lengths) < workers:
        raise ValueError(
            f"{len(lengths)} documents for dp {workers}: each worker needs one or more, so choose a"
            " smaller dp"
        )
    placer = POLICIES["kk"].placer
    on_workers = place(lengths, workers, options, placer=placer)
    owner = np.zeros(len(lengths), np.int64)
    for worker in range(workers):
        members = on_workers.document[on_workers.worker == worker]
        parts = place(lengths[members], micro_batches, options, placer=placer)
        owner[members[parts.document]] = parts.worker * workers + worker
    bins = workers * micro_batches
    made = plan(_whole(lengths, owner, bins), options, scheduler="home")
    order = as_ints(np.arange(bins).reshape(micro_batches, workers))
    return PackedPlan(made, order, 1, int(made.placement.tokens.max()))


def _in_dynamic_groups(
    lengths: Ints, rates: Rates, micro_batches: int, options: PlanOptions
) -> PackedPlan:
    """Gives every document a group of its own size; a worker runs larger groups first.

    Each size is a micro-batch. They lie inside each other, so the workers of a group have done the
    same before, and nobody waits. Without a pipeline, the documents of a size are divided into as
    many micro-batches as memory needs, which take the same time; groups are then so large that no
    document is more than one micro-batch of a worker. In a pipeline, documents are first divided
    into micro-batches that take about the same time.
    """
    workers = rates.parallel.workers_per_stage
    sets = micro_batches if rates.parallel.pp > 1 else 1
    given = _whole(lengths, np.zeros_like(lengths), sets * workers)
    piece = UNLIMITED if micro_batches == 1 else -(-int(lengths.sum()) // micro_batches // workers)
    groups = assign_groups(options.problem(given), max_piece=piece)
    sizes = np.unique(groups.size)[::-1]
    of_set, first = np.divmod(groups.first, workers)
    bin_row = of_set * len(sizes) + np.searchsorted(-sizes, -groups.size)
    bins = sets * len(sizes) * workers
    placement = deal(_whole(lengths, np.zeros_like(lengths), bins), bin_row * workers + first,
                     groups.size)  # fmt: skip
    made = plan(placement, options, scheduler="home")
    order = np.arange(bins).reshape(-1, workers)
    of_worker = placement.tokens.reshape(-1, workers).sum(axis=0)
    longest = int((-(-lengths // groups.size)).max())
    return PackedPlan(
        made,
        as_ints(order),
        width=1,
        largest_tokens=max(longest, -(-int(of_worker.max()) // micro_batches)),
        group_size=as_ints(np.tile(np.repeat(sizes, workers), sets)),
    )
