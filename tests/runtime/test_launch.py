"""Local ranks: their environment, which failure is reported, and that none is left behind."""

import json
import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from distca.runtime import launch as launching
from distca.runtime.launch import launch, local_ranks
from distca.runtime.launched import RankEndedError, RankFailedError
from distca.runtime.rank_watch import Stop

pytestmark = pytest.mark.alone
START = (
    "import os, signal, sys, time; from distca.runtime.launched import reporting;"
    " rank = int(os.environ['RANK'])\n"
)


def program(body: str) -> list[str]:
    """A rank that does ``body``, which knows ``rank``."""
    indented = "".join(f"    {line}\n" for line in body.splitlines())
    return [sys.executable, "-c", f"{START}with reporting():\n{indented}"]


def test_ranks_get_what_torchrun_would_give(tmp_path: Path) -> None:
    body = "import json\nprint(json.dumps(dict(os.environ)))"
    assert launch(program(body), 3, tmp_path / "logs") is None
    found = [json.loads((tmp_path / f"logs/rank-{n}.log").read_text()) for n in (1, 2)]
    for number, environment in enumerate(found, 1):
        assert environment["RANK"] == environment["LOCAL_RANK"] == str(number)
        assert environment["WORLD_SIZE"] == "3"
        assert environment["MASTER_ADDR"] == "127.0.0.1"
        assert environment["OMP_NUM_THREADS"] == os.environ.get("OMP_NUM_THREADS", "1")
    assert found[0]["MASTER_PORT"] == found[1]["MASTER_PORT"]


LISTENING = """
import json
import torch.distributed as dist
dist.init_process_group("gloo")
dist.barrier()
from pathlib import Path
mine = {str(fd.readlink()) for fd in Path("/proc/self/fd").iterdir() if fd.is_symlink()}
found = []
for table in ("tcp", "tcp6"):
    for line in open(f"/proc/net/{table}").read().splitlines()[1:]:
        _, local, _, state, *_, inode = line.split()[:10]
        store = local.endswith(f":{int(os.environ['MASTER_PORT']):04X}")  # of the launcher
        if state == "0A" and (store or f"socket:[{inode}]" in mine):
            found.append(local)
print(json.dumps([found, os.environ["MASTER_PORT"]]), flush=True)
dist.barrier()
dist.destroy_process_group()
"""


