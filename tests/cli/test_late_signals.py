"""Signals to commands that have shown their result, and whose ranks take a moment to end."""

import signal
import subprocess
import time
from pathlib import Path

import pytest
from cli.test_train import COMMAND, command

pytestmark = pytest.mark.slow
DONE, STOPPED = "done: ", "stopped after "


def start(arguments: list[str]) -> subprocess.Popen[str]:
    return subprocess.Popen(
        arguments, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True, bufsize=1
    )


def wait_for(process: subprocess.Popen[str], words: str) -> None:
    assert process.stdout is not None
    said = []
    for line in process.stdout:
        said.append(line)
        if line.startswith(words):
            return
    raise AssertionError((said, process.communicate()))


@pytest.mark.parametrize(("number", "status"), [(signal.SIGTERM, 0), (signal.SIGINT, 130)])
def test_a_signal_after_the_last_step_claims_nothing(
    tmp_path: Path, number: signal.Signals, status: int
) -> None:
    with start(command(tmp_path, "train.steps=1")) as process:
        wait_for(process, DONE)
        process.send_signal(number)
        assert process.communicate(timeout=60) == ("", "")
    assert process.returncode == status


@pytest.mark.parametrize("stops", [False, True])
def test_ctrl_c_again_and_again(tmp_path: Path, stops: bool) -> None:
    """How many of them come before all ranks have ended depends on the machine."""
    steps = 1_000_000 if stops else 1
    with start(command(tmp_path, f"train.steps={steps}")) as process:
        if stops:
            wait_for(process, "step ")
            process.send_signal(signal.SIGINT)
        wait_for(process, STOPPED if stops else DONE)
        while process.poll() is None:
            process.send_signal(signal.SIGINT)
            time.sleep(0.01)
        out, err = process.communicate(timeout=60)
    assert (process.returncode, out) == (130, "")
    (saved,) = (tmp_path / "checkpoints").iterdir()
    assert err in ("", f"ended at once by a second signal: the last checkpoint is {saved}\n")


def test_a_result_that_is_shown_is_one(tmp_path: Path) -> None:
    with start([*COMMAND, "selftest", f"--out={tmp_path}"]) as process:
        wait_for(process, "All checks passed")
        process.send_signal(signal.SIGTERM)
        _, err = process.communicate(timeout=60)
    assert (process.returncode, err) == (0, "")


def test_sigterm_again_and_again_saves_all_the_same(tmp_path: Path) -> None:
    """Schedulers send it to a job, and to its processes."""
    with start(command(tmp_path, "train.steps=1000000")) as process:
        wait_for(process, "step ")
        for _ in range(3):
            process.send_signal(signal.SIGTERM)
            time.sleep(0.1)
        wait_for(process, STOPPED)
        assert process.communicate(timeout=60) == ("", "")
    assert process.returncode == 0
