"""Which sizes are best: all that apply to a policy, tried on the same batches under a memory limit.

1. ``candidates`` lists the sizes of a policy's ways.
2. ``best`` drops those that cannot fit, and tries the others on one batch, the most promising
   first; what cannot be faster than what was found, or hardly can, is left out.
3. The fastest few then run on all batches.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, replace

from distca.pipeline.mesh import MeshShape
from distca.planning.models import ModelShape
from distca.sim.cluster import Cluster
from distca.sim.lower_bounds import least_bytes, least_s
from distca.sim.packed import SEQUENCES
from distca.sim.scenario import Batch, Scenario, Way
from distca.sim.simulate import Outcome, Summary, simulate

STAGES = (1, 2, 4, 8)
TIMES_STAGES = (1, 2, 4)  # micro-batches of a disaggregated pipeline, for each stage
MOST_MICRO_BATCHES = 8  # of a disaggregated step without a pipeline: only memory asks for them
# After one batch: so near to the best, and so many of them, run on all. Where attention is not
# disaggregated, how even it is depends on the batch, so that more is left open.
CLOSE, FINALISTS = {True: 1.01, False: 1.15}, {True: 3, False: 12}
FAR = 1.3  # times the best: a pipeline so slow is not tried with other micro-batches
HIDDEN = 0.05  # of a step: with so little exposed, gathering weights less often wins nothing
TENSOR_PARALLEL = 8  # as published comparisons have it

Show = Callable[[Way], None]


@dataclass(frozen=True)
class Sizes:
    """What is tried; where nothing is given, all that applies."""

    tp: tuple[int, ...] = ()
    pp: tuple[int, ...] = ()
    dp: tuple[int, ...] = ()
    cp: tuple[int, ...] = ()
    micro_batches: tuple[int, ...] = ()
    servers: tuple[int, ...] = (0,)  # GPUs that only serve; of policy distca

    def __post_init__(self) -> None:
        for what in ("tp", "pp", "dp", "cp", "micro_batches"):
            if any(size < 1 for size in getattr(self, what)):
                raise ValueError(f"{what} = {min(getattr(self, what))}: give 1 or more")
        if any(size < 0 for size in self.servers):
            raise ValueError(f"servers = {min(self.servers)}: give 0 or more")

    def as_published(self, model: ModelShape, cluster: Cluster) -> Sizes:
        """The widest tensor parallelism up to 8 and no pipeline, unless they are given."""
        widths = [tp for tp in tensor_sizes(model, cluster) if tp <= TENSOR_PARALLEL]
        return replace(self, tp=self.tp or (max(widths),), pp=self.pp or (1,))


@dataclass(frozen=True)
class Found:
    """The best of a policy's ways; where none fits, the one that needs least."""

    name: str
    tried: int  # ways that were simulated
    summary: Summary | None = None  # None where no way can run at all
    fits: bool = False
    refused: str = ""  # why none can


def tensor_sizes(model: ModelShape, cluster: Cluster) -> list[int]:
    """Powers of two that divide a node, the heads and the feed-forward."""
    powers = (1 << n for n in range(cluster.gpus_per_node.bit_length()))
    parts = (cluster.gpus_per_node, cluster.gpus, model.heads, model.kv_heads, model.ffn)
    return [tp for tp in powers if not any(part % tp for part in parts)]