@pytest.mark.skipif(not Path("/proc/net/tcp").exists(), reason="looks into /proc")
def test_nothing_listens_beyond_this_machine(
    tmp_path: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    """Neither the store, which listens on all interfaces by default, nor gloo."""
    assert launch(program(LISTENING), 2, tmp_path) is None
    found, port = json.loads(capfd.readouterr().out)
    assert f"0100007F:{int(port):04X}" in found
    others, _ = json.loads((tmp_path / "rank-1.log").read_text())
    assert {address.split(":")[0] for address in (*found, *others)} == {"0100007F"}


def test_only_what_rank_0_prints_is_shown(
    tmp_path: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    body = "print('out', rank)\nprint('err', rank, file=sys.stderr)"
    launch(program(body), 2, tmp_path)
    assert capfd.readouterr() == ("out 0\n", "")
    assert (tmp_path / "rank-0.log").read_text() == "err 0\n"
    assert sorted((tmp_path / "rank-1.log").read_text().split("\n")) == ["", "err 1", "out 1"]


def test_a_mistake_keeps_its_sentence(tmp_path: Path) -> None:
    with pytest.raises(ValueError, match=r"^lr = -1: give more$"):
        launch(program("raise ValueError('lr = -1: give more')"), 2, tmp_path)


def test_a_failure_that_explains_itself_and_one_without_words(tmp_path: Path) -> None:
    explained = (
        "from distca.runtime.launched import RankFailedError\nraise RankFailedError('loss nan')"
    )
    with pytest.raises(RankFailedError, match=r"^loss nan$"):
        launch(program(explained), 1, tmp_path)
    with pytest.raises(RankFailedError, match=r"^rank 0 failed with KeyError; its output is in"):
        launch(program("raise KeyError"), 1, tmp_path)
    with pytest.raises(ValueError, match=r"^no space left on device: check the disks"):
        launch(program("open('/dev/full', 'wb', 0).write(b'x')"), 1, tmp_path)
    with pytest.raises(ValueError, match=r"^too many open files: start fewer ranks, or allow"):
        launch(program("[os.dup(0) for _ in range(1 << 20)]"), 1, tmp_path)


@pytest.mark.parametrize(
    ("words", "more"),
    [
        ("CUDA out of memory. Tried to allocate 2.00 GiB. GPU 0 has ...", " for 2.00 GiB more"),
        ("out of memory", ""),
    ],
)
def test_a_gpu_without_memory_left_names_the_rank_and_the_way_out(
    words: str, more: str, tmp_path: Path
) -> None:
    body = f"import torch\nif rank: raise torch.OutOfMemoryError({words!r})\ntime.sleep(60)"
    said = f"^rank 1 has no GPU memory{more}: give ranks fewer tokens or layers, recompute"
    with pytest.raises(RankFailedError, match=said):
        launch(program(body), 2, tmp_path)


def test_the_first_failure_is_reported_and_the_others_are_ended(tmp_path: Path) -> None:
    """Rank 0 fails too, a moment later; rank 2 sleeps and ignores SIGTERM."""
    failing = tmp_path / "failing"
    body = (
        f"failing = {str(failing)!r}\n"
        "if rank == 1:\n"
        "    open(failing, 'w').close()\n"
        "    raise KeyError('first')\n"
        "if rank == 0:\n"
        "    while not os.path.exists(failing): time.sleep(0.01)\n"
        "    time.sleep(0.5)\n"
        "    raise KeyError('later')\n"
        "signal.signal(signal.SIGTERM, signal.SIG_IGN)\n"
        "time.sleep(60)"
    )
    start = time.monotonic()
    with pytest.raises(
        RankFailedError, match=r"rank 1 failed with KeyError: 'first'; its output is in "
    ):
        launch(program(body), 3, tmp_path)
    assert time.monotonic() - start < 15
    assert "Traceback" in (tmp_path / "rank-1.log").read_text()


def test_a_rank_that_dies_without_an_error(tmp_path: Path) -> None:
    kill = "if rank: os.kill(os.getpid(), signal.SIGKILL)\ntime.sleep(60)"
    with pytest.raises(RankFailedError, match=r"rank 1 was killed by SIGKILL, so all ranks were"):
        launch(program(kill), 2, tmp_path)
    with pytest.raises(RankFailedError, match=r"rank 0 ended with status 7"):
        launch(program("os._exit(7)"), 1, tmp_path)


def test_the_others_go_on_without_a_spare_rank(tmp_path: Path) -> None:
    dies = "if rank == 1: os.kill(os.getpid(), signal.SIGKILL)\n"
    fails = "if rank == 1: raise MemoryError\n"
    ends = f"time.sleep(1)\nopen({str(tmp_path)!r} + f'/done-{{rank}}', 'w').close()"
    for body in (dies + ends, fails + ends):
        assert launch(program(body), 3, tmp_path, spares=[1]) is None
        for rank in (0, 2):
            (tmp_path / f"done-{rank}").unlink()
    needed = dies + "time.sleep(1)\nif rank == 2: os.kill(os.getpid(), signal.SIGKILL)"
    with pytest.raises(RankFailedError, match=r"rank 2 was killed by SIGKILL"):
        launch(program(needed), 3, tmp_path, spares=[1])


def test_a_spare_rank_is_started_again(tmp_path: Path) -> None:
    """Rank 1 dies, and rank 2 hangs, which rank 0 tells; both are started again, rank 1 twice."""
    body = (
        "from distca.runtime.launched import report_lost, report_started\n"
        "report_started()\n"
        "if rank == 1: os.kill(os.getpid(), signal.SIGKILL)\n"
        "if rank == 2: time.sleep(60)\n"
        "time.sleep(0.5)\n"
        "report_lost(2, time.time())\n"
        f"while len([n for n in os.listdir({str(tmp_path)!r}) if 'joined' in n]) < 3:\n"
        "    time.sleep(0.05)"
    )
    joins = (
        f"open({str(tmp_path)!r} + f'/joined-{{rank}}-{{os.getpid()}}', 'w').write(sys.argv[1])\n"
        f"files = ' '.join(os.listdir({str(tmp_path)!r}))\n"
        "if rank == 1 and files.count('joined-1') == 1: raise ValueError('it does not fit')\n"
        "time.sleep(60)"
    )
    told: list[str] = []
    rejoining = launching.Rejoining(lambda store: [*program(joins), store], 3, told.append)
    start = time.monotonic()
    assert launch(program(body), 3, tmp_path, spares=[1, 2], rejoining=rejoining) is None
    assert time.monotonic() - start < 30  # nobody waits for those that would join
    assert all(":" in path.read_text() for path in tmp_path.glob("joined-*"))
    assert sum("rank 1 was killed by SIGKILL; it is started again" in one for one in told) == 1
    assert sum("rank 2 was killed by SIGKILL; it is started again" in one for one in told) == 1
    assert "rank 1 has not joined: it does not fit" in told
    assert len(told) == 4


def test_a_message_that_is_far_too_long_is_reported_cut(tmp_path: Path) -> None:
    with pytest.raises(RankFailedError, match=r"xxxx"):
        launch(program("raise RuntimeError('x' * 100_000)"), 1, tmp_path)


def launcher(tmp_path: Path, body: str) -> subprocess.Popen[str]:
    """A launcher of two ranks that write down their process ids; waits until they have."""
    body = f"open({str(tmp_path)!r} + f'/pid-{{rank}}', 'w').write(str(os.getpid()))\n{body}"
    code = (
        "from pathlib import Path; from distca.runtime.launch import launch;"
        f" print(launch({program(body)!r}, 2, Path({str(tmp_path)!r})))"
    )
    process = subprocess.Popen(
        [sys.executable, "-c", code], stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True
    )
    pids = [tmp_path / f"pid-{rank}" for rank in (0, 1)]
    until(lambda: all(path.exists() and path.read_text() for path in pids))
    return process


def until(true: Callable[[], bool], most_s: float = 20) -> None:
    deadline = time.monotonic() + most_s
    while not true():
        assert time.monotonic() < deadline, "timed out"
        time.sleep(0.05)


def are_gone(tmp_path: Path) -> bool:
    for path in tmp_path.glob("pid-*"):
        try:  # a zombie counts as gone, though nobody has waited for it
            stat = Path(f"/proc/{path.read_text()}/stat").read_text()
        except OSError:
            continue
        if stat.rpartition(")")[2].split()[0] != "Z":
            return False
    return True


SAVES = (
    "asked = []\n"
    "signal.signal(signal.SIGTERM, lambda *_: asked.append(1))\n"
    "while not asked: time.sleep(0.02)\n"
    "time.sleep(0.3)\n"
    "print('saved', rank, flush=True)"
)


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM])
def test_signals_are_forwarded(tmp_path: Path, number: signal.Signals) -> None:
    process = launcher(tmp_path, SAVES)
    time.sleep(0.2)  # for the handlers of the ranks
    process.send_signal(number)
    out, err = process.communicate(timeout=30)
    assert err == ""
    assert f"signal=<Signals.{number.name}" in out
    assert "early=False" in out
    assert "saved 0" in out
    assert "saved 1" in (tmp_path / "rank-1.log").read_text()
    assert are_gone(tmp_path)


