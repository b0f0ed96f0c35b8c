"""``distca profile`` as people and machines call it."""

import json
import subprocess
import sys
from dataclasses import replace
from pathlib import Path
from signal import SIGINT, SIGTERM
from typing import Any

import pytest
from measure.measured import TINY

from distca.cli import main
from distca.measure.bench import Bench, Scope
from distca.planning.costs.profile import Profile
from distca.runtime.rank_watch import Stop


@pytest.fixture
def run(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> Any:
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("COLUMNS", "80")
    monkeypatch.setattr(Scope, "of", lambda *_: TINY)

    def call(*args: str, status: int = 0) -> tuple[str, str]:
        with pytest.raises(SystemExit) as exited:
            main([*args])
        out, err = capsys.readouterr()
        assert exited.value.code == status, err
        return out, err

    return call


def test_people_see_lines_and_tables(run: Any) -> None:
    out, err = run("profile")
    assert err == ""
    assert "figure 11/12  held out, 4 of 4" in out
    for words in ("forward,", "backward,", "GFLOP/s", "linear", "copy", "of 4 held-out calls"):
        assert words in out
    assert "distca plan ... --cost profile.json" in out
    assert max(map(len, out.splitlines())) <= 80


def test_machines_get_one_object_and_plans_take_the_file(run: Any) -> None:
    out, err = run("profile", "--json", "--out", "mine.json", "--model", "150m")
    assert err == ""
    record = json.loads(out)
    assert (record["name"], record["out"], record["head_dim"]) == ("mine", "mine.json", 64)
    assert record["forward_errors"].keys() == {"median", "worst"}
    assert Profile.from_json(record) == Profile.read("mine.json")
    out, _ = run(
        "plan",
        "fixed:2000",
        "--ranks=2",
        "--context=4K",
        "--cost=mine.json",
        "--json",
        "--heads=4",
        "--head-dim=32",
    )
    assert json.loads(out)["cost"] == "mine"


def test_it_goes_on_and_then_has_all(run: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    right, calls = Bench.attention, []

    def stop_at_fourth(*args: Any) -> Any:
        calls.append(args)
        if len(calls) == 4:
            raise KeyboardInterrupt
        return right(*args)

    monkeypatch.setattr(Bench, "attention", stop_at_fourth)
    _, err = run("profile", status=130)
    assert err == "stopped: the same command continues with what is in profile.json\n"
    assert len(Profile.read("profile.json").missing) == 2
    out, _ = run("profile")
    assert "profile.json holds 3 of 12 figures already" in out
    assert " 4/12  " in out
    out, _ = run("profile")
    assert "profile.json holds all figures already" in out
    assert "/12" not in out


def test_another_setting_is_refused(run: Any) -> None:
    run("profile")
    _, err = run("profile", "--backend=reference", status=2)
    assert err.startswith("distca: profile profile was begun with backend sdpa, but here")
    done = Profile.read("profile.json")
    replace(done, device="NVIDIA H200").write(Path("profile.json"))
    _, err = run("profile", status=2)
    assert "begun with device NVIDIA H200" in err
    assert err.count("\n") == 1


@pytest.mark.parametrize(
    ("args", "words"),
    [
        (["--model=llama9"], "model 'llama9' is unknown"),
        (["--backend=fast"], "attention backend 'fast' is unknown"),
        (["--backend=fa4"], "attention backend fa4 refuses"),
        (["--ranks=0"], "0 ranks: start 1 or more"),
        (["--share-gpu"], "--share-gpu, but there is no GPU: leave it out"),
        (["--out=bad.json"], "profile bad.json is not JSON"),
        (["--out=."], "cannot open"),
    ],
)
def test_mistakes_are_one_sentence(run: Any, args: list[str], words: str) -> None:
    Path("bad.json").write_text("{")
    out, err = run("profile", *args, status=2)
    assert out == ""
    assert words in err
    assert err.startswith("distca: ")
    assert err.count("\n") == 1


def test_several_ranks_are_started(run: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    started: list[Any] = []
    monkeypatch.setattr("distca.runtime.launch.launch", lambda *args: started.extend(args))
    run("profile", "--ranks=3", "--quick", "--out=x.json", "--model=150m")
    command, num_ranks, _, shared_gpu = started
    assert shared_gpu is None
    assert num_ranks == 3
    assert command[-5:] == ["profile", "--model=150m", "--out=x.json", "--ranks=3", "--quick"]


@pytest.mark.parametrize(
    ("stop", "status", "words"),
    [
        (Stop(SIGTERM, early=True), 0, "stopped: the same command continues with what is in"),
        (Stop(SIGTERM, early=False), 0, ""),  # it was done
        (Stop(SIGINT, early=False), 130, ""),
    ],
)
def test_only_an_unfinished_profile_is_to_be_continued(
    run: Any, monkeypatch: pytest.MonkeyPatch, stop: Stop, status: int, words: str
) -> None:
    monkeypatch.setattr("distca.runtime.launch.launch", lambda *_: stop)
    _, err = run("profile", "--ranks=2", status=status)
    assert words in err
    assert bool(words) == bool(err)


@pytest.mark.usefixtures("only_rank")
def test_a_rank_of_torchrun_measures(run: Any) -> None:
    run("profile", "--json")
    assert Profile.read("profile.json").missing == []


@pytest.mark.slow
def test_two_ranks_measure_together(tmp_path: Path) -> None:
    command = [sys.executable, "-P", "-m", "distca"]
    ran = subprocess.run(
        [*command, "profile", "--ranks=2", "--quick", "--json"],
        capture_output=True,
        text=True,
        timeout=110,
        cwd=tmp_path,
    )
    assert (ran.returncode, ran.stderr) == (0, "")
    record = json.loads(ran.stdout)
    assert record["ranks"] == 2
    assert len(record["exchange"]) == 3
