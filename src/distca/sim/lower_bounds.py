"""Lower bounds of a step's time and memory without a plan, with which a search can be pruned."""

import numpy as np

from distca.pipeline.memory import estimate
from distca.planning.costs.base import PS
from distca.planning.masks import document_pairs
from distca.planning.policies import POLICIES
from distca.planning.spans import as_ints
from distca.sim.rates import Rates
from distca.sim.scenario import Batch, Scenario, Strategy
from distca.sim.streams import least_factor


def min_bytes(scenario: Scenario, strategy: Strategy) -> int:
    """Returns a lower bound of the memory of a GPU: with even tokens, and nothing received."""
    p, model = strategy.parallel, scenario.model
    tokens = scenario.tokens // (p.workers_per_stage * strategy.micro_batches)
    needed = estimate(
        model,
        p,
        tokens,
        recompute=scenario.recompute,
        layers=model.layers // p.pp,
        in_flight=min(p.pp, strategy.micro_batches),
    )
    return needed.total - needed.exchange


def min_step_s(scenario: Scenario, strategy: Strategy, batch: Batch) -> float:
    """Returns a lower bound of the seconds of a step.

    Tokens and attention are even, and communication takes no time but for the all-gathers of
    context parallelism, which nothing hides. While a pipeline fills and drains, linear layers of
    idle stages wait; they can compute attention if it is pooled. All jitter is as lucky as it can
    be: a step of few kernels may well take less than it does without jitter.
    """
    p, count, cluster = strategy.parallel, strategy.micro_batches, scenario.cluster
    if p.pp == 1 and POLICIES[strategy.policy].has_dynamic_groups:
        count = 1  # more of them are simulated as one
    rates = Rates(scenario.model, cluster, p, scenario.recompute)
    tokens = scenario.tokens / (p.workers_per_stage * count)
    layer, head = rates.layer_and_head_s(tokens)
    per_stage = scenario.model.layers // p.pp
    steady = count * (per_stage * layer + head)
    # Micro-batches that are packed anew differ in size, so the smallest one may fill the pipeline.
    filled = steady
    if not POLICIES[strategy.policy].repacks:
        filled += (scenario.model.layers - per_stage) * layer
    attention = attention_s(scenario, rates, batch) / p.num_plan_ranks
    fastest = max([1.0, *cluster.slow.values()])
    gathering = 0.0
    if p.servers:
        serving = p.servers // p.tp if p.pp == 1 else p.num_plan_ranks
        attending = [filled, attention * p.num_plan_ranks / serving]
    elif strategy.disaggregated:
        attending = [filled, steady + attention]
    else:
        attending = [filled + attention * per_stage * p.pp / scenario.model.layers]
        if p.cp > 1 and not POLICIES[strategy.policy].has_dynamic_groups:
            gathered = tokens * (p.cp - 1) * rates.share.kv_bytes
            gathering = 2 * count * per_stage * rates.collective_s(p.cp, gathered)
    computing = least_factor(cluster.jitter) * (max(attending) + rates.optimizer_s)
    return (computing + least_factor(cluster.link_jitter) * gathering) / fastest


def attention_s(scenario: Scenario, rates: Rates, batch: Batch) -> float:
    """Returns the seconds of all attention, forward and backward, on one rank at the best rate."""
    seen = float(document_pairs(as_ints(np.concatenate(batch)), scenario.mask))
    cost = rates.cost
    per_pair = cost.forward.min_ps_per_pair + cost.backward.min_ps_per_pair
    return scenario.model.layers * seen * per_pair / PS
