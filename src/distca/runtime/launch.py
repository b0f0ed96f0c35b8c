"""Local ranks: they start together, end together, and the first failure is reported.

Every rank shares a socket with its launcher. A rank sends its error over it at the moment of the
failure, so the launcher knows which rank failed first even though the others fail soon after. And
each side notices at once when the other is gone: the launcher that a rank has died, and a rank that
its launcher has died and that it must not stay behind as an orphan.

Nothing of a local run listens on the network: the store of the ranks and their sockets are bound to
the loopback interface.

Each rank has a session of its own, so a Ctrl-C reaches only the launcher. The launcher then asks
all ranks by SIGTERM to save and stop, as it does when it receives SIGTERM itself.
"""

import json
import os
import selectors
import signal
import socket
import subprocess
import time
from collections.abc import Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager, suppress
from dataclasses import dataclass
from pathlib import Path
from threading import Thread
from typing import Any, NoReturn

CPU_RANKS = 2  # without GPUs, ranks are only for trying things out
# Environment variables with file descriptors: a rank's socket to its launcher, and the socket on
# which the store of rank 0 listens.
CHANNEL, LISTENER = "DISTCA_CHANNEL", "DISTCA_LISTENER"
LOOPBACK = "127.0.0.1"
STOP_SIGNALS = (signal.SIGINT, signal.SIGTERM)
GRACE_S = 3.0  # between SIGTERM and SIGKILL
DEATH_S = 0.5  # how long a killed rank may take to be reported as dead
_ERROR_BYTES = 1 << 16


class RankFailedError(RuntimeError):
    """A run failed for a reason other than a user's mistake, which is told in one sentence."""


@dataclass(frozen=True)
class Stop:
    """The ranks ended because of a signal."""

    signal: signal.Signals
    early: bool  # a rank ended before it could handle the signal


def is_rank() -> bool:
    """Returns whether torchrun or ``launch`` has started this process as one of several ranks."""
    return "RANK" in os.environ


def is_launched() -> bool:
    """Returns whether ``launch`` has started this process; then it has announced the run too."""
    return CHANNEL in os.environ


def local_ranks(wanted: int | None) -> int:
    """Returns the number of ranks to start: by default one for each GPU, or a few on the CPU."""
    import torch

    gpus = torch.cuda.device_count()
    if wanted is None:
        return gpus or CPU_RANKS
    if wanted < 1:
        raise ValueError(f"{wanted} ranks: start 1 or more")
    if gpus and wanted > gpus:
        raise ValueError(
            f"{wanted} ranks on {gpus} GPUs: each rank needs its own GPU; start at most {gpus}, or"
            " set CUDA_VISIBLE_DEVICES= to run on the CPU"
        )
    return wanted


def launch(command: Sequence[str], num_ranks: int, logs: Path) -> Stop | None:
    """Runs ``command`` as ranks 0..n-1 until all are done or a signal has stopped them.

    The standard output of rank 0 is that of this process; all other output goes to ``logs``. Raises
    a rank's ValueError with its own message, and RankFailedError for any other failure. No rank is
    left behind in any case. After a second signal, ranks get no time to save.
    """
    logs.mkdir(parents=True, exist_ok=True)
    with ExitStack() as stack:
        ranks: list[_Rank] = []
        received: list[signal.Signals] = []
        stack.enter_context(_forward_signals(ranks, received))
        stack.callback(_end, ranks, received)
        with socket.create_server((LOOPBACK, 0)) as listener:
            for number in range(num_ranks):
                ranks.append(_start(command, number, num_ranks, listener, logs))
        return _watch(ranks, received)


def loopback_store() -> dict[str, Any]:
    """Returns ``store``, ``rank`` and ``world_size`` for ``init_process_group`` in a launched rank.

    By default torch's store listens on all interfaces. Under torchrun nothing is returned, and
    torchrun's own store is used.
    """
    if not is_launched():
        return {}
    from torch.distributed import TCPStore  # type: ignore[attr-defined]

    rank, size = int(os.environ["RANK"]), int(os.environ["WORLD_SIZE"])
    listener = os.environ.get(LISTENER)
    store = TCPStore(
        os.environ["MASTER_ADDR"],
        int(os.environ["MASTER_PORT"]),
        size,
        is_master=rank == 0,
        master_listen_fd=None if listener is None else int(listener),
    )
    return {"store": store, "rank": rank, "world_size": size}


