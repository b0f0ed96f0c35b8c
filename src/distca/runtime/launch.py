"""Local ranks: started together, ended together, and the first failure told.

Every rank shares a socket with its launcher. Over it a rank says what went wrong, at the moment it
does, so the first to fail is known even though the others fail soon after. And each side sees at
once when the other is gone: the launcher that a rank has died, a rank that it would be an orphan.

Ranks have sessions of their own, so a Ctrl-C reaches the launcher alone, which asks all ranks to
stop by SIGTERM, as whoever started it may do.
"""

from __future__ import annotations

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

CPU_RANKS = 2  # without GPUs ranks are there to be tried, not to be many
CHANNEL = "DISTCA_CHANNEL"  # the launcher's own variable: which file descriptor the socket has
STOPS = (signal.SIGINT, signal.SIGTERM)
GRACE_S = 3.0  # between asking a rank to end and ending it
KILLED_S = 0.5  # how long a killed rank may take to be gone
_NOTE_BYTES = 1 << 16


class RankFailedError(RuntimeError):
    """A rank failed, and not by a user's mistake."""


@dataclass(frozen=True)
class Stop:
    """Ranks that ended because a signal asked for it."""

    signal: signal.Signals
    early: bool  # one of them before it could do anything about it


def is_rank() -> bool:
    """Whether torchrun, or ``launch``, has started this process as one of several."""
    return "RANK" in os.environ


def is_launched() -> bool:
    """Whether it was ``launch``, which has then said already what runs."""
    return CHANNEL in os.environ


def local_ranks(wanted: int | None) -> int:
    """How many ranks to start here: one for each GPU, or a few on the CPU."""
    import torch

    gpus = torch.cuda.device_count()
    if wanted is None:
        return gpus or CPU_RANKS
    if wanted < 1:
        raise ValueError(f"{wanted} ranks: start 1 or more")
    if gpus and wanted > gpus:
        raise ValueError(
            f"{wanted} ranks on {gpus} GPUs: each needs a GPU of its own; start at most {gpus}, or"
            " set CUDA_VISIBLE_DEVICES= to run on the CPU"
        )
    return wanted


def launch(command: Sequence[str], num_ranks: int, logs: Path) -> Stop | None:
    """Runs ``command`` as ranks 0..n-1 until all are done, or a signal has stopped them.

    Rank 0 writes to this process's output, and its errors, like all that others write, go to
    ``logs``. Raises ValueError with the words of a rank's ValueError, RankFailedError for all else.
    Whatever happens, no rank is left behind. A second signal does not wait for ranks to save.
    """
    logs.mkdir(parents=True, exist_ok=True)
    with ExitStack() as stack:
        ranks: list[_Rank] = []
        asked: list[signal.Signals] = []
        stack.callback(_end, ranks, asked)
        stack.enter_context(_on_stops(ranks, asked))
        port = _free_port()
        for number in range(num_ranks):
            ranks.append(_start(command, number, num_ranks, port, logs))
        return _watch(ranks, asked)


@contextmanager
def reporting() -> Iterator[None]:
    """What a rank's whole work stands in; does nothing where there is no launcher of ours."""
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
        note = {
            "kind": type(error).__name__,
            "words": " ".join(str(error).split()),
            "mistake": isinstance(error, ValueError | OSError),
        }
        with suppress(ValueError):  # not the main thread
            # It ends by itself, and should not be ended in the middle of its traceback.
            signal.signal(signal.SIGTERM, signal.SIG_IGN)
        with suppress(OSError):  # the launcher may be gone
            channel.sendall(json.dumps(note).encode()[: _NOTE_BYTES - 1] + b"\n")
        raise
    finally:
        channel.detach()  # stays open until the process is gone: that is what closes it


def _end_with_launcher(channel: socket.socket) -> None:
    """The other end is never written to, so what comes is its end; then all of this session goes,
    which ``launch`` gave to this rank alone."""
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
        """It, and what it has started."""
        with suppress(ProcessLookupError):
            os.killpg(self.process.pid, signal.SIGKILL)
        self.process.wait()


