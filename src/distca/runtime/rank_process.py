"""A local rank as its launcher sees it: a process, and the socket over which it reports."""

import json
import os
import signal
import socket
import subprocess
import time
from collections.abc import Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from distca.runtime.launched import CHANNEL, ERROR_BYTES

LOOPBACK = "127.0.0.1"
GRACE_S = 3.0  # between SIGTERM and SIGKILL, and between the end of the socket and of the process


@dataclass(frozen=True, eq=False)
class RankProcess:
    """One rank.

    started_at: in seconds since 1970.
    is_spare: whether the others can go on without it.
    joins: whether it was started to join ranks that were there before.
    """

    number: int
    process: subprocess.Popen[bytes]
    channel: socket.socket
    log: Path
    is_spare: bool = False
    joins: bool = False
    started_at: float = field(default_factory=time.time)

    @classmethod
    def start(
        cls,
        command: Sequence[str],
        number: int,
        local_rank: int,
        num_ranks: int,
        port: int,
        log: Path,
        variables: Mapping[str, str],
        *,
        is_spare: bool = False,
        joins: bool = False,
    ) -> "RankProcess":
        """Starts a rank, with what torchrun would give it.

        port: of the store.
        """
        ours, theirs = socket.socketpair()
        environment = os.environ | {
            **variables,
            "RANK": str(number),
            "LOCAL_RANK": str(local_rank),
            "WORLD_SIZE": str(num_ranks),
            "LOCAL_WORLD_SIZE": str(num_ranks),
            "MASTER_ADDR": LOOPBACK,
            "MASTER_PORT": str(port),
            "TORCHELASTIC_USE_AGENT_STORE": str(True),  # as under torchrun: the store exists
            CHANNEL: str(theirs.fileno()),
        }
        # Ranks that each use all cores slow each other down.
        environment.setdefault("OMP_NUM_THREADS", "1")
        for name in ("GLOO_SOCKET_IFNAME", "NCCL_SOCKET_IFNAME"):
            environment.setdefault(name, loopback_interface())
        with theirs, log.open("wb") as file:
            process = subprocess.Popen(
                command,
                env=environment,
                stdin=subprocess.DEVNULL,
                stdout=file if number else None,
                stderr=file,
                pass_fds=[theirs.fileno()],
                start_new_session=True,
            )
        return cls(number, process, ours, log, is_spare, joins)

    def reports(self) -> list[Mapping[str, Any]]:
        """Returns what the rank reports, such as its error; nothing if the rank is gone."""
        try:
            data = self.channel.recv(ERROR_BYTES)
        except ConnectionError:
            return []
        reports = []
        for line in data.splitlines():
            try:
                reports.append(json.loads(line))
            except ValueError:  # a very long message was cut
                text = line.decode(errors="replace")
                known = {"kind": "an error", "mistake": False, "explained": False}
                reports.append(known | {"message": text})
        return reports

    def exit_code(self) -> int:
        """Returns the exit code of a rank whose socket is closed, so that it ends in a moment."""
        try:
            return self.process.wait(GRACE_S)
        except subprocess.TimeoutExpired:
            self.kill()
            return self.process.wait()

    def kill(self) -> None:
        """Kills the rank and all processes that it has started."""
        with suppress(ProcessLookupError):
            os.killpg(self.process.pid, signal.SIGKILL)
        self.process.wait()

    def ended(self, code: int) -> str:
        """Returns in words how it has ended."""
        how = f"killed by {signal.Signals(-code).name}" if code < 0 else f"ended with status {code}"
        return f"rank {self.number} {'was ' * (code < 0)}{how}"


def loopback_interface() -> str:
    names = [name for _, name in socket.if_nameindex()]
    return next((name for name in names if name in ("lo", "lo0")), names[0])
