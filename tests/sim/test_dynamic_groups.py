"""Dynamic context parallelism in the simulator: against plain loops, and by hand."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from sim.draws import close
from sim.steps import link_s, ring
from sim.test_packed import rates_of, sequences
from sim.tiny import AFTER_S, BEFORE_S, HEAD_S, KV_BYTES, PAIR_S, US

from distca.pipeline.mesh import MeshShape
from distca.sim.packed_step import PackedStep
from distca.sim.packing import PackedPlan, pack
from distca.sim.rates import Rates


def packed_of(rates: Rates, lengths: list[int], micro_batches: int = 1, **options: Any) -> Any:
    return pack(rates, sequences(lengths), "dynamic-cp", micro_batches, **options)


def test_keys_travel_around_the_ring_during_the_attention(profile: str) -> None:
    """A document of 16 tokens on two workers, 8 tokens and 68 pairs each.

    Keys of 8 tokens, 16 bytes each, take 1 + 2 us, and with their gradients 1 + 4 us: longer than
    the attention of 0.068 and 0.136 us, which they hide.
    """
    rates = rates_of(profile, MeshShape(cp=2))
    step = PackedStep(rates, packed_of(rates, [16]))
    found = step.run()
    forward, backward = 8 + 3 + 16 + 8, 16 + 32 + 5 + 16
    assert found.stop["F"][0, 0].tolist() == close([forward * US] * 2)
    assert found.stop["B"][0, 0].tolist() == close([(forward + backward) * US] * 2)
    assert step.num_bytes == 2 * 8 * KV_BYTES * 3


def test_a_ring_that_is_faster_than_the_attention_costs_nothing(profile: str) -> None:
    """4096 tokens: 4.2 ms of attention on each worker and 0.5 ms of keys."""
    rates = rates_of(profile, MeshShape(cp=2))
    found = PackedStep(rates, packed_of(rates, [4096])).run()
    pairs = 4096 * 4097 / 2 / 2
    taken = 2048 * 4 * US + pairs * PAIR_S[False]
    assert found.stop["F"][0, 0].tolist() == close([taken] * 2)


def reference(packed: PackedPlan, rates: Rates, workers: int) -> list[float]:
    """When each worker is done: its groups one after the other, token by token."""
    placement, sizes = packed.plan.placement, packed.group_size
    assert sizes is not None
    tokens, pairs = [0] * len(sizes), [0] * len(sizes)
    for bin_, start, stop in zip(placement.worker, placement.start, placement.stop, strict=True):
        tokens[bin_] += int(stop - start)
        pairs[bin_] += sum(range(start + 1, stop + 1))
    done = [0.0] * workers
    for row in range(0, len(sizes), workers):
        size = int(sizes[row])
        for first in range(0, workers, size):
            members = range(first, first + size)
            held = sum(tokens[row + member] for member in members)
            keys = held * KV_BYTES * (size - 1) / size
            link = ring(size, rates.cluster)
            for backward in (False, True):
                times = 1 + backward
                before, after = BEFORE_S * times, (AFTER_S + HEAD_S) * times
                if backward:
                    before, after = after, before
                starts = [done[m] + tokens[row + m] * before for m in members]
                arrival = max(starts) + link_s(link, keys * times) if size > 1 else 0.0
                for member, start in zip(members, starts, strict=True):
                    attended = start + pairs[row + member] * PAIR_S[backward]
                    waited = max(attended, arrival) if keys else attended
                    done[member] = waited + tokens[row + member] * after
    return done


@settings(max_examples=30)
@given(
    # Multiples of eight, so that the workers of a group have the same number of tokens.
    st.lists(
        (st.integers(1, 9) | st.integers(50, 99)).map(lambda n: 8 * n), min_size=1, max_size=9
    ),
    st.sampled_from([(1, 2), (2, 2), (1, 4), (2, 4), (3, 2)]),
    st.sampled_from([0.0, 0.1, 0.9]),
    st.sampled_from([1, 2, 8]),
)
def test_a_step_takes_what_its_groups_take_one_after_the_other(
    profile: str, lengths: list[int], mesh: tuple[int, int], tolerance: float, of_node: int
) -> None:
    dp, cp = mesh
    rates = rates_of(profile, MeshShape(dp=dp, cp=cp), gpus_per_node=of_node)
    packed = packed_of(rates, lengths, tolerance=tolerance)
    assert int(packed.tokens.sum()) == sum(lengths)
    assert packed.group_size is not None
    rows = packed.group_size.reshape(-1, dp * cp)
    assert all(len(set(row)) == 1 for row in rows.tolist())
    assert rows[:, 0].tolist() == sorted(rows[:, 0].tolist(), reverse=True)
    found = PackedStep(rates, packed).run()
    expected = reference(packed, rates, dp * cp)
    assert found.end[0].tolist() == close(expected)


def test_micro_batches_only_save_memory_without_a_pipeline(profile: str) -> None:
    rates = rates_of(profile, MeshShape(cp=2))
    lengths = [10] * 20
    one, four = (packed_of(rates, lengths, count) for count in (1, 4))
    assert (one.largest_tokens, four.largest_tokens) == (100, 25)
    ends = [PackedStep(rates, packed).run().end.tolist() for packed in (one, four)]
    assert ends[0] == ends[1]
    # The groups of long documents are larger, if they can be.
    mixed = [40, *[10] * 16]
    assert packed_of(rates, mixed, 1).group_size.tolist() == [1, 1]
    shared = packed_of(rates, mixed, 4)
    assert shared.group_size.tolist() == [2, 2, 1, 1]
    assert shared.largest_tokens == 25
    assert packed_of(rates, [40], 64).largest_tokens == 20


def test_a_pipeline_gets_micro_batches_of_about_the_same_time(profile: str) -> None:
    rates = rates_of(profile, MeshShape(pp=2, cp=2), layers=2)
    packed = packed_of(rates, [100] * 16, 4)
    tokens = packed.tokens[packed.order]
    assert tokens.shape == (4, 2)
    np.testing.assert_array_equal(tokens, np.full((4, 2), 200))


# -- Karmarkar-Karp ------------------------------------------------------------------------------


@pytest.mark.parametrize("micro_batches", [1, 2, 3])
def test_documents_go_to_ranks_first_and_then_to_micro_batches(
    profile: str, micro_batches: int
) -> None:
    """What a rank has does not depend on the number of micro-batches."""
    rates = rates_of(profile, MeshShape(dp=2))
    lengths = [900, 500, 400, 300, 200, 100, 70, 50]
    packed = pack(rates, sequences(lengths), "kk", micro_batches)
    placement = packed.plan.placement
    of_rank = [
        sorted(lengths[d] for d in placement.document[placement.worker % 2 == rank].tolist())
        for rank in range(2)
    ]
    alone = pack(rates, sequences(lengths), "kk", 1).plan.placement
    expected = [
        sorted(lengths[d] for d in alone.document[alone.worker == rank].tolist())
        for rank in range(2)
    ]
    assert of_rank == expected
    attention = packed.plan.forward_load_ps + packed.plan.backward_load_ps
    work = (attention / 1e12 + placement.tokens * rates.token_s).reshape(micro_batches, 2)
    assert np.all(np.diff(work, axis=0) <= 0)


def test_ranks_without_documents_are_refused(profile: str) -> None:
    rates = rates_of(profile, MeshShape(dp=3))
    with pytest.raises(ValueError, match="2 documents for dp 3: each worker needs one or more"):
        pack(rates, sequences([8, 8]), "kk", 1)
