"""The little cluster: its script on two CPU ranks, its figures, and its predictions."""

from __future__ import annotations

import json
import subprocess
import sys
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from types import ModuleType
from typing import Any

import numpy as np
import pytest

from distca.model.sizes import model_config
from distca.pipeline.mesh import MeshShape
from distca.pipeline.step_plan import StepPlan
from distca.planning.costs.profile import MeasuredExchange, Profile
from distca.sim.cluster import Cluster, Link
from distca.sim.scenario import Scenario, Strategy
from distca.sim.simulate import simulate

FOLDER = Path(__file__).parents[2] / "benchmarks"
LINK = Link(50e9, 30e-6)


@pytest.fixture(scope="module")
def scripts() -> Iterator[dict[str, ModuleType]]:
    """The script and its parts, which import each other as if from their folder."""
    names = ("cluster_report", "cluster_predict", "cluster_predict_again")
    sys.path.insert(0, str(FOLDER))
    try:
        yield {name: __import__(name) for name in names}
    finally:
        sys.path.remove(str(FOLDER))


def about(**changes: Any) -> dict[str, Any]:
    return {
        "ranks": 4, "lengths": "even", "context": "64K", "backend": "flash", "model": "m",
        "recompute": True, "card": "c", "SMs": 32, "torch": "2", "NCCL": "2.30", "sides": "a,b",
        "profile": "", "date": "today", "command": "python benchmarks/cluster_gpu.py",
    } | changes  # fmt: skip


def figures(seconds: float, loss: float = 8.0, predicted: float | None = None) -> dict[str, Any]:
    return {
        "seconds": seconds, "loss": loss, "attention_worst": 0.3, "attention_mean": 0.2,
        "exposed": 0.1, "bytes": 10**9, "step_bytes": 1 << 30, "predicted": predicted,
        "alloc_retries": 0,
    }  # fmt: skip


def test_ratios_are_over_whole_runs(scripts: dict[str, ModuleType]) -> None:
    report = scripts["cluster_report"]
    cell = report.Cell(about(), tokens=1000)
    for base, other in ((2.0, 1.0), (4.0, 3.0)):
        cell.add("packed-dp", figures(base))
        cell.add("given", figures(other, loss=8.5, predicted=1.0))
    cell.sides["torch-cp"] = {"refused": "no GPU"}
    given = report.rows(cell)[1]
    assert given["ratio"] == pytest.approx(6 / 4)
    assert given["single steps"] == "1.33 / 1.67 / 2.00"
    assert given["tokens/s"] == pytest.approx(500)
    assert given["worst/mean attention"] == pytest.approx(1.5)
    assert given["exposed %"] == pytest.approx(5)
    assert given["loss difference"] == 0.5
    assert given["measured/predicted"] == pytest.approx(2)
    assert "torch-cp did not run: no GPU" in report.table(cell)


def test_a_new_run_replaces_its_cell_and_a_resumed_one_continues(
    scripts: dict[str, ModuleType], tmp_path: Path
) -> None:
    report = scripts["cluster_report"]
    other, cell = report.Cell(about(ranks=8), 1000), report.Cell(about(), 1000)
    for one in (other, cell):
        one.add("packed-dp", figures(1.0))
        one.add("given", figures(1.0))
    cell.add("packed-dp", figures(2.0))  # killed before the other side had its turn
    report.write_cell(other, tmp_path)
    report.write_cell(cell, tmp_path)
    known = report.read_cell(about(), tmp_path)
    assert known.num_steps == 1
    assert known.sides["packed-dp"]["seconds"] == [1.0]
    assert report.read_cell(about(torch="3"), tmp_path) is None
    report.write_cell(report.Cell(about(), 1000), tmp_path)
    assert len(json.loads((tmp_path / "cluster_gpu.json").read_text())) == 2
    text = (tmp_path / "cluster_gpu.md").read_text()
    assert "## 8 ranks, even, context 64K, flash" in text
    assert "no steps yet" in text


@pytest.fixture
def profile(tmp_path: Path) -> str:
    sizes = [1 << power for power in (20, 23, 26, 29)]
    exchange = [
        MeasuredExchange(size, size / float(LINK.seconds(np.array(size)))) for size in sizes
    ]
    path = tmp_path / "profile.json"
    replace(Profile.read("h200-flash"), exchange=tuple(exchange)).write(path)
    return str(path)