def test_a_signal_before_ranks_can_react(tmp_path: Path) -> None:
    process = launcher(tmp_path, "time.sleep(60)")
    process.terminate()
    out, _ = process.communicate(timeout=30)
    assert "early=True" in out
    assert are_gone(tmp_path)


def test_a_signal_before_there_are_ranks(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    store = launching._store

    def signalled(num_ranks: int) -> object:
        signal.raise_signal(signal.SIGTERM)
        return store(num_ranks)

    monkeypatch.setattr(launching, "_store", signalled)
    stop = launch(program("time.sleep(60)"), 2, tmp_path)
    assert stop == Stop(signal.SIGTERM, early=True)


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM])
def test_a_signal_after_the_work_is_done_cuts_nothing_short(
    tmp_path: Path, number: signal.Signals, capfd: pytest.CaptureFixture[str]
) -> None:
    """Rank 0 is done, while rank 1, which is about to be, ends by the signal."""
    body = (
        "if rank: time.sleep(60)\n"
        "from distca.runtime.launched import report_finished\n"
        "report_finished()\n"
        f"os.kill(os.getppid(), {number:d})\n"
        "time.sleep(0.5)\n"
        "os.kill(os.getpid(), signal.SIGTERM)\n"
        "print('shown')"
    )
    assert launch(program(body), 2, tmp_path) == Stop(number, early=False)
    assert capfd.readouterr().out == "shown\n"


