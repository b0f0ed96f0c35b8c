"""Spans add up by name, are taken once, and do not accumulate without limit."""

from __future__ import annotations

import time

import pytest
import torch

from distca.dispatch.meter import PENDING, Meter

CPU = torch.device("cpu")


def test_spans_add_up_and_are_taken_once() -> None:
    meter = Meter()
    for _ in range(2):
        with meter.time("attention", CPU):
            time.sleep(0.01)
    with meter.time("exposed", CPU):
        pass
    taken = meter.take()
    assert taken.keys() == {"attention", "exposed"}
    assert taken["attention"] >= 0.02 > taken["exposed"]
    assert meter.take() == {}


def test_laps_have_their_own_sums() -> None:
    meter = Meter()
    with meter.time("attention", CPU, planned_s=1.0):
        meter.start_lap()  # what has begun before belongs to the lap before
    for _ in range(2):
        with meter.time("attention", CPU, planned_s=2.0):
            pass
    meter.start_lap()
    assert [lap["planned"] for lap in meter.take_laps()] == [1.0, 4.0, 0.0]
    assert meter.take_laps() == [{}]


def test_planned_seconds_come_with_measured_ones() -> None:
    meter = Meter()
    for _ in range(2):
        with meter.time("attention", CPU, planned_s=3.0):
            pass
    assert meter.take(wait=False)["planned"] == 6.0
    assert meter.take() == {}


@pytest.mark.gpu
def test_without_waiting_only_what_has_ended_is_taken() -> None:
    meter, device = Meter(), torch.device("cuda")
    with meter.time("attention", device, planned_s=1.0):
        pass
    torch.cuda.synchronize()
    with meter.time("attention", device, planned_s=2.0):
        torch.cuda._sleep(2_000_000_000)  # about a second
    assert meter.take(wait=False)["planned"] == 1.0
    assert meter.take()["planned"] == 2.0


@pytest.mark.gpu
def test_laps_of_a_gpu_do_not_mix() -> None:
    meter, device = Meter(), torch.device("cuda")
    for planned_s in (1.0, 2.0):
        meter.start_lap()
        with meter.time("attention", device, planned_s=planned_s):
            torch.cuda._sleep(1000)
    assert [lap["planned"] for lap in meter.take_laps()] == [0.0, 1.0, 2.0]


@pytest.mark.gpu
def test_events_of_a_gpu_do_not_pile_up() -> None:
    meter, device = Meter(), torch.device("cuda")
    for _ in range(3 * PENDING):
        with meter.time("attention", device):
            torch.cuda._sleep(1000)
        if len(meter._events) >= PENDING:
            torch.cuda.synchronize()
    assert len(meter._events) <= PENDING + 1
    assert meter.take()["attention"] > 0
    assert not meter._events
