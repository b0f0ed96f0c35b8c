"""Timelines of simulated steps: valid for viewers, inside the step, one thing at a time."""

import json
from collections import defaultdict
from dataclasses import replace
from itertools import pairwise
from typing import Any

import pytest

from distca.pipeline.mesh import MeshShape
from distca.planning.models import ModelShape
from distca.sim import trace as tracing
from distca.sim.cluster import cluster
from distca.sim.scenario import Scenario, Way
from distca.sim.simulate import simulate
from distca.sim.trace import trace

SMALL = ModelShape("small", 4, 2, 128, layers=2, hidden=512, ffn=2048, vocab_size=32000)
SCENARIO = Scenario(SMALL, replace(cluster("h200"), gpus=4, gpus_per_node=2), 16384, 8)
WAYS = (
    Way("distca", MeshShape(cp=4), placement="balanced"),
    Way("distca", MeshShape(pp=2, cp=2), 2),
    Way("distca", MeshShape(cp=2, servers=2)),
    Way("wlb", MeshShape(pp=2, cp=2), 2),
)


def timeline(*ways: Way) -> tuple[dict[str, Any], list[float]]:
    """As a file would give it back, and the steps' seconds."""
    (batch,) = SCENARIO.batches(1)
    outcomes = [simulate(SCENARIO, way, batch, record=True) for way in ways]
    steps = {way: outcome.events for way, outcome in zip(ways, outcomes, strict=True)}
    return json.loads(json.dumps(trace(steps))), [outcome.step_s for outcome in outcomes]


@pytest.mark.parametrize("way", WAYS, ids=lambda way: f"{way.name}, {way.sizes}")
def test_events_lie_inside_the_step_and_follow_each_other(way: Way) -> None:
    read, (step_s,) = timeline(way)
    threads: dict[tuple[int, int], list[Any]] = defaultdict(list)
    for event in read["traceEvents"]:
        if event["ph"] == "X":
            assert event["dur"] > 0
            threads[event["pid"], event["tid"]].append((event["ts"], event["ts"] + event["dur"]))
    assert {lane for lane, _ in threads} == {0, 1, 2, 3}
    for spans in threads.values():
        assert spans[0][0] >= 0
        assert max(stop for _, stop in spans) <= step_s * 1e6 + 1e-3
        for (_, stop), (start, _) in pairwise(sorted(spans)):
            assert start >= stop - 1e-3


def test_several_steps_lie_side_by_side_with_names() -> None:
    read, _ = timeline(WAYS[1], WAYS[2])
    names = {
        event["pid"]: event["args"]["name"]
        for event in read["traceEvents"]
        if event["name"] == "process_name"
    }
    assert len(names) == 8
    assert names[3] == "distca, given: lane 3, stage 1"
    assert sorted(names.values())[:2] == [
        "distca, given, 2 servers: lane 0",
        "distca, given, 2 servers: lane 1",
    ]
    assert "distca, given, 2 servers: lane 3, serves" in names.values()
    threads = [event for event in read["traceEvents"] if event["name"] == "thread_name"]
    assert {event["args"]["name"] for event in threads} == {"compute", "port"}
    assert {event["pid"] for event in read["traceEvents"]} == set(names)


def test_many_lanes_are_cut(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(tracing, "MOST_LANES", 2)
    read, _ = timeline(WAYS[0])
    assert {event["pid"] for event in read["traceEvents"]} == {0, 1}