def test_a_spare_rank_that_leaves_does_not_end_the_work(tmp_path: Path) -> None:
    leaves = (
        "from distca.runtime.launched import report_finished\n"
        "if rank:\n"
        "    report_finished()\n"
        "    os.kill(os.getppid(), signal.SIGTERM)\n"
        "time.sleep(60 * (1 - rank))"
    )
    stop = launch(program(leaves), 2, tmp_path, spares=[1])
    assert stop == Stop(signal.SIGTERM, early=True)


def test_a_failure_knows_of_a_signal_that_came_with_it(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """So that a run that was asked to stop is not started again."""
    asked = "signal.signal(signal.SIGTERM, signal.SIG_IGN)\nos.kill(os.getppid(), signal.SIGTERM)\n"
    killed = "time.sleep(0.3)\nos.kill(os.getpid(), signal.SIGKILL)"
    with pytest.raises(RankEndedError, match="killed by SIGKILL") as raised:
        launch(program(asked + killed), 1, tmp_path)
    assert raised.value.stop_requested

    with pytest.raises(RankEndedError, match="ended with status 7") as raised:
        launch(program("os._exit(7)"), 1, tmp_path)
    assert not raised.value.stop_requested
    end = launching._end

    def signalled(*args: Any) -> None:  # while the other ranks are ended
        signal.raise_signal(signal.SIGTERM)
        end(*args)

    monkeypatch.setattr(launching, "_end", signalled)
    with pytest.raises(RankEndedError, match="ended with status 7") as raised:
        launch(program("os._exit(7)"), 1, tmp_path)
    assert raised.value.stop_requested


def test_a_second_signal_does_not_wait(tmp_path: Path) -> None:
    process = launcher(tmp_path, "signal.signal(signal.SIGTERM, signal.SIG_IGN); time.sleep(60)")
    process.send_signal(signal.SIGINT)
    time.sleep(0.3)
    process.send_signal(signal.SIGINT)
    process.send_signal(signal.SIGINT)  # impatient users press it again while ranks are killed
    process.communicate(timeout=30)
    assert process.returncode
    assert are_gone(tmp_path)


def test_no_orphans_when_the_launcher_is_killed(tmp_path: Path) -> None:
    process = launcher(tmp_path, "signal.signal(signal.SIGTERM, signal.SIG_IGN); time.sleep(60)")
    assert not are_gone(tmp_path)
    process.kill()
    until(lambda: are_gone(tmp_path), most_s=5)
    process.communicate()


def test_how_many_ranks(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("torch.cuda.device_count", lambda: 0)
    assert [local_ranks(None), local_ranks(5)] == [2, 5]
    with pytest.raises(ValueError, match=r"^257 ranks on the CPU, .* start at most 256$"):
        local_ranks(257)
    with pytest.raises(ValueError, match=r"^--share-gpu, but there is no GPU: leave it out"):
        local_ranks(2, share_gpu=True)
    monkeypatch.setattr("torch.cuda.device_count", lambda: 4)
    assert [local_ranks(None), local_ranks(3)] == [4, 3]
    assert [local_ranks(None, share_gpu=True), local_ranks(8, share_gpu=True)] == [2, 8]
    with pytest.raises(ValueError, match=r"^5 ranks on 4 GPUs: .* start at most 4, or set"):
        local_ranks(5)
    with pytest.raises(ValueError, match=r"start at most 4, let all share one with --share-gpu"):
        local_ranks(5, share_gpu=False)
    with pytest.raises(ValueError, match=r"^0 ranks: start 1 or more"):
        local_ranks(0)
