"""Policies: a placer and a scheduler under one name, ours and published ones to compare with.

Only names, which ``distca.planning.api`` maps to functions: help texts list policies without numpy.
"""

from dataclasses import dataclass

from distca.schema import choose

GIVEN = "given"


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

    @property
    def disaggregated(self) -> bool:
        """Whether tasks may move to other ranks, beyond fixed groups of workers."""
        return self.scheduler not in ("home", "all-gather")

    @property
    def keeps_tasks_home(self) -> bool:
        """Whether every task is computed where its queries live, so that nothing is sent."""
        return self.scheduler == "home" and not self.has_dynamic_groups

    @property
    def has_dynamic_groups(self) -> bool:
        """Whether every document has a context-parallel group of its own size."""
        return self.placer == "dynamic-groups"

    @property
    def repacks(self) -> bool:
        """Whether documents of all micro-batches are packed anew, into bins of unequal tokens."""
        return self.placer in ("variable-length", "karmarkar-karp", "dynamic-groups")


POLICIES = {
    policy.name: policy
    for policy in (
        Policy("distca", GIVEN, "distca"),
        Policy("colocated", GIVEN, "home"),
        Policy("head-tail-cp", "head-tail", "all-gather"),
        Policy("per-document-cp", "per-document", "all-gather"),
        Policy("wlb", "variable-length", "all-gather"),
        Policy("kk", "karmarkar-karp", "home"),
        Policy("dynamic-cp", "dynamic-groups", "home"),
        Policy("greedy", GIVEN, "greedy"),
    )
}
PLACEMENTS = (GIVEN, "balanced")  # placements for policies that do not place tokens themselves


def policy_of(name: str, placement: str = GIVEN) -> Policy:
    """Returns a policy by its name, with ``balanced`` placement if asked for."""
    policy = choose(POLICIES, name, "policy")
    if placement not in PLACEMENTS:
        raise ValueError(f"placement {placement!r} is unknown: choose {' or '.join(PLACEMENTS)}")
    if placement == GIVEN:
        return policy
    if policy.places_tokens:
        raise ValueError(f"policy {name} places tokens itself: use it with placement given")
    return Policy(f"{name}, {placement} placement", placement, policy.scheduler)
