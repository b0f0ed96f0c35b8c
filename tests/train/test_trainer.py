"""Whole runs in real processes: one curve on any mesh, resumption, evaluation, frozen layers."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from quick import others_slow
from ranks import World
from train.runs import clocked, fit, fit_on_nodes, preparing

TINY = {
    "model.sizes": "{layers=2, hidden=32, heads=4, kv_heads=2, head_dim=8, ffn=48}",
    "data.sources": '["lognormal:120:1.6"]',
    "data.tokenizer": '"ids:61"',
    "data.context": "600",
    "data.held_out": "0.05",
    "train.tokens_per_step": "2400",
    "train.steps": "20",
    "train.lr": "0.003",
    "train.warmup": "3",
}
ALONE: dict[str, str] = {}
COLOCATED = {"parallel.policy": "colocated", "parallel.placement": "given"}
PING_PONG = {"parallel.ping_pong": "true", "parallel.recompute": "true"}
PIPELINE = {"parallel.pp": "2", "parallel.micro_batches": "4"}
SERVED = {"parallel.servers": "1", "parallel.placement": "given"}
MESHES: dict[str, tuple[int, dict[str, str]]] = {
    "dp2, ping-pong": (2, PING_PONG),
    "2 + 1 server": (3, SERVED),
}
OTHERS: dict[str, tuple[int, dict[str, str]]] = {
    "dp2, colocated": (2, COLOCATED),
    "cp2": (2, {"parallel.cp": "2", "parallel.placement": "given"}),
    "tp2": (2, {"parallel.tp": "2"}),
    "dp2 x tp2, ping-pong": (4, {"parallel.tp": "2", **PING_PONG}),
    "dp2 x cp2": (4, {"parallel.cp": "2", "parallel.placement": "given"}),
    "2 + 2 servers, ping-pong": (4, {"parallel.servers": "2", **PING_PONG}),
    "dp2, three micro-batches": (2, {"parallel.micro_batches": "3"}),
    "pp2, ping-pong": (2, {"parallel.pp": "2", "parallel.micro_batches": "2", **PING_PONG}),
    "pp2 x dp2": (4, PIPELINE),
    "pp2 x tp2": (4, {"parallel.tp": "2", **PIPELINE}),
    "pp2 x dp2 + 1 server": (5, {"parallel.servers": "1", **PIPELINE}),
}


def run(world: World, ranks: int, out: Path, **settings: str) -> list[dict[str, Any]]:
    chosen = [f"{name}={value}" for name, value in {**TINY, **settings}.items()]
    return world(ranks).run(fit, [*chosen, f"out={out}"], ranks=ranks)[0]


def losses(records: list[dict[str, Any]]) -> list[float]:
    return [record["loss"] for record in records]


@pytest.fixture(scope="module")
def alone(world: World, tmp_path_factory: pytest.TempPathFactory) -> list[dict[str, Any]]:
    return run(world, 1, tmp_path_factory.mktemp("alone"), **ALONE)


def check_curve(world: World, mesh: tuple[int, dict[str, str]], out: Path, right: Any) -> None:
    ranks, settings = mesh
    found = run(world, ranks, out, **settings)
    assert losses(found) == pytest.approx(losses(right), rel=1e-4)
    if ranks // int(settings.get("parallel.tp", 1)) > 1 and settings is not COLOCATED:
        assert sum(record["bytes"] > 0 for record in found) > len(found) / 2  # they do exchange
    if settings is SERVED:  # one server computes all attention: workers do not count as idle
        assert {record["imbalance_measured"] for record in found} == {1.0}


@pytest.mark.parametrize("mesh", MESHES)
def test_the_curve_is_that_of_one_rank(world: World, mesh: str, tmp_path: Path, alone: Any) -> None:
    check_curve(world, MESHES[mesh], tmp_path, alone)


@pytest.mark.slow
@pytest.mark.parametrize("mesh", OTHERS)
def test_the_curve_on_other_meshes(world: World, mesh: str, tmp_path: Path, alone: Any) -> None:
    check_curve(world, OTHERS[mesh], tmp_path, alone)


def test_layouts_are_made_by_the_thread_that_plans(world: World, tmp_path: Path) -> None:
    chosen = [
        f"{name}={value}" for name, value in {**TINY, **PING_PONG, "train.steps": "3"}.items()
    ]
    for counts in world(2).run(preparing, [*chosen, f"out={tmp_path}"], ranks=2):
        assert sum(counts.values()) >= 3 * 2 * 2  # steps, halves, directions
        assert all(name.startswith("distca-plan") for name in counts), counts


def test_nodes_may_hold_different_numbers_of_ranks(world: World, tmp_path: Path) -> None:
    """Ranks that derived it from the number of ranks on their own node would plan differently."""
    settings = [f"{name}={value}" for name, value in {**TINY, "train.steps": "2"}.items()]
    for node_of, planned, num_local in (
        ([0, 0, 0, 1], [0, 0, 0, 1], [3, 3, 3, 1]),
        ([0, 1, 1, 1], [0, 1, 2, 3], [1, 3, 3, 3]),  # blocks of one rank, which no border cuts
    ):
        out = tmp_path / str(num_local[0])
        answers = world(4).run(fit_on_nodes, [*settings, f"out={out}"], node_of, ranks=4)
        assert [len(records) for records, *_ in answers] == [2, 0, 0, 0]
        assert [found for _, found, _ in answers] == [planned] * 4
        assert [local for *_, local in answers] == num_local


def test_kernels_are_loaded_before_the_clock_of_a_step_starts(world: World, tmp_path: Path) -> None:
    """Ranks that share a GPU load some in every step, which ranks with their own do not."""
    settings = [f"{name}={value}" for name, value in {**TINY, "train.steps": "2"}.items()]
    (events,) = world(1).run(clocked, [*settings, f"out={tmp_path}"], ranks=1)
    # What the step itself asks for has been loaded then.
    assert events == ["kernels", "clock", "kernels", "clock"] * 2


def test_it_trains_and_writes_it_down(tmp_path: Path, world: World, alone: Any) -> None:
    assert np.mean(losses(alone)[-3:]) < losses(alone)[0] - 0.02
    records = run(world, 1, tmp_path, **{"train.steps": "3"})
    lines = (tmp_path / "metrics.jsonl").read_text().splitlines()
    assert [json.loads(line) for line in lines] == records
    assert json.loads((tmp_path / "config.json").read_text())["train"]["steps"] == 3
    assert records[0]["tokens"] == 2400
    assert records[-1]["lr"] == pytest.approx(0.003)


def test_another_world_goes_on_where_the_first_stopped(
    world: World, tmp_path: Path, alone: Any
) -> None:
    saving = {"train.checkpoint_every": "4"}
    first = run(world, 2, tmp_path, **saving, **{"train.steps": "20", "stop_after": "8"})
    assert losses(first) == pytest.approx(losses(alone)[:8], rel=1e-4)
    rest = run(world, 1, tmp_path, **saving)
    assert [record["step"] for record in rest] == list(range(8, 20))
    assert losses(rest) == pytest.approx(losses(alone)[8:], rel=1e-4)
    lines = (tmp_path / "metrics.jsonl").read_text().splitlines()
    assert [json.loads(line)["step"] for line in lines] == list(range(20))


@pytest.mark.slow
@pytest.mark.parametrize("tied", ["false", "true"])
def test_stages_go_on_where_one_stage_stopped_and_back(
    world: World, tmp_path: Path, tied: str
) -> None:
    model = {"model.sizes": TINY["model.sizes"].replace("}", f", tied={tied}}}")}
    settings = {**model, "train.steps": "9", "train.checkpoint_every": "3"}
    right = run(world, 1, tmp_path / "whole", **settings)
    out = tmp_path / "turns"
    turns = [(2, PIPELINE, "3"), (1, {}, "6"), (2, PIPELINE, "9")]
    found = [
        record
        for ranks, way, stop in turns
        for record in run(world, ranks, out, **settings, **way, stop_after=stop)
    ]
    assert [record["step"] for record in found] == list(range(9))
    assert losses(found) == pytest.approx(losses(right), rel=1e-4)
    norms = [[record["grad_norm"] for record in records] for records in (found, right)]
    assert norms[0] == pytest.approx(norms[1], rel=1e-3)


@pytest.mark.slow
def test_held_out_loss_is_the_same_on_any_mesh(world: World, tmp_path: Path) -> None:
    settings = {"train.steps": "2", "train.eval_every": "2", "train.eval_tokens": "2000"}
    one = run(world, 1, tmp_path / "one", **settings)[-1]
    two = run(world, 2, tmp_path / "two", **settings, **PING_PONG)[-1]
    three = run(world, 3, tmp_path / "three", **settings, **SERVED)[-1]
    stages = run(world, 2, tmp_path / "stages", **settings, **PIPELINE)[-1]
    names = [name for name in one if name.startswith("eval_loss")]
    assert len(names) > 1  # in all, and by length
    assert not [name for name in one if " " in name]
    for other in (two, three, stages):
        assert [other[name] for name in names] == pytest.approx([one[n] for n in names], rel=1e-4)


@pytest.mark.parametrize(
    "mesh", others_slow([*MESHES, "dp2, colocated", "pp2 x dp2"], quick={"dp2, ping-pong"})
)
def test_frozen_layers(world: World, mesh: str, tmp_path: Path) -> None:
    ranks, settings = {**MESHES, **OTHERS}[mesh]
    frozen = {"train.frozen": '["seams.0.*", "seams.1.after.*"]', "train.steps": "3"}
    right = run(world, 1, tmp_path / "right", **frozen)
    found = run(world, ranks, tmp_path / "found", **frozen, **settings)
    assert losses(found) == pytest.approx(losses(right), rel=1e-4)


def test_a_pattern_that_fits_nothing_is_told(world: World, tmp_path: Path) -> None:
    answers = world(1).answers(
        fit, [*(f"{k}={v}" for k, v in TINY.items()), 'train.frozen=["layers.*"]'], ranks=1
    )
    assert "matches no parameter; names look like seams.0" in str(answers[0][0])


def test_a_trace_shows_all_ranks_and_what_they_do(world: World, tmp_path: Path) -> None:
    settings = {"train.steps": "2", "train.trace": "1", "parallel.placement": "given"}
    settings |= {"parallel.pp": "2", "parallel.micro_batches": "2", **PING_PONG}
    run(world, 2, tmp_path, **settings)
    events = json.loads((tmp_path / "traces" / "trace.json").read_text())["traceEvents"]
    ranks = {event["args"]["name"] for event in events if event["name"] == "process_name"}
    assert ranks == {"rank 0", "rank 1"}
    exchanges = [event for event in events if "alltoall" in event["name"].replace("_", "")]
    assert {event["pid"].split(".")[0] for event in exchanges} == {"0", "1"}
    # Stage 1 has layer 1. In tick 0 it has no micro-batch, and serves.
    for path in (
        ["step 1", "tick 0 F: .", "forward compute, slot 0, pong"],
        ["step 1", "tick 1 F: F0", "forward dispatch, layer 1, ping"],
        ["step 1", "tick 2 B: B0", "backward combine, layer 1, pong"],
    ):
        assert has_nested([event for event in events if event["pid"].startswith("1.")], path)
    newest = json.loads((tmp_path / "ticks.json").read_text())["newest"]
    record = json.loads((tmp_path / "metrics.jsonl").read_text().splitlines()[-1])
    assert newest["step"] == record["step"] == 1
    assert newest["cells"][:3] == [["F0", "."], ["F1", "F0"], [".", "B0"]]
    for name in ("attention_s", "exposed_s"):
        of_ranks = np.sum(newest[name], axis=0)
        assert of_ranks == pytest.approx(record["ranks"][name], abs=1e-4)
    assert np.sum(newest["tick_s"], axis=0).max() < record["seconds"]


def has_nested(events: list[dict[str, Any]], names: list[str]) -> bool:
    """Whether there are events with these names, each of them inside the one before."""
    if not names:
        return True
    inside = [e for e in events if e["name"] == names[0] and e["ph"] == "X"]
    return any(
        has_nested([e for e in events if _contains(outer, e)], names[1:]) for outer in inside
    )


def _contains(outer: dict[str, Any], event: dict[str, Any]) -> bool:
    end = outer["ts"] + outer["dur"]
    return event["ph"] == "X" and outer["ts"] <= event["ts"] <= event["ts"] + event["dur"] <= end


def test_compiling_on_a_cpu_is_refused(world: World, tmp_path: Path) -> None:
    settings = [*(f"{k}={v}" for k, v in TINY.items()), "parallel.compile=true"]
    (answer,) = world(1).answers(fit, settings, ranks=1)
    assert "compile = true works on GPUs only" in str(answer[0])