def candidates(scenario: Scenario, like: Way, sizes: Sizes) -> list[Way]:
    """All ways to train as ``like`` does, in other sizes."""
    model, cluster = scenario.model, scenario.cluster
    found = []
    for tp in sizes.tp or tensor_sizes(model, cluster):
        for pp in sizes.pp or STAGES:
            for servers in sizes.servers if like.policy == "distca" else (0,):
                lanes, rest = divmod(cluster.gpus - servers, tp * pp)
                if rest or lanes < 1 or servers % tp or pp > model.layers:
                    continue
                for cp in _context_sizes(like, lanes, sizes):
                    parallel = MeshShape(pp, lanes // cp, cp, tp, servers)
                    for micro_batches in _micro_batches(scenario, like, parallel, sizes):
                        found.append(replace(like, parallel=parallel, micro_batches=micro_batches))
    return [with_weights for way in found for with_weights in _kept(way)]


def _context_sizes(like: Way, lanes: int, sizes: Sizes) -> Iterable[int]:
    """Divisors of the lanes. Disaggregated, documents lie in order over all workers."""
    divisors = [cp for cp in range(1, lanes + 1) if lanes % cp == 0]
    if like.policy == "colocated":
        divisors = [1]
    elif like.disaggregated and not (sizes.cp or sizes.dp):
        divisors = [lanes]
    return [
        cp
        for cp in divisors
        if cp in (sizes.cp or divisors) and lanes // cp in (sizes.dp or (lanes // cp,))
    ]


def _micro_batches(
    scenario: Scenario, like: Way, parallel: MeshShape, sizes: Sizes
) -> Iterable[int]:
    if sizes.micro_batches:
        return sizes.micro_batches
    sequences, pp, dp = scenario.sequences, parallel.pp, parallel.dp
    if like.disaggregated:
        powers = [1 << n for n in range(MOST_MICRO_BATCHES.bit_length())]
        wished = powers if pp == 1 else [times * pp for times in TIMES_STAGES]
        return [count for count in wished if count == 1 or count <= sequences]
    if like.policy in SEQUENCES:
        return [count for count in range(1, sequences // dp + 1) if sequences % (dp * count) == 0]
    return [1 << n for n in range((sequences // dp).bit_length())]


def _kept(way: Way) -> list[Way]:
    """Weights may stay gathered, where there is room for them; a pipeline's always do."""
    if not way.disaggregated or way.parallel.pp > 1:
        return [way]
    return [
        replace(way, parallel=replace(way.parallel, keep_weights=keep)) for keep in (False, True)
    ]


def best(
    scenario: Scenario,
    like: Way,
    sizes: Sizes,
    batches: Sequence[Batch],
    *,
    limit_bytes: float,
    show: Show = lambda way: None,
) -> Found:
    """Of the ``candidates`` of one policy. ``show`` is told each in turn, left out or not."""
    ways = candidates(scenario, like, sizes)
    if not ways:
        return Found(like.name, 0, refused=_none_applies(scenario, like, sizes))
    search = _Search(scenario, batches, limit_bytes)
    for way in sorted(ways, key=lambda way: (search.least_s(way), way.micro_batches)):
        show(way)
        search.consider(way)
    if not search.tried:
        search.try_smallest(ways)
    winner = search.winner(CLOSE[like.disaggregated], FINALISTS[like.disaggregated])
    if winner is None:
        return Found(like.name, len(search.tried), refused=search.refused)
    fits = winner.memory.total <= limit_bytes
    return Found(winner.way.name, len(search.tried), winner, fits)


def _none_applies(scenario: Scenario, like: Way, sizes: Sizes) -> str:
    if like.policy == "colocated":
        sizes = replace(sizes, cp=(1,))
    given = [
        f"{what.replace('_', '-')} {' or '.join(map(str, chosen))}"
        for what, chosen in vars(sizes).items()
        if any(chosen)
    ]
    return (
        f"{scenario.cluster.gpus} GPUs and {scenario.sequences} sequences do not divide by"
        f" {', '.join(given) or 'any sizes'}: tp x pp x dp x cp must make up the GPUs less the"
        " servers, and dp x micro-batches divide the sequences"
    )


class _Search:
    """Ways on the first batch, then the best of them on all."""

    def __init__(self, scenario: Scenario, batches: Sequence[Batch], limit_bytes: float) -> None:
        self._scenario, self._batches, self._limit = scenario, batches, limit_bytes
        self.tried: list[tuple[Way, Outcome]] = []
        self.refused = ""  # what the simulator said last

    @property
    def fitting(self) -> list[tuple[Way, Outcome]]:
        """Fastest first."""
        fit = [one for one in self.tried if one[1].memory.total <= self._limit]
        return sorted(fit, key=lambda one: one[1].step_s)

    def least_s(self, way: Way) -> float:
        return least_s(self._scenario, way, self._batches[0])

    def consider(self, way: Way) -> None:
        """Tries it, unless it cannot fit, or cannot be faster than one that does."""
        if least_bytes(self._scenario, way) > self._limit:
            return
        fitting, least = self.fitting, self.least_s(way)
        for other, outcome in fitting:
            far = outcome.step_s > FAR * fitting[0][1].step_s
            if (
                outcome.step_s < least
                or _only_smaller(way, other)
                or (far and _same_pipeline(way, other))
                or (outcome.exposed < HIDDEN and _fewer_gathers(way, other))
            ):
                return
        self._try(way)

    def try_smallest(self, ways: Sequence[Way]) -> None:
        """The one that needs least of those that can run at all."""
        for way in sorted(ways, key=lambda way: least_bytes(self._scenario, way)):
            if not self.tried:
                self._try(way)

    def _try(self, way: Way) -> None:
        planned = None
        if self.tried and _other_weights(way, self.tried[-1][0]):
            planned = self.tried[-1][1].planned
        try:
            outcome = simulate(self._scenario, way, self._batches[0], planned=planned)
        except ValueError as error:
            self.refused = str(error)
        else:
            self.tried.append((way, outcome))

    def winner(self, close: float, most: int) -> Summary | None:
        """On all batches; where none fits, the one that needs least."""
        finalists: list[Summary] = []
        for way, outcome in self.fitting:
            late = outcome.step_s > close * self.fitting[0][1].step_s
            if finalists and (late or len(finalists) == most):
                break
            summary = self._mean(way, outcome)
            if summary is not None and summary.memory.total <= self._limit:
                finalists.append(summary)
        if finalists:
            return min(finalists, key=lambda one: one.step_s)
        by_need = sorted(self.tried, key=lambda one: one[1].memory.total)
        known = (self._mean(way, outcome) for way, outcome in by_need)
        return next((summary for summary in known if summary is not None), None)

    def _mean(self, way: Way, first: Outcome) -> Summary | None:
        """None where another batch cannot run so."""
        try:
            others = [
                simulate(self._scenario, way, batch, seed=number)
                for number, batch in enumerate(self._batches[1:], 1)
            ]
        except ValueError as error:
            self.refused = str(error)
            return None
        return Summary.mean(self._scenario, way, [first, *others])


def _other_weights(way: Way, other: Way) -> bool:
    """Whether all but the weights that are kept is the same, plans too."""
    keep = other.parallel.keep_weights
    return replace(way, parallel=replace(way.parallel, keep_weights=keep)) == other


def _same_pipeline(way: Way, other: Way) -> bool:
    """Disaggregated, with other micro-batches."""
    pipeline = way.disaggregated and way.parallel.pp > 1
    return pipeline and replace(way, micro_batches=other.micro_batches) == other


def _only_smaller(way: Way, other: Way) -> bool:
    """Whether a way differs from another only in what saves memory and takes time."""
    saves = way.micro_batches >= other.micro_batches
    saves &= way.parallel.keep_weights <= other.parallel.keep_weights
    return saves and _without_pipeline(way, other)


def _fewer_gathers(way: Way, other: Way) -> bool:
    """Whether all it could win is that weights, with more micro-batches, are gathered less."""
    return way.micro_batches > other.micro_batches and _without_pipeline(way, other)


def _without_pipeline(way: Way, other: Way) -> bool:
    """Disaggregated ways without stages that are the same but for micro-batches and weights."""
    if not way.disaggregated or way.parallel.pp > 1:
        return False
    return _other_weights(replace(way, micro_batches=other.micro_batches), other)
