"""PackedPlan baselines: against the oracle, by hand, and which bin goes where."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from sim.draws import close
from sim.steps import packed_step
from sim.tiny import END, KV_BYTES, LAYER, MODEL, US, machines

from distca.pipeline.mesh import MeshShape
from distca.pipeline.schedule import Phase
from distca.planning.spans import Ints, as_ints
from distca.sim.packed_step import PackedStep, events
from distca.sim.packing import KEEP_SEQUENCES, PackedPlan, pack
from distca.sim.rates import Rates


def rates_of(profile: str, parallel: MeshShape, layers: int = 1, **changes: Any) -> Rates:
    cluster = machines(profile, parallel.num_ranks, **changes)
    return Rates(replace(MODEL, layers=layers), cluster, parallel)


def sequences(*documents: list[int]) -> list[Ints]:
    return [as_ints(lengths) for lengths in documents]


def step_s(rates: Rates, packed: PackedPlan) -> float:
    step = PackedStep(rates, packed)
    timeline = step.run()
    return float(timeline.end.max()) + step.weights_and_optimizer_s(timeline)


# -- against the oracle --------------------------------------------------------------------------

STRATEGIES = [
    ("colocated", MeshShape()),
    ("colocated", MeshShape(dp=2)),
    ("colocated", MeshShape(pp=2, dp=2)),
    ("head-tail-cp", MeshShape(cp=2)),
    ("head-tail-cp", MeshShape(dp=2, cp=2)),
    ("head-tail-cp", MeshShape(pp=2, cp=3)),
    ("per-document-cp", MeshShape(cp=3)),
    ("per-document-cp", MeshShape(pp=2, dp=2, cp=2)),
    ("wlb", MeshShape(dp=3)),
    ("wlb", MeshShape(pp=3, cp=2)),
    ("wlb", MeshShape(pp=2, dp=2)),
    ("kk", MeshShape(dp=3)),
    ("kk", MeshShape(pp=2, dp=2)),
]


@given(
    data=st.data(),
    strategy=st.sampled_from(STRATEGIES),
    micro_batches=st.integers(1, 3),
    slow=st.sampled_from([{}, {}, {0: 0.5}]),
)
def test_any_packed_step_takes_what_the_oracle_says(
    profile: str,
    data: st.DataObject,
    strategy: tuple[str, MeshShape],
    micro_batches: int,
    slow: dict[int, float],
) -> None:
    """On nodes of any size: groups and stages lie inside them, across them, or both."""
    policy, parallel = strategy
    layers = data.draw(st.integers(parallel.pp, 3))
    count = parallel.dp * micro_batches
    document = st.integers(1, 6) | st.integers(12, 40)
    held = st.lists(document, min_size=1, max_size=3)
    batch = sequences(*data.draw(st.lists(held, min_size=count, max_size=count)))
    of_node = data.draw(st.integers(1, parallel.num_plan_ranks))
    rates = rates_of(profile, parallel, layers, gpus_per_node=of_node, slow=slow)
    packed = pack(rates, batch, policy, micro_batches)
    assert step_s(rates, packed) == close(packed_step(packed, parallel, rates.cluster, layers))


# -- by hand -------------------------------------------------------------------------------------


def test_a_bin_alone_takes_its_linear_layers_and_its_pairs(profile: str) -> None:
    """10 tokens and 55 pairs: 40 us forward, 80 us backward, 55 and 110 ns."""
    rates = rates_of(profile, MeshShape())
    found = PackedStep(rates, pack(rates, sequences([10]), "colocated", 1)).run()
    assert float(found.stop["F"][0, 0, 0]) == close(40.055 * US)
    assert float(found.stop["B"][0, 0, 0]) == close((40.055 + 80.11) * US)


def test_groups_wait_for_the_one_with_most_pairs(profile: str) -> None:
    """10 tokens each: one document of 55 pairs, ten of one pair."""
    rates = rates_of(profile, MeshShape(dp=2))
    step = PackedStep(rates, pack(rates, sequences([10], [1] * 10), "colocated", 1))
    assert step.run().end.tolist() == [close([(120 + 0.165) * US, (120 + 0.030) * US])]
    assert step.busy.tolist() == [close([(120 + 0.165) * US, (120 + 0.030) * US])]


def test_keys_are_gathered_before_the_attention_and_their_gradients_after(profile: str) -> None:
    """A document of 16 tokens on two workers: 8 each, head and tail, 68 pairs each.

    Keys of 8 tokens, 16 bytes each, take 1 + 2 us in every layer of both directions.
    Forward: 8, 3, 0.068, 16 and the head's 8 us. Backward: 16, 32, 0.136, 3, 16.
    """
    rates = rates_of(profile, MeshShape(cp=2))
    packed = pack(rates, sequences([16]), "head-tail-cp", 1)
    step = PackedStep(rates, packed)
    found = step.run()
    assert float(found.stop["F"][0, 0, 0]) == close(35.068 * US)
    assert float(found.stop["B"][0, 0, 0]) == close((35.068 + 67.136) * US)
    assert step.num_bytes == 2 * 2 * 8 * KV_BYTES


def test_gathered_keys_are_kept_and_only_their_gradients_travel_in_backward(profile: str) -> None:
    rates = rates_of(profile, MeshShape(cp=2))
    plan = pack(rates, sequences([16]), "head-tail-cp", 1).plan
    forward, backward = (rates.attention(plan, backward=backward) for backward in (False, True))
    assert forward.dispatch is not None
    assert backward.combine is not None
    assert forward.combine is backward.dispatch is None
    assert forward.local_s.tolist() == backward.local_s.tolist() == [0.0, 0.0]


def test_a_slow_gpu_slows_its_own_group(profile: str) -> None:
    """The second of two workers of the second group is half as fast."""
    rates = rates_of(profile, MeshShape(dp=2, cp=2), slow={3: 0.5})
    batch = sequences([16], [16])
    step = PackedStep(rates, pack(rates, batch, "head-tail-cp", 1))
    end = step.run().end
    even, moving = 102.204, 6.0
    assert end.tolist() == [close([even * US, (2 * (even - moving) + moving) * US])]


def test_a_slow_gpu_slows_its_own_stage(profile: str) -> None:
    """The second of two stages: its one layer and the head take 40.055 us at full speed."""
    rates = rates_of(profile, MeshShape(pp=2), layers=2, slow={1: 0.5})
    found = PackedStep(rates, pack(rates, sequences([10]), "colocated", 1)).run()
    taken = (found.stop["F"] - found.start["F"])[:, 0, 0]
    assert taken.tolist() == close([30.055 * US, 2 * 40.055 * US])


# -- between stages


def gaps(rates: Rates, packed: PackedPlan) -> list[list[float]]:
    """[groups] Seconds from the first stage to the second, and back, of the first micro-batch."""
    found = PackedStep(rates, packed).run()
    forward = found.start["F"][1, 0] - found.stop["F"][0, 0]
    backward = found.start["B"][0, 0] - found.stop["B"][1, 0]
    return [forward.tolist(), backward.tolist()]


def test_stages_in_one_node_use_the_link_inside(profile: str) -> None:
    """10 tokens are 160 bytes: 1 + 2.5 us inside a node, 2 + 10 across."""
    for of_node, seconds in ((2, 3.5), (1, 12.0)):
        rates = rates_of(profile, MeshShape(pp=2), layers=2, gpus_per_node=of_node)
        packed = pack(rates, sequences([10]), "colocated", 1)
        assert gaps(rates, packed) == [close([seconds * US])] * 2


def test_of_two_groups_one_may_cross_nodes_between_its_stages(profile: str) -> None:
    """Nodes of three: stages are ranks 0 and 1, 2 and 3; of 0 and 2, and of 1 and 3, only the first
    two share a node."""
    rates = rates_of(profile, MeshShape(pp=2, dp=2), layers=2, gpus_per_node=3)
    packed = pack(rates, sequences([10], [10]), "colocated", 1)
    assert gaps(rates, packed) == [close([3.5 * US, 12 * US])] * 2


def test_a_group_with_one_rank_far_from_its_partner_passes_on_across(profile: str) -> None:
    """Three ranks with 4 tokens each, 64 bytes. In nodes of four, the first stage's rank 0 shares
    one with its partner, rank 3, but 1 and 2 do not."""
    for of_node, seconds in ((6, 1 + 64 / 64), (4, 2 + 64 / 16)):
        rates = rates_of(profile, MeshShape(pp=2, cp=3), layers=2, gpus_per_node=of_node)
        packed = pack(rates, sequences([12]), "head-tail-cp", 1)
        assert gaps(rates, packed) == [close([seconds * US])] * 2


def test_a_group_passes_on_when_its_fullest_rank_is_through(profile: str) -> None:
    """One token on two workers: 16 bytes of one of them."""
    rates = rates_of(profile, MeshShape(pp=2, cp=2), layers=2)
    packed = pack(rates, sequences([1]), "head-tail-cp", 1)
    assert gaps(rates, packed) == [close([(1 + 16 / 64) * US])] * 2


@pytest.mark.parametrize("strategy", STRATEGIES)
def test_every_byte_is_counted(profile: str, strategy: tuple[str, MeshShape]) -> None:
    """Of every token, its activations, 16 bytes, at each border there and back; of every group's
    keys, as often as there are others, in each layer there and back; of every stage's parameters, 2
    bytes there and 4 back, likewise."""
    policy, p = strategy
    layers, batch = 3, sequences([7], [12, 1], [5, 5], [30], [1, 2], [4])[: 2 * p.dp]
    rates = rates_of(profile, p, layers)
    packed = pack(rates, batch, policy, 2)
    step = PackedStep(rates, packed)
    step.weights_and_optimizer_s(step.run())
    tokens = int(packed.tokens.sum())
    assert tokens == sum(int(lengths.sum()) for lengths in batch)
    activations = 2 * (p.pp - 1) * tokens * 16
    others = [int(n) * KV_BYTES * (p.cp - 1) // p.cp for n in packed.tokens]
    keys = 2 * layers * p.cp * sum(others)
    elements = -(-layers // p.pp) * LAYER + (2 * END if p.pp == 1 else END)
    weights = p.pp * (p.workers_per_stage - 1) * elements * (2 + 4)
    assert step.num_bytes == activations + keys + weights


def test_a_group_over_two_nodes_pays_for_the_link_across(profile: str) -> None:
    """Nodes of four; groups of three: the second group is ranks 3, 4, 5. A document of 12 tokens on
    each group, 4 tokens and 26 pairs on each rank.

    Keys of 8 tokens, 128 bytes, take 2 + 8 us over one port. Forward: 4, 10, 0.026, 8 and the
    head's 4 us. Backward: 8, 16, 0.052, 10, 8.
    """
    rates = rates_of(profile, MeshShape(dp=4, cp=3), gpus_per_node=4)
    packed = pack(rates, sequences([12], [12], [12], [12]), "head-tail-cp", 1)
    end = PackedStep(rates, packed).run().end
    assert end.tolist() == [close([(26.026 + 42.052) * US] * 4)]


# -- ends of a step


def ends_of(profile: str, parallel: MeshShape, *documents: list[int], **changes: Any) -> float:
    rates = rates_of(profile, parallel, **changes)
    step = PackedStep(rates, pack(rates, sequences(*documents), "colocated", 1))
    return step.weights_and_optimizer_s(step.run())


def test_of_the_weights_a_stage_holds_one_layer_shows(profile: str) -> None:
    """640 parameters on two workers, 384 of them in the layer: 640 bytes of weights take 11 us and
    1280 of gradients 21. 0.6 of that shows, as forward and backward, 40.055 and 80.110 us, hide the
    rest. The optimizer takes 10."""
    assert (LAYER, LAYER + 2 * END) == (384, 640)
    assert ends_of(profile, MeshShape(dp=2), [10], [10]) == close((0.6 * (11 + 21) + 10) * US)


def test_of_the_weights_a_stage_holds_all_show_that_the_shortest_pass_does_not_hide(
    profile: str,
) -> None:
    """One token on the second worker: 4.001 us forward and 8.002 backward, and so 11 - 4.001 and
    21 - 8.002, which is more than 0.6 x 11 and 0.6 x 21."""
    shown = (11 - 4.001) + (21 - 8.002)
    assert ends_of(profile, MeshShape(dp=2), [10], [1]) == close((shown + 10) * US)


def test_the_shortest_pass_is_that_of_any_stage(profile: str) -> None:
    """512 parameters of a stage on two workers: 512 bytes take 9 us, 1024 take 17. The first stage
    has no head: a token takes 3.001 us forward and 6.002 backward. A layer's part is 0.75 of them,
    6.75 of 9 us, which is more than 9 - 3.001, and 12.75 of 17, more than 17 - 6.002; on slower
    links, of 2 + 32 us and 2 + 64, what is not hidden is more. The optimizer has 1024 / 4."""
    mesh = MeshShape(pp=2, dp=2)
    near = ends_of(profile, mesh, [1], [1], layers=2, gpus_per_node=2)
    assert near == close((0.75 * (9 + 17) + 8) * US)
    far = ends_of(profile, mesh, [1], [1], layers=2, gpus_per_node=1)
    assert far == close(((34 - 3.001) + (66 - 6.002) + 8) * US)


def test_the_slowest_rank_updates_its_weights_last(profile: str) -> None:
    """10 us at full speed; forward and backward of the other worker are the shorter ones still."""
    slow = ends_of(profile, MeshShape(dp=2), [10], [10], slow={1: 0.5})
    assert slow == close((0.6 * (11 + 21) + 2 * 10) * US)


def test_a_model_without_weights_has_none_to_gather(profile: str) -> None:
    rates = rates_of(profile, MeshShape(dp=2))
    rates = replace(rates, shape=replace(rates.shape, hidden=0))
    step = PackedStep(rates, pack(rates, sequences([10], [10]), "colocated", 1))
    assert step.weights_and_optimizer_s(step.run()) == 0.0


# -- jitter --------------------------------------------------------------------------------------


def taken(rates: Rates, phase: Phase, stage: int = 0, seed: int = 0) -> float:
    packed = pack(rates, sequences([10]), "colocated", 1)
    found = PackedStep(rates, packed, seed=seed).run()
    return float((found.stop[phase] - found.start[phase])[stage, 0, 0])


def test_forward_and_backward_are_shaken_by_themselves(profile: str) -> None:
    """Of three heads, what lies before and after the attention is alike, and there is no output
    head: were their kernels shaken alike, backward would take twice the forward."""
    shape = replace(MODEL, heads=3, kv_heads=3, vocab_size=0)
    even = replace(rates_of(profile, MeshShape()), shape=shape)
    assert taken(even, "B") == close(2 * taken(even, "F"))
    shaken = replace(even, cluster=replace(even.cluster, jitter=0.2))
    assert taken(shaken, "B") != pytest.approx(2 * taken(shaken, "F"), rel=1e-3)


def test_the_next_seed_does_not_shake_a_stage_as_this_one_shakes_the_next(profile: str) -> None:
    rates = rates_of(profile, MeshShape(pp=2), layers=2, jitter=0.2)
    rates = replace(rates, shape=replace(rates.shape, vocab_size=0))  # stages are alike
    assert taken(rates, "F", stage=0, seed=1) != pytest.approx(taken(rates, "F", stage=1))


# -- bins ----------------------------------------------------------------------------------------


@pytest.mark.parametrize("policy", [*KEEP_SEQUENCES, "wlb", "kk"])
def test_every_document_lies_in_one_bin(profile: str, policy: str) -> None:
    parallel = MeshShape(dp=2) if policy == "colocated" else MeshShape(dp=2, cp=2)
    rates = rates_of(profile, parallel)
    batch = sequences([9, 3], [12], [5, 5, 2], [7, 5])
    packed = pack(rates, batch, policy, 2)
    assert sorted(packed.order.reshape(-1).tolist()) == [0, 1, 2, 3]
    assert int(packed.tokens.sum()) == 48
    placed = packed.plan.placement
    groups = [set((placed.worker[placed.document == d] // parallel.cp).tolist()) for d in range(8)]
    assert [len(group) for group in groups] == [1] * 8


@pytest.mark.parametrize("policy", KEEP_SEQUENCES)
def test_sequences_stay_whole_and_in_order(profile: str, policy: str) -> None:
    """Four sequences on two groups and two micro-batches: 0 and 1, then 2 and 3."""
    parallel = MeshShape(dp=2) if policy == "colocated" else MeshShape(dp=2, cp=2)
    packed = pack(rates_of(profile, parallel), sequences([8], [4], [12], [2]), policy, 2)
    assert packed.tokens[packed.order].tolist() == [[8, 4], [12, 2]]


def test_bins_of_about_the_same_work_run_beside_each_other(profile: str) -> None:
    """Documents of 1, 2, 3 and 4 hundred tokens in four bins: who has the lighter of the first two
    has the heavier of the others."""
    rates = rates_of(profile, MeshShape(dp=2))
    packed = pack(rates, sequences([300, 100], [400, 200]), "wlb", 2)
    assert packed.tokens[packed.order].tolist() == [[100, 200], [400, 300]]


def test_events_show_every_micro_batch_on_its_ranks(profile: str) -> None:
    rates = rates_of(profile, MeshShape(pp=2, cp=2), layers=2)
    packed = pack(rates, sequences([8], [8]), "head-tail-cp", 2)
    timeline = PackedStep(rates, packed).run()
    found = events(timeline, width=2)
    taken = np.sum([event.stop - event.start for event in found], axis=0)
    every = sum((timeline.stop[phase] - timeline.start[phase]).sum(axis=1) for phase in "FB")
    assert taken.tolist() == close(np.repeat(np.ravel(every), 2).tolist())
    assert max(float(event.stop.max()) for event in found) == float(timeline.end.max())


# -- refusals ------------------------------------------------------------------------------------


def test_sequences_that_do_not_divide_are_refused(profile: str) -> None:
    rates = rates_of(profile, MeshShape(dp=2))
    with pytest.raises(ValueError, match="3 sequences over dp 2 x 1 micro-batches: they must divi"):
        pack(rates, sequences([8], [8], [8]), "colocated", 1)


def test_too_few_documents_are_refused(profile: str) -> None:
    rates = rates_of(profile, MeshShape(dp=2))
    with pytest.raises(ValueError, match="2 documents for dp 2 x 2 micro-batches: each needs one"):
        pack(rates, sequences([8, 8]), "wlb", 2)
