"""``distca bench`` as people and machines call it."""

import json
from pathlib import Path
from typing import Any

import pytest

from distca.cli import main

TINY = ["--ranks=4", "--tokens=256", "--context=512", "--sample=3", "--rounds=1", "--layers=1"]


@pytest.fixture
def run(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> Any:
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("COLUMNS", "80")

    def call(*args: str, status: int = 0) -> tuple[str, str]:
        with pytest.raises(SystemExit) as exited:
            main(["bench", *args])
        out, err = capsys.readouterr()
        assert exited.value.code == status, err
        return out, err

    return call


@pytest.mark.parametrize("args", [[], ["--help"]])
def test_it_says_what_it_can_measure(run: Any, args: list[str]) -> None:
    out, err = run(*args)
    assert "replay" in out
    assert err == ""


def test_people_see_a_table_for_each_way(run: Any) -> None:
    out, err = run("replay", *TINY)
    assert err == ""
    assert "4 ranks of tp 1, 256 tokens each, pretrain up to 512, given placement, ping-pong" in out
    assert "no ping-pong" in " ".join(out.split())
    assert out.count("rank 3/3") == 2
    for words in ("step", "measured", "simulated", "exposed", "worst / mean", "factors", "error"):
        assert out.count(words) >= 2
    assert max(map(len, out.splitlines())) <= 80


def test_wide_screens_have_all_columns(run: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("COLUMNS", "140")
    out, _ = run("replay", *TINY, "--no-ping-pong", "--placement=balanced")
    for words in ("sent", "received", "tokens", "chosen for", "most traffic", "balanced"):
        assert words in out


def test_machines_get_one_object_and_files_a_line_for_each_case(run: Any) -> None:
    out, err = run("replay", *TINY, "--json", "--out=found.jsonl")
    assert err == ""
    cases = json.loads(out)["cases"]
    assert [case["ping_pong"] for case in cases] == [True, False]
    for case in cases:
        assert (case["ranks"], case["backend"], case["model"]) == (4, "sdpa", "debug")
        assert [row["calibrates"] for row in case["rows"]] == [False, False, True]
        assert all(row["measured"]["step"] > 0 for row in case["rows"])
        assert case["calibrated"].keys() == case["raw"].keys() == {"mean", "worst"}
        assert case["worst_over_mean"] > 0
    run("replay", *TINY, "--ping-pong", "--out=found.jsonl", "--tp=2", "--lengths=fixed:300")
    lines = [json.loads(line) for line in Path("found.jsonl").read_text().splitlines()]
    assert lines[:2] == cases
    assert [line["tp"] for line in lines] == [1, 1, 2]


@pytest.mark.parametrize(
    ("args", "words"),
    [
        (["--model=llama9"], "model 'llama9' is unknown"),
        (["--backend=fa4"], "attention backend fa4 refuses"),
        (["--placement=even"], "placement 'even' is unknown"),
        (["--lengths=long"], "length distribution 'long' is unknown"),
        (["--context=1M"], "must hold the longest document"),
        (["--context=none"], "'none' is not a number of tokens"),
        (["--cost=slow"], "cost 'slow' is unknown"),
        (["--tp=3"], "tp = 3 does not divide"),
        (["--sample=1"], "a sample of 1"),
        (["--rounds=0"], "give 1 or more layers and rounds"),
        (["--latency=-1"], "a latency of 0 or more"),
        (["--across=fast"], "'fast' is not a bandwidth"),
        (["--ranks=0"], "ranks = 0"),
        (["--out=."], "cannot open"),
    ],
)
def test_mistakes_are_one_sentence(run: Any, args: list[str], words: str) -> None:
    out, err = run("replay", *TINY, *args, "--json", status=2)
    assert out == ""
    assert words in err
    assert err.startswith("distca: ")
    assert err.count("\n") == 1