def test_the_link_is_fitted(scripts: dict[str, ModuleType], profile: str) -> None:
    link = scripts["cluster_predict"].link_of(Profile.read(profile))
    assert link.bytes_per_s == pytest.approx(LINK.bytes_per_s, rel=1e-6)
    assert link.latency_s == pytest.approx(LINK.latency_s, rel=1e-6)


@pytest.mark.parametrize("ping_pong", [False, True])
def test_a_prediction_is_that_of_the_simulator(
    scripts: dict[str, ModuleType], profile: str, ping_pong: bool
) -> None:
    config = replace(model_config("llama3.2-1b"), layers=2, vocab_size=4096, tied=False)
    parallel = MeshShape(dp=4)
    cluster = Cluster("shared", 4, 4, 0, LINK, LINK, profile=profile, transfer_sms=0.25)
    scenario = Scenario(config.shape, cluster, 16384, 4)
    (batch,) = scenario.batches(1)
    simulated = simulate(scenario, Strategy("distca", parallel, ping_pong=ping_pong), batch)
    assert isinstance(simulated.planned, StepPlan)
    predict = scripts["cluster_predict"].predictor(
        profile, config, 4, recompute=True, transfer_sms=0.25
    )
    assert predict(simulated.planned, parallel) == pytest.approx(simulated.step_s, rel=1e-6)
    assert predict(None, parallel) is None


@pytest.mark.parametrize(("ranks", "sms", "share"), [(4, 32, 8 / 32), (8, 14, 4 / 14), (2, 0, 0)])
def test_transfers_occupy_the_sms_that_nccl_may_use(
    scripts: dict[str, ModuleType], ranks: int, sms: int, share: float
) -> None:
    assert scripts["cluster_predict"].transfer_sms_of(ranks, sms) == share


@pytest.fixture
def measured(scripts: dict[str, ModuleType], profile: str) -> Any:
    """Two measured steps, with the bytes of their plans and without predictions."""
    options = f"--lengths prolong --context 4K --layers 1 --profile {profile}"
    command = f"python benchmarks/cluster_gpu.py {options} (1 step, then 1 with --resume)"
    cell = scripts["cluster_report"].Cell(about(profile=profile, command=command), 4 * 4096)
    again = scripts["cluster_predict_again"]
    chosen = again.options_of(options.split())
    for name, way in (("given+ping-pong", again.WAYS["given+ping-pong"]), ("torch-cp", None)):
        for seed in range(2):
            record = figures(1.0)
            if way is not None:
                choices = again.planners_of(chosen, again.model_of(chosen), way)
                plan = again.plan_step(choices, again.batch_of(chosen, seed)).plan
                record["bytes"] = plan.num_bytes
            cell.add(name, record)
    return cell


def test_measured_steps_are_predicted_again(scripts: dict[str, ModuleType], measured: Any) -> None:
    again = scripts["cluster_predict_again"].predict_again
    side = measured.sides["given+ping-pong"]
    again(measured, transfer_sms=0.0)
    free = side["predicted"]
    assert min(free) > 0
    assert free[0] != free[1]
    again(measured)  # 8 thread blocks on 32 SMs
    assert all(slowed > alone for slowed, alone in zip(side["predicted"], free, strict=True))
    assert measured.sides["torch-cp"]["predicted"] == [None, None]


def test_other_plans_than_those_that_ran_predict_nothing(
    scripts: dict[str, ModuleType], measured: Any, capsys: pytest.CaptureFixture[str]
) -> None:
    side = measured.sides["given+ping-pong"]
    side["bytes"][1] += 1
    scripts["cluster_predict_again"].predict_again(measured)
    assert side["predicted"] == [None, None]
    assert (
        "given+ping-pong has other plans now, and keeps its predictions" in capsys.readouterr().out
    )


@pytest.mark.slow
def test_the_script_runs_on_the_cpu(tmp_path: Path) -> None:
    command = [sys.executable, str(FOLDER / "cluster_gpu.py"), "--cpu", f"--out={tmp_path}"]
    ran = subprocess.run(command, cwd=tmp_path, capture_output=True, text=True, timeout=110)
    assert ran.returncode == 0, ran.stderr
    (cell,) = json.loads((tmp_path / "cluster_gpu.json").read_text()).values()
    assert "sharding strategy" in cell["sides"].pop("torch-cp")["refused"]
    base = cell["sides"]["packed-dp"]
    assert len(cell["sides"]) == 10
    for side in cell["sides"].values():
        assert len(side["seconds"]) == 2
        assert side["loss"] == pytest.approx(base["loss"], abs=1e-5)
