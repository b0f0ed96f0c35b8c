"""Time on ranks: by hand, and against the simulator that goes event by event."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from sim.draws import close, kernels, speeds, transfer_of, transfers
from sim.oracle import OracleTransfer, Program, play
from sim.steps import point_to_point
from sim.tiny import machines

from distca.planning.spans import as_ints
from distca.sim.cluster import Link
from distca.sim.streams import Streams, Transfer, least_factor

Draw = Callable[[st.SearchStrategy[Any]], Any]


def even(ranks: int = 2, **options: Any) -> Streams:
    return Streams(np.ones(ranks), **options)


def pair(first: float, second: float, ranks: int = 2) -> Transfer:
    """Ranks 0 and 1, with so many seconds at their ports."""
    both = frozenset((0, 1))
    return transfer_of(OracleTransfer({0: first, 1: second}, {0: both, 1: both}), ranks)


# -- by hand -------------------------------------------------------------------------------------


def test_a_rank_computes_one_thing_after_the_other() -> None:
    streams = even()
    streams.run("one", np.array([3.0, 1.0]))
    streams.run("two", np.array([2.0, 0.0]))
    assert streams.compute.tolist() == streams.busy.tolist() == [5.0, 1.0]


def test_a_slow_rank_takes_longer_to_compute() -> None:
    streams = Streams(np.array([1.0, 0.5]))
    streams.run("one", np.array([3.0, 3.0]))
    assert streams.compute.tolist() == streams.busy.tolist() == [3.0, 6.0]


def test_a_slow_rank_sends_as_fast_as_others() -> None:
    streams = Streams(np.array([0.5, 0.5]))
    assert streams.send("one", pair(3.0, 3.0)).tolist() == [3.0, 3.0]


def test_an_exchange_ends_when_the_last_partner_is_through() -> None:
    """Rank 0 is there at 1 and sends for 2; rank 1 is there at 4 and sends for 5."""
    streams = even()
    streams.run("one", np.array([1.0, 4.0]))
    assert streams.send("two", pair(2.0, 5.0)).tolist() == [9.0, 9.0]


def test_computing_goes_on_beside_a_transfer() -> None:
    streams = even()
    done = streams.send("one", pair(5.0, 5.0))
    streams.run("two", np.array([3.0, 8.0]))
    streams.wait(done)
    assert streams.compute.tolist() == [5.0, 8.0]
    assert streams.waited.tolist() == [2.0, 0.0]
    assert streams.busy.tolist() == [3.0, 8.0]


def test_a_port_sends_one_thing_after_the_other() -> None:
    streams = even()
    assert streams.send("one", pair(5.0, 5.0)).tolist() == [5.0, 5.0]
    assert streams.send("two", pair(2.0, 2.0)).tolist() == [7.0, 7.0]


def test_a_port_is_held_until_the_partner_is_through_too() -> None:
    """Rank 0 alone would be through at 1, but rank 1 comes at 6; only then can rank 0 go on."""
    streams = even()
    streams.run("late", np.array([0.0, 6.0]))
    streams.send("one", pair(1.0, 1.0))
    assert streams.send("two", pair(2.0, 2.0)).tolist() == [9.0, 9.0]


def test_partners_of_partners_are_not_waited_for() -> None:
    """0 and 1 meet, 1 and 2 meet; rank 2 comes late, which rank 0 does not notice."""
    sets = {0: frozenset((0, 1)), 1: frozenset((0, 1, 2)), 2: frozenset((1, 2))}
    streams = even(3)
    streams.run("late", np.array([0.0, 0.0, 10.0]))
    done = streams.send("one", transfer_of(OracleTransfer(dict.fromkeys(range(3), 1.0), sets), 3))
    assert done.tolist() == [1.0, 11.0, 11.0]


def test_ranks_without_a_part_are_not_held_up() -> None:
    streams = even(3)
    streams.run("late", np.array([0.0, 4.0, 1.0]))
    done = streams.send("one", pair(2.0, 2.0, ranks=3))
    streams.wait(done)
    assert streams.compute.tolist() == [6.0, 6.0, 1.0]
    assert streams.port.tolist() == [6.0, 6.0, 0.0]


def test_an_isolated_rank_finds_its_partners_ready() -> None:
    streams = even(isolated=True)
    streams.run("late", np.array([1.0, 4.0]))
    assert streams.send("one", pair(2.0, 5.0)).tolist() == [3.0, 9.0]


def test_nothing_to_send_takes_no_time() -> None:
    streams = even()
    streams.run("one", np.array([1.0, 2.0]))
    streams.wait(streams.send("nothing", None))
    assert streams.compute.tolist() == [1.0, 2.0]
    assert streams.num_bytes == 0


# -- kernels beside transfers --------------------------------------------------------------------


def beside_a_transfer(
    transfer_s: float, kernel_s: list[float], transfer_sms: float, ranks: int = 2
) -> Streams:
    """Ranks 0 and 1 send for some seconds while all ranks compute."""
    streams = even(ranks, transfer_sms=transfer_sms)
    streams.send("one", pair(transfer_s, transfer_s, ranks))
    streams.run("two", np.array(kernel_s))
    return streams


def test_kernels_have_the_sms_that_a_transfer_leaves() -> None:
    """With 3 of 4 SMs, 6 s of work take 8 s, and 3 s take 4 s; the transfer ends at 10."""
    streams = beside_a_transfer(10.0, [6.0, 3.0], transfer_sms=0.25)
    assert streams.compute.tolist() == streams.busy.tolist() == [8.0, 4.0]


def test_from_the_end_of_a_transfer_on_kernels_have_all_sms() -> None:
    """By 4 s, when the transfer ends, 3 s of the work are done; the other 5 s or 1 s remain."""
    streams = beside_a_transfer(4.0, [8.0, 4.0], transfer_sms=0.25)
    assert streams.compute.tolist() == [4.0 + 5.0, 4.0 + 1.0]


def test_ranks_without_a_transfer_are_not_slowed() -> None:
    streams = beside_a_transfer(4.0, [8.0, 8.0, 8.0], transfer_sms=0.25, ranks=3)
    assert streams.compute.tolist() == [9.0, 9.0, 8.0]


def test_a_transfer_that_waits_for_its_partner_slows_kernels_too() -> None:
    """Rank 1 comes at 6 and sends until 8. Until then rank 0 loses a quarter of its time."""
    streams = even(transfer_sms=0.25)
    streams.run("late", np.array([0.0, 6.0]))
    streams.send("one", pair(2.0, 2.0))
    streams.run("two", np.array([7.0, 0.0]))
    assert streams.compute.tolist() == [9.0, 6.0]


def test_transfers_in_a_row_slow_a_kernel_until_the_last_is_done() -> None:
    streams = even(transfer_sms=0.5)
    for _ in range(2):
        streams.send("one", pair(3.0, 3.0))
    streams.run("two", np.array([2.0, 4.0]))
    assert streams.compute.tolist() == [4.0, 6.0 + 1.0]


def test_a_kernel_behind_a_transfer_is_not_slowed() -> None:
    streams = even(transfer_sms=0.5)
    streams.wait(streams.send("one", pair(3.0, 3.0)))
    streams.run("two", np.array([2.0, 4.0]))
    assert streams.compute.tolist() == [5.0, 7.0]


@given(kernels(2), st.floats(0.01, 10.0), st.sampled_from([0.1, 0.25, 0.6]))
def test_kernels_take_what_tiny_steps_of_time_add_up_to(
    kernel_s: list[float], transfer_s: float, share: float
) -> None:
    tick = 0.01
    taken = []
    for left in kernel_s:
        now = 0.0
        while left > 0:
            left -= tick * (1 - share if now < transfer_s else 1.0)
            now += tick
        taken.append(now)
    streams = beside_a_transfer(transfer_s, kernel_s, share)
    assert streams.compute.tolist() == pytest.approx(taken, abs=3 * tick)


@given(kernels(2), st.floats(0.01, 10.0))
def test_transfers_without_sms_cost_kernels_nothing(
    kernel_s: list[float], transfer_s: float
) -> None:
    assert beside_a_transfer(transfer_s, kernel_s, 0.0).compute.tolist() == kernel_s


# -- exchanges -----------------------------------------------------------------------------------

NEAR, FAR = Link(100.0, 1.0), Link(10.0, 2.0)  # bytes a second, and seconds before them


def between(flows: dict[tuple[int, int], int], ranks: int = 4, tp: int = 1) -> Transfer | None:
    """On nodes of two ranks."""
    cluster = machines("none", ranks * tp, gpus_per_node=2 * tp, inside=NEAR, across=FAR)
    source, target = (as_ints([ends[i] for ends in flows]) for i in (0, 1))
    return Transfer.between(source, target, as_ints(list(flows.values())), cluster, tp, ranks)


def seconds_between(flows: dict[tuple[int, int], int], **sizes: int) -> list[float]:
    transfer = between(flows, **sizes)
    assert transfer is not None
    return transfer.seconds.tolist()


def test_inside_a_node_the_fast_link_is_used() -> None:
    assert seconds_between({(0, 1): 300}) == [1 + 3.0, 1 + 3.0, 0.0, 0.0]


def test_across_nodes_the_slow_one() -> None:
    assert seconds_between({(0, 2): 300}) == [2 + 30.0, 0.0, 2 + 30.0, 0.0]


def test_a_port_shares_its_bandwidth_among_partners_and_pays_the_latency_once() -> None:
    """Rank 0 sends 300 and 200 bytes over one port; its partners receive only their own."""
    assert seconds_between({(0, 2): 300, (0, 3): 200}) == [2 + 50.0, 0.0, 2 + 30.0, 2 + 20.0]


def test_what_comes_in_from_two_sides_shares_a_port_too() -> None:
    assert seconds_between({(2, 0): 300, (3, 0): 200})[0] == 2 + 50.0


def test_a_port_sends_and_receives_at_once() -> None:
    assert seconds_between({(0, 1): 300, (1, 0): 200})[:2] == [1 + 3.0, 1 + 3.0]


def test_the_links_inside_and_across_work_side_by_side() -> None:
    assert seconds_between({(0, 1): 5000, (0, 2): 300})[0] == max(1 + 50.0, 2 + 30.0)


def test_nodes_hold_fewer_ranks_with_tensor_parallelism() -> None:
    """Four GPUs in a node are two ranks of tp = 2."""
    assert seconds_between({(1, 2): 300}, tp=2) == [0.0, 2 + 30.0, 2 + 30.0, 0.0]


def test_a_transfer_of_no_bytes_is_none() -> None:
    assert between({(0, 1): 0}) is None
    assert between({}) is None


def test_bytes_are_counted_once() -> None:
    transfer = between({(0, 1): 300, (1, 0): 200, (2, 3): 0})
    assert transfer is not None
    assert transfer.num_bytes == 500


@given(st.data())
def test_loads_of_ports_are_those_of_all_flows_one_by_one(data: st.DataObject) -> None:
    ranks = data.draw(st.integers(2, 6))
    rank = st.integers(0, ranks - 1)
    flows = data.draw(st.dictionaries(st.tuples(rank, rank), st.integers(0, 500), max_size=8))
    flows = {ends: n for ends, n in flows.items() if ends[0] != ends[1]}
    cluster = machines("none", ranks, gpus_per_node=2, inside=NEAR, across=FAR)
    expected, found = point_to_point(flows, cluster), between(flows, ranks)
    if expected is None or found is None:
        assert expected is found
        return
    assert found.seconds.tolist() == close([expected.seconds.get(i, 0.0) for i in range(ranks)])
    assert partners_of(found) == [expected.partners.get(i, {i}) for i in range(ranks)]


def partners_of(transfer: Transfer) -> list[set[int]]:
    return [set(part.tolist()) for part in np.split(transfer.partner, transfer.first[1:])]


@given(st.lists(st.integers(-1, 3), min_size=1, max_size=8))
def test_a_collective_joins_the_ranks_of_a_group(group: list[int]) -> None:
    transfer = Transfer.within(np.array(group), np.arange(1.0, len(group) + 1), 7)
    for rank, number in enumerate(group):
        members = {other for other, its in enumerate(group) if its == number}
        assert partners_of(transfer)[rank] == (members if number >= 0 else {rank})
        assert transfer.seconds[rank] == (rank + 1.0 if number >= 0 else 0.0)


def test_in_a_collective_of_no_groups_every_rank_is_its_only_partner() -> None:
    transfer = Transfer.within(np.array([-1, -1]), np.ones(2), 0)
    assert partners_of(transfer) == [{0}, {1}]
    assert transfer.seconds.tolist() == [0.0, 0.0]


def test_nothing_arrives_before_it_is_sent_however_fast_the_link() -> None:
    """Rank 0 comes at 5 to send 100 bytes; there are no links that take no time at all."""
    cluster = machines("none", 2, inside=Link(1e300))
    transfer = Transfer.between(as_ints([0]), as_ints([1]), as_ints([100]), cluster, 1, 2)
    streams = even()
    streams.run("late", np.array([5.0, 0.0]))
    streams.wait(streams.send("one", transfer))
    assert streams.compute.tolist() == [5.0, 5.0]


# -- jitter and events ---------------------------------------------------------------------------


def test_the_same_seed_shakes_alike_and_another_one_differently() -> None:
    def end(seed: int | tuple[int, int]) -> list[float]:
        streams = even(jitter=0.2, link_jitter=0.2, seed=seed)
        streams.run("one", np.ones(2))
        streams.wait(streams.send("two", pair(1.0, 1.0)))
        return streams.compute.tolist()

    assert end(1) == end(1)
    assert end(1) != end(2)
    assert end((1, 0)) == end((1, 0)) != end((1, 1)) != end((0, 1))


def test_jitter_is_about_one_on_average_and_as_wide_as_it_says() -> None:
    streams = even(20_000, jitter=0.1)
    streams.run("one", np.full(20_000, 5.0))
    assert streams.compute.mean() == pytest.approx(5.0, rel=0.005)
    assert streams.compute.std() == pytest.approx(0.5, rel=0.03)


def test_jitter_never_makes_time_go_back() -> None:
    streams = even(20_000, jitter=0.9)
    streams.run("one", np.ones(20_000))
    assert streams.compute.min() > 0.3


def test_no_kernel_goes_below_the_least_factor_of_jitter() -> None:
    assert least_factor(0.0) == 1.0
    for jitter in (0.05, 0.5):
        streams = even(20_000, jitter=jitter)
        streams.run("one", np.ones(20_000))
        assert streams.compute.min() >= least_factor(jitter)


def test_nothing_is_shaken_where_nothing_happens() -> None:
    streams = even(3, jitter=0.5, link_jitter=0.5)
    streams.run("one", np.array([1.0, 1.0, 0.0]))
    streams.wait(streams.send("two", pair(1.0, 1.0, ranks=3)))
    assert streams.compute[2] == 0.0


def test_recorded_events_say_when_each_stream_worked() -> None:
    streams = even(record=True)
    streams.run("one", np.array([1.0, 4.0]))
    streams.send("two", pair(2.0, 2.0))
    assert streams.events is not None
    found = [(e.stream, e.what, e.start.tolist(), e.stop.tolist()) for e in streams.events]
    assert found == [
        ("compute", "one", [0.0, 0.0], [1.0, 4.0]),
        ("port", "two", [1.0, 4.0], [6.0, 6.0]),
    ]


def test_nothing_is_recorded_unless_asked_for() -> None:
    assert even().events is None


# -- against the oracle --------------------------------------------------------------------------


@st.composite
def stories(draw: Draw) -> tuple[int, list[tuple[str, Any]]]:
    """Any order of computing, sending and waiting, the same on all ranks."""
    ranks = draw(st.integers(2, 4))
    story: list[tuple[str, Any]] = []
    for _ in range(draw(st.integers(1, 12))):
        sent = [n for n, (verb, _) in enumerate(story) if verb == "send"]
        verb = draw(st.sampled_from(["run", "send", "wait"] if sent else ["run", "send"]))
        if verb == "run":
            story.append((verb, draw(kernels(ranks))))
        elif verb == "send":
            story.append((verb, draw(transfers(ranks))))
        else:
            story.append((verb, draw(st.sampled_from(sent))))
    return ranks, story


@given(stories(), st.booleans(), st.sampled_from([0.0, 0.25, 0.6]), st.data())
def test_any_program_takes_what_the_oracle_says(
    drawn: tuple[int, list[tuple[str, Any]]],
    isolated: bool,
    transfer_sms: float,
    data: st.DataObject,
) -> None:
    ranks, story = drawn
    speed = data.draw(speeds(ranks))
    streams = Streams(np.array(speed), isolated=isolated, transfer_sms=transfer_sms)
    done = {}
    programs: list[Program] = [[] for _ in range(ranks)]
    named = {}
    for n, (verb, what) in enumerate(story):
        if verb == "run":
            streams.run("run", np.array(what))
        elif verb == "send":
            done[n] = streams.send("send", transfer_of(what, ranks))
            itself = {rank: frozenset([rank]) for rank in what.seconds}
            named[n] = OracleTransfer(what.seconds, itself) if isolated else what
        else:
            streams.wait(done[what])
        for rank, program in enumerate(programs):
            run = what[rank] / speed[rank] if verb == "run" else None
            program.append((verb, {"run": run, "send": n, "wait": what}[verb]))
    expected = play(programs, named, transfer_sms)
    assert streams.compute.tolist() == close(expected.finish)
    assert streams.port.tolist() == close(expected.port)
    assert streams.busy.tolist() == close(expected.busy)
    assert streams.waited.tolist() == close(expected.waited)
