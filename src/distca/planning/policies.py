"""Placers and schedulers by name, and policies that pair them: distca and published baselines."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

from distca.planning.placement import Placement
from distca.planning.placers.balanced import balanced_placement
from distca.planning.placers.head_tail import packed_sequence_placement, per_document_placement
from distca.planning.placers.variable_length import variable_length_packing
from distca.planning.problem import Assignment, Problem
from distca.planning.schedulers.disaggregated import disaggregated
from distca.planning.schedulers.greedy import greedy
from distca.planning.schedulers.home import all_gather, at_home

GIVEN = "given"

PLACERS: dict[str, Callable[[Problem], Placement]] = {
    GIVEN: lambda problem: problem.placement,
    "balanced": balanced_placement,
    "head-tail": packed_sequence_placement,
    "per-document": per_document_placement,
    "variable-length": variable_length_packing,
}
SCHEDULERS: dict[str, Callable[[Problem], Assignment]] = {
    "distca": disaggregated,
    "home": at_home,
    "all-gather": all_gather,
    "greedy": greedy,
}


@dataclass(frozen=True)
class Policy:
    """A placer, which chooses the worker of each token, and a scheduler, which moves tasks."""

    name: str
    placer: str
    scheduler: str

    @property
    def places_tokens(self) -> bool:
        """Whether the policy changes the placement that it is given."""
        return self.placer != GIVEN


POLICIES = {
    policy.name: policy
    for policy in (
        Policy("distca", GIVEN, "distca"),
        Policy("colocated", GIVEN, "home"),
        Policy("head-tail-cp", "head-tail", "all-gather"),
        Policy("per-document-cp", "per-document", "all-gather"),
        Policy("wlb", "variable-length", "all-gather"),
        Policy("greedy", GIVEN, "greedy"),
    )
}
PLACEMENTS = (GIVEN, "balanced")  # placements for policies that do not place tokens themselves


def policy_of(name: str, placement: str = GIVEN) -> Policy:
    """Returns a policy by its name, with ``balanced`` placement if asked for."""
    if name not in POLICIES:
        raise ValueError(f"policy {name!r} is unknown: choose one of {', '.join(POLICIES)}")
    if placement not in PLACEMENTS:
        raise ValueError(f"placement {placement!r} is unknown: choose {' or '.join(PLACEMENTS)}")
    policy = POLICIES[name]
    if placement == GIVEN:
        return policy
    if policy.places_tokens:
        raise ValueError(f"policy {name} places tokens itself: use it with placement given")
    return Policy(f"{name}, {placement} placement", placement, policy.scheduler)
