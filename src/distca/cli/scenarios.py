"""From the settings of ``distca simulate`` to scenarios and strategies."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass, replace

from distca.cli.model_shapes import check_dense, named_shape
from distca.cli.settings import COMPARED, Settings
from distca.cli.sources import (
    MOST_RANKS,
    parse_bandwidth,
    parse_bytes,
    parse_tokens,
    read_documents,
)
from distca.data.length_names import names_distribution
from distca.data.lengths import Lengths, distribution
from distca.pipeline.mesh import MeshShape
from distca.planning.masks import Mask
from distca.planning.models import ModelShape
from distca.planning.options import PlanOptions
from distca.planning.policies import PLACEMENTS, policy_of
from distca.sim.cluster import Cluster, Link, cluster
from distca.sim.rates import Rates
from distca.sim.scenario import Batch, Scenario, Strategy
from distca.sim.sweep import Sizes

MOST_BATCHES, MOST_SEQUENCES, LARGEST = 10_000, 1 << 20, 10**9  # far above all that is of use
TOKENS_PER_GPU = 32768  # in a step, unless the number of sequences is given


@dataclass(frozen=True)
class Study:
    """What is simulated: every strategy in every scenario, one for each number of GPUs."""

    scenarios: tuple[Scenario, ...]
    strategies: tuple[Strategy, ...]  # without sizes
    sizes: Sizes  # those to try
    sweep: bool
    batches: int  # of each seed
    seeds: tuple[int, ...]

    @classmethod
    def of(cls, settings: Settings) -> Study:
        model, machines = model_of(settings), cluster_of(settings)
        _ = Rates(model, machines, MeshShape()).profile  # reports a missing one at once
        context, lengths = _documents(settings)
        _within("--batches", settings.batches, 1, MOST_BATCHES)
        _within("--sequences", settings.sequences or 1, 1, MOST_SEQUENCES)
        seeds = _counts("seed", settings.seed)
        for seed in seeds or (-1,):
            _within("--seed", seed, 0, LARGEST)
        if len(seeds) > 1 and not isinstance(lengths, str):
            raise ValueError(
                f"--seed {settings.seed}: all seeds have the same batches of given documents, so"
                " give a distribution, or leave out --seed and raise --batches"
            )
        Mask.parse(settings.mask)
        gpus = _counts("gpus", settings.gpus) or (machines.gpus,)
        for count in gpus:
            _within("--gpus", count, 1, MOST_RANKS)
        scenarios = tuple(
            Scenario(
                model=model,
                cluster=replace(machines, gpus=count, slow=_speeds(settings.slow or ())),
                context=context,
                sequences=_sequences(settings.sequences, context, count, gpus[0]),
                lengths=lengths,
                mask=settings.mask,
                recompute=settings.recompute,
                seed=seeds[0],
            )
            for count in gpus
        )
        sizes = Sizes(
            **{name: _counts(name, getattr(settings, name))
               for name in ("tp", "pp", "dp", "cp", "micro_batches")},
            servers=_counts("servers", settings.servers) or (0,),
        )  # fmt: skip
        return cls(scenarios, _strategies(settings), sizes, settings.sweep, settings.batches, seeds)

    def batches_of(self, scenario: Scenario) -> list[Batch]:
        """Returns the batches of all seeds."""
        drawn = (replace(scenario, seed=seed).batches(self.batches) for seed in self.seeds)
        return [batch for batches in drawn for batch in batches]

    def sizes_of(self, scenario: Scenario) -> Sizes:
        if self.sweep:
            return self.sizes
        return self.sizes.as_published(scenario.model, scenario.cluster)


def model_of(settings: Settings) -> ModelShape:
    """Returns a model by name, with other sizes where they are given."""
    known = named_shape(settings.model, ", and change its sizes as needed")
    if settings.ffn is None:
        check_dense(settings.model)
    names = ("layers", "hidden", "ffn", "heads", "kv_heads", "head_dim", "v_head_dim", "vocab_size")
    changed = {name: size for name in names if (size := getattr(settings, name)) is not None}
    for name, size in changed.items():
        _within(_flag(name), size, 1, LARGEST)
    words = [known.name, *(f"{name} {size}" for name, size in changed.items())]
    model = replace(known, name=", ".join(words), **changed)
    if not (model.hidden and model.ffn and model.vocab_size):
        raise ValueError(
            f"model {known.name} has the sizes of attention alone: give --hidden, --ffn and"
            " --vocab-size of its linear layers too"
        )
    return model


def cluster_of(settings: Settings) -> Cluster:
    """Returns a cluster by name, with other figures where they are given."""
    known = cluster(settings.cluster)
    _within("--latency", settings.latency or 0, 0, LARGEST)
    across = Link(
        _bandwidth("--across", settings.across) or known.across.bytes_per_s,
        known.across.latency_s if settings.latency is None else settings.latency / 1e6,
    )
    inside = _bandwidth("--inside", settings.inside) or known.inside.bytes_per_s
    per_node = settings.gpus_per_node
    _within("--gpus-per-node", 1 if per_node is None else per_node, 1, MOST_RANKS)
    return replace(
        known,
        gpus_per_node=known.gpus_per_node if per_node is None else per_node,
        memory_bytes=parse_bytes(settings.memory) if settings.memory else known.memory_bytes,
        inside=Link(inside, known.inside.latency_s),
        across=across,
        profile=settings.profile or known.profile,
        jitter=settings.jitter,
        link_jitter=settings.link_jitter,
        transfer_sms=settings.transfer_sms,
        known=not settings.unknown_speeds,
    )


def _strategies(settings: Settings) -> tuple[Strategy, ...]:
    PlanOptions(tolerance=settings.tolerance)  # raises ValueError for a wrong one
    placements = (settings.placement,) if settings.placement else PLACEMENTS
    policy_of("distca", placements[0])  # raises ValueError for an unknown one
    strategies = []
    for policy in dict.fromkeys(settings.policy or COMPARED):
        strategy = Strategy(
            policy, MeshShape(), ping_pong=settings.ping_pong, tolerance=settings.tolerance
        )
        if not strategy.disaggregated:
            strategies.append(strategy)
            continue
        chosen = placements if policy == "distca" else placements[:1]
        strategies += [replace(strategy, placement=placement) for placement in chosen]
    return tuple(strategies)


def _documents(settings: Settings) -> tuple[int, str | Lengths]:
    context, source = parse_tokens(settings.context), settings.lengths
    if names_distribution(source):
        distribution(source, context)  # raises ValueError for a wrong one
        return context, source
    return context, read_documents(source, settings.end_of_document)


def _sequences(given: int | None, context: int, gpus: int, first: int) -> int:
    """Returns the number of sequences that gives every GPU as many tokens in all scenarios."""
    if given is None:
        return max(gpus * TOKENS_PER_GPU // context, 1)
    if given * gpus % first:
        raise ValueError(
            f"{given} sequences on {first} GPUs are {given * gpus / first:g} on {gpus}: give a"
            " number of sequences that is whole for every number of GPUs"
        )
    return given * gpus // first


def _speeds(slow: Iterable[str]) -> dict[int, float]:
    speeds = {}
    for text in slow:
        gpu, equals, speed = text.partition("=")
        try:
            speeds[int(gpu)] = float(speed if equals else "?")
        except ValueError:
            raise ValueError(
                f"--slow {text}: write the GPU's number and its speed, such as 3=0.5"
            ) from None
    return speeds


def _counts(name: str, text: str) -> tuple[int, ...]:
    try:
        return tuple(dict.fromkeys(int(word) for word in text.split(",") if text))
    except ValueError:
        raise ValueError(
            f"{_flag(name)} {text}: write a whole number, or several as 2,4,8"
        ) from None


def _bandwidth(flag: str, text: str) -> float | None:
    try:
        return parse_bandwidth(text) if text else None
    except ValueError as error:
        raise ValueError(f"{flag}: {error}") from None


def _within(flag: str, value: float, least: int, most: int) -> None:
    if not least <= value <= most:
        raise ValueError(f"{flag} {value:g}: give a number from {least:,} to {most:,}")


def _flag(name: str) -> str:
    return f"--{name.replace('_', '-')}"
