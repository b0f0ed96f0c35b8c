"""``distca train --inject``: runs with faults, as people start them."""

import json
import os
import subprocess
import sys
from pathlib import Path
from shutil import copytree
from typing import Any

import pytest
from cli.test_train import TINY, command, metrics, run
from ranks import World
from train.runs import fit

from distca.cli import main
from distca.runtime.launch import _store

SETTINGS = ("train.steps=6", "train.checkpoint_every=2")


def lines(out: Path) -> list[dict[str, Any]]:
    return [json.loads(line) for line in (out / "faults.jsonl").read_text().splitlines()]


@pytest.fixture(scope="module")
def whole(world: World, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The folder of a run without faults."""
    out = tmp_path_factory.mktemp("whole")
    world(2).run(fit, [*TINY, *SETTINGS, f"out={out}"], ranks=2)
    return out


@pytest.mark.slow
def test_a_run_with_faults_ends_like_one_without(whole: Path, tmp_path: Path) -> None:
    faults = ["stop rank 0 for 2s step 1", "kill worker 1 step 3 layer 0 backward"]
    options = ("--max-restarts=1", *(f"--inject={fault}" for fault in faults))
    out, err = run(tmp_path, *SETTINGS, options=options)
    assert err.startswith("distca: rank 1 was killed by SIGKILL, so all ranks were ended; its")
    assert err.endswith(f"; restart 1 of 1 from {tmp_path}/checkpoints/step-00000002\n")
    assert out.endswith("2 of 2 planned faults delivered; 1 recovery was completed\n")
    stopped, killed, recovery = lines(tmp_path)
    assert [stopped["fault"], killed["fault"]] == faults
    assert (killed["rank"], killed["step"], killed["direction"]) == (1, 3, "backward")
    assert (recovery["recovery"], recovery["step"]) == (1, 2)
    found, right = metrics(tmp_path), metrics(whole)
    assert found[1]["seconds"] >= 2  # all ranks wait for the one that is stopped
    assert [record["step"] for record in found] == list(range(6))
    assert [record["loss"] for record in found] == pytest.approx(
        [record["loss"] for record in right], rel=1e-6
    )


FAULT = "kill rank 0 step 4"
NEVER_CAME = (
    f"distca: 1 of 1 planned fault never came: '{FAULT}'; give places that the run reaches,"
    " and --fresh if it had passed them before\n"
)
COUNTS = {"planned": 1, "delivered": 0, "recoveries": 0, "missing": [FAULT]}


def test_a_fault_that_never_came_fails_the_run(tmp_path: Path, as_rank: Any) -> None:
    as_rank(tmp_path, *(f"--set={setting}" for setting in SETTINGS))  # it passes the step
    options = ("--set=train.steps=7", f"--inject={FAULT}", "--json")
    out, err = as_rank(tmp_path, *options, status=1)
    assert err == NEVER_CAME
    assert json.loads(out)["faults"] == COUNTS


@pytest.mark.slow
def test_a_fault_that_never_came_to_two_ranks_is_told_once(whole: Path, tmp_path: Path) -> None:
    copytree(whole, tmp_path, dirs_exist_ok=True)
    options = (f"--inject={FAULT}", "--json")
    out, err = run(tmp_path, "train.steps=7", options=options, status=1)
    assert err == NEVER_CAME
    assert json.loads(out)["faults"] == COUNTS


@pytest.mark.slow
@pytest.mark.parametrize("rank", [0, 1])
def test_a_rank_whose_connection_is_dropped_is_named(tmp_path: Path, rank: int) -> None:
    fault = f"drop connection rank {rank} step 2"
    _, err = run(tmp_path, *SETTINGS, options=(f"--inject={fault}",), status=1)
    assert err == (
        f"distca: rank {rank} is lost (its process ended without a word), so this rank ends too;"
        " start the run again to resume from its last checkpoint\n"
    )
    assert [line["fault"] for line in lines(tmp_path)] == [fault]


@pytest.mark.slow
def test_a_killed_rank_is_restarted_by_torchrun(whole: Path, tmp_path: Path) -> None:
    """Restarted ranks share the store of the first ones, and must not find their addresses."""
    torchrun = [sys.executable, "-m", "torch.distributed.run", "--nproc-per-node=2", "--no-python"]
    ran = subprocess.run(
        [
            *(*torchrun, "--max-restarts=1", *command(tmp_path, *SETTINGS)),
            "--inject=kill worker 1 step 3",
        ],
        capture_output=True,
        text=True,
        timeout=110,
    )
    assert ran.returncode == 0, ran.stderr
    assert ran.stdout.endswith("1 of 1 planned fault delivered; 1 recovery was completed\n")
    assert [record["loss"] for record in metrics(tmp_path)] == pytest.approx(
        [record["loss"] for record in metrics(whole)], rel=1e-6
    )


def test_what_cannot_come_is_told_before_ranks_are_started(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    settings = [f"--set={setting}" for setting in (*TINY, *SETTINGS)]
    with pytest.raises(SystemExit) as exited:
        main(["train", f"--out={tmp_path}", *settings, "--inject=kill rank 2 step 5"])
    assert exited.value.code == 2
    words = "--inject 'kill rank 2 step 5': there is no rank 2: this run has ranks 0 to 1"
    assert capsys.readouterr().err == f"distca: {words}\n"
    assert not (tmp_path / "logs").exists()


def test_faults_that_only_one_rank_was_given_are_refused_on_all(tmp_path: Path) -> None:
    """As under torchrun on several nodes, with different commands; the others would wait."""
    store = _store(2)
    common = {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(store.port), "WORLD_SIZE": "2"}
    ranks = [
        subprocess.Popen(
            [*command(tmp_path), *given],
            env=os.environ | common | {"RANK": str(rank), "TORCHELASTIC_USE_AGENT_STORE": "True"},
            stdout=subprocess.DEVNULL,
            stderr=subprocess.PIPE,
            text=True,
        )
        for rank, given in enumerate([[], ["--inject=slow rank 1 x0.5 steps 0-1"]])
    ]
    try:
        said = [rank.communicate(timeout=90)[1] for rank in ranks]
    finally:
        for rank in ranks:
            rank.kill()
    assert [rank.returncode for rank in ranks] == [2, 2], said
    assert "--inject is [] on rank 0 and ['slow rank 1 x0.5 steps 0-1'] on rank 1" in said[0]
