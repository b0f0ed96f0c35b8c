"""One tick: by hand, and against a simulator that goes event by event."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from sim.draws import Draw, close, kernels, transfer_of, transfers
from sim.oracle import Attended, OracleTransfer, Pass, play, programs_of

from distca.pipeline.schedule import BACKWARD, FORWARD
from distca.sim.rates import Attention
from distca.sim.streams import Streams, Transfer
from distca.sim.ticks import run_tick


def ran(one: Pass, ranks: int = 2, **options: bool) -> Streams:
    """What ``run_tick`` makes of a pass, as a forward tick."""

    def same(transfer: OracleTransfer | None) -> Transfer | None:
        return None if transfer is None else transfer_of(transfer, ranks)

    streams = Streams(np.ones(ranks), **options)
    parts = [[np.array(part) for part in halves] for halves in one.parts]
    slots = [
        [Attention(np.array(a.own), np.array(a.remote), same(a.out), same(a.back))
         for a in halves]
        for halves in one.attention
    ]  # fmt: skip
    transfers = ([same(t) for t in ts] for ts in (one.gathering, one.reducing))
    run_tick(streams, FORWARD, parts, slots, *transfers)
    return streams


def all_of(*seconds: float) -> OracleTransfer:
    """Every rank with every other; so many seconds at each port."""
    everyone = frozenset(range(len(seconds)))
    return OracleTransfer(dict(enumerate(seconds)), dict.fromkeys(everyone, everyone))


def equal_parts(*seconds: float) -> list[list[list[float]]]:
    """Parts of two ranks that are alike, one for each seam, in one half."""
    return [[[s, s]] for s in seconds]


# -- by hand, in microseconds --------------------------------------------------------------------


def test_one_layer_on_two_ranks_that_are_alike() -> None:
    """Computing 0-10, dispatch 10-15, own attention 10-13, the other 15-22, return 22-26, and the
    last part 26-32."""
    attended = Attended([3, 3], [7, 7], all_of(5, 5), all_of(4, 4))
    streams = ran(Pass(equal_parts(10, 6), [[attended]]))
    assert streams.compute.tolist() == [32, 32]
    assert streams.busy.tolist() == [10 + 3 + 7 + 6] * 2
    assert streams.waited.tolist() == [(15 - 13) + (26 - 22)] * 2


def test_own_attention_hides_the_dispatch() -> None:
    """Own attention 10-18 is longer than the dispatch 10-15, so no rank waits for it."""
    attended = Attended([8, 8], [7, 7], all_of(5, 5), all_of(4, 4))
    streams = ran(Pass(equal_parts(10, 6), [[attended]]))
    assert streams.compute.tolist() == [10 + 8 + 7 + 4 + 6] * 2
    assert streams.waited.tolist() == [4, 4]


def test_a_rank_waits_for_the_slower_one() -> None:
    """Rank 0 sends from 10 on, rank 1 from 14 on: both have it at 19. Rank 0 attends 19-20 and
    rank 1 19-28, so returns end at 28 + 4 = 32 on both. The last part: 6, and 2."""
    attended = Attended([0, 0], [1, 9], all_of(5, 5), all_of(4, 4))
    streams = ran(Pass([[[10, 14]], [[6, 2]]], [[attended]]))
    assert streams.compute.tolist() == [38, 34]


def test_what_moves_one_way_holds_only_those_who_take_part() -> None:
    """Ranks 0 and 1 exchange; rank 2 computes for itself: 10 + 3 + 6."""
    both = frozenset((0, 1))
    transfer = OracleTransfer({0: 5, 1: 5}, {0: both, 1: both})
    attended = Attended([3, 3, 3], [7, 7, 0], transfer, transfer)
    streams = ran(Pass([[[10] * 3], [[6] * 3]], [[attended]]), ranks=3)
    assert streams.compute.tolist() == [15 + 7 + 5 + 6] * 2 + [19]


def test_ping_hides_behind_pong() -> None:
    """The first test in two halves.

    compute  ping 0-5, pong 5-10, ping's own 10-11.5, ping's other 11.5-15, pong's own 15-16.5,
             pong's other 16.5-20, the last part of ping 20-23 and of pong 23-26
    port     ping's dispatch 5-7.5, pong's 10-12.5, ping's return 15-17, pong's 20-22
    """
    half = Attended([1.5] * 2, [3.5] * 2, all_of(2.5, 2.5), all_of(2, 2))
    parts = [[[5, 5]] * 2, [[3, 3]] * 2]
    streams = ran(Pass(parts, [[half, half]]))
    assert streams.compute.tolist() == [26, 26]
    assert streams.waited.tolist() == [0, 0]


def test_in_a_backward_tick_the_last_half_comes_first() -> None:
    """compute  pong 0-2, ping 2-12, pong's attention 12-13, ping's 22-23, pong 23-27, ping 27-28
    port     pong's dispatch 2-12, ping's 12-22
    """
    slot = [Attended([0, 0], [1, 1], all_of(10, 10)) for _ in range(2)]
    parts = [[[10, 10], [2, 2]], [[1, 1], [4, 4]]]
    streams = Streams(np.ones(2), record=True)
    attention = [
        [Attention(np.array(a.own), np.array(a.remote), transfer_of(a.out, 2), None) for a in slot]
    ]
    run_tick(streams, BACKWARD, [[np.array(p) for p in seam] for seam in parts], attention)
    names = [event.what for event in streams.events or ()]
    assert names[:4] == ["linear, pong", "dispatch, pong", "linear, ping", "dispatch, ping"]
    assert names[-2:] == ["linear, pong", "linear, ping"]
    assert streams.compute.tolist() == [28, 28]


def test_halves_queue_at_the_port_when_exchanges_are_long() -> None:
    """compute  ping 0-5, pong 5-10, ping's attention 25-26, pong's 45-46
    port     ping's dispatch 5-25, pong's 25-45, ping's return 45-65, pong's 65-85

    Ping's return is ready at 26 but finds the port taken by pong's dispatch.
    The last part: ping's 65-68, pong's 85-88.
    """
    half = Attended([0, 0], [1, 1], all_of(20, 20), all_of(20, 20))
    streams = ran(Pass([[[5, 5]] * 2, [[3, 3]] * 2], [[half, half]]))
    assert streams.compute.tolist() == [88, 88]
    assert streams.port.tolist() == [85, 85]


def test_weights_come_one_seam_ahead() -> None:
    """Port: the first seam's weights 0-4, the second's 4-14 beside the first part 4-10; the
    attention is over at 11, and the second part has to wait until 14."""
    attended = Attended([1, 1], [0, 0])
    one = Pass(equal_parts(6, 5), [[attended]], [all_of(4, 4), all_of(10, 10)])
    streams = ran(one)
    assert streams.compute.tolist() == [14 + 5] * 2
    assert streams.waited.tolist() == [4 + 3] * 2


def test_the_dispatch_queues_behind_weights() -> None:
    """Weights 0-4 and 4-14; the first part ends at 10, its dispatch is sent 14-16."""
    attended = Attended([0, 0], [1, 1], all_of(2, 2), all_of(2, 2))
    one = Pass(equal_parts(6, 5), [[attended]], [all_of(4, 4), all_of(10, 10)])
    assert ran(one).compute.tolist() == [16 + 1 + 2 + 5] * 2


def test_gradients_are_reduced_behind_and_no_rank_waits_for_them() -> None:
    """Port: gradients of the first seam 6-16, of the second 16-18, while computing ends at 12."""
    attended = Attended([1, 1], [0, 0])
    one = Pass(equal_parts(6, 5), [[attended]], [None, None], [all_of(10, 10), all_of(2, 2)])
    streams = ran(one)
    assert streams.compute.tolist() == [12, 12]
    assert streams.port.tolist() == [18, 18]


def test_two_layers_follow_each_other() -> None:
    """Each layer: 3 of dispatch, 7 of attention, 4 of return; parts of 10, 6 and 2."""
    attended = Attended([0, 0], [7, 7], all_of(3, 3), all_of(4, 4))
    streams = ran(Pass(equal_parts(10, 6, 2), [[attended]] * 2))
    assert streams.compute.tolist() == [10 + 14 + 6 + 14 + 2] * 2


def test_no_attention_is_one_part() -> None:
    assert ran(Pass(equal_parts(10), [])).compute.tolist() == [10, 10]


# -- against the oracle --------------------------------------------------------------------------


@st.composite
def passes(draw: Draw) -> tuple[int, Pass]:
    ranks, layers, halves = (draw(st.integers(a, b)) for a, b in ((2, 4), (1, 3), (1, 2)))
    moved = st.none() | transfers(ranks)
    attended = st.builds(Attended, kernels(ranks), kernels(ranks), moved, moved)
    weights = st.lists(moved, min_size=layers + 1, max_size=layers + 1)
    return ranks, Pass(
        [[draw(kernels(ranks)) for _ in range(halves)] for _ in range(layers + 1)],
        [[draw(attended) for _ in range(halves)] for _ in range(layers)],
        draw(st.just([]) | weights),
        draw(weights),
    )


@given(passes())
def test_any_pass_takes_what_the_oracle_says(drawn: tuple[int, Pass]) -> None:
    ranks, one = drawn
    if not one.gathering:
        one = Pass(one.parts, one.attention)
    streams, expected = ran(one, ranks), play(*programs_of(one, ranks))
    assert streams.compute.tolist() == close(expected.finish)
    assert streams.port.tolist() == close(expected.port)
    assert streams.busy.tolist() == close(expected.busy)
    assert streams.waited.tolist() == close(expected.waited)


# -- laws ----------------------------------------------------------------------------------------


@given(passes())
def test_an_isolated_rank_is_never_later(drawn: tuple[int, Pass]) -> None:
    ranks, one = drawn
    assert np.all(ran(one, ranks, isolated=True).compute <= ran(one, ranks).compute)


def cut_in_two(one: Pass) -> Pass:
    """The same pass as ping and pong, each with half of everything."""

    def half(transfer: OracleTransfer | None) -> OracleTransfer | None:
        if transfer is None:
            return None
        return OracleTransfer({k: s / 2 for k, s in transfer.seconds.items()}, transfer.partners)

    def halved(seconds: Sequence[float]) -> list[float]:
        return [s / 2 for s in seconds]

    return Pass(
        [[halved(part)] * 2 for (part,) in one.parts],
        [[Attended(halved(a.own), halved(a.remote), half(a.out), half(a.back))] * 2
         for (a,) in one.attention],
    )  # fmt: skip


@given(st.integers(2, 4), st.integers(1, 3), st.data())
def test_ping_pong_is_never_slower_where_halves_are_even_and_latency_is_none(
    ranks: int, layers: int, data: st.DataObject
) -> None:
    """And where everyone meets everyone: ranks that met only some would, at the port, wait for
    ping's partners of partners before pong."""
    moved = st.lists(st.floats(0.01, 10.0), min_size=ranks, max_size=ranks).map(
        lambda seconds: all_of(*seconds)
    )
    attended = st.builds(Attended, kernels(ranks), kernels(ranks), moved, moved)
    one = Pass(
        [[data.draw(kernels(ranks))] for _ in range(layers + 1)],
        [[data.draw(attended)] for _ in range(layers)],
    )
    whole, halves = ran(one, ranks).compute.max(), ran(cut_in_two(one), ranks).compute.max()
    assert halves <= whole * (1 + 1e-12)


@pytest.mark.parametrize("exchange", [1.0, 5.0, 20.0, 100.0])
def test_ping_pong_hides_all_it_can(exchange: float) -> None:
    """A layer of 10 before, 10 of attention and 10 after, all of it remote. While one half is in
    transit the other half has 5 to compute: so much of each exchange's first half can be hidden."""
    attended = Attended([0, 0], [10, 10], all_of(exchange, exchange), all_of(exchange, exchange))
    one = Pass(equal_parts(10, 10), [[attended]])
    assert ran(one).compute.max() == 30 + 2 * exchange
    each = exchange / 2
    if each <= 5:  # all of it
        expected = 30.0
    else:  # the port never rests between the first half's first part and the last half's last
        expected = 5 + 4 * each + 5
    assert ran(cut_in_two(one)).compute.max() == expected
