"""Steps of the tiny model, from documents to an outcome."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

from sim.tiny import MODEL, machines

from distca.pipeline.mesh import MeshShape
from distca.planning.spans import Ints, as_ints
from distca.sim.scenario import Scenario, Strategy
from distca.sim.simulate import Outcome, simulate


def scenario(
    profile: str, documents: list[int], context: int, *, gpus: int = 2, **changes: Any
) -> Scenario:
    """One batch of all the documents. Changes are of the cluster, where it has such a number."""
    cluster = machines(profile, gpus)
    own = {key: changes.pop(key) for key in list(changes) if hasattr(cluster, key)}
    return Scenario(
        model=changes.pop("model", MODEL),
        cluster=replace(cluster, **own),
        context=context,
        sequences=sum(documents) // context,
        lengths=as_ints(documents),
        recompute=False,
        **changes,
    )


def batch_of(one: Scenario) -> list[Ints]:
    return next(one.batches(1))


def outcome(one: Scenario, policy: str, parallel: MeshShape, **choices: Any) -> Outcome:
    options = {key: choices.pop(key) for key in ("seed", "record") if key in choices}
    return simulate(one, Strategy(policy, parallel, **choices), batch_of(one), **options)


# A document of 512 tokens on one GPU and four of 128 on the other: 131,328 pairs and 33,024. One
# task moves: queries [256, 384) have 41,024 pairs, and then no rank has more than 1.1 x the mean.
MOVED = [512, 128, 128, 128, 128]


def moved(profile: str, tp: int = 1, **changes: Any) -> Outcome:
    one = scenario(profile, MOVED, 512, **changes)
    return outcome(one, "distca", MeshShape(dp=2, tp=tp), ping_pong=False, tolerance=0.1)
