"""NVIDIA's Multi-Process Service (MPS), through which the processes of one GPU run side by side.

Without it, they take turns on the whole GPU. A control daemon waits for processes at the named
pipes of a folder, and starts a server when the first one connects.

[Note: the end of MPS] The daemon is ended by a process that does nothing but wait for the end of
its standard input, which is a pipe from here. The pipe is closed when this process is done, and
also when it is killed. So no daemon is left behind in any case.
"""

import os
import shutil
import signal
import subprocess
import time
from collections.abc import Iterator, Mapping
from contextlib import contextmanager, suppress
from pathlib import Path
from tempfile import TemporaryDirectory

from distca.runtime.launched import RankFailedError

CONTROL = "nvidia-cuda-mps-control"
PIPES, LOGS = "CUDA_MPS_PIPE_DIRECTORY", "CUDA_MPS_LOG_DIRECTORY"
GPUS = "CUDA_VISIBLE_DEVICES"
LIST = "get_server_list"
ANSWER_S = 10.0  # for a command to the daemon
END_S = 20.0  # for servers and the daemon, after the last process has left
# Servers with processes that have not left after 5 seconds are ended as well.
QUIT = f"cat > /dev/null; echo quit -t 5 | {CONTROL}"


@contextmanager
def mps(logs: Path) -> Iterator[dict[str, str]]:
    """Runs an MPS daemon of its own, and yields the environment variables of its processes.

    It serves the first visible GPU, writes to ``logs``, and is gone when the context ends. A daemon
    that the user runs already, at CUDA_MPS_PIPE_DIRECTORY, is used instead and stays.
    """
    if shutil.which(CONTROL) is None:
        raise ValueError(
            f"{CONTROL} was not found: ranks share a GPU through MPS, which comes with NVIDIA's"
            " driver; install it, or put its folder on PATH"
        )
    if PIPES in os.environ and ask(LIST, os.environ) is not None:
        yield {}
        return
    logs.mkdir(parents=True, exist_ok=True)
    # Not in TMPDIR, which may be too long a path for a socket.
    with TemporaryDirectory(prefix="distca-mps-", dir="/tmp") as pipes:
        variables = {PIPES: pipes, LOGS: str(logs.resolve())}
        environment = os.environ | variables
        # The daemon numbers the GPUs that it sees anew, and its processes see those numbers.
        environment[GPUS] = os.environ.get(GPUS, "0").split(",")[0]
        environment.pop("LD_PRELOAD", None)
        with _ending(environment, logs):
            _start(environment, logs)
            yield variables | {GPUS: "0"}


def ask(command: str, environment: Mapping[str, str]) -> str | None:
    """Returns the answer of an MPS daemon, or None if there is none."""
    try:
        ran = subprocess.run(
            [CONTROL], input=f"{command}\n", env=environment, text=True, timeout=ANSWER_S,
            stdout=subprocess.PIPE, stderr=subprocess.DEVNULL,
        )  # fmt: skip
    except (OSError, subprocess.TimeoutExpired):
        return None
    return None if ran.returncode or "Cannot find MPS" in ran.stdout else ran.stdout


def server_ids(environment: Mapping[str, str]) -> list[int]:
    """Returns the process ids of the servers of an MPS daemon."""
    return [int(word) for word in (ask(LIST, environment) or "").split() if word.isdecimal()]


def _start(environment: Mapping[str, str], logs: Path) -> None:
    said = logs / "start.log"  # not a pipe, which the daemon would hold open
    try:
        with said.open("wb") as file:
            code = subprocess.run(
                [CONTROL, "-d"], env=environment, stdin=subprocess.DEVNULL, stdout=file,
                stderr=file, timeout=ANSWER_S, start_new_session=True,
            ).returncode  # fmt: skip
    except subprocess.TimeoutExpired:
        code = -1
    if code or ask(LIST, environment) is None:
        words = " ".join(said.read_text(errors="replace").split()) or f"exit status {code}"
        raise ValueError(
            f"MPS cannot start ({words}): see its logs in {logs}, and end an MPS of another user"
            " that holds the GPU, if there is one"
        )


@contextmanager
def _ending(environment: Mapping[str, str], logs: Path) -> Iterator[None]:
    """Ends the daemon and its servers at the end, see [Note: the end of MPS]."""
    waiting = subprocess.Popen(
        ["sh", "-c", QUIT],
        env=environment,
        stdin=subprocess.PIPE,
        stdout=subprocess.DEVNULL,
        stderr=subprocess.DEVNULL,
        start_new_session=True,
    )
    assert waiting.stdin is not None
    known: list[int] = []
    try:
        yield
    finally:
        try:
            # A process that is ending has no environment any more, by which daemons are found.
            known = [*server_ids(environment), *_daemons(environment[PIPES])]
        finally:
            waiting.stdin.close()
        _wait(waiting, known, environment[PIPES], logs)


def _wait(waiting: subprocess.Popen[bytes], known: list[int], pipes: str, logs: Path) -> None:
    """Waits until all is gone: a run that starts earlier finds the GPU busy.

    known: processes of MPS; a daemon that was starting when they were listed is found as well.
    """
    deadline = time.monotonic() + END_S
    with suppress(subprocess.TimeoutExpired):
        waiting.wait(END_S)
    while left := {*filter(_is_running, known), *_daemons(pipes)}:
        if time.monotonic() > deadline:
            for process in left:
                with suppress(ProcessLookupError):
                    os.kill(process, signal.SIGKILL)
            raise RankFailedError(
                f"MPS did not end within {END_S:.0f} s and was killed: see {logs}"
            )
        time.sleep(0.1)


def _daemons(pipes: str) -> Iterator[int]:
    """Yields the processes of MPS that were started with a folder of pipes."""
    name, variable = CONTROL[:15], f"{PIPES}={pipes}\0".encode()  # the kernel cuts names
    for folder in Path("/proc").glob("[0-9]*"):
        with suppress(OSError):  # ended, or of another user
            if (folder / "comm").read_text().strip() != name:
                continue
            if variable in (folder / "environ").read_bytes() and _is_running(int(folder.name)):
                yield int(folder.name)


def _is_running(pid: int) -> bool:
    try:
        state = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0]
    except OSError:
        return False
    return state != "Z"  # a process that ended, and that nobody has waited for
