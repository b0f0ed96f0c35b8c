"""What integrations share: lengths of batches, gathered documents, plan options, prefetching."""

from __future__ import annotations

import re
import time
from concurrent.futures import Future
from dataclasses import replace
from threading import Event
from typing import Any

import numpy as np
import pytest
import torch
from integrations import gathering
from integrations.gathering import tensors
from integrations.tiny import packed
from ranks import RankPool, World
from recorded import preparing_threads

import distca
from distca.dispatch import background
from distca.integrations.shared.lengths import (
    lengths_of_offsets,
    lengths_of_starts,
    starts_of_positions,
)
from distca.integrations.shared.planned import PlannedAttention
from distca.integrations.shared.planned_batch import AttentionSpec, BatchPlans, PlannedBatch
from distca.integrations.shared.prefetch import prefetch
from distca.integrations.transformers.batches import documents_of, filler
from distca.planning.entries import Entry
from distca.planning.masks import CAUSAL, Mask
from distca.planning.options import PlanOptions


def test_lengths_of_offsets() -> None:
    assert lengths_of_offsets(torch.tensor([0, 3, 4, 9, 9, 9]), 9) == [3, 1, 5]
    assert lengths_of_offsets(torch.tensor([0]), 0) == []
    for wrong in ([0, 3], [1, 9], [0, 5, 4, 9], []):
        with pytest.raises(ValueError, match=r"for 9 tokens: they must rise from 0"):
            lengths_of_offsets(torch.tensor(wrong), 9)
    assert lengths_of_offsets([0, 3, 9], 9) == [3, 6]
    for other in (torch.tensor([0.0, 9.0]), torch.tensor(9), torch.tensor([[0, 9]]), "0,9", 9):
        with pytest.raises(ValueError, match=r"for 9 tokens: give integers in a tensor"):
            lengths_of_offsets(other, 9)


def test_lengths_of_positions() -> None:
    positions = torch.tensor([[0, 1, 2, 0, 0, 1], [5, 6, 7, 8, 9, 0]])
    assert lengths_of_starts(starts_of_positions(positions)) == [3, 1, 2, 5, 1]


def test_lengths_of_batches() -> None:
    batch: dict[str, Any] = packed([4, 1, 3])
    assert documents_of(batch) == [4, 1, 3]
    assert documents_of(batch | {"cu_seq_lens_q": torch.tensor([0, 5, 8])}) == [5, 3]
    assert documents_of({"input_ids": torch.zeros(3, 7)}) == [7, 7, 7]
    assert documents_of({"inputs_embeds": torch.zeros(2, 7, 16)}) == [7, 7]
    assert documents_of(filler(batch)) == [1]
    several = batch["position_ids"].expand(4, 1, 8)  # of text, time, height and width
    assert documents_of(batch | {"position_ids": several}) == [4, 1, 3]
    with pytest.raises(ValueError, match="padding"):
        documents_of(batch | {"attention_mask": torch.tensor([[1, 1, 1, 1, 1, 1, 1, 0]])})
    with pytest.raises(ValueError, match="neither input_ids nor inputs_embeds"):
        documents_of({"pixels": torch.zeros(1)})
    with pytest.raises(ValueError, match="has no tokens: leave it out"):
        documents_of({"input_ids": torch.zeros(1, 0)})


