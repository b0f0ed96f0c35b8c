"""A rank's side of its launcher: how it reports its errors, and how it ends.

A rank sends its error over the socket that it shares with its launcher, at the moment of the
failure. When the launcher is gone, the rank ends, so that it does not stay behind as an orphan.
"""

import errno
import json
import os
import re
import signal
import time
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from threading import Thread
from types import FrameType
from typing import Any, NoReturn

from distca.runtime.disk import is_full, no_space
from distca.runtime.interrupts import exit_if_importing, outlast_sigterm

CHANNEL = "DISTCA_CHANNEL"  # environment variable with the file descriptor of a rank's socket
RESTART = "TORCHELASTIC_RESTART_COUNT"  # the variable of torchrun, which ``launch`` sets too
ERROR_BYTES = 1 << 16
AGAIN = 75  # the exit status of a rank that may join again
STOPPED_EARLY = "stopped before the next step: there was nothing new to save"


class RankFailedError(RuntimeError):
    """A run failed for a reason other than a user's mistake, which is told in one sentence."""


class RankEndedError(RankFailedError):
    """A rank was killed or failed unexpectedly, which need not happen again.

    rank: the one that was the first to end; None if that is not known.
    had_started: whether all ranks had begun to work together before.
    stop_requested: whether a signal has asked the run to stop, so that it is not started again.
    """

    rank: int | None = None
    had_started: bool = True
    stop_requested: bool = False


def is_rank() -> bool:
    """Returns whether torchrun or ``launch`` has started this process as one of several ranks."""
    return "RANK" in os.environ


def is_launched() -> bool:
    """Returns whether ``launch`` has started this process; then it has announced the run too."""
    return CHANNEL in os.environ


def num_restarts() -> int:
    """Returns how often this run was restarted by the launcher that has started this rank."""
    return int(os.environ.get(RESTART, "0"))


def stop_before_first_step() -> None:
    """Makes SIGTERM end this process with a sentence, until something handles it otherwise.

    A rank of a launcher just ends, and the launcher says so.
    """
    if is_launched():
        return

    def end(_: int, frame: FrameType | None) -> None:
        # Not ``print``, which must not be entered twice.
        os.write(2, f"{STOPPED_EARLY}\n".encode() if os.environ.get("RANK", "0") == "0" else b"")
        exit_if_importing(frame, 0)
        raise SystemExit(0)

    signal.signal(signal.SIGTERM, end)


@contextmanager
def reporting() -> Iterator[None]:
    """Reports an error inside the context to the launcher, or to torchrun for its summary."""
    if is_launched():
        channel = int(os.environ[CHANNEL])
        os.set_inheritable(channel, False)
        Thread(target=_end_with_launcher, args=(channel,), daemon=True).start()
    try:
        yield
    except Exception as error:
        if is_launched():
            with suppress(ValueError):  # not the main thread
                # It ends by itself; the launcher must not end it while it prints its traceback.
                signal.signal(signal.SIGTERM, signal.SIG_IGN)
        report(error)
        raise


def report(error: Exception) -> None:
    """Reports an error of this rank to the launcher, or to torchrun."""
    mistake = isinstance(error, ValueError | OSError)
    explained = isinstance(error, RankFailedError) or _is_out_of_memory(error)
    if is_launched():
        told = {
            "kind": type(error).__name__,
            "message": sentence(error),
            "mistake": mistake,
            "explained": explained,
        }
        _write(told)
    elif (mistake or explained) and (file := os.environ.get("TORCHELASTIC_ERROR_FILE")):
        told = {"message": sentence(error), "timestamp": int(time.time())}
        Path(file).write_text(json.dumps(told))


def report_started() -> None:
    """Tells the launcher that ranks work together; from now on they go on without spare ones."""
    _write({"started": True})


def report_finished() -> None:
    """Tells the launcher that the work is done, so that SIGTERM comes too late from now on.

    Call it on all ranks before the result is shown: then no signal contradicts what is shown.
    """
    outlast_sigterm()
    _write({"finished": True})


def report_lost(rank: int, noticed_at: float) -> None:
    """Tells the launcher that the others go on without a rank, which may live but not answer.

    noticed_at: in seconds since 1970.
    """
    _write({"lost": rank, "noticed_at": noticed_at})


def end_to_be_started_again() -> NoReturn:
    """Ends a rank that the others do not need as it is, but which may join them again."""
    raise SystemExit(AGAIN if is_launched() else 0)


def _write(told: dict[str, Any]) -> None:
    if is_launched():
        with suppress(OSError):  # the launcher may be gone
            data = json.dumps(told).encode()[: ERROR_BYTES - 1] + b"\n"
            os.write(int(os.environ[CHANNEL]), data)


def sentence(error: Exception) -> str:
    """Returns an error in one line: what failed, the values, the rule, the way out."""
    if isinstance(error, OSError) and error.errno is not None:
        reason = (error.strerror or type(error).__name__).lower()
        if error.filename and is_full(error):
            return no_space(Path(error.filename))
        if error.errno == errno.EFBIG:
            return (
                f"cannot write {error.filename or 'a file'}: it would be larger than files may be"
                " here; raise the limit (ulimit -f), or use another disk"
            )
        if error.filename:
            return (
                f"cannot open {error.filename}: {reason}; give a path that can be read or written"
            )
        if error.errno in (errno.EMFILE, errno.ENFILE):
            return f"{reason}: start fewer ranks, or allow more files (ulimit -n)"
        return f"{reason}: check the disks that this run reads from and writes to"
    words = " ".join(str(error).split())
    return _out_of_memory(words) if _is_out_of_memory(error) else words


def _is_out_of_memory(error: Exception) -> bool:
    """Returns whether a GPU has no memory left; torch, which has the class, may not be imported."""
    return type(error).__name__ == "OutOfMemoryError"


def _out_of_memory(words: str) -> str:
    wanted = re.search(r"allocate ([\d.]+ \w+)", words)
    more = f" for {wanted[1]} more" if wanted else ""
    return (
        f"rank {os.environ.get('RANK', 0)} has no GPU memory{more}: give ranks fewer tokens or"
        " layers, recompute activations, or use more ranks"
    )


def mark_repeated(error: Exception, repeated: bool) -> None:
    """Marks an error that another rank reports as well, so that a user reads it once."""
    error._distca_repeated = repeated  # type: ignore[attr-defined]


def is_repeated(error: Exception) -> bool:
    return getattr(error, "_distca_repeated", False)


def _end_with_launcher(channel: int) -> None:
    """Kills this rank's session when the launcher is gone.

    The launcher never writes to the socket, so a read returns only when the launcher closes it.
    """
    with suppress(OSError):
        if os.read(channel, 1):
            return
    os.killpg(os.getpgrp(), signal.SIGKILL)
