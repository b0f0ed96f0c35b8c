"""Buffers: how much memory they take, what they refuse, and who uses them."""

from __future__ import annotations

import gc
from collections.abc import Callable

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor

from distca.dispatch.buffers import Buffers

CPU = torch.device("cpu")
Claim = Callable[[Buffers, int, torch.device], Tensor]
both_ways = pytest.mark.parametrize("claim", [Buffers.send, Buffers.recv], ids=["send", "recv"])


class User:
    """Stands for an exchange."""


@both_ways
def test_memory_grows_to_the_largest_and_stays(claim: Claim) -> None:
    buffers = Buffers()
    assert buffers.nbytes == 0
    claim(buffers, 4_000, CPU)
    largest = claim(buffers, 6_000, CPU)
    taken = buffers.nbytes
    assert len(largest) == 6_000
    assert taken < 9_000, "the smaller one is freed, and little more is taken than asked for"
    for size in (6_000, 4_000, 1, 5_999):
        memory = claim(buffers, size, CPU)
        assert len(memory) == size
        assert memory.data_ptr() == largest.data_ptr()
    assert buffers.nbytes == taken


@given(st.lists(st.integers(0, 300), min_size=1, max_size=8), st.sampled_from([None, 300, 1_000]))
def test_every_claim_is_met(sizes: list[int], capacity: int | None) -> None:
    buffers = Buffers(capacity)
    for size in sizes:
        buffers.check("send", size)
        send, recv = buffers.send(size, CPU), buffers.recv(size, CPU)
        send.fill_(1)
        recv.fill_(2)
        assert send.tolist() == [1] * size, "each way has its own memory"
        assert recv.tolist() == [2] * size


@both_ways
def test_a_capacity_is_claimed_once_at_first_use(claim: Claim) -> None:
    buffers = Buffers(1_000)
    assert buffers.nbytes == 0
    first = claim(buffers, 10, CPU)
    assert buffers.nbytes == 1_000
    assert claim(buffers, 1_000, CPU).data_ptr() == first.data_ptr()
    assert buffers.nbytes == 1_000


@both_ways
def test_what_never_fits_is_refused(claim: Claim) -> None:
    buffers = Buffers(1_000)
    sentence = r"needs 1,234 bytes to \w+ in one exchange but the buffers have 1,000: raise"
    with pytest.raises(ValueError, match=sentence):
        buffers.check("send", 1_234)
    with pytest.raises(ValueError, match=sentence):
        claim(buffers, 1_234, CPU)
    assert buffers.nbytes == 0


def test_what_just_fits_is_accepted() -> None:
    Buffers(1_000).check("send", 1_000)
    Buffers(0).check("receive", 0)
    Buffers(None).check("send", 10**15)


def test_a_negative_capacity_is_refused() -> None:
    with pytest.raises(ValueError, match="buffers of -1 bytes"):
        Buffers(-1)


def test_a_second_user_is_refused_until_the_first_releases_them() -> None:
    buffers, first, second = Buffers(), User(), User()
    buffers.acquire(first)
    with pytest.raises(RuntimeError, match="while another one used the same buffers"):
        buffers.acquire(second)
    buffers.release()
    buffers.acquire(second)
    with pytest.raises(RuntimeError, match="while another one used the same buffers"):
        buffers.acquire(first)


def test_buffers_of_a_deleted_user_are_free() -> None:
    buffers, user = Buffers(), User()
    buffers.acquire(user)
    del user
    gc.collect()
    buffers.acquire(User())
