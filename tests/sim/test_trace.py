"""Timelines of simulated steps: valid for viewers, inside the step, one thing at a time."""

import json
from collections import defaultdict
from dataclasses import replace
from itertools import pairwise
from typing import Any

import pytest

from distca.pipeline.mesh import MeshShape
from distca.pipeline.schedule import Schedule
from distca.planning.models import ModelShape
from distca.sim import trace as tracing
from distca.sim.cluster import cluster
from distca.sim.scenario import Scenario, Strategy
from distca.sim.simulate import simulate
from distca.sim.trace import trace

SMALL = ModelShape("small", 4, 2, 128, layers=2, hidden=512, ffn=2048, vocab_size=32000)
SCENARIO = Scenario(SMALL, replace(cluster("h200"), gpus=4, gpus_per_node=2), 16384, 8)
STRATEGIES = (
    Strategy("distca", MeshShape(cp=4), placement="balanced"),
    Strategy("distca", MeshShape(pp=2, cp=2), 2),
    Strategy("distca", MeshShape(cp=2, servers=2)),
    Strategy("wlb", MeshShape(pp=2, cp=2), 2),
)


def timeline(*strategies: Strategy) -> tuple[dict[str, Any], list[float]]:
    """As a file would give it back, and the steps' seconds."""
    (batch,) = SCENARIO.batches(1)
    outcomes = [simulate(SCENARIO, strategy, batch, record=True) for strategy in strategies]
    steps = {
        strategy: outcome.events for strategy, outcome in zip(strategies, outcomes, strict=True)
    }
    return json.loads(json.dumps(trace(steps))), [outcome.step_s for outcome in outcomes]


@pytest.mark.parametrize(
    "strategy", STRATEGIES, ids=lambda strategy: f"{strategy.name}, {strategy.sizes}"
)
def test_events_lie_inside_the_step_and_follow_each_other(strategy: Strategy) -> None:
    read, (step_s,) = timeline(strategy)
    threads: dict[tuple[int, int], list[Any]] = defaultdict(list)
    for event in read["traceEvents"]:
        if event["ph"] == "X":
            assert event["dur"] > 0
            threads[event["pid"], event["tid"]].append((event["ts"], event["ts"] + event["dur"]))
    assert {rank for rank, _ in threads} == {0, 1, 2, 3}
    for spans in threads.values():
        assert spans[0][0] >= 0
        assert max(stop for _, stop in spans) <= step_s * 1e6 + 1e-3
        for (_, stop), (start, _) in pairwise(sorted(spans)):
            assert start >= stop - 1e-3


def test_several_steps_lie_side_by_side_with_names() -> None:
    read, _ = timeline(STRATEGIES[1], STRATEGIES[2])
    names = {
        event["pid"]: event["args"]["name"]
        for event in read["traceEvents"]
        if event["name"] == "process_name"
    }
    assert len(names) == 8
    assert names[3] == "distca, given: rank 3, stage 1"
    assert sorted(names.values())[:2] == [
        "distca, given, 2 servers: rank 0",
        "distca, given, 2 servers: rank 1",
    ]
    assert "distca, given, 2 servers: rank 3, serves" in names.values()
    threads = [event for event in read["traceEvents"] if event["name"] == "thread_name"]
    assert {event["args"]["name"] for event in threads} == {"tick", "compute", "port"}
    assert {event["pid"] for event in threads if event["tid"] == 0} == {0, 1, 2, 3}  # the pipeline
    assert {event["pid"] for event in read["traceEvents"]} == set(names)


def test_ticks_follow_the_schedule() -> None:
    strategy = Strategy("distca", MeshShape(pp=2, cp=2), 2)
    read, _ = timeline(strategy)
    rows: dict[int, list[str]] = defaultdict(list)
    for event in sorted(read["traceEvents"], key=lambda event: event.get("ts", 0)):
        if event["ph"] == "X" and event["tid"] == 0:
            rows[event["pid"]].append(event["name"])
    schedule = Schedule.aligned(2, 2)
    words = {"F": "forward, micro-batch ", "B": "backward, micro-batch ", ".": "serves"}
    for rank, names in rows.items():
        cells = [tick.cell(rank // 2) for tick in schedule.ticks]
        assert names == [
            f"{words[cell[0]]}{cell[1:]}, tick {number}" for number, cell in enumerate(cells)
        ]
    assert set(rows) == {0, 1, 2, 3}


def test_many_ranks_are_cut(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(tracing, "MAX_RANKS", 2)
    read, _ = timeline(STRATEGIES[0])
    assert {event["pid"] for event in read["traceEvents"]} == {0, 1}
