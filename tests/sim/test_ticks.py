"""Disaggregated steps: against the oracle, and what they must conserve."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from sim.draws import close
from sim.oracle import play
from sim.steps import step_of
from sim.tiny import END, LAYER, MODEL, OPTIMIZER_S, US, machines

from distca.pipeline.mesh import MeshShape
from distca.pipeline.step_plan import StepPlan
from distca.pipeline.step_planner import StepPlanner
from distca.planning.costs.base import PS
from distca.planning.masks import Mask
from distca.planning.options import PlanOptions
from distca.planning.policies import policy_of
from distca.planning.spans import as_ints
from distca.sim.cluster import Link
from distca.sim.rates import Rates
from distca.sim.streams import Streams
from distca.sim.ticks import micro_batch_tokens, run_ticks, seam_elements, stage_elements

CUTS = {"tile": 4, "min_shard": 4, "tolerance": 0.1}  # so that documents of some tokens are cut


def rates_of(profile: str, parallel: MeshShape, layers: int = 1, **changes: Any) -> Rates:
    cluster = machines(profile, parallel.num_ranks, **{"gpus_per_node": 2, **changes})
    return Rates(replace(MODEL, layers=layers), cluster, parallel)


def planned(rates: Rates, lengths: list[int], **choices: Any) -> StepPlan:
    planner = StepPlanner(
        parallel=rates.parallel,
        masks=(Mask(),) * rates.shape.layers,
        options=PlanOptions(
            model=rates.shape,
            ranks_per_node=rates.cluster.ranks_per_node(rates.parallel.tp),
            cost=rates.cost,
            **CUTS,
        ),
        policy=policy_of(choices.pop("policy", "distca"), choices.pop("placement", "given")),
        **choices,
    )
    return planner.plan(as_ints(lengths))


def ran(rates: Rates, step: StepPlan, **options: Any) -> Streams:
    streams = Streams(np.ones(rates.num_ranks), **options)
    run_ticks(rates, step, streams)
    return streams


# -- against the oracle --------------------------------------------------------------------------


MESHES = [
    MeshShape(),
    MeshShape(dp=2),
    MeshShape(dp=3),
    MeshShape(dp=2, keep_weights=True),
    MeshShape(dp=2, cp=2),
    MeshShape(dp=2, servers=1),
    MeshShape(pp=2),
    MeshShape(pp=2, dp=2),
    MeshShape(pp=3),
    MeshShape(pp=2, servers=2),
]


@given(
    data=st.data(),
    mesh=st.sampled_from(MESHES),
    ping_pong=st.booleans(),
    transfer_sms=st.sampled_from([0.0, 0.25]),
)
def test_any_step_takes_what_the_oracle_says(
    profile: str, data: st.DataObject, mesh: MeshShape, ping_pong: bool, transfer_sms: float
) -> None:
    layers = data.draw(st.integers(mesh.pp, 3))
    micro_batches = data.draw(st.integers(1, 3))
    most = st.one_of(st.integers(1, 8), st.integers(20, 60))
    sets = micro_batches * (1 + ping_pong)
    lengths = data.draw(st.lists(most, min_size=sets, max_size=sets + 4))
    rates = rates_of(profile, mesh, layers)
    step = planned(rates, lengths, micro_batches=micro_batches, ping_pong=ping_pong)
    streams = ran(rates, step, transfer_sms=transfer_sms)
    expected = play(*step_of(step, mesh, rates.cluster, layers), transfer_sms)
    assert streams.compute.tolist() == close(expected.finish)
    assert streams.port.tolist() == close(expected.port)
    assert streams.busy.tolist() == close(expected.busy)


# -- by hand -------------------------------------------------------------------------------------


def test_one_gpu_only_computes(profile: str) -> None:
    """10 tokens in two layers: forward 2 x (10 + 20) us and 10 of the head, backward twice that;
    55 pairs in two layers, 1 and 2 ns each; and the optimizer's 2 x 384 + 256 parameters."""
    rates = rates_of(profile, MeshShape(), layers=2)
    end = ran(rates, planned(rates, [10])).compute
    attention = 2 * 55 * (0.001 + 0.002)
    assert end.tolist() == close([(3 * 70 + attention) * US + 1024 * OPTIMIZER_S])


def test_stages_hand_activations_to_each_other(profile: str) -> None:
    """One micro-batch of 10 tokens on two stages of one layer, attended at home.

    Forward: stage 0 takes 30 us and the attention, 160 bytes take 1 + 2.5 us, stage 1 takes 40 us.
    Backward: 80, sending back, 60. No weights are gathered, as each stage has one worker.
    """
    rates = rates_of(profile, MeshShape(pp=2), layers=2)
    step = planned(rates, [10], policy="colocated")
    attention = 2 * 55 * (0.001 + 0.002)
    passing = 2 * (1 + 160 / 64)
    end = (30 + 40 + 80 + 60 + attention + passing) * US + 1024 / 2 * OPTIMIZER_S
    assert ran(rates, step).compute.max() == close(end)


