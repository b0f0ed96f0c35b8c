"""Whether disaggregation helps, and why not."""

from collections.abc import Sequence
from dataclasses import replace
from math import inf
from statistics import fmean

import numpy as np
import pytest

from distca.pipeline.mesh import MeshShape
from distca.planning.models import ModelShape
from distca.planning.spans import Ints
from distca.sim.cluster import Cluster, Link, cluster
from distca.sim.scenario import Scenario, Strategy
from distca.sim.simulate import simulate
from distca.sim.sweep import Sizes, SweepResult, best
from distca.sim.verdict import ERROR, LITTLE_ATTENTION, Verdict, attention_share, busiest, verdict

SMALL = ModelShape("small", 8, 4, 128, layers=2, hidden=1024, ffn=4096, vocab_size=8192)
MACHINES = replace(cluster("h200"), gpus=4, gpus_per_node=2)
TEMPLATES = (
    Strategy("colocated", MeshShape()),
    Strategy("wlb", MeshShape()),
    Strategy("distca", MeshShape(), placement="balanced"),
)


def judge(
    machines: Cluster,
    lengths: str | Ints,
    context: int,
    templates: Sequence[Strategy] = TEMPLATES,
    limit: float = inf,
    sequences: int = 8,
    count: int = 1,
) -> tuple[Scenario, Verdict]:
    scenario = Scenario(SMALL, machines, context, sequences, lengths)
    batches, sizes = list(scenario.batches(count)), Sizes(tp=(1,), pp=(1,))
    found = [best(scenario, template, sizes, batches, limit_bytes=limit) for template in templates]
    return scenario, verdict(scenario, found, batches)


def test_it_helps_for_long_contexts_of_uneven_documents() -> None:
    _, said = judge(MACHINES, "pretrain", 131072, [TEMPLATES[0], TEMPLATES[2]])
    assert said.gain == "faster"
    assert said.speed_up is not None
    assert said.speed_up > 1.1
    assert said.because == ""
    assert said.busiest > 1.1
    assert said.attention > 0.4


def test_short_contexts_have_little_attention() -> None:
    _, said = judge(MACHINES, "fixed:2048", 8192)
    assert said.gain == "even"
    assert said.attention < 0.15
    assert said.because == "attention"


def test_reasons_are_those_of_all_batches_and_not_of_the_first() -> None:
    short, long = np.full(8 * 32, 2048), np.full(8, 65536)  # a batch each, of 8 sequences
    scenario = Scenario(SMALL, MACHINES, 65536, 8, np.concatenate([short, long, long]))
    batches = list(scenario.batches(3))
    first, every = (
        attention_share(scenario, TEMPLATES[0], some) for some in (batches[:1], batches)
    )
    assert first < LITTLE_ATTENTION < every
    sizes = Sizes(tp=(1,), pp=(1,))
    found = [best(scenario, one, sizes, batches, limit_bytes=inf) for one in TEMPLATES]
    said = verdict(scenario, found, batches)
    assert said.attention == pytest.approx(every)
    assert said.because == "even"


def test_even_documents_need_no_balance() -> None:
    _, said = judge(MACHINES, "fixed:65536", 65536)
    assert (said.gain, said.because) == ("even", "even")
    assert said.busiest == pytest.approx(1.0, abs=0.02)


def test_a_slow_network_takes_it_back_and_a_faster_one_is_named() -> None:
    slow = replace(MACHINES, across=Link(0.3e9, 20e-6))
    scenario, said = judge(slow, "pretrain", 131072, [TEMPLATES[0], TEMPLATES[2]])
    assert (said.gain, said.because) == ("slower", "links")
    needed = said.needed_bytes_per_s
    assert needed is not None
    assert said.ours is not None
    assert said.other is not None
    (batch,) = scenario.batches(1)
    for factor, helps in ((1.1, True), (1 / 1.1, False)):
        links = replace(slow, across=Link(needed * factor, 20e-6))
        faster = replace(scenario, cluster=links)
        ours, other = (
            simulate(faster, one.strategy, batch).step_s for one in (said.ours, said.other)
        )
        assert (other / ours > 1 + ERROR) is helps


def test_slow_gpus_that_the_planner_does_not_know() -> None:
    machines = replace(MACHINES, slow={1: 0.4}, known=False)
    _, said = judge(machines, "pretrain", 32768)
    assert (said.gain, said.because) == ("slower", "slow")


def test_one_side_alone_says_nothing() -> None:
    _, one = judge(MACHINES, "pretrain", 16384, TEMPLATES[:1])
    assert (one.gain, one.speed_up, one.ours) == ("", None, None)
    _, none = judge(MACHINES, "fixed:4096", 16384, limit=1.0)
    assert none == Verdict(None, None)
    assert verdict(Scenario(SMALL, MACHINES, 16384, 8), [SweepResult("x", 0)], []) == Verdict(
        None, None
    )


@pytest.mark.parametrize(
    ("other_s", "ours_s", "gain"),
    [
        ((1.02,), (1.0,), "even"),  # within the error of a simulation
        ((1.024,), (1.0,), "even"),  # is shown as 1.02, so the verdict is that of 1.02
        ((1.026,), (1.0,), "faster"),
        ((1.0,), (1.03,), "slower"),
        ((1.1, 1.1, 1.1), (1.0, 1.0, 1.0), "faster"),
        ((1.5, 0.9, 0.9), (1.0, 1.0, 1.0), "even"),  # 1.10 +- 0.40: one batch decides
        ((0.5, 1.1, 1.1), (1.0, 1.0, 1.0), "even"),
    ],
)
def test_a_difference_within_its_noise_is_none(
    other_s: tuple[float, ...], ours_s: tuple[float, ...], gain: str
) -> None:
    _, said = judge(MACHINES, "fixed:4096", 16384)
    assert said.ours is not None
    assert said.other is not None
    ours, other = (
        replace(one, step_s=fmean(each), batch_step_s=each)
        for one, each in ((said.ours, ours_s), (said.other, other_s))
    )
    judged = replace(said, ours=ours, other=other)
    assert judged.gain == gain
    assert judged.is_unclear == (gain == "even" and len(other_s) > 1)


def test_too_few_batches_are_a_reason_of_their_own() -> None:
    """Two batches differ by 0.4, which is neither the links nor too little attention."""
    lengths = np.array([4096] * 64 + [65536] + [4096] * 48)
    _, said = judge(MACHINES, lengths, 65536, sequences=4, count=2)
    assert (said.gain, said.because, said.needed_bytes_per_s) == ("even", "noise", None)
    assert said.speed_up is not None
    assert said.speed_up > 1 + ERROR


def test_shares_are_what_they_say() -> None:
    scenario = Scenario(SMALL, MACHINES, 16384, 8, "fixed:16384")
    (batch,) = scenario.batches(1)
    strategy = Strategy("colocated", MeshShape(dp=4))
    assert busiest(scenario, strategy, batch) == 1.0
    long, short = (
        attention_share(replace(scenario, context=n, lengths=f"fixed:{n}"), strategy,
                        [*replace(scenario, context=n, lengths=f"fixed:{n}").batches(1)])
        for n in (32768, 16384)
    )  # fmt: skip
    odds = (long / (1 - long)) / (short / (1 - short))
    assert odds == pytest.approx(2.0, rel=0.01)  # attention per token doubles, the rest does not