@contextmanager
def reporting() -> Iterator[None]:
    """Reports an error inside the context to the launcher; without a launcher it does nothing."""
    number = os.environ.get(CHANNEL)
    if number is None:
        yield
        return
    channel = socket.socket(fileno=int(number))
    channel.set_inheritable(False)
    Thread(target=_end_with_launcher, args=(channel,), daemon=True).start()
    try:
        yield
    except Exception as error:
        report = {
            "kind": type(error).__name__,
            "message": sentence(error),
            "mistake": isinstance(error, ValueError | OSError),
            "explained": isinstance(error, RankFailedError),
        }
        with suppress(ValueError):  # not the main thread
            # This rank ends by itself; the launcher must not end it while it prints its traceback.
            signal.signal(signal.SIGTERM, signal.SIG_IGN)
        with suppress(OSError):  # the launcher may be gone
            channel.sendall(json.dumps(report).encode()[: _ERROR_BYTES - 1] + b"\n")
        raise
    finally:
        channel.detach()  # the socket stays open until the process ends, which closes it


def sentence(error: Exception) -> str:
    """Returns an error in one line: what failed, the values, the rule, the way out."""
    if isinstance(error, OSError) and error.errno is not None:
        reason = (error.strerror or type(error).__name__).lower()
        if error.filename:
            return (
                f"cannot open {error.filename}: {reason}; give a path that can be read or written"
            )
        return f"{reason}: check the disks that this run reads from and writes to"
    return " ".join(str(error).split())


def mark_repeated(error: Exception, repeated: bool) -> None:
    """Marks an error that another rank reports as well, so that a user reads it once."""
    error._distca_repeated = repeated  # type: ignore[attr-defined]


def is_repeated(error: Exception) -> bool:
    return getattr(error, "_distca_repeated", False)


def _end_with_launcher(channel: socket.socket) -> None:
    """Kills this rank's session when the launcher is gone.

    The launcher never writes to the socket, so a read returns only when the launcher closes it.
    """
    with suppress(OSError):
        if os.read(channel.fileno(), 1):
            return
    os.killpg(os.getpgrp(), signal.SIGKILL)


@dataclass(frozen=True, eq=False)
class _Rank:
    number: int
    process: subprocess.Popen[bytes]
    channel: socket.socket
    log: Path

    def kill(self) -> None:
        """Kills the rank and all processes that it has started."""
        with suppress(ProcessLookupError):
            os.killpg(self.process.pid, signal.SIGKILL)
        self.process.wait()


def _start(
    command: Sequence[str], number: int, num_ranks: int, listener: socket.socket, logs: Path
) -> _Rank:
    ours, theirs = socket.socketpair()
    passed = [theirs.fileno()]
    path = logs / f"rank-{number}.log"
    environment = os.environ | {
        "RANK": str(number),
        "LOCAL_RANK": str(number),
        "WORLD_SIZE": str(num_ranks),
        "LOCAL_WORLD_SIZE": str(num_ranks),
        "MASTER_ADDR": LOOPBACK,
        "MASTER_PORT": str(listener.getsockname()[1]),
        CHANNEL: str(theirs.fileno()),
    }
    if number == 0:
        environment[LISTENER] = str(listener.fileno())
        passed.append(listener.fileno())
    # Ranks that each use all cores slow each other down.
    environment.setdefault("OMP_NUM_THREADS", "1")
    for name in ("GLOO_SOCKET_IFNAME", "NCCL_SOCKET_IFNAME"):
        environment.setdefault(name, _loopback_interface())
    with theirs, path.open("wb") as log:
        process = subprocess.Popen(
            command,
            env=environment,
            stdin=subprocess.DEVNULL,
            stdout=log if number else None,
            stderr=log,
            pass_fds=passed,
            start_new_session=True,
        )
    return _Rank(number, process, ours, path)


