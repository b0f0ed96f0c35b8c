"""The ticks of a step, as they are recorded."""

from __future__ import annotations

import json
from pathlib import Path

import numpy as np
import pytest
import torch

from distca.dispatch.meter import Meter
from distca.pipeline.mesh import MeshShape
from distca.pipeline.step_plan import StepPlan
from distca.pipeline.step_planner import StepPlanner
from distca.planning.masks import Mask
from distca.planning.options import PlanOptions
from distca.train.config import LogSection
from distca.train.metrics import Records
from distca.train.tick_record import MEASURED, measured_ticks, tick_record
from distca.train.trackers import Trackers

CPU = torch.device("cpu")


@pytest.fixture(scope="module")
def plan() -> StepPlan:
    options = PlanOptions(heads=2, kv_heads=1, head_dim=8, cost="pairs")
    speed = (1.0, 1.0, 1.0, 0.5, 1.0)
    mesh = MeshShape(pp=2, dp=2, servers=1)
    planner = StepPlanner(mesh, (Mask.parse("causal"),) * 2, options, micro_batches=2)
    return planner.with_speed(speed).plan(np.array([700, 300, 400, 100, 50, 50]))


def test_the_record_has_what_was_planned_and_measured(plan: StepPlan) -> None:
    plan_rank = torch.tensor([0, 0, 1, 1, 2, 2, 3, 3, 4, 4])  # with tp 2
    ticks = len(plan.schedule.ticks)
    measured = torch.rand(10, ticks, len(MEASURED), dtype=torch.float64)
    record = tick_record(plan, plan_rank, measured)
    assert record["workers_per_stage"] == 2
    assert record["cells"][0] == ["F0", "."]
    for tick in range(ticks):
        backward = record["phases"][tick] == "B"
        for rank in range(5):
            load = sum(
                (one.backward_load_ps if backward else one.forward_load_ps)[rank]
                / one.devices.speed[rank]
                for slot in plan.slots[tick]
                for one in slot
                if one.devices.speed[rank]
            )
            assert record["planned_s"][tick][rank] == pytest.approx(load / 1e12, abs=1e-6)
            for name in ("tick", "attention", "exposed"):
                both = measured[2 * rank : 2 * rank + 2, tick, MEASURED.index(name)]
                assert record[f"{name}_s"][tick][rank] == pytest.approx(float(both.max()), abs=1e-6)


def test_only_the_ticks_of_the_last_step_count() -> None:
    meters = [Meter(), Meter()]
    for planned_s in (100.0, 1.0, 2.0, 3.0):  # first a tick of an evaluation
        for meter in meters:
            meter.start_lap()
            with meter.time("attention", CPU, planned_s=planned_s):
                pass
    table = measured_ticks(meters, 3)
    assert table[:, MEASURED.index("planned")].tolist() == [2.0, 4.0, 6.0]


def test_the_newest_and_the_slowest_step_are_kept(tmp_path: Path) -> None:
    records = Records(tmp_path, 0, Trackers(LogSection(), tmp_path, {}))
    for step, seconds in enumerate((9.0, 2.0, 5.0, 3.0)):
        record = {"step": step, "seconds": seconds, "ticks": {"cells": [["F0"]]}}
        records.write(record)
        assert "ticks" not in record
    records.close()
    found = json.loads((tmp_path / "ticks.json").read_text())
    assert {which: one["step"] for which, one in found.items()} == {"newest": 3, "slowest": 2}
    Records(tmp_path, 4, Trackers(LogSection(), tmp_path, {})).close()
    assert (tmp_path / "ticks.json").exists()  # a run that continues keeps them
    Records(tmp_path, 0, Trackers(LogSection(), tmp_path, {})).close()
    assert not (tmp_path / "ticks.json").exists()
