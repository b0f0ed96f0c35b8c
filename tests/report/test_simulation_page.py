"""Pages of simulations and replays have what their records have."""

import contextlib
import io
import json
import shutil
from pathlib import Path
from typing import Any

import pytest

from distca.cli import main
from distca.cli.report_inputs import read_page
from distca.report.pages.page import Page, Section
from distca.report.pages.replay import replay_page
from distca.report.pages.simulation import simulation_page
from distca.report.pages.timeline import timeline_record

SMALL = (
    "--layers=2", "--hidden=1024", "--ffn=4096", "--heads=8", "--kv-heads=4", "--vocab-size=8192",
    "--gpus-per-node=2", "--tp=1", "--batches=1", "--context=64K", "--sequences=2",
    "--policy=wlb", "--policy=distca", "--placement=given",
)  # fmt: skip
SECONDS = {"step": 0.5, "exposed": 0.1, "attention": 0.3, "host": 0.4}


@pytest.fixture(scope="module")
def made(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder with a simulation and its timeline."""
    folder = tmp_path_factory.mktemp("made")
    out = io.StringIO()
    with pytest.raises(SystemExit), contextlib.redirect_stdout(out):
        main(["simulate", *SMALL, "--gpus=2,4", "--json", f"--trace={folder / 'trace.json'}"])
    (folder / "simulation.json").write_text(out.getvalue())
    return folder


@pytest.fixture
def simulated(made: Path, tmp_path: Path) -> Path:
    """A copy that a test may change; its timeline is found beside it."""
    record = json.loads((made / "simulation.json").read_text())
    record["trace"] = "elsewhere/trace.json"
    (tmp_path / "simulation.json").write_text(json.dumps(record))
    shutil.copy(made / "trace.json", tmp_path)
    return tmp_path / "simulation.json"


def named(page: Page) -> dict[str, Section]:
    return {section.name: section for section in page.sections}


def check_figures(page: Page) -> None:
    graph_objects = pytest.importorskip("plotly.graph_objects")
    for section in page.sections:
        if section.figure is not None:
            graph_objects.Figure(section.figure)  # raises for an unknown property


def test_policies_scaling_verdict_and_timeline(simulated: Path) -> None:
    record = json.loads(simulated.read_text())
    kind, page = read_page([simulated])
    assert kind == "simulation"
    check_figures(page)
    found = named(page)
    assert page.words[0] == f"4 GPUs: {record['runs'][-1]['verdict']['text']}"
    steps = found["step"].figure["data"][0]["x"]
    assert steps == [one["step_s"] for one in record["runs"][-1]["strategies"]]
    line = found["scaling"].figure["data"][0]
    assert (line["name"], line["x"]) == ("wlb", [2, 4])
    assert len(found["all"].table.rows) == 4
    assert any("trace.json, too: open it at ui.perfetto.dev" in words for words in page.words)
    trace = json.loads(simulated.with_name("trace.json").read_text())
    drawn = found["timeline"].view
    slices = [one for one in trace["traceEvents"] if one["ph"] == "X"]
    assert len(drawn["from"]) == len(slices)
    spent = sum(b - a for a, b in zip(drawn["from"], drawn["to"], strict=True))
    assert spent == pytest.approx(sum(one["dur"] for one in slices) / 1e6, rel=1e-3)


def test_a_page_without_its_timeline_and_with_a_refused_policy(simulated: Path) -> None:
    record = json.loads(simulated.read_text())
    simulated.with_name("trace.json").unlink()
    assert "timeline" not in named(read_page([simulated])[1])
    del record["runs"][0], record["trace"]
    record["runs"][0]["strategies"][0] = {"policy": "wlb", "error": "it cannot"}
    page = simulation_page("name", record)
    check_figures(page)
    assert "scaling" not in named(page)
    assert named(page)["all"].table.rows[0][:3] == ["4", "wlb", "it cannot"]


def test_a_damaged_simulation_is_one_sentence(simulated: Path) -> None:
    whole = simulated.read_text()
    record = json.loads(whole)
    del record["runs"][0]["verdict"]
    simulated.write_text(json.dumps(record))
    with pytest.raises(ValueError, match=r"is damaged \(KeyError: 'verdict'\): make it again with"):
        read_page([simulated])
    record = json.loads(whole)
    record["cluster"]["inside"]["bytes_per_s"] = 10**400
    simulated.write_text(json.dumps(record))
    with pytest.raises(ValueError, match=r"is damaged \(OverflowError: "):
        read_page([simulated])


def test_rows_of_a_timeline_are_streams_of_ranks() -> None:
    def event(pid: int, tid: int, name: str, ts: float, dur: float) -> dict[str, Any]:
        return {"ph": "X", "pid": pid, "tid": tid, "name": name, "ts": ts, "dur": dur}

    names = [
        {"ph": "M", "pid": pid, "tid": tid, "name": what, "args": {"name": name}}
        for pid in (0, 1)
        for what, tid, name in (
            ("process_name", 0, f"rank {pid}"),
            ("thread_name", 0, "compute"),
            ("thread_name", 1, "port"),
        )
    ]
    events = [event(1, 0, "linear, layer 1", 5e6, 1e6), event(0, 1, "dispatch, layer 0", 0.0, 2e6)]
    found = timeline_record({"traceEvents": [*names, *events]})
    assert found == {
        "rows": ["rank 0, port", "rank 1, compute"],
        "names": ["dispatch, layer 0", "linear, layer 1"],
        "kinds": ["dispatch", "linear"],
        "row": [0, 1],
        "name": [0, 1],
        "kind": [0, 1],
        "from": [0.0, 5.0],
        "to": [2.0, 6.0],
    }


def test_a_replay_is_drawn_case_by_case(tmp_path: Path) -> None:
    row = {
        "rank": 3, "why": "most traffic", "calibrates": False, "tokens": 1024, "sent_bytes": 1e6,
        "received_bytes": 2e6, "measured": SECONDS, "simulated": SECONDS, "calibrated": SECONDS,
    }  # fmt: skip
    case = {
        "ranks": 16, "tp": 1, "tokens": 1024, "context": 8192, "lengths": "pretrain",
        "placement": "given", "ping_pong": True, "cost": "cpu", "bytes_per_s": 5e10,
        "latency_s": 2e-5, "model": "debug", "layers": 2, "backend": "sdpa", "device": "a CPU",
        "torch": "2", "plan_s": 0.1, "imbalance_before": 2.0, "imbalance": 1.02, "step_s": 0.5,
        "exposed_s": 0.1, "worst_over_mean": 1.1, "simulated_worst_over_mean": 1.0,
        "factors": {"linear": 1.0, "attention": 1.0}, "raw": {"mean": 0.1, "worst": 0.2},
        "calibrated": {"mean": 0.05, "worst": 0.1}, "rows": [row, row | {"calibrates": True}],
    }  # fmt: skip
    page = replay_page("name", [case, case | {"ping_pong": False}])
    check_figures(page)
    drawn = named(page)["steps-0"].figure["data"]
    assert [one["name"] for one in drawn] == ["measured", "simulated", "fitted"]
    assert drawn[0]["y"] == [500.0, 500.0]
    assert drawn[0]["x"] == ["3", "3*"]
    lines = tmp_path / "replay.jsonl"  # as --out appends them
    lines.write_text(json.dumps(case) + "\n" + json.dumps(case) + "\n")
    kind, page = read_page([lines])
    assert kind == "replay"
    assert len(page.words) == 2
    lines.write_text(json.dumps(case) + "\n")
    assert read_page([lines])[0] == "replay"
