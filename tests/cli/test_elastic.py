"""``distca train`` whose servers come and go, and which goes on with fewer ranks."""

import os
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from cli.test_lost_servers import ended
from cli.test_train import COMMAND, TINY, children, command, metrics, run
from ranks import World
from train.runs import fit

from distca.cli.attempts import Attempts
from distca.runtime.launched import RankEndedError, RankFailedError
from distca.train.config import Config

ENDLESS = ("train.steps=100000", "train.eval_every=0")


def wait_for(out: Path, kind: str, rank: int, process: subprocess.Popen[str]) -> None:
    """Waits for a record that says what has become of a server."""

    def is_there() -> bool:
        return (out / "metrics.jsonl").exists() and any(
            change["rank"] == rank for record in metrics(out) for change in record.get(kind, ())
        )

    until(is_there, process)


def until(true: Callable[[], bool], process: subprocess.Popen[str]) -> None:
    deadline = time.monotonic() + 120
    while not true():
        assert time.monotonic() < deadline
        assert process.poll() is None, process.communicate()
        time.sleep(0.1)


@pytest.mark.slow
@pytest.mark.timeout(400)
def test_servers_come_back_join_and_leave(world: World, tmp_path: Path) -> None:
    out, options = tmp_path / "out", ["--ranks=3", "--inject=kill server 0 step 2"]
    # So that few steps are taken while processes start.
    options += [f"--inject=stop worker 1 for 8s step {step}" for step in range(3, 60, 3)]
    with ended(command(out, *ENDLESS, "parallel.servers=1"), *options) as process:
        assert process.stdout is not None
        words = "servers can join: "
        line = next(line for line in process.stdout if line.startswith(words))
        wait_for(out, "joined_servers", 2, process)
        serve = [*COMMAND, *line.removeprefix(words).split()[1:]]
        with ended(serve) as server:
            wait_for(out, "joined_servers", 3, process)
            server.send_signal(signal.SIGINT)
            told, err = server.communicate(timeout=100)
        assert (server.returncode, err) == (0, "")
        assert "serves as rank 3 from step" in told
        assert told.endswith("left the run\n")
        wait_for(out, "left_servers", 3, process)
        steps = len(metrics(out))
        process.send_signal(signal.SIGTERM)
        told, err = process.communicate(timeout=100)
    assert process.returncode == 0
    assert err == (
        f"distca: rank 2 was killed by SIGKILL; it is started again ({out}/logs/rank-2.1.log)\n"
    )
    settings = [*TINY, *ENDLESS, f"out={tmp_path / 'whole'}", f"stop_after={steps}"]
    right = world(1).run(fit, settings, ranks=1)[0]
    for found, expected in zip(metrics(out)[:steps], right, strict=True):
        assert found["loss"] == pytest.approx(expected["loss"], rel=1e-6)


@pytest.mark.slow
def test_a_server_that_hangs_is_ended_and_started_again(tmp_path: Path) -> None:
    """Its connection is dropped, so that it waits for answers that never come."""
    options = ("--ranks=3", "--inject=drop connection server 0 step 2")
    with ended(command(tmp_path, *ENDLESS, "parallel.servers=1"), *options) as process:
        wait_for(tmp_path, "joined_servers", 2, process)
        process.send_signal(signal.SIGTERM)
        _, err = process.communicate(timeout=60)
    assert process.returncode == 0
    assert "rank 2 was killed by SIGKILL; it is started again" in err


@pytest.mark.slow
def test_an_address_without_a_run_is_refused() -> None:
    for address, words in (("x", "give HOST:PORT"), ("127.0.0.1:9", "no run answers there")):
        ran = subprocess.run(
            [*COMMAND, "serve", f"--join={address}"], capture_output=True, text=True, timeout=100
        )
        assert ran.returncode == 2
        assert ran.stderr.startswith(f"distca: --join {address}: {words}")
        assert ran.stderr.count("\n") == 1


def test_ranks_that_do_not_start_are_left_out(capsys: pytest.CaptureFixture[str]) -> None:
    def tried(sizes: list[int], restarts: int, fewest: int) -> list[list[int]]:
        """The local ranks of each attempt; only so many of them are a mesh."""
        found: list[list[int]] = []

        def fails(local_ranks: list[int], restart: int, has_begun: bool) -> None:
            assert has_begun is (restart > 0)
            found.append(local_ranks)
            error = RankEndedError("a rank failed")
            error.rank, error.had_started = (1, False) if restart else (2, True)
            if restart < restarts:
                raise error

        def check(size: int) -> None:
            if size not in sizes:
                raise ValueError(f"{size} ranks are no mesh")

        Attempts(Config(out="nowhere"), restarts, fewest, check).run(4, fails)
        return found

    def stopped(local_ranks: list[int], restart: int, has_begun: bool) -> None:
        error = RankEndedError("a rank failed")
        error.stop_requested = True
        raise error

    with pytest.raises(RankEndedError):  # at the first attempt
        Attempts(Config(out="nowhere"), 3, None, lambda _: None).run(2, stopped)
    assert capsys.readouterr().err == ""
    assert tried([2, 3], 3, 2) == [[0, 1, 2, 3], [0, 1, 2, 3], [0, 2, 3], [0, 3]]
    assert capsys.readouterr().err.splitlines()[-1].endswith("no checkpoint, with 2 ranks")
    assert tried([2], 2, 2)[2] == [0, 2]
    with pytest.raises(RankFailedError, match="cannot go on with fewer ranks: 3 ranks are no mesh"):
        tried([2], 2, 3)
    with pytest.raises(RankFailedError, match="cannot go on with fewer ranks: --min-ranks is 4"):
        tried([2], 2, 4)


