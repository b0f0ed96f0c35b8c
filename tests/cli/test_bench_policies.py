"""``distca bench policies``: real steps of all policies on two CPU ranks, and what it says."""

import json
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
from rich.console import Console

from distca.cli import main
from distca.measure.policies import Study, layers_of
from distca.report.policies import figures_of, policies_table, verdicts

COMMAND = [sys.executable, "-P", "-m", "distca", "bench", "policies"]
ABOUT = {"ranks": 2, "tokens": 100}


def test_two_ranks_train_all_policies(tmp_path: Path) -> None:
    options = ["--context=512", "--steps=2", "--warm-up=1", "--layers=1", "--out=found.json"]
    ran = subprocess.run(
        [*COMMAND, *options], cwd=tmp_path, capture_output=True, text=True, timeout=110
    )
    assert (ran.returncode, ran.stderr) == (0, "")
    record = json.loads((tmp_path / "found.json").read_text())
    rows = {row["policy"]: row for row in record["policies"]}
    assert len(rows) == 10
    assert (record["ranks"], record["tokens"], record["steps"]) == (2, 512, 2)
    assert (record["model"], record["layers"], record["refused"]) == ("debug", 1, {})
    for row in rows.values():
        assert len(row["seconds"]) == 2
        assert row["loss_difference"] < 1e-5
        assert row["losses"][0] != row["losses"][1]
    assert rows["colocated"]["bytes"] == 0 < rows["given"]["bytes"]
    for words in ("2 ranks: ", "1 layer of debug", "step 2/2", "exposed", "over 2 steps."):
        assert words in ran.stdout
    assert max(len(line) for line in ran.stdout.splitlines() if line.startswith("given")) <= 80


@pytest.mark.parametrize(
    ("args", "words"),
    [
        (["--policies=given,fast"], "--policies: 'fast' is unknown; choose of colocated, wlb"),
        (["--model=llama9"], "model 'llama9' is unknown"),
        (["--backend=fast"], "attention backend 'fast' is unknown"),
        (["--lengths=nothing.json"], "nothing.json does not exist"),
        (["--lengths=fixed:1"], "no document has a second token, so there is no loss"),
        (["--context=none"], "'none' is not a number of tokens"),
        (["--cost=slow"], "cost 'slow' is unknown"),
        (["--layers=0"], "--layers 0: it must be at least 1"),
        (["--warm-up=-1"], "--warm-up -1: it must be at least 0"),
        (["--ranks=300"], "300 ranks on the CPU, where they are for trying things out"),
        (["--out=no/file"], "no/file cannot be written: there is no folder no; create it"),
        (["--out=."], "is a directory"),
        (["--share-gpu"], "--share-gpu, but there is no GPU"),
    ],
)
def test_mistakes_are_told_before_ranks_start(
    args: list[str],
    words: str,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    monkeypatch.chdir(tmp_path)
    with pytest.raises(SystemExit) as exited:
        main(["bench", "policies", *args])
    out, err = capsys.readouterr()
    assert (exited.value.code, out) == (2, "")
    assert words in err
    assert err.count("\n") == 1
    assert not list(tmp_path.iterdir())


def study(lengths: str) -> Study:
    return Study(
        ranks=2,
        config=layers_of("debug", 1),
        lengths=lengths,
        context=300,
        tokens=600,
        cost="cpu",
        seed=0,
        recompute=True,
    )


def test_batches_are_the_same_on_all_ranks_and_differ_from_step_to_step(tmp_path: Path) -> None:
    known = tmp_path / "lengths.json"
    known.write_text("[100, 20, 5000, 7]")
    for lengths in ("pretrain", str(known)):
        batches = [study(lengths).batch(number).lengths.tolist() for number in (-1, 0, 1, 0)]
        assert batches[1] == batches[3]
        assert len({*map(tuple, batches)}) == 3
        for batch in batches:
            assert sum(batch) == 1200
            assert max(batch) <= 300


def figures(seconds: float, loss: float = 8.0, retries: int = 0) -> dict[str, Any]:
    return {
        "seconds": seconds, "loss": loss, "attention_worst": 0.3, "attention_mean": 0.2,
        "exposed": 0.1, "bytes": 1000, "step_bytes": 1 << 30, "alloc_retries": retries,
    }  # fmt: skip


def test_speed_ups_are_over_all_steps_that_both_have_made() -> None:
    steps = [
        {"colocated": figures(2.0), "balanced": figures(1.0), "kk": figures(1.0)},
        {"colocated": figures(4.0), "balanced": figures(3.0, retries=2)},
    ]
    found = figures_of(["colocated", "balanced", "kk"], steps, {"kk": "no room"}, ABOUT)
    rows = {row["policy"]: row for row in found["policies"]}
    assert rows["balanced"]["speed_up"] == 6.0 / 4.0
    assert rows["balanced"]["speed_up_of_steps"] == pytest.approx([4 / 3, 5 / 3, 2])
    assert rows["balanced"]["tokens_per_s"] == 100
    assert rows["balanced"]["attention_imbalance"] == pytest.approx(1.5)
    assert rows["balanced"]["exposed_share"] == pytest.approx(0.05)
    assert rows["kk"]["speed_up"] == 2.0
    said = [words for words, _ in verdicts(found)]
    assert said[0] == "kk is 2.00x as fast as colocated, over 1 step."
    assert said[1].startswith("Ranks were short of memory with balanced")
    assert said[2] == "kk did not run to the end: no room"


def test_losses_that_differ_are_told() -> None:
    steps = [{"colocated": figures(1.0), "given": figures(2.0, loss=8.1)}]
    found = figures_of(["colocated", "given"], steps, {}, ABOUT)
    fastest, differing = verdicts(found)
    assert fastest[0] == "colocated is the fastest here, over 1 step."
    assert differing[0].startswith("Losses do NOT agree with those of colocated: given by 1.2e-02")
    nan = [{"colocated": figures(1.0), "given": figures(2.0, loss=float("nan"))}]
    assert "do NOT agree" in verdicts(figures_of(["colocated", "given"], nan, {}, ABOUT))[1][0]


@pytest.mark.parametrize(("width", "column"), [(40, "speed-"), (160, "differs")])
def test_tables_fit_the_screen(width: int, column: str) -> None:
    found = figures_of(["given+ping-pong"], [{"given+ping-pong": figures(1.0)}], {}, ABOUT)
    console = Console(width=width, file=None, record=True, quiet=False)
    with console.capture() as captured:
        console.print(policies_table(found, width))
    lines = captured.get().splitlines()
    assert max(map(len, lines)) <= width
    assert column in captured.get()
    for meaning in ("speed-up: tokens/s over", "memory: of the fullest"):  # only of what is shown
        assert (meaning in " ".join(captured.get().split())) == (width > 40 or "speed" in meaning)


@pytest.mark.parametrize(("rank", "told"), [("0", True), ("1", False)])
def test_one_rank_of_torchrun_tells_of_a_mistake(
    rank: str, told: bool, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setenv("RANK", rank)
    monkeypatch.setenv("WORLD_SIZE", "2")
    for option in ("--policies=fast", "--share-gpu"):
        with pytest.raises(SystemExit) as exited:
            main(["bench", "policies", option])
        err = capsys.readouterr().err
        assert exited.value.code == 2
        assert (option.partition("=")[0] in err) is told
