"""Finds the best sizes of a policy on given batches under a memory limit.

1. ``candidates`` lists the strategies of a policy, one for each combination of sizes.
2. ``best`` searches them best first. The time of a strategy is at least that of the batches
   simulated so far plus the lower bounds of the others. The strategy that can still be fastest is
   simulated on its next batch, until one has been simulated on all batches: no other can be faster.

Without disaggregation, the winner is therefore the fastest of all candidates on these batches.
With it, strategies that differ from a simulated one only in what saves memory are left out as well.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, replace
from heapq import heapify, heappop, heappush
from itertools import product
from math import inf

from distca.pipeline.mesh import MeshShape
from distca.planning.models import ModelShape
from distca.planning.policies import POLICIES
from distca.sim.cluster import Cluster
from distca.sim.lower_bounds import min_bytes, min_step_s
from distca.sim.packing import KEEP_SEQUENCES
from distca.sim.scenario import Batch, Scenario, Strategy
from distca.sim.simulate import Outcome, Planned, Summary, simulate

STAGES = (1, 2, 4, 8)
MICRO_BATCHES_PER_STAGE = (1, 2, 4)  # in a disaggregated pipeline
MAX_MICRO_BATCHES = 8  # without a pipeline, where they only save memory
FAR = 1.3  # a pipeline this many times slower than the best is not tried with other micro-batches
HIDDEN = 0.05  # with less of a step exposed, gathering weights less often gains nothing
TENSOR_PARALLEL = 8  # the most in published comparisons
# How even dynamic groups are. Smaller groups are less even, and send less.
GROUP_TOLERANCES = (0.02, 0.1)

Show = Callable[[Strategy], None]


@dataclass(frozen=True)
class Sizes:
    """The sizes to try on each axis; an empty tuple stands for all that apply."""

    tp: tuple[int, ...] = ()
    pp: tuple[int, ...] = ()
    dp: tuple[int, ...] = ()
    cp: tuple[int, ...] = ()
    micro_batches: tuple[int, ...] = ()
    servers: tuple[int, ...] = (0,)  # numbers of dedicated servers, for policy distca

    def __post_init__(self) -> None:
        for what in ("tp", "pp", "dp", "cp", "micro_batches"):
            if any(size < 1 for size in getattr(self, what)):
                raise ValueError(f"{what} = {min(getattr(self, what))}: give 1 or more")
        if any(size < 0 for size in self.servers):
            raise ValueError(f"servers = {min(self.servers)}: give 0 or more")

    def as_published(self, model: ModelShape, cluster: Cluster) -> Sizes:
        """Returns the largest tensor parallelism up to 8 and no pipeline, unless they are given."""
        widths = [tp for tp in tensor_sizes(model, cluster) if tp <= TENSOR_PARALLEL]
        return replace(self, tp=self.tp or (max(widths),), pp=self.pp or (1,))


@dataclass(frozen=True)
class SweepResult:
    """The best strategy of a policy; if none fits, the one that needs the least memory."""

    name: str
    tried: int  # simulated strategies
    summary: Summary | None = None  # None if no strategy can run at all
    fits: bool = False
    refused: str = ""  # why none can run


def tensor_sizes(model: ModelShape, cluster: Cluster) -> list[int]:
    """Returns the powers of two that divide a node, the heads and the feed-forward width."""
    powers = (1 << n for n in range(cluster.gpus_per_node.bit_length()))
    parts = (cluster.gpus_per_node, cluster.gpus, model.heads, model.kv_heads, model.ffn)
    return [tp for tp in powers if not any(part % tp for part in parts)]


def candidates(scenario: Scenario, template: Strategy, sizes: Sizes) -> list[Strategy]:
    """Returns ``template`` with every combination of sizes that applies."""
    model, cluster, found = scenario.model, scenario.cluster, []
    dynamic = POLICIES[template.policy].has_dynamic_groups
    tolerances = GROUP_TOLERANCES if dynamic else (template.tolerance,)
    for tp, pp, servers in product(
        sizes.tp or tensor_sizes(model, cluster),
        sizes.pp or STAGES,
        sizes.servers if template.policy == "distca" else (0,),
    ):
        workers, rest = divmod(cluster.gpus - servers, tp * pp)
        if rest or workers < 1 or servers % tp or pp > model.layers:
            continue
        keeps = (False, True) if template.disaggregated and pp == 1 else (False,)
        for cp in _context_sizes(template, workers, sizes):
            mesh = MeshShape(pp, workers // cp, cp, tp, servers)
            counts = _micro_batches(scenario, template, mesh, sizes)
            found += [
                replace(
                    template,
                    parallel=replace(mesh, keep_weights=keep),
                    micro_batches=count,
                    tolerance=tolerance,
                )
                for count, keep, tolerance in product(counts, keeps, tolerances)
            ]
    return found


def _context_sizes(template: Strategy, workers: int, sizes: Sizes) -> Iterable[int]:
    """Returns divisors of the workers of a stage; all workers with disaggregation.

    Dynamic groups have at most ``cp`` workers, and always a power of two.
    """
    divisors = [cp for cp in range(1, workers + 1) if workers % cp == 0]
    if POLICIES[template.policy].has_dynamic_groups:
        divisors = [cp for cp in divisors if cp & (cp - 1) == 0]
    elif POLICIES[template.policy].keeps_tasks_home:
        divisors = [1]
    elif template.disaggregated and not (sizes.cp or sizes.dp):
        divisors = [workers]
    return [
        cp
        for cp in divisors
        if cp in (sizes.cp or divisors) and workers // cp in (sizes.dp or (workers // cp,))
    ]


def _micro_batches(
    scenario: Scenario, template: Strategy, parallel: MeshShape, sizes: Sizes
) -> Iterable[int]:
    if sizes.micro_batches:
        return sizes.micro_batches
    sequences, pp, dp = scenario.sequences, parallel.pp, parallel.dp
    if template.disaggregated:
        powers = [1 << n for n in range(MAX_MICRO_BATCHES.bit_length())]
        counts = powers if pp == 1 else [each * pp for each in MICRO_BATCHES_PER_STAGE]
        return [count for count in counts if count == 1 or count <= sequences]
    if template.policy in KEEP_SEQUENCES:
        return [count for count in range(1, sequences // dp + 1) if sequences % (dp * count) == 0]
    # Documents are packed without regard to sequences. Usual are as many micro-batches as a group
    # has sequences, which need not be a power of two: of three, three may fit where two do not.
    per_group = sequences // dp
    most = per_group if template.policy == "wlb" else max(per_group, MAX_MICRO_BATCHES)
    tried = {1 << n for n in range(most.bit_length())} | {per_group}
    return sorted(tried - {0})


def best(
    scenario: Scenario,
    template: Strategy,
    sizes: Sizes,
    batches: Sequence[Batch],
    *,
    limit_bytes: float,
    show: Show = lambda strategy: None,
) -> SweepResult:
    """Finds the best of the ``candidates``; ``show`` is called with each, simulated or not."""
    strategies = candidates(scenario, template, sizes)
    if not strategies:
        return SweepResult(template.name, 0, refused=_none_applies(scenario, template, sizes))
    search = _Search(scenario, batches, limit_bytes)
    search.run(strategies, show)
    winner = search.winner or search.smallest(strategies)
    if winner is None:
        return SweepResult(template.name, search.num_tried, refused=search.refused)
    return SweepResult(
        winner.strategy.name, search.num_tried, winner, fits=search.winner is not None
    )


def _none_applies(scenario: Scenario, template: Strategy, sizes: Sizes) -> str:
    if POLICIES[template.policy].keeps_tasks_home:
        sizes = replace(sizes, cp=(1,))
    given = [
        f"{what.replace('_', '-')} {' or '.join(map(str, chosen))}"
        for what, chosen in vars(sizes).items()
        if any(chosen)
    ]
    return (
        f"{scenario.cluster.gpus} GPUs and {scenario.sequences} sequences do not divide by"
        f" {', '.join(given) or 'any sizes'}: tp x pp x dp x cp must be the number of GPUs less the"
        " servers, and dp x micro-batches must divide the sequences"
    )


class _Search:
    """A best-first search over strategies.

    winner: the fastest strategy that fits into memory on all batches; None if none does.
    num_tried: strategies that were simulated on at least one batch.
    refused: the simulator's last error.
    """

    def __init__(self, scenario: Scenario, batches: Sequence[Batch], limit_bytes: float) -> None:
        self._scenario, self._batches, self._limit = scenario, batches, limit_bytes
        self._outcomes: dict[Strategy, list[Outcome]] = {}
        self._plans: dict[tuple[MeshShape, int, float, int], Planned] = {}
        self.winner: Summary | None = None
        self.refused = ""

    @property
    def num_tried(self) -> int:
        return len(self._outcomes)

    def run(self, strategies: Sequence[Strategy], show: Show) -> None:
        bounds = {
            one: [min_step_s(self._scenario, one, batch) for batch in self._batches]
            for one in strategies
        }
        queue = [
            (sum(bounds[one]), one.micro_batches, number)
            for number, one in enumerate(strategies)
            if min_bytes(self._scenario, one) <= self._limit
        ]
        heapify(queue)
        shown: set[int] = set()
        least: dict[Strategy, float] = {}  # seconds of simulated strategies that fit so far
        while queue and self.winner is None:
            bound_s, _, number = heappop(queue)
            strategy = strategies[number]
            floor_s = max((least.get(one, 0.0) for one in self._no_slower(strategy)), default=0.0)
            if floor_s > bound_s:
                heappush(queue, (floor_s, strategy.micro_batches, number))
                continue
            least.pop(strategy, None)
            if number not in shown:
                shown.add(number)
                show(strategy)
                if self._left_out(strategy):
                    continue
            outcomes = self._outcomes.get(strategy, [])
            if len(outcomes) == len(self._batches):
                self.winner = Summary.mean(self._scenario, strategy, outcomes)
            elif (outcome := self._simulate_next(strategy)) and outcome.memory.total <= self._limit:
                outcomes = self._outcomes[strategy]
                known_s = sum(outcome.step_s for outcome in outcomes)
                left_s = sum(bounds[strategy][len(outcomes) :])
                least[strategy] = known_s + left_s
                heappush(queue, (known_s + left_s, strategy.micro_batches, number))
        for number in set(range(len(strategies))) - shown:
            show(strategies[number])

    def _simulate_next(self, strategy: Strategy) -> Outcome | None:
        """Simulates a strategy on its next batch; returns None if it cannot run."""
        done = self._outcomes.get(strategy, [])
        number = len(done)
        key = (_mesh(strategy), strategy.micro_batches, strategy.tolerance, number)
        batch, planned = self._batches[number], self._plans.get(key)
        try:
            outcome = simulate(self._scenario, strategy, batch, planned=planned, seed=number)
        except ValueError as error:
            self.refused = str(error)
            return None
        self._outcomes[strategy] = [*done, outcome]
        self._plans[key] = outcome.planned
        return outcome

    def _left_out(self, strategy: Strategy) -> bool:
        """Returns whether a strategy hardly can be faster than a simulated one of the same mesh.

        Without a pipeline, more micro-batches and weights that are gathered more often only save
        memory, and gathering them less often gains nothing where communication is hidden.
        """
        if not strategy.disaggregated:
            return False
        fitting = {
            other: outcomes[0]
            for other, outcomes in self._outcomes.items()
            if outcomes[0].memory.total <= self._limit
        }
        far_s = FAR * min((outcome.step_s for outcome in fitting.values()), default=inf)
        same = [pair for pair in fitting.items() if _mesh(pair[0]) == _mesh(strategy)]
        if strategy.parallel.pp > 1:
            return any(outcome.step_s > far_s for _, outcome in same)
        count, keeps = strategy.micro_batches, strategy.parallel.keep_weights
        return any(
            (count >= other.micro_batches and keeps <= other.parallel.keep_weights)
            or (count > other.micro_batches and outcome.exposed < HIDDEN)
            for other, outcome in same
        )

    def _no_slower(self, strategy: Strategy) -> list[Strategy]:
        """Returns strategies that take no longer than this one, as workers have the same in them.

        Without a pipeline, kk divides what a worker has into micro-batches only to save memory.
        With jitter, more kernels may be faster: their deviations cancel out.
        """
        if strategy.parallel.pp > 1 or strategy.policy != "kk" or self._scenario.cluster.jitter:
            return []
        fewer = range(strategy.micro_batches.bit_length() - 1)
        return [replace(strategy, micro_batches=1 << power) for power in fewer]

    def smallest(self, strategies: Sequence[Strategy]) -> Summary | None:
        """Simulates the strategy with the smallest need of memory that can run all batches."""
        for strategy in sorted(strategies, key=lambda one: min_bytes(self._scenario, one)):
            left = len(self._batches) - len(self._outcomes.get(strategy, []))
            if all(self._simulate_next(strategy) for _ in range(left)):
                return Summary.mean(self._scenario, strategy, self._outcomes[strategy])
        return None


def _mesh(strategy: Strategy) -> MeshShape:
    """Returns the sizes of a strategy's mesh, on which its plans depend besides micro-batches."""
    return replace(strategy.parallel, keep_weights=False)
