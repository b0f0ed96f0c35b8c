"""Transports without processes: all ranks as threads, and one rank with a link but no peers."""

from __future__ import annotations

import time
from functools import partial
from threading import Event

import pytest
import torch
from torch import Tensor

from distca.dispatch.transports import throttled
from distca.dispatch.transports.base import Wait
from distca.dispatch.transports.local import LocalTransport, LocalWorld
from distca.dispatch.transports.throttled import ThrottledTransport


def start(transport: LocalTransport, number: int) -> tuple[Wait, Tensor]:
    """One byte for each rank, which names the sender and the exchange."""
    ones = [1] * transport.num_ranks
    send = torch.full((transport.num_ranks,), 10 * transport.rank + number, dtype=torch.uint8)
    recv = torch.empty_like(send)
    return transport.start(send, recv, ones, ones), recv


@pytest.mark.parametrize("failing", [0, 2])
def test_an_error_on_one_rank_ends_all_with_that_error(failing: int) -> None:
    def one_rank(transport: LocalTransport) -> None:
        transport.all_gather_object("all are well")
        if transport.rank == failing:
            raise LookupError("the original")
        transport.all_gather_object("one is gone")

    with pytest.raises(LookupError, match="the original"):
        LocalWorld(3).run(one_rank)


def test_ranks_that_expect_other_sizes_are_told_so() -> None:
    def one_rank(transport: LocalTransport) -> None:
        send, recv = (torch.zeros(4, dtype=torch.uint8) for _ in range(2))
        expected = [2, 2] if transport.rank == 0 else [1, 3]
        transport.start(send, recv, [2, 2], expected)()

    sentence = r"rank 1 expects \[1, 3\] bytes but is sent \[2, 2\]: the ranks hold different plans"
    with pytest.raises(ValueError, match=sentence):
        LocalWorld(2).run(one_rank)


def test_objects_are_gathered_in_the_order_of_ranks() -> None:
    def one_rank(transport: LocalTransport) -> list[dict[str, int]]:
        time.sleep(0.002 * (2 - transport.rank))  # the last rank comes first
        return transport.all_gather_object({"rank": transport.rank})

    assert LocalWorld(3).run(one_rank) == [[{"rank": 0}, {"rank": 1}, {"rank": 2}]] * 3


def test_exchanges_under_way_together_are_told_apart() -> None:
    def one_rank(transport: LocalTransport) -> list[list[int]]:
        (wait_first, first), (wait_second, second) = (start(transport, n) for n in (1, 2))
        wait_second()
        wait_first()
        return [first.tolist(), second.tolist()]

    assert LocalWorld(3).run(one_rank) == [[[1, 11, 21], [2, 12, 22]]] * 3


def test_a_sender_may_go_on_before_a_slow_peer_has_looked() -> None:
    overwritten = Event()

    def one_rank(transport: LocalTransport) -> list[int]:
        send = torch.full((2,), transport.rank + 1, dtype=torch.uint8)
        recv = torch.empty_like(send)
        wait = transport.start(send, recv, [1, 1], [1, 1])
        if transport.rank == 1:
            assert overwritten.wait(10)
        wait()
        send.zero_()
        overwritten.set()
        return recv.tolist()

    assert LocalWorld(2).run(one_rank) == [[1, 2]] * 2


def test_nothing_is_left_when_all_have_collected() -> None:
    world = LocalWorld(3)

    def one_rank(transport: LocalTransport) -> int:
        most = 0
        for number in range(50):
            transport.all_gather_object("now")
            start(transport, number % 10)[0]()
            most = max(most, len(world._posted))
        return most

    assert max(world.run(one_rank)) <= 2 * world.num_ranks, "no rank is two collectives ahead"
    assert not world._posted
    assert not world._collected


@pytest.fixture
def _little_noise(monkeypatch: pytest.MonkeyPatch) -> None:
    """Less noise than a buffer has bytes, so that it is repeated."""
    monkeypatch.setattr(throttled, "_noise", partial(throttled._noise, num_bytes=4096))


@pytest.mark.usefixtures("_little_noise")
@pytest.mark.parametrize(("sent", "received"), [(15_000, 8), (8, 15_000)])
def test_an_exchange_takes_as_long_as_the_link_would(sent: int, received: int) -> None:
    transport = ThrottledTransport(0, 2, bytes_per_s=1e6, latency_s=0.005)
    send, recv = (torch.zeros(size, dtype=torch.uint8) for size in (sent, received))
    begin = time.perf_counter()
    transport.start(send, recv, [0, sent], [0, received])()
    assert time.perf_counter() - begin >= 0.02


def test_the_larger_direction_counts() -> None:
    transport = ThrottledTransport(0, 3, bytes_per_s=1e3, latency_s=0.5)
    assert transport.seconds([10, 20, 30], [5, 5, 5]) == pytest.approx(0.56)
    assert transport.seconds([5, 5, 5], [10, 20, 30]) == pytest.approx(0.56)
    assert transport.seconds([0, 0, 0], [0, 0, 0]) == 0.5


@pytest.mark.usefixtures("_little_noise")
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32, torch.float64], ids=str)
def test_what_arrives_is_finite_all_through(dtype: torch.dtype) -> None:
    recv = torch.full((10_000,), 255, dtype=torch.uint8)  # NaN in every dtype
    assert recv.view(dtype).isnan().all()
    ThrottledTransport(0, 1, bytes_per_s=1e12).start(recv[:0], recv, [0], [len(recv)])()
    assert recv.view(dtype).isfinite().all()
    assert recv.view(dtype).unique().numel() > 100, "numbers, not a constant"


@pytest.mark.parametrize(("bytes_per_s", "latency_s"), [(0, 0), (-1e9, 0), (1e9, -1e-6)])
def test_a_link_that_cannot_be_is_refused(bytes_per_s: float, latency_s: float) -> None:
    with pytest.raises(ValueError, match="give a bandwidth above 0 and a latency of 0 or more"):
        ThrottledTransport(0, 2, bytes_per_s, latency_s)