def test_of_weights_that_are_kept_one_layer_comes_before_all_and_leaves_after_it(
    profile: str,
) -> None:
    """640 parameters on two workers, 384 of them the layer's: 1 + 384 / 64 us to gather those, and
    1 + 768 / 64 to reduce them; the 256 of the ends travel while the first and the last micro-batch
    compute. Two micro-batches of a document of 10 tokens on each: 40.055 us forward and 80.110
    backward. The optimizer takes 10."""
    rates = rates_of(profile, MeshShape(dp=2, keep_weights=True))
    step = planned(rates, [10] * 4, micro_batches=2)
    end = 7 + 2 * (40.055 + 80.110) + 13 + 10
    streams = ran(rates, step)
    assert streams.compute.tolist() == close([end * US] * 2)
    assert streams.waited.tolist() == close([(7 + 13) * US] * 2)
    assert streams.num_bytes == 2 * (640 + 1280)


def test_of_weights_that_are_kept_all_show_that_no_tick_hides(profile: str) -> None:
    """One token on each worker: 4.001 us forward and 8.002 backward. The layer's weights come 0-7,
    those of the ends 7-12 us, beside the forward 7-11.001. Gradients of the ends, 512 bytes in
    9 us, are behind them in the port, 12-21; the backward ends at 19.003, the layer's gradients go
    21-34, and the optimizer ends at 44."""
    rates = rates_of(profile, MeshShape(dp=2, keep_weights=True))
    streams = ran(rates, planned(rates, [1, 1]))
    assert streams.compute.tolist() == close([44 * US] * 2)
    assert streams.waited.tolist() == close([(7 + (34 - 19.003)) * US] * 2)


def test_a_seam_holds_what_lies_between_two_attentions(profile: str) -> None:
    rates = rates_of(profile, MeshShape(dp=2), layers=3)
    seams = seam_elements(rates)
    assert sum(seams) == 3 * LAYER + 2 * END
    assert seams[1:3] == [LAYER, LAYER]


def test_the_first_stage_of_a_pipeline_is_the_largest(profile: str) -> None:
    """Three layers on two stages: two and the embedding, one and the head."""
    assert stage_elements(rates_of(profile, MeshShape(pp=2), layers=3)) == 2 * LAYER + END
    assert stage_elements(rates_of(profile, MeshShape(dp=2), layers=3)) == 3 * LAYER + 2 * END


def halved(profile: str, **changes: Any) -> Rates:
    """Two tensor-parallel GPUs."""
    shape = replace(MODEL, heads=4, kv_heads=2, head_dim=2)
    return replace(rates_of(profile, MeshShape()), parallel=MeshShape(tp=2), shape=shape, **changes)


def test_tensor_parallel_ranks_share_the_work_and_gather_tokens(profile: str) -> None:
    """8 tokens: half of 8, 16 and 8 us, and five exchanges of 8 x 8 x 2 / 2 bytes, 1 + 1 us each:
    one before the attention, three after it, one in the head."""
    rates, tokens = halved(profile), np.array([8.0])
    assert rates.before(tokens).tolist() == close([(8 / 2 + 2) * US])
    assert rates.after(tokens).tolist() == close([(16 / 2 + 3 * 2) * US])
    assert rates.head(tokens).tolist() == close([(8 / 2 + 2) * US])


def test_tensor_parallel_ranks_pass_on_a_part_each(profile: str) -> None:
    """8 tokens of 8 x 2 bytes are 128, half of them on each rank; nodes hold one rank: 2 + 4 us."""
    rates = replace(halved(profile), parallel=MeshShape(pp=2, tp=2))
    transfer = rates.send_activations(as_ints([8]), as_ints([0]), as_ints([1]))
    assert transfer is not None
    assert transfer.num_bytes == 64
    assert transfer.seconds.tolist() == close([(2 + 64 / 16) * US] * 2)


@pytest.mark.parametrize(("recompute", "expected"), [(False, 2 * 4 + 2), (True, 3 * 4 + 2 * 2)])
def test_what_is_recomputed_is_a_forward_more(
    profile: str, recompute: bool, expected: float
) -> None:
    """Backward takes twice the products of forward and gathers tokens once."""
    rates = halved(profile, recompute=recompute)
    assert rates.before(np.array([8.0])).tolist() == close([(4 + 2) * US])
    assert rates.before(np.array([8.0]), backward=True).tolist() == close([expected * US])


# -- conservation --------------------------------------------------------------------------------

UNEVEN = [120, 40, 12, 12, 9, 7, 4, 3, 3, 1]
CHOICES: list[dict[str, Any]] = [
    {"parallel": MeshShape(dp=2), "layers": 1},
    {"parallel": MeshShape(dp=2, keep_weights=True), "layers": 3, "micro_batches": 2},
    {"parallel": MeshShape(dp=4), "layers": 3, "ping_pong": True},
    {"parallel": MeshShape(dp=4), "layers": 2, "placement": "balanced"},
    {"parallel": MeshShape(dp=2, cp=2), "layers": 1, "micro_batches": 2},
    {"parallel": MeshShape(dp=2, servers=2), "layers": 2},
    {"parallel": MeshShape(pp=2, dp=2), "layers": 3, "micro_batches": 3, "ping_pong": True},
]