@pytest.mark.slow
def test_a_run_goes_on_without_a_rank_that_cannot_start_again(
    world: World, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    broken = (
        "import os\n"
        "restart = os.environ.get('TORCHELASTIC_RESTART_COUNT', '0')\n"
        "if os.environ.get('LOCAL_RANK') == '1' and restart > '0':\n"
        "    os._exit(7)\n"
    )
    (tmp_path / "sitecustomize.py").write_text(broken)
    monkeypatch.setenv("PYTHONPATH", f"{tmp_path}:{os.environ.get('PYTHONPATH', '')}")
    out, settings = tmp_path / "out", ("train.steps=6", "train.checkpoint_every=2")
    options: tuple[str, ...] = ("--ranks=3", "--max-restarts=3", "--min-ranks=2")
    _, err = run(out, *settings, options=(*options, "--inject=kill rank 1 step 3"))
    first, second = err.splitlines()
    assert "restart 1 of 3 from" in first
    assert second.startswith("distca: rank 1 ended with status 7, so all ranks were ended")
    assert second.endswith("step-00000002, with 2 ranks")
    monkeypatch.undo()
    right: list[dict[str, Any]] = world(3).run(
        fit, [*TINY, *settings, f"out={tmp_path / 'whole'}"], ranks=3
    )[0]
    assert [record["loss"] for record in metrics(out)] == pytest.approx(
        [record["loss"] for record in right], rel=1e-6
    )


@pytest.mark.slow
@pytest.mark.timeout(400)
@pytest.mark.skipif(not Path("/proc/self/task").exists(), reason="looks into /proc")
def test_torchrun_goes_on_with_fewer_nodes(world: World, tmp_path: Path) -> None:
    """Two agents of torchrun, of which one is killed with its rank, as with its node."""
    out, settings = tmp_path / "out", ("train.steps=30", "train.checkpoint_every=2")
    with socket.create_server(("127.0.0.1", 0)) as free:
        endpoint = f"127.0.0.1:{free.getsockname()[1]}"

    def agent(is_host: int) -> list[str]:
        rendezvous = f"is_host={is_host},join_timeout=100,last_call_timeout=2"
        torchrun = [sys.executable, "-m", "torch.distributed.run", "--nnodes=1:2", "--no-python"]
        torchrun += ["--nproc-per-node=1", "--max-restarts=2", "--rdzv-backend=c10d"]
        torchrun += [f"--rdzv-endpoint={endpoint}", f"--rdzv-conf={rendezvous}"]
        return [*torchrun, *command(out, *settings)]

    with ended(agent(1)) as first, ended(agent(0)) as second:
        until(lambda: (out / "metrics.jsonl").exists() and len(metrics(out)) > 4, first)
        for pid in (second.pid, *children(second)):
            os.kill(pid, signal.SIGKILL)
        told, err = first.communicate(timeout=200)
    assert first.returncode == 0, err
    assert "resumed from step" in told
    right = world(2).run(fit, [*TINY, *settings, f"out={tmp_path / 'whole'}"], ranks=2)[0]
    assert [record["loss"] for record in metrics(out)] == pytest.approx(
        [record["loss"] for record in right], rel=1e-6
    )


@pytest.mark.parametrize(
    ("changes", "where"),
    [
        ({"resume": False}, "restart 1 of 2 from the beginning"),
        ({"from_step": 2}, "restart 1 of 2 from step 2"),
        ({}, "restart 1 of 2 from the beginning, since there is no checkpoint"),
    ],
)
def test_what_a_run_begins_from_holds_until_it_has_begun(
    changes: dict[str, Any], where: str, capsys: pytest.CaptureFixture[str]
) -> None:
    seen = []

    def dies(local_ranks: list[int], restart: int, has_begun: bool) -> None:
        seen.append(has_begun)
        error = RankEndedError("a rank died")
        error.had_started = restart == 1
        if restart < 2:
            raise error

    Attempts(Config(out="nowhere", **changes), 2, None, lambda _: None).run(2, dies)
    assert seen == [False, False, True]
    first, second = capsys.readouterr().err.splitlines()
    assert first.endswith(where)
    assert second.endswith("restart 2 of 2 from the beginning, since there is no checkpoint")
