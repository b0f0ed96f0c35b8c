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

import signal
import socket
import subprocess
import time
from collections.abc import Callable, Collection, Iterator, Sequence
from contextlib import ExitStack, contextmanager, suppress
from dataclasses import dataclass
from itertools import count
from pathlib import Path
from typing import TYPE_CHECKING

from distca.runtime.interrupts import STOP_SIGNALS
from distca.runtime.launched import RESTART, RankEndedError
from distca.runtime.rank_process import GRACE_S, LOOPBACK, RankProcess
from distca.runtime.rank_watch import RankWatch, Stop
from distca.runtime.shared_gpu import SharedGpu

if TYPE_CHECKING:
    from torch.distributed import TCPStore  # type: ignore[attr-defined]

SHARING_RANKS = 2  # on the CPU or on one GPU, ranks are only for trying things out
MOST_ON_CPU = 256


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
    if not gpus and wanted > MOST_ON_CPU:
        raise ValueError(
            f"{wanted} ranks on the CPU, where they are for trying things out: start at most"
            f" {MOST_ON_CPU}"
        )
    if gpus and wanted > gpus and not share_gpu:
        sharing = "" if share_gpu is None else " let all share one with --share-gpu,"
        raise ValueError(
            f"{wanted} ranks on {gpus} GPUs: each rank needs its own GPU; start at most {gpus},"
            f"{sharing} or set CUDA_VISIBLE_DEVICES= to run on the CPU"
        )
    return wanted


@dataclass(frozen=True)
class Rejoining:
    """How a spare rank that was lost is started again, while the others go on.

    command: what to start, given the address of the store.
    times: how often, over all ranks.
    tell: called with a sentence for each of them.
    """

    command: Callable[[str], Sequence[str]]
    times: int
    tell: Callable[[str], None]


def launch(
    command: Sequence[str],
    num_ranks: int,
    logs: Path,
    shared_gpu: SharedGpu | None = None,
    *,
    spares: Collection[int] = (),
    rejoining: Rejoining | None = None,
    restart: int = 0,
    local_ranks: Sequence[int] | None = None,
) -> Stop | None:
    """Runs ``command`` as ranks 0..n-1 until all are done or a signal has stopped them.

    shared_gpu: the GPU that all ranks use; None if each has its own, or if they use the CPU.
    spares: ranks without which the others can go on. If they cannot, they say so themselves.
    rejoining: starts spare ranks again.
    restart: how often the same run was started before.
    local_ranks: what chooses the GPU of each rank; its number by default.

    The standard output of rank 0 is that of this process; all other output goes to ``logs``. Raises
    a rank's ValueError with its own message, RankFailedError for a failure that a rank explains,
    and RankEndedError for any other. No rank is left behind in any case. After a second signal,
    ranks get no time to save.
    """
    logs.mkdir(parents=True, exist_ok=True)
    with ExitStack() as stack:
        ranks: list[RankProcess] = []
        received: list[signal.Signals] = []
        stack.enter_context(_noting_stop(received))
        stack.enter_context(_forward_signals(ranks, received))
        stack.callback(_end, ranks, received)
        store = _store(num_ranks)
        variables = {RESTART: str(restart)}
        variables |= {} if shared_gpu is None else shared_gpu.variables
        local = range(num_ranks) if local_ranks is None else local_ranks
        again = count(1)

        def start(what: Sequence[str], number: int, log: Path, joins: bool = False) -> RankProcess:
            place = number, local[number], num_ranks, store.port
            spare = number in spares
            return RankProcess.start(what, *place, log, variables, is_spare=spare, joins=joins)

        def rejoin(number: int) -> RankProcess | None:
            """Starts a lost rank again, if that may be."""
            if rejoining is None or received or (attempt := next(again)) > rejoining.times:
                return None
            what, log = (
                rejoining.command(f"{LOOPBACK}:{store.port}"),
                f"rank-{number}.{attempt}.log",
            )
            ranks[number] = start(what, number, logs / log, joins=True)
            return ranks[number]

        for number in range(num_ranks):
            rank = start(command, number, logs / f"rank-{number}.log")
            ranks.append(rank)
            if received:  # before this rank was there to be told
                rank.process.terminate()
        tell = None if rejoining is None else rejoining.tell
        watch = RankWatch(ranks, received, rejoin, tell or (lambda _: None))
        try:
            return watch.run()
        except RankEndedError as error:
            error.had_started = watch.has_started
            raise


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


@contextmanager
def _noting_stop(received: Sequence[signal.Signals]) -> Iterator[None]:
    """Notes in the failure of a rank that a signal has come before all ranks had ended."""
    try:
        yield
    except RankEndedError as error:
        error.stop_requested = bool(received)
        raise


def _end(ranks: Sequence[RankProcess], received: Sequence[signal.Signals]) -> None:
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
def _forward_signals(
    ranks: Sequence[RankProcess], received: list[signal.Signals]
) -> Iterator[None]:
    """Forwards the first signal to all ranks, so that they save; a second one ends everything.

    Schedulers repeat SIGTERM, to a job and to its processes: this changes nothing.
    """

    def handle(number: int, _: object) -> None:
        if number == signal.SIGTERM and signal.SIGTERM in received:
            return
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
