"""Predicts the steps of ``cluster_gpu.py`` with the simulator, from a profile of the same ranks."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from functools import cache

import numpy as np

from distca.model.config import ModelConfig
from distca.pipeline.mesh import MeshShape
from distca.pipeline.step_plan import StepPlan
from distca.planning.costs.profile import Profile
from distca.runtime.shared_gpu import nccl_ctas
from distca.sim.cluster import Cluster, Link
from distca.sim.rates import Rates
from distca.sim.streams import Streams
from distca.sim.ticks import run_ticks

Predict = Callable[[StepPlan | None, MeshShape], float | None]


def predictor(
    path: str | None, config: ModelConfig, ranks: int, *, recompute: bool, transfer_sms: float
) -> Predict:
    """Returns a function that predicts the seconds of a step; None without profile or plan."""
    if path is None:
        return lambda plan, parallel: None
    link = link_of(Profile.read(path))
    cluster = Cluster(
        "shared", ranks, ranks, 0, link, link, profile=path, transfer_sms=transfer_sms
    )
    rates_on = cache(lambda parallel: Rates(config.shape, cluster, parallel, recompute))

    def predict(plan: StepPlan | None, parallel: MeshShape) -> float | None:
        if plan is None:
            return None
        streams = Streams.on(cluster, np.ones(ranks))
        run_ticks(rates_on(parallel), as_run(plan), streams)
        return float(streams.compute.max())

    return predict


def worst_tokens(plan: StepPlan | None) -> float | None:
    """Returns the tokens of the busiest rank over the mean; None without a plan.

    Every half of a micro-batch waits for its busiest worker, so their tokens add up.
    """
    if plan is None:
        return None
    tokens = [half.placement.tokens for halves in plan.micro_batches for half in halves]
    return float(sum(one.max() for one in tokens) / sum(one.mean() for one in tokens))


def transfer_sms_of(ranks: int, sms: int) -> float:
    """Returns the share of a rank's SMs that NCCL may occupy; 0 on a CPU, which has none."""
    return nccl_ctas(ranks) / sms if sms else 0.0


def link_of(profile: Profile) -> Link:
    """Fits seconds = latency + bytes / bandwidth to the measured exchanges."""
    if len(profile.exchange) < 2:
        raise ValueError("the profile has no exchanges: measure it with --ranks N --share-gpu")
    size = np.array([one.bytes for one in profile.exchange], float)
    seconds = size / np.array([one.bytes_per_s for one in profile.exchange])
    # Relative errors count, so that small exchanges determine the latency.
    columns = np.stack([np.ones_like(size), size], axis=1) / seconds[:, None]
    latency, inverse = np.linalg.lstsq(columns, np.ones_like(size), rcond=None)[0]
    return Link(1 / inverse, max(latency, 0.0))


def as_run(plan: StepPlan) -> StepPlan:
    """Returns the plan as the runtime executes it: only needed keys are sent, nothing gathered."""
    slots = tuple(
        tuple(tuple(replace(one, gather=0) for one in slot) for slot in tick) for tick in plan.slots
    )
    return replace(plan, slots=slots)