def made(profile: str, choice: dict[str, Any]) -> tuple[Rates, StepPlan]:
    rest = {key: value for key, value in choice.items() if key not in ("parallel", "layers")}
    rates = rates_of(profile, choice["parallel"], choice["layers"])
    return rates, planned(rates, UNEVEN, **rest)


@pytest.mark.parametrize("choice", CHOICES)
def test_every_byte_of_the_plans_is_sent_and_no_other(profile: str, choice: dict[str, Any]) -> None:
    """Beside attention there are weights of 2 bytes, gradients of 4, and activations of 16 a token.

    Each tick gathers the whole model and each backward one reduces it: of W workers, each receives
    all but its own share. Where weights are kept, as in every pipeline, that happens once a step.
    """
    rates, step = made(profile, choice)
    p, layers, num_micro_batches = rates.parallel, rates.shape.layers, len(step.micro_batches)
    attention = sum(
        (plan.backward_traffic if backward else plan.traffic).total
        for plan, backward in step.passes
    )
    assert attention > 0
    everyone_else = p.workers_per_stage - 1
    if p.pp > 1:
        weights = p.pp * (-(-layers // p.pp) * LAYER + END) * (2 + 4)
    else:
        per_parameter = 2 + 4 if p.keep_weights else (2 + 2 + 4) * num_micro_batches
        weights = (layers * LAYER + 2 * END) * per_parameter
    activations = 2 * (p.pp - 1) * sum(UNEVEN) * 16
    assert ran(rates, step).num_bytes == attention + weights * everyone_else + activations


@pytest.mark.parametrize("choice", CHOICES)
def test_attention_of_all_ranks_is_that_of_all_tasks(profile: str, choice: dict[str, Any]) -> None:
    """And of all pairs of all documents, at 1 ns forward and 2 ns backward."""
    rates, step = made(profile, choice)
    pairs = sum(n * (n + 1) // 2 for n in UNEVEN) * rates.shape.layers
    for backward, pair_s in ((False, 1e-9), (True, 2e-9)):
        total = 0.0
        for plan, is_backward in step.passes:
            if is_backward == backward:
                attention = rates.attention(plan, backward=backward)
                found = float((attention.local_s + attention.remote_s).sum())
                work = plan.backward_load_ps if backward else plan.forward_load_ps
                assert found == close(float(work.sum()) / PS)
                total += found
        assert total == close(pairs * pair_s)


@pytest.mark.parametrize("choice", CHOICES)
def test_ranks_are_busy_with_all_tokens_and_all_pairs(profile: str, choice: dict[str, Any]) -> None:
    """3 + 6 us of a token in each layer, 1 + 2 in the head; 1 + 2 ns of each pair in each layer."""
    rates, step = made(profile, choice)
    layers, tokens = rates.shape.layers, sum(UNEVEN)
    pairs = sum(n * (n + 1) // 2 for n in UNEVEN)
    computing = tokens * (9 * layers + 3) * US + pairs * layers * 3e-9
    optimizer = (layers * LAYER + 2 * END) * OPTIMIZER_S
    streams = ran(rates, step)
    assert float(streams.busy.sum()) == close(computing + optimizer)
    assert np.all(streams.busy <= streams.compute)


@pytest.mark.parametrize("choice", CHOICES)
def test_micro_batches_hold_all_tokens(profile: str, choice: dict[str, Any]) -> None:
    _, step = made(profile, choice)
    assert sum(
        int(micro_batch_tokens(step, m).sum()) for m in range(len(step.micro_batches))
    ) == sum(UNEVEN)


def test_dedicated_servers_do_nothing_but_attention(profile: str) -> None:
    rates = rates_of(profile, MeshShape(dp=2, servers=2))
    step = planned(rates, UNEVEN)
    busy = ran(rates, step).busy
    pairs = sum(n * (n + 1) // 2 for n in UNEVEN)
    assert float(busy[2:].sum()) == close(pairs * 3e-9)


# -- laws ----------------------------------------------------------------------------------------


@settings(max_examples=8)
@given(
    choice=st.sampled_from(CHOICES),
    slow=st.floats(1e5, 1e8),
    factor=st.floats(1.0, 1e3),
    which=st.sampled_from(["inside", "across"]),
)
def test_more_bandwidth_is_never_slower(
    profile: str, choice: dict[str, Any], slow: float, factor: float, which: str
) -> None:
    """Of the same plans."""
    rates, step = made(profile, choice)

    def end(bytes_per_s: float) -> float:
        cluster = replace(rates.cluster, **{which: Link(bytes_per_s, 1 * US)})
        return float(ran(replace(rates, cluster=cluster), step).compute.max())

    assert end(slow * factor) <= end(slow)