@pytest.mark.alone
def test_exit_waits_for_submitted_work_but_not_for_long(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """A thread that is inside a collective at exit would abort the process."""
    at_end: list[Any] = []
    monkeypatch.setattr(background.atexit, "register", lambda *call: at_end.append(call))
    monkeypatch.setattr(background, "_EXIT_TIMEOUT_S", 0.2)
    for work, done in ((lambda: time.sleep(0.05), True), (Event().wait, False)):
        future = background.DaemonExecutor().submit(work)
        end, *args = at_end.pop()
        end(*args)
        assert future.done() == done


def test_windows_that_no_document_exceeds_share_the_causal_plan() -> None:
    batch = PlannedAttention(cost="pairs").local([30, 12])
    causal, wide, narrow = (
        batch.plan(AttentionSpec(Mask(reach), tensors(4, 2, 8))) for reach in (CAUSAL, 30, 29)
    )
    assert wide is causal
    assert narrow is not causal


def test_other_head_sizes_of_v() -> None:
    """Latent attention has another head size of v."""
    attention = PlannedAttention(cost="pairs")
    batch = attention.local([40])
    q, k = torch.randn(2, 40, 4, 12, dtype=torch.float64)
    for size in (8, 16):
        v = torch.randn(40, 4, size, dtype=torch.float64)
        out = attention.attend(q, k, v, batch)
        q_, k_, v_ = (x.transpose(0, 1) for x in (q, k, v))
        right = torch.nn.functional.scaled_dot_product_attention(q_, k_, v_, is_causal=True)
        torch.testing.assert_close(out.transpose(0, 1), right)


def test_a_loader_reads_one_ahead() -> None:
    """The next batch is planned while the caller works on the current one."""
    read: list[int] = []

    def loader() -> Any:
        for number in range(3):
            read.append(number)
            yield number

    batches = prefetch(
        loader(),
        PlannedAttention(cost="pairs"),
        documents_of=lambda batch: [batch + 1],
        attach=lambda batch, future: (batch, future),
        filler=lambda last: 0,
    )
    seen = []
    for number, future in batches:
        assert isinstance(future, Future)
        batch = future.result()
        assert isinstance(batch, PlannedBatch)
        assert batch.ranks == ((number + 1,),)
        seen.append((number, len(read)))
    assert seen == [(0, 2), (1, 3), (2, 3)]


def test_one_rank_prepares_its_batches_in_the_background() -> None:
    """From the second batch on: the first layer tells what tensors are like."""
    attention = PlannedAttention(cost="pairs")
    for length, made in ((4, {"MainThread": 2}), (5, {"distca": 2}), (6, {"distca": 2}), (6, {})):
        entries: list[Entry] = [30, {"length": length, "parent": 0, "prefix": 30}]
        with preparing_threads() as counts:
            batch = attention.wait(attention.submit(entries))
            assert batch is not None
            q, k, v = torch.randn(3, 30 + length, 4, 8)
            for _ in range(3):
                attention.attend(q, k, v, batch)
        assert counts == made
    with pytest.raises(ValueError, match="no documents"):
        attention.gather([], "no documents")


def test_only_a_batch_with_the_same_documents_gets_the_last_plans() -> None:
    attention, spec = PlannedAttention(cost="pairs"), AttentionSpec(Mask(CAUSAL), tensors(4, 2, 8))
    entry = {"length": 4, "parent": 0, "prefix": 30}
    first = attention.local([30, entry])
    assert attention.local([30, dict(entry)]).plan(spec) is first.plan(spec)
    entry["length"] = 5  # in the record of the first batch
    second = attention.local([30, entry])
    assert second.lengths == (30, 5)
    assert second.plan(spec).placement.tokens.tolist() == [35]


def test_plans_are_for_the_speeds_of_ranks_too() -> None:
    ranks, options = ((300,), (20, 7)), PlanOptions.of(None, {"cost": "pairs"})
    slower = replace(options, speed=(1.0, 0.5))
    plans = BatchPlans(ranks, slower, "disaggregated")
    assert plans.are_for([[300], [20, 7]], replace(options, speed=[1.0, 0.5]))
    assert not plans.are_for([[300], [20, 8]], slower)
    assert not plans.are_for(ranks, options)
    assert not BatchPlans(ranks, options, "disaggregated").are_for(ranks, slower)


def test_spans_that_change_in_place_are_planned_again() -> None:
    attention, spec = PlannedAttention(cost="pairs"), AttentionSpec(Mask(CAUSAL), tensors(4, 2, 8))
    spans = [[2, 6]]
    first = attention.local([{"length": 30, "two_way": spans}]).plan(spec)
    spans[0] = [2, 9]
    assert attention.local([{"length": 30, "two_way": spans}]).plan(spec) is not first


def test_plans_of_one_rank_are_those_of_the_scheduler() -> None:
    """They are made without a search, since every task is at home."""
    entries: list[Entry] = [500, {"length": 40, "parent": 0, "prefix": 300}, 70]
    spec = AttentionSpec(Mask(CAUSAL), tensors(4, 2, 8))
    local = PlannedAttention(cost="pairs").local(entries).plan(spec)
    searched = distca.plan([entries], model=spec.shape, cost="pairs")
    assert local.fingerprint == searched.fingerprint


def test_documents_of_any_number(pair: RankPool) -> None:
    lengths = [list(range(1, 2000)), [7]]
    for ranks in pair.run(gathering.gathered, lengths, ranks=2):
        assert [list(one) for one in ranks] == lengths


def test_layouts_are_made_with_the_plans(pair: RankPool) -> None:
    """In the background, from the second batch on: the first layer tells what tensors are like."""
    for first, *others, again in pair.run(gathering.preparing, ranks=2):
        assert first == {"MainThread": 2}
        assert others == [{"distca": 2}] * 2
        assert again == {}


def test_figures_of_plans_are_added_up_with_the_plans(pair: RankPool) -> None:
    """In the background too: the first layer has to wait for nothing but its kernels."""
    for first, *others in pair.run(gathering.counting_traffic, ranks=2):
        assert first == {"MainThread"}
        assert others == [{"distca"}] * 2


def test_ranks_that_share_nothing_do_not_wait_for_each_other(pair: RankPool) -> None:
    for rank, (error, sentence) in enumerate(pair.run(gathering.at_home, ranks=2)):
        assert error < 1e-5
        assert sentence == f"rank {rank} cannot"


def test_groups_that_are_parts_of_the_world(world: World) -> None:
    """One group has a rank without documents, and one has a single rank."""
    errors = world(4).run(gathering.in_parts, ranks=4)
    assert max(errors) < 1e-5


def test_plan_options_reach_the_plans(world: World) -> None:
    limits = {"speed": [1.0, 0.5, 1.0, 2.0], "memory_bytes": 1 << 20}
    for shared, local in world(4).run(gathering.devices_of, 2, limits, ranks=4):
        assert shared["node"] == [0, 0, 1, 1]
        assert shared["speed"] == limits["speed"]
        assert shared["memory_bytes"] == [1 << 20] * 4
        assert local == {"node": [0], "speed": [1.0], "memory_bytes": [1 << 20]}
    for shared, _ in world(4).run(gathering.devices_of, 2, {"ranks_per_node": 3}, ranks=4):
        assert shared["node"] == [0, 0, 0, 1]


@pytest.mark.parametrize("speed", [[1.0, 2.0, 3.0], "fast", [1.0, "x"], 1.0, [1.0, float("nan")]])
def test_wrong_speeds_are_refused(pair: RankPool, speed: Any) -> None:
    for error in pair.run(gathering.failed_with, {"speed": speed}, ranks=2):
        assert re.search(r"values of speed for 2 ranks|speed = .*: give each rank a number", error)


@pytest.mark.slow
def test_a_slow_rank_gets_less_within_ten_batches_and_as_much_as_others_after(world: World) -> None:
    slow, batches = (6, 24), 42

    def run(batches: int, learns: bool) -> tuple[list[list[float]], Any]:
        """Returns the speeds and the imbalance of each batch."""
        ranks = world(4).run(gathering.with_a_slow_rank, batches, slow, learns, ranks=4)
        speeds, seconds = zip(*(zip(*rank, strict=True) for rank in ranks), strict=True)
        assert speeds.count(speeds[0]) == 4  # all ranks plan with the same
        return list(speeds[0]), np.max(seconds, axis=0) / np.mean(seconds, axis=0)

    speeds, without = run(12, False)
    assert speeds == [[1.0] * 4] * 12
    assert np.median(without[slow[0] :]) > 1.3
    speeds, learned = run(batches, True)
    for start, stop in ((slow[0] + 10, slow[1]), (slow[1] + 10, batches)):
        assert np.median(learned[start:stop]) <= 1.05
    assert speeds[slow[1] - 1] == pytest.approx([1, 1, 0.6, 1], abs=0.05)
    assert speeds[-1] == [1.0] * 4


def test_unknown_plan_options() -> None:
    with pytest.raises(ValueError, match=r"'tolerence' is unknown: did you mean tolerance\?"):
        PlannedAttention(tolerence=0.1)


def test_another_default_device(pair: RankPool) -> None:
    assert max(pair.run(gathering.on_another_device, ranks=2)) < 1e-5


def test_an_error_on_one_rank_is_raised_on_all(pair: RankPool) -> None:
    assert pair.run(gathering.failed, ranks=2) == [
        "rank 1 cannot take part: no ink",
        "no ink",
    ]