def _start(command: Sequence[str], number: int, num_ranks: int, port: int, logs: Path) -> _Rank:
    ours, theirs = socket.socketpair()
    path = logs / f"rank-{number}.log"
    environment = os.environ | {
        "RANK": str(number),
        "LOCAL_RANK": str(number),
        "WORLD_SIZE": str(num_ranks),
        "LOCAL_WORLD_SIZE": str(num_ranks),
        "MASTER_ADDR": "127.0.0.1",
        "MASTER_PORT": str(port),
        CHANNEL: str(theirs.fileno()),
    }
    # Ranks that all want all cores hinder each other.
    environment.setdefault("OMP_NUM_THREADS", "1")
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


def _watch(ranks: Sequence[_Rank], asked: Sequence[signal.Signals]) -> Stop | None:
    with selectors.DefaultSelector() as selector:
        for rank in ranks:
            selector.register(rank.channel, selectors.EVENT_READ, rank)
        while selector.get_map():
            heard = [(key.data, _hear(key.data)) for key, _ in selector.select()]
            # A death that explains the others' trouble may be seen in the same moment.
            for rank, note in sorted(heard, key=lambda one: one[1] is not None):
                if note is not None:
                    if not note["mistake"] and (killed := _killed(ranks)):
                        _fail_without_words(killed, killed.process.returncode)
                    _fail(rank, note)
                selector.unregister(rank.channel)
                code = _code(rank)
                if asked and code == -signal.SIGTERM:
                    return Stop(asked[0], early=True)
                if code:
                    _fail_without_words(rank, code)
    return Stop(asked[0], early=False) if asked else None


def _killed(ranks: Sequence[_Rank]) -> _Rank | None:
    """A rank that a signal has ended. Peers may complain of its absence before it is quite gone."""
    deadline = time.monotonic() + KILLED_S
    while time.monotonic() < deadline:
        for rank in ranks:
            if (rank.process.poll() or 0) < 0:
                return rank
        time.sleep(0.01)
    return None


def _hear(rank: _Rank) -> Mapping[str, Any] | None:
    """What a rank says of its failure; None if it is gone."""
    try:
        said = rank.channel.recv(_NOTE_BYTES)
    except ConnectionError:
        return None
    if not said:
        return None
    try:
        note: Mapping[str, Any] = json.loads(said)
    except ValueError:  # cut, being far too long
        note = {"kind": "an error", "words": said.decode(errors="replace"), "mistake": False}
    return note


def _code(rank: _Rank) -> int:
    """Of a rank whose socket is closed, so its end is only a moment away."""
    try:
        return rank.process.wait(GRACE_S)
    except subprocess.TimeoutExpired:
        rank.kill()
        return rank.process.wait()


def _fail(rank: _Rank, note: Mapping[str, Any]) -> NoReturn:
    if note["mistake"]:
        raise ValueError(note["words"])
    raise RankFailedError(
        f"rank {rank.number} failed with {note['kind']}: {note['words']}; all is in {rank.log}"
    )


def _fail_without_words(rank: _Rank, code: int) -> NoReturn:
    how = f"was killed by {signal.Signals(-code).name}" if code < 0 else f"ended with status {code}"
    raise RankFailedError(
        f"rank {rank.number} {how}, so all ranks were ended; what it wrote is in {rank.log}"
    )


def _end(ranks: Sequence[_Rank], asked: Sequence[signal.Signals]) -> None:
    """Asks those that still run, waits a little unless somebody is impatient, and ends them."""
    for rank in ranks:
        rank.process.terminate()
    deadline = time.monotonic() + (GRACE_S if len(asked) < 2 else 0.0)
    for rank in ranks:
        with suppress(subprocess.TimeoutExpired):
            rank.process.wait(max(deadline - time.monotonic(), 0))
    for rank in ranks:
        rank.kill()
        rank.channel.close()


@contextmanager
def _on_stops(ranks: Sequence[_Rank], asked: list[signal.Signals]) -> Iterator[None]:
    """The first signal is passed on, so that ranks save and leave; the second ends everything."""

    def react(number: int, _: object) -> None:
        asked.append(signal.Signals(number))
        if len(asked) > 1:
            raise KeyboardInterrupt
        for rank in ranks:
            rank.process.terminate()

    before = {number: signal.signal(number, react) for number in STOPS}
    try:
        yield
    finally:
        for number, handler in before.items():
            signal.signal(number, handler)


def _free_port() -> int:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port: int = probe.getsockname()[1]
        return port