def _watch(ranks: Sequence[_Rank], received: Sequence[signal.Signals]) -> Stop | None:
    """Waits until all ranks have ended, or raises the first failure."""
    with selectors.DefaultSelector() as selector:
        for rank in ranks:
            selector.register(rank.channel, selectors.EVENT_READ, rank)
        while selector.get_map():
            events = [(key.data, _receive(key.data)) for key, _ in selector.select()]
            # Deaths before errors: a death may be the cause of errors that arrive with it.
            for rank, report in sorted(events, key=lambda event: event[1] is not None):
                if report is not None:
                    if not report["mistake"] and (killed := _killed(ranks)):
                        _raise_ended(killed, killed.process.returncode)
                    _raise_reported(rank, report)
                selector.unregister(rank.channel)
                code = _exit_code(rank)
                if received and code == -signal.SIGTERM:
                    return Stop(received[0], early=True)
                if code:
                    _raise_ended(rank, code)
    return Stop(received[0], early=False) if received else None


def _killed(ranks: Sequence[_Rank]) -> _Rank | None:
    """Returns a rank that a signal has killed, if there is one.

    Other ranks may report its absence a moment before its death can be seen.
    """
    deadline = time.monotonic() + DEATH_S
    while time.monotonic() < deadline:
        for rank in ranks:
            if (rank.process.poll() or 0) < 0:
                return rank
        time.sleep(0.01)
    return None


def _receive(rank: _Rank) -> Mapping[str, Any] | None:
    """Returns a rank's report of its error, or None if the rank is gone."""
    try:
        data = rank.channel.recv(_ERROR_BYTES)
    except ConnectionError:
        return None
    if not data:
        return None
    try:
        report: Mapping[str, Any] = json.loads(data)
    except ValueError:  # a very long message was cut
        text = data.decode(errors="replace")
        return {"kind": "an error", "message": text, "mistake": False, "explained": False}
    return report


def _exit_code(rank: _Rank) -> int:
    """Returns the exit code of a rank whose socket is closed, so that it ends in a moment."""
    try:
        return rank.process.wait(GRACE_S)
    except subprocess.TimeoutExpired:
        rank.kill()
        return rank.process.wait()


def _raise_reported(rank: _Rank, report: Mapping[str, Any]) -> NoReturn:
    if report["mistake"]:
        raise ValueError(report["message"])
    if report["explained"]:
        raise RankFailedError(report["message"])
    why = ": ".join(filter(None, (report["kind"], report["message"])))
    raise RankFailedError(f"rank {rank.number} failed with {why}; its output is in {rank.log}")


def _raise_ended(rank: _Rank, code: int) -> NoReturn:
    how = f"was killed by {signal.Signals(-code).name}" if code < 0 else f"ended with status {code}"
    raise RankFailedError(
        f"rank {rank.number} {how}, so all ranks were ended; its output is in {rank.log}"
    )


def _end(ranks: Sequence[_Rank], received: Sequence[signal.Signals]) -> None:
    """Ends all ranks: by SIGTERM, and by SIGKILL after a grace period or a second signal."""
    for rank in ranks:
        rank.process.terminate()
    deadline = time.monotonic() + (GRACE_S if len(received) < 2 else 0.0)
    for rank in ranks:
        with suppress(subprocess.TimeoutExpired):
            rank.process.wait(max(deadline - time.monotonic(), 0))
    for rank in ranks:
        rank.kill()
        rank.channel.close()


@contextmanager
def _forward_signals(ranks: Sequence[_Rank], received: list[signal.Signals]) -> Iterator[None]:
    """Forwards the first signal to all ranks, so that they save; a second one ends everything."""

    def handle(number: int, _: object) -> None:
        received.append(signal.Signals(number))
        if len(received) == 2:
            raise KeyboardInterrupt
        for rank in ranks if len(received) == 1 else ():
            rank.process.terminate()

    before = {number: signal.signal(number, handle) for number in STOP_SIGNALS}
    try:
        yield
    finally:
        for number, handler in before.items():
            signal.signal(number, handler)


def _loopback_interface() -> str:
    names = [name for _, name in socket.if_nameindex()]
    return next((name for name in names if name in ("lo", "lo0")), names[0])
