"""Backward calls of tasks with similar numbers of keys. [Note: empty blocks]"""

import gc
import weakref

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor

from distca.attention.backends.alike import ALIKE, BLOCK, WORTH_A_CALL, alike
from distca.attention.backends.base import Gradients, Saved, Scoring
from distca.attention.backends.choice import backends
from distca.attention.backends.flash import Flash
from distca.attention.backends.packed import PackedCall
from distca.planning.masks import CAUSAL, Mask
from distca.planning.spans import as_ints, cumulative


def num_empty(keys: list[int]) -> int:
    """Returns the empty thread blocks of a head."""
    blocks = -(-np.array(keys) // BLOCK)
    return int((blocks.max() - blocks).sum())


@given(st.lists(st.one_of(st.integers(1, 3000), st.integers(1, 1 << 20)), min_size=1, max_size=80))
def test_groups_are_all_tasks_in_order_and_each_call_is_worth_it(keys: list[int]) -> None:
    groups = alike(as_ints(keys))
    assert [first for first, _ in groups] == [0, *(last for _, last in groups[:-1])]
    assert groups[-1][1] == len(keys)
    assert all(first < last for first, last in groups)
    saved = num_empty(keys) - sum(num_empty(keys[first:last]) for first, last in groups)
    # A stretch that is cut out of the middle makes two calls more.
    assert saved >= WORTH_A_CALL * (len(groups) - 1) // 2


def test_many_short_tasks_have_a_call_of_their_own() -> None:
    assert alike(as_ints([300] * 20 + [100_000] + [400] * 30)) == [(0, 20), (20, 21), (21, 51)]
    assert alike(as_ints([100_000] + [10_000] * 99 + [400] * 99)) == [(0, 1), (1, 100), (100, 199)]


def test_few_or_similar_tasks_share_a_call() -> None:
    assert alike(as_ints([100_000, 300, 100_000])) == [(0, 3)]
    assert alike(as_ints([8192, 300] * 8)) == [(0, 16)]
    assert alike(as_ints([100_000, 100_000 // ALIKE + BLOCK] * 1000)) == [(0, 2000)]


@pytest.mark.parametrize("mask", ["causal", "full", "window:300"])
def test_gradients_of_groups_go_to_their_rows(mask: str, monkeypatch: pytest.MonkeyPatch) -> None:
    queries, keys = as_ints([70, 13, 1, 300, 20, 64]), as_ints([70, 900, 40, 6000, 20, 74])
    call = PackedCall.of(Mask.parse(mask), cumulative(queries), cumulative(keys), "cpu")
    reference = next(backend for backend in backends() if backend.name == "reference")
    draw = torch.Generator().manual_seed(0)
    q, k, v, grad_out = (
        torch.randn(rows, heads, 8, generator=draw)
        for rows, heads in (
            (call.num_queries, 2),
            (call.num_keys, 1),
            (call.num_keys, 1),
            (call.num_queries, 2),
        )
    )
    calls = []

    def backward(grad_out: Tensor, saved: Saved, call: PackedCall, scoring: Scoring) -> Gradients:
        calls.append(call.lengths)
        return reference.backward(grad_out, saved, call, scoring.scale)

    monkeypatch.setattr("distca.attention.backends.flash._backward", backward)
    monkeypatch.setattr("distca.attention.backends.alike.WORTH_A_CALL", 8)
    saved = Saved(q, k, v, *reference.forward(q, k, v, call, 0.3))
    found = Flash().backward(grad_out, saved, call, 0.3)
    assert len(calls) > 1
    expected = reference.backward(grad_out, saved, call, 0.3)
    for name, grad in expected._asdict().items():
        torch.testing.assert_close(getattr(found, name), grad)


@pytest.mark.gpu
@pytest.mark.parametrize("mask", ["causal", "full", "window:300"])
def test_gradients_in_groups_are_those_of_one_call(
    mask: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    queries = as_ints([70, 130, 1, 3000, 200, 64, 500, 20])
    keys = queries + as_ints([0, 900, 40, 3000, 0, 10, 300, 0])
    flash = next(backend for backend in backends() if backend.name == "flash")
    draw = torch.Generator("cuda").manual_seed(0)

    def random(rows: int, heads: int) -> torch.Tensor:
        return torch.randn(rows, heads, 64, generator=draw, device="cuda", dtype=torch.bfloat16)

    num_queries, num_keys = int(queries.sum()), int(keys.sum())
    q, grad_out, k, v = (
        random(rows, heads)
        for rows, heads in ((num_queries, 8), (num_queries, 8), (num_keys, 2), (num_keys, 2))
    )

    def gradients(worth_a_call: int) -> tuple[Gradients, int]:
        monkeypatch.setattr("distca.attention.backends.alike.WORTH_A_CALL", worth_a_call)
        call = PackedCall.of(Mask.parse(mask), cumulative(queries), cumulative(keys), "cuda")
        attended = flash.forward(q, k, v, call, 0.125)
        found = flash.backward(grad_out, Saved(q, k, v, *attended), call, 0.125)
        return found, len(call.groups)

    (whole, one), (found, several) = gradients(1 << 30), gradients(8)
    assert one == 0 < several
    for name, expected in whole._asdict().items():
        torch.testing.assert_close(getattr(found, name), expected, rtol=1e-2, atol=1e-3)


def test_groups_have_the_rows_of_their_tasks() -> None:
    queries, keys = as_ints([5, 300, 7, 9]), as_ints([50, 4_000_000, 70, 90])
    whole = PackedCall.of(Mask(CAUSAL), cumulative(queries), cumulative(keys), "cpu")
    lengths = []
    for group in whole.groups:
        assert group.call.num_queries == group.queries.stop - group.queries.start
        assert group.call.num_keys == group.keys.stop - group.keys.start
        assert group.call.q_offsets.tolist() == list(group.call.q_bounds)
        assert group.call.max_keys == max(keys for _, keys in group.call.lengths)
        lengths += group.call.lengths
    assert len(whole.groups) == 3
    assert lengths == whole.lengths


@pytest.mark.parametrize("keys", [[700, 800], [50, 4_000_000, 70]])
def test_a_call_is_freed_with_its_last_reference(keys: list[int]) -> None:
    """Else offsets of past plans stay on the device until Python collects garbage."""
    gc.disable()
    try:
        call = PackedCall.of(
            Mask(CAUSAL), cumulative(as_ints([5] * len(keys))), cumulative(as_ints(keys)), "cpu"
        )
        assert bool(call.groups) == (max(keys) > 1000)
        known = weakref.ref(call)
        del call
        assert known() is None
    finally:
        gc.enable()
