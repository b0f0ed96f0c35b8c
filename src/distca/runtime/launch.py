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
from collections.abc import Collection, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager, suppress
from dataclasses import dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any, NoReturn

from distca.runtime.launched import (
    CHANNEL,
    ERROR_BYTES,
    RESTART,
    RankEndedError,
    RankFailedError,
)
from distca.runtime.shared_gpu import SharedGpu

if TYPE_CHECKING:
    from torch.distributed import TCPStore  # type: ignore[attr-defined]

SHARING_RANKS = 2  # on the CPU or on one GPU, ranks are only for trying things out
LOOPBACK = "127.0.0.1"
STOP_SIGNALS = (signal.SIGINT, signal.SIGTERM)
GRACE_S = 3.0  # between SIGTERM and SIGKILL
DEATH_S = 0.5  # how long a killed rank may take to be reported as dead


@dataclass(frozen=True)
class Stop:
    """The ranks ended because of a signal."""

    signal: signal.Signals
    early: bool  # a rank ended before it could handle the signal


def local_ranks(wanted: int | None, share_gpu: bool | None = None) -> int:
    """Returns the number of ranks to start: by default one for each GPU, or a few that share it.

    Without GPUs, they share the CPU.

    share_gpu: whether ranks share a GPU; None for a command in which they cannot.
    """
    import torch

    gpus = torch.cuda.device_count()
    if share_gpu and not gpus:
        raise ValueError("--share-gpu, but there is no GPU: leave it out to run on the CPU")
    if wanted is None:
        return SHARING_RANKS if share_gpu or not gpus else gpus
    if wanted < 1:
        raise ValueError(f"{wanted} ranks: start 1 or more")
    if gpus and wanted > gpus and not share_gpu:
        sharing = "" if share_gpu is None else " let all share one with --share-gpu,"
        raise ValueError(
            f"{wanted} ranks on {gpus} GPUs: each rank needs its own GPU; start at most {gpus},"
            f"{sharing} or set CUDA_VISIBLE_DEVICES= to run on the CPU"
        )
    return wanted


def launch(
    command: Sequence[str],
    num_ranks: int,
    logs: Path,
    shared_gpu: SharedGpu | None = None,
    *,
    spares: Collection[int] = (),
    restart: int = 0,
) -> Stop | None:
    """Runs ``command`` as ranks 0..n-1 until all are done or a signal has stopped them.

    shared_gpu: the GPU that all ranks use; None if each has its own, or if they use the CPU.
    spares: ranks without which the others can go on. If they cannot, they say so themselves.
    restart: how often the same run was started before.

    The standard output of rank 0 is that of this process; all other output goes to ``logs``. Raises
    a rank's ValueError with its own message, RankFailedError for a failure that a rank explains,
    and RankEndedError for any other. No rank is left behind in any case. After a second signal,
    ranks get no time to save.
    """
    logs.mkdir(parents=True, exist_ok=True)
    with ExitStack() as stack:
        ranks: list[_Rank] = []
        received: list[signal.Signals] = []
        stack.enter_context(_forward_signals(ranks, received))
        stack.callback(_end, ranks, received)
        store = _store(num_ranks)
        variables = {RESTART: str(restart)}
        variables |= {} if shared_gpu is None else shared_gpu.variables
        for number in range(num_ranks):
            rank = _start(command, number, num_ranks, store.port, logs, variables)
            ranks.append(replace(rank, is_spare=number in spares))
            if received:  # before this rank was there to be told
                ranks[-1].process.terminate()
        return _watch(ranks, received)


def _store(num_ranks: int) -> "TCPStore":
    """Starts the store over which ranks find each other; it ends with this process.

    A store that torch starts by itself, in rank 0, listens on all interfaces.
    """
    from torch.distributed import TCPStore  # type: ignore[attr-defined]

    listener = socket.create_server((LOOPBACK, 0))
    return TCPStore(
        LOOPBACK,
        listener.getsockname()[1],
        num_ranks,
        is_master=True,
        wait_for_workers=False,
        master_listen_fd=listener.detach(),
    )


@dataclass(frozen=True, eq=False)
class _Rank:
    number: int
    process: subprocess.Popen[bytes]
    channel: socket.socket
    log: Path
    is_spare: bool = False

    def kill(self) -> None:
        """Kills the rank and all processes that it has started."""
        with suppress(ProcessLookupError):
            os.killpg(self.process.pid, signal.SIGKILL)
        self.process.wait()


def _start(
    command: Sequence[str],
    number: int,
    num_ranks: int,
    port: int,
    logs: Path,
    variables: Mapping[str, str],
) -> _Rank:
    ours, theirs = socket.socketpair()
    path = logs / f"rank-{number}.log"
    environment = os.environ | {
        **variables,
        "RANK": str(number),
        "LOCAL_RANK": str(number),
        "WORLD_SIZE": str(num_ranks),
        "LOCAL_WORLD_SIZE": str(num_ranks),
        "MASTER_ADDR": LOOPBACK,
        "MASTER_PORT": str(port),
        "TORCHELASTIC_USE_AGENT_STORE": str(True),  # as under torchrun: the store exists already
        CHANNEL: str(theirs.fileno()),
    }
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
            pass_fds=[theirs.fileno()],
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
                    if rank.is_spare and not report["mistake"]:
                        continue  # it ends, and the others know
                    if not report["mistake"] and (killed := _killed(ranks)):
                        _raise_ended(killed, killed.process.returncode)
                    _raise_reported(rank, report)
                selector.unregister(rank.channel)
                code = _exit_code(rank)
                if received and code == -signal.SIGTERM:
                    return Stop(received[0], early=True)
                if code and not rank.is_spare:
                    _raise_ended(rank, code)
    return Stop(received[0], early=False) if received else None


def _killed(ranks: Sequence[_Rank]) -> _Rank | None:
    """Returns a rank that a signal has killed, if there is one, and that the others needed.

    Other ranks may report its absence a moment before its death can be seen.
    """
    deadline = time.monotonic() + DEATH_S
    while time.monotonic() < deadline:
        for rank in ranks:
            if (rank.process.poll() or 0) < 0 and not rank.is_spare:
                return rank
        time.sleep(0.01)
    return None


def _receive(rank: _Rank) -> Mapping[str, Any] | None:
    """Returns a rank's report of its error, or None if the rank is gone."""
    try:
        data = rank.channel.recv(ERROR_BYTES)
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
        ended = report["kind"] == RankEndedError.__name__
        raise (RankEndedError if ended else RankFailedError)(report["message"])
    why = ": ".join(filter(None, (report["kind"], report["message"])))
    raise RankEndedError(f"rank {rank.number} failed with {why}; its output is in {rank.log}")


def _raise_ended(rank: _Rank, code: int) -> NoReturn:
    how = f"was killed by {signal.Signals(-code).name}" if code < 0 else f"ended with status {code}"
    raise RankEndedError(
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
