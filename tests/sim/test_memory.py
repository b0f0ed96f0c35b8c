"""Memory at its fullest, worked out by hand."""

from __future__ import annotations

from dataclasses import replace

import pytest
from sim.runs import batch_of, moved, outcome, scenario
from sim.tiny import END, KV_BYTES, LAYER, MODEL, Q_BYTES

from distca.pipeline.mesh import MeshShape
from distca.planning.spans import as_ints
from distca.sim.scenario import Strategy
from distca.sim.simulate import Summary

# A token keeps 8 + 24 elements between seams, x and q, k, v, o, and 24 + 24 inside one; at two
# bytes those are 160. Logits of a token: 16 words, their gradient, 4 bytes each.
KEPT, WITHIN, LOGITS = 2 * 32, 2 * 48, 2 * 16 * 4


def test_memory_of_a_packed_step(profile: str) -> None:
    """All 640 weights and gradients stay gathered, 2 + 4 bytes; 16 bytes are half of each
    parameter's state."""
    memory = outcome(scenario(profile, [10, 10], 10), "colocated", MeshShape(dp=2)).memory
    assert memory.state == 640 * 16 // 2
    assert memory.gathered == 640 * 6
    assert memory.activations == 10 * (KEPT + WITHIN)
    assert memory.logits == 10 * LOGITS
    assert memory.exchange == 0
    assert memory.total == 5120 + 3840 + 1600 + 1280


def test_memory_of_gathered_keys(profile: str) -> None:
    """16 tokens on two workers: 8 tokens' keys of the other, in each of three layers."""
    one = scenario(profile, [16], 16, model=replace(MODEL, layers=3))
    memory = outcome(one, "head-tail-cp", MeshShape(cp=2)).memory
    assert memory.exchange == 3 * 8 * KV_BYTES
    assert memory.activations == 8 * 3 * (KEPT + WITHIN)


def test_memory_of_micro_batches_in_flight(profile: str) -> None:
    """The first of two stages holds two micro-batches of three, and their keys."""
    one = scenario(profile, [16] * 3, 16, gpus=4, model=replace(MODEL, layers=2))
    memory = outcome(one, "head-tail-cp", MeshShape(pp=2, cp=2), micro_batches=3).memory
    assert memory.state == (LAYER + END) * 16 // 2
    assert memory.gathered == (LAYER + END) * 6
    assert memory.activations == 2 * 8 * (KEPT + WITHIN)
    assert memory.exchange == 2 * 8 * KV_BYTES


@pytest.mark.parametrize(("policy", "in_flight"), [("colocated", 2), ("distca", 3)])
def test_what_is_recomputed_is_not_kept(profile: str, policy: str, in_flight: int) -> None:
    """But for the one at work."""
    one = replace(scenario(profile, [10] * 3, 10, model=replace(MODEL, layers=2)), recompute=True)
    memory = outcome(one, policy, MeshShape(pp=2), micro_batches=3, ping_pong=False).memory
    assert memory.activations == 10 * (in_flight * KEPT + WITHIN)


def test_a_summary_has_the_memory_of_the_fullest_step(profile: str) -> None:
    """Documents stay whole: bins of 5 and 5 tokens, and of 9 and 1."""
    one = scenario(profile, [5, 5, 9, 1], 10)
    strategy = Strategy("wlb", MeshShape(dp=2))
    batches = [[as_ints([5, 5])], [as_ints([9, 1])]]
    for order in (batches, batches[::-1]):
        assert Summary.of(one, strategy, order).memory.activations == 9 * (KEPT + WITHIN)


def test_memory_of_ticks_holds_what_a_moved_task_brings(profile: str) -> None:
    """q and o of 128 tokens and keys of 384; of weights, those of three seams at once."""
    memory = moved(profile).memory
    assert memory.exchange == 128 * 2 * Q_BYTES + 384 * KV_BYTES
    assert memory.gathered == 3 * LAYER * 2
    assert memory.activations == 512 * (KEPT + WITHIN)
    assert memory.logits == 512 * LOGITS


def test_what_dedicated_servers_receive_is_not_the_memory_of_workers(profile: str) -> None:
    """Devices attend for both workers, and workers receive nothing but what they sent for."""
    one = scenario(profile, [512, 512], 512, gpus=4)
    found = outcome(one, "distca", MeshShape(dp=2, servers=2), ping_pong=False)
    assert found.num_bytes > 0
    assert found.memory.exchange == 0


def test_both_halves_of_a_step_bring_their_tasks(profile: str) -> None:
    """Documents of 768 and 512 + 512 tokens on one GPU, two of 640 on the other.

    One half has 295,296 and 205,120 pairs: queries [128, 256) move. The other has 262,656 and
    205,120: queries [0, 128) of one document of 512 do.
    """
    one = scenario(profile, [768, 640, 640, 512, 512], 3072)
    memory = outcome(one, "distca", MeshShape(dp=2), ping_pong=True, tolerance=0.1).memory
    assert memory.exchange == 2 * 128 * 2 * Q_BYTES + (256 + 128) * KV_BYTES
    assert memory.activations == (768 + 2 * 512) * (KEPT + WITHIN)


def test_aligned_ticks_hold_more_micro_batches_than_the_usual_pipeline(profile: str) -> None:
    """Three of three, where 1F1B holds two."""
    one = scenario(profile, [10] * 3, 10, model=replace(MODEL, layers=2))
    memory = outcome(one, "distca", MeshShape(pp=2), micro_batches=3, ping_pong=False).memory
    assert memory.activations == 3 * 10 * (KEPT + WITHIN)
    assert memory.gathered == (LAYER + END) * 6


def test_what_does_not_fit_says_so(profile: str) -> None:
    """11,840 bytes are needed: see the first of these. Of 12,464 there are 0.95 x 12,464 = 11,840.8
    to use, and of 12,463 there are 11,839.85."""
    strategy = Strategy("colocated", MeshShape(dp=2))
    for room, fits in ((12_463, False), (12_464, True)):
        one = scenario(profile, [10, 10], 10, memory_bytes=room)
        assert Summary.of(one, strategy, [batch_of(one)]).fits == fits


def test_weights_that_are_kept_take_room_with_their_gradients(profile: str) -> None:
    one = scenario(profile, [10, 10], 10)
    for keep, gathered in ((False, 3 * LAYER * 2), (True, (LAYER + 2 * END) * (2 + 4))):
        mesh = MeshShape(dp=2, keep_weights=keep)
        assert outcome(one, "distca", mesh, ping_pong=False).memory.gathered == gathered
