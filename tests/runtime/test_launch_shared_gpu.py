"""Ranks that share a GPU: what they get, what is refused, and that nothing is left running.

On a machine without a GPU: MPS, the driver and NCCL are small programs that stand in for them.
"""

from __future__ import annotations

import json
import os
import shutil
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
from runtime.fake_gpu import FakeGpu

from distca.cli import main
from distca.runtime import nccl, rank_device
from distca.runtime.launch import launch
from distca.runtime.launched import RankFailedError
from distca.runtime.mps import mps
from distca.runtime.shared_gpu import share_gpu
from distca.train.memory import available_bytes

pytestmark = pytest.mark.skipif(
    shutil.which("cc") is None or not Path("/proc/self/stat").exists(),
    reason="compiles small libraries, and looks into /proc",
)
SHOW = "import json, os; print(json.dumps(dict(os.environ)), flush=True)"


@pytest.fixture
def gpu(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[FakeGpu]:
    folder = tmp_path / "fake"
    folder.mkdir()
    fake = FakeGpu.make(folder, monkeypatch)
    yield fake
    fake.clean()


def until(true: Callable[[], bool], most_s: float = 60) -> None:
    deadline = time.monotonic() + most_s
    while not true():
        assert time.monotonic() < deadline, "timed out"
        time.sleep(0.05)


def test_ranks_get_all_that_sharing_takes(gpu: FakeGpu, tmp_path: Path) -> None:
    gpu.set(CUDA_VISIBLE_DEVICES="3,5", LD_PRELOAD="")
    logs = tmp_path / "logs"
    with share_gpu(4, logs / "mps") as shared:
        assert len(gpu.running()) == 2, "a daemon and a server"
        assert launch([sys.executable, "-c", SHOW], 4, logs, shared) is None
    library = gpu.folder / "2.30.7/libnccl.so.2"
    for rank in (1, 2, 3):
        found = json.loads((logs / f"rank-{rank}.log").read_text())
        assert found["LOCAL_RANK"] == found["RANK"] == str(rank)
        assert found["DISTCA_SHARE_GPU"] == found["CUDA_VISIBLE_DEVICES"] == "0"
        assert found["DISTCA_SHARE_BYTES"] == str(19 << 30)
        assert found["NCCL_MULTI_RANK_GPU_ENABLE"] == "1"
        assert found["CUDA_MPS_ACTIVE_THREAD_PERCENTAGE"] == "25"
        assert found["NCCL_MAX_CTAS"] == "8"
        assert found["NCCL_CGA_CLUSTER_SIZE"] == "0"
        assert found["LD_PRELOAD"] == str(library)
        assert found["CUDA_MPS_LOG_DIRECTORY"] == str(logs / "mps")
        assert not Path(found["CUDA_MPS_PIPE_DIRECTORY"]).exists(), "removed at the end"
    assert gpu.running() == []
    assert gpu.events.read_text() == "daemon started, GPUs 3, preload None\ndaemon ended\n"
    assert str(shared) == (
        "4 ranks share one Fake 100: 66 SMs and 19.0 GiB each,"
        f" through MPS, with NCCL 2.30.7 of {library}"
    )


def test_ranks_in_turns_do_without_mps(gpu: FakeGpu, tmp_path: Path) -> None:
    with share_gpu(4, tmp_path / "mps", side_by_side=False) as shared:
        assert gpu.running() == []
        assert shared.variables["NCCL_MAX_CTAS"] == "8"
        assert not any("MPS" in name for name in shared.variables)
    assert "each, in turns, with NCCL 2.30.7" in str(shared)
    gpu.set(FAKE_CUDA_ERROR="100")
    words = r"the GPU cannot be used \(cuInit: a fake error\): end what else"
    with pytest.raises(ValueError, match=words), share_gpu(4, tmp_path, side_by_side=False):
        pytest.fail("not reached")


def test_what_the_user_has_set_stays(gpu: FakeGpu, tmp_path: Path) -> None:
    gpu.set(NCCL_MAX_CTAS="2", NCCL_CGA_CLUSTER_SIZE="2", CUDA_MPS_ACTIVE_THREAD_PERCENTAGE="100")
    with share_gpu(8, tmp_path) as shared:
        assert shared.variables["NCCL_MAX_CTAS"] == "2"
        assert shared.variables["NCCL_CGA_CLUSTER_SIZE"] == "2"
        assert shared.variables["CUDA_MPS_ACTIVE_THREAD_PERCENTAGE"] == "100"


def test_a_daemon_of_the_user_is_used_and_stays(gpu: FakeGpu, tmp_path: Path) -> None:
    with mps(tmp_path / "outer") as outer:
        gpu.set(**outer)
        with share_gpu(2, tmp_path / "inner") as shared:
            assert "CUDA_MPS_PIPE_DIRECTORY" not in shared.variables
        assert len(gpu.running()) == 2
    assert gpu.running() == []
    # The folder of a daemon that is gone is no daemon.
    with share_gpu(2, tmp_path / "inner") as shared:
        assert shared.variables["CUDA_MPS_PIPE_DIRECTORY"] != outer["CUDA_MPS_PIPE_DIRECTORY"]


def test_a_server_that_is_not_ready_yet_is_waited_for(gpu: FakeGpu, tmp_path: Path) -> None:
    attempts = tmp_path / "attempts"
    gpu.set(FAKE_CUDA_ERROR="807", FAKE_CUDA_READY_AFTER=str(attempts))
    with share_gpu(2, tmp_path / "logs"):
        assert len(attempts.read_text()) == 3


@pytest.mark.parametrize(
    ("variables", "words"),
    [
        ({"FAKE_FREE_GIB": "3"}, r"4 ranks need at least 5 GiB .* there are 3: start at most 2"),
        ({"FAKE_CUDA_ERROR": "100"}, r"cannot be used through MPS \(cuInit: a fake error\): see"),
        ({"FAKE_CUDA_ERROR": "807"}, r"cannot be used through MPS \(cuInit: a fake error\): see"),
        ({"FAKE_CUDA_HANGS": "1"}, r"cannot be used through MPS \(no answer within .*echo quit"),
        ({"FAKE_MPS": "refuses"}, r"MPS cannot start \(An instance of this daemon is already run"),
        ({"FAKE_MPS": "idle"}, r"MPS is running, but did not serve a process"),
        ({"PATH": "/nowhere"}, r"nvidia-cuda-mps-control was not found: .* put its folder on PATH"),
        ({"DISTCA_NCCL_LIBRARY": "/nowhere/x.so"}, r"/nowhere/x.so does not exist: give the path"),
        ({"DISTCA_NCCL_LIBRARY": __file__}, r"cannot be loaded as NCCL \(.*: give another"),
    ],
)
def test_refusals(
    gpu: FakeGpu,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    variables: dict[str, str],
    words: str,
) -> None:
    monkeypatch.setattr("distca.runtime.shared_gpu.READY_S", 1.0)
    if "FAKE_CUDA_HANGS" in variables:
        monkeypatch.setattr("distca.runtime.shared_gpu.PROBE_S", 1.0)
    gpu.set(**variables)
    with pytest.raises(ValueError, match=words) as refused, share_gpu(4, tmp_path / "logs"):
        pytest.fail("not reached")
    assert "\n" not in str(refused.value)
    assert gpu.running() == []


def test_more_ranks_than_mps_serves_are_refused(gpu: FakeGpu, tmp_path: Path) -> None:
    words = "60 ranks cannot share a GPU: MPS serves 48 processes on one; start at most 48"
    with pytest.raises(ValueError, match=words), share_gpu(60, tmp_path / "logs"):
        pytest.fail("not reached")
    assert gpu.running() == []
    gpu.set(FAKE_FREE_GIB="100")
    with share_gpu(60, tmp_path / "logs", side_by_side=False) as shared:
        assert shared.num_ranks == 60


def test_a_run_has_to_fit_into_the_free_memory(
    gpu: FakeGpu,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    """Its estimate is compared with the whole GPU first, which is that of this machine."""
    monkeypatch.setattr("torch.cuda.device_count", lambda: 1)
    gpu.set(FAKE_FREE_GIB="3")
    monkeypatch.setattr("distca.train.memory.host_bytes", lambda: 1 << 40)
    large = ["--set", "model.name=debug", "--set", "train.tokens_per_step=500000"]
    with pytest.raises(SystemExit) as exited:
        main(["train", "--share-gpu", "--ranks=2", f"--out={tmp_path}", *large])
    assert exited.value.code == 2
    said = capsys.readouterr().err
    assert said.startswith("distca: this run needs about ")
    assert " and has 0.5: use more ranks, fewer tokens per step" in said
    assert gpu.running() == []


def test_which_nccl(gpu: FakeGpu, monkeypatch: pytest.MonkeyPatch) -> None:
    old, new = gpu.nccl("2.28.9"), gpu.nccl("2.31.2")
    gpu.set(DISTCA_NCCL_LIBRARY=str(old))
    with pytest.raises(ValueError, match=r"is NCCL 2\.28\.9: ranks can share a GPU from 2\.30\.0"):
        nccl.find_nccl()
    monkeypatch.delenv("DISTCA_NCCL_LIBRARY")
    with pytest.raises(ValueError, match=r"torch has none, and no newer one .* pip install -U"):
        nccl.find_nccl()
    monkeypatch.setattr("torch.version.cuda", "12.8")
    site = gpu.folder / "site"
    (site / "nvidia_nccl_cu12-2.31.2.dist-info").mkdir(parents=True)
    (site / "nvidia_nccl_cu12-2.31.2.dist-info/METADATA").write_text(
        "Metadata-Version: 2.1\nName: nvidia-nccl-cu12\nVersion: 2.31.2\n"
    )
    (site / "nvidia/nccl/lib").mkdir(parents=True)
    installed = site / "nvidia/nccl/lib/libnccl.so.2"
    monkeypatch.syspath_prepend(str(site))
    shutil.copy(old, installed)
    with pytest.raises(ValueError, match=r"no newer one .*: pip install -U nvidia-nccl-cu12, or"):
        nccl.find_nccl()
    shutil.copy(new, installed)
    assert nccl.find_nccl() == nccl.Nccl(23102, installed)
    monkeypatch.setattr("torch.version.cuda", "13.0")  # that package is for another one
    with pytest.raises(ValueError, match=r"no newer one .*: pip install -U nvidia-nccl-cu13, or"):
        nccl.find_nccl()
    monkeypatch.setattr(nccl, "loaded_version", lambda: 23007)
    assert nccl.find_nccl() == nccl.Nccl(23007, None)


def test_a_preloaded_nccl_is_seen_under_any_name(gpu: FakeGpu, tmp_path: Path) -> None:
    library = shutil.copy(gpu.nccl("2.31.2"), tmp_path / "newest.so")
    code = "from distca.runtime.nccl import loaded_version; print(loaded_version())"
    environment = os.environ | {"LD_PRELOAD": str(library)}
    ran = subprocess.run([sys.executable, "-c", code], env=environment, capture_output=True)
    assert ran.stdout == b"23102\n"


LAUNCHER = """
import sys
from pathlib import Path
from distca.runtime.launch import launch
from distca.runtime.shared_gpu import share_gpu
folder = Path(sys.argv[1])
sleep = f"import os, time; open('{folder}/rank-' + os.environ['RANK'], 'w'); time.sleep(60)"
with share_gpu(2, folder / "mps") as shared:
    launch([sys.executable, "-c", sleep], 2, folder, shared)
"""


@pytest.mark.parametrize(
    ("number", "when"),
    [
        pytest.param(signal.SIGINT, "rank-1", marks=pytest.mark.slow),
        pytest.param(signal.SIGTERM, "rank-1", marks=pytest.mark.slow),
        (signal.SIGKILL, "rank-1"),
        (signal.SIGTERM, "fake/pids"),
    ],
    ids=lambda value: getattr(value, "name", value),
)
def test_no_signal_leaves_mps_behind(
    gpu: FakeGpu, tmp_path: Path, number: signal.Signals, when: str
) -> None:
    command = [sys.executable, "-c", LAUNCHER, str(tmp_path)]
    process = subprocess.Popen(command, stderr=subprocess.DEVNULL)
    until((tmp_path / when).exists)
    process.send_signal(number)
    process.wait(60)
    if number == signal.SIGKILL or when == "fake/pids":  # ended without a chance to wait
        until(lambda: not gpu.running())
    assert gpu.running() == []


def test_a_rank_that_fails_or_dies_leaves_nothing_behind(gpu: FakeGpu, tmp_path: Path) -> None:
    """And the next run finds the GPU free."""
    for status in (7, 8):
        with (
            pytest.raises(RankFailedError, match=f"ended with status {status}"),
            share_gpu(2, tmp_path) as shared,
        ):
            launch([sys.executable, "-c", f"import os; os._exit({status})"], 2, tmp_path, shared)
        assert gpu.running() == []


def test_an_mps_that_does_not_end_is_killed(
    gpu: FakeGpu, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("distca.runtime.mps.END_S", 1.0)
    gpu.set(FAKE_MPS="stays")
    with (
        pytest.raises(RankFailedError, match="MPS did not end within 1 s and was killed: see"),
        share_gpu(2, tmp_path),
    ):
        assert len(gpu.running()) == 2
    until(lambda: not gpu.running())


def test_a_command_says_what_it_found_and_ends_mps(
    gpu: FakeGpu,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    """Its ranks see that there is no GPU after all, which is a mistake in one sentence."""
    monkeypatch.setattr("torch.cuda.device_count", lambda: 1)
    with pytest.raises(SystemExit) as exited:
        main(["selftest", "--share-gpu", "--ranks=2", f"--out={tmp_path}"])
    said = capsys.readouterr()
    assert exited.value.code == 2
    assert said.out.startswith("2 ranks share one Fake 100: 66 SMs and 39.0 GiB each, through MPS")
    assert said.err.startswith("distca: DISTCA_SHARE_GPU is 0, but 0 GPUs are visible: give the")
    assert said.err.count("\n") == 1
    assert gpu.running() == []


def gpus(monkeypatch: pytest.MonkeyPatch, count: int, **variables: str) -> None:
    monkeypatch.setattr("torch.cuda.device_count", lambda: count)
    monkeypatch.setattr("torch.cuda.set_device", lambda device: None)
    for name in (
        "RANK",
        "LOCAL_RANK",
        "WORLD_SIZE",
        "LOCAL_WORLD_SIZE",
        "DISTCA_SHARE_GPU",
        "DISTCA_SHARE_BYTES",
    ):
        monkeypatch.delenv(name, raising=False)
    for name, value in variables.items():
        monkeypatch.setenv(name, value)


def test_each_rank_takes_its_own_gpu(monkeypatch: pytest.MonkeyPatch) -> None:
    gpus(monkeypatch, 0, LOCAL_RANK="3", WORLD_SIZE="4")
    assert str(rank_device.local_device()) == "cpu"
    gpus(monkeypatch, 4, LOCAL_RANK="3", WORLD_SIZE="4")
    assert str(rank_device.local_device()) == "cuda:3"
    gpus(monkeypatch, 2)
    assert str(rank_device.local_device()) == "cuda:0"


@pytest.mark.parametrize(
    ("count", "variables", "words"),
    [
        (2, {"LOCAL_RANK": "2"}, r"LOCAL_RANK is 2, but only 2 GPUs are visible: .* DISTCA_SHARE"),
        (1, {"LOCAL_RANK": "1"}, r"set LOCAL_RANK=0 if each rank sees only its own GPU"),
        (2, {"RANK": "1", "WORLD_SIZE": "2"}, r"but not LOCAL_RANK, .* start ranks with torchrun"),
        (2, {"LOCAL_RANK": "-1"}, r"LOCAL_RANK is '-1': give a number, 0 or more"),
        (2, {"DISTCA_SHARE_GPU": "yes"}, r"DISTCA_SHARE_GPU is 'yes': give a number"),
        (0, {"DISTCA_SHARE_GPU": "0"}, r"DISTCA_SHARE_GPU is 0, but 0 GPUs are visible"),
        (1, {"DISTCA_SHARE_GPU": "0", "LOCAL_WORLD_SIZE": "2"}, r"NCCL 0\.0\.0 does not let ranks"),
    ],
)
def test_a_rank_without_a_gpu_is_refused(
    monkeypatch: pytest.MonkeyPatch, count: int, variables: dict[str, str], words: str
) -> None:
    """It would compute on the CPU, and all others would wait for it."""
    gpus(monkeypatch, count, **variables)
    with pytest.raises(ValueError, match=words):
        rank_device.local_device()


def test_a_rank_of_a_shared_gpu_cannot_take_all_of_its_memory(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    gpus(monkeypatch, 1, DISTCA_SHARE_GPU="0", LOCAL_RANK="3", LOCAL_WORLD_SIZE="4")
    monkeypatch.setattr(rank_device, "loaded_version", lambda: 23007)

    class Properties:
        total_memory = 80 << 30

    limits = []
    monkeypatch.setattr("torch.cuda.get_device_properties", lambda device: Properties)
    monkeypatch.setattr(
        "torch.cuda.set_per_process_memory_fraction", lambda *given: limits.append(given)
    )
    device = rank_device.local_device()
    assert str(device) == "cuda:0"
    assert limits == [(19 / 80, device)]
    monkeypatch.setenv("DISTCA_SHARE_BYTES", str(4 << 30))  # others had used most of the GPU
    rank_device.local_device()
    assert limits[1:] == [(4 / 80, device)]
    assert available_bytes(device, 4) == 4 << 30
