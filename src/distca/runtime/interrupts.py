"""Ctrl-C and SIGTERM while Python cannot handle them: during imports, and at the end.

An exception that a signal raises inside an import, which takes seconds, may be caught there, and
leaves half a module: numpy and torch then fail later, with errors of their own. So a process that
is asked to end during an import ends at once. It has nothing to clean up yet. Once the status of a
process is decided, both signals come too late and change nothing.
"""

from __future__ import annotations

import os
import signal
from contextlib import suppress

TYPE_CHECKING = False  # of typing, which takes a while to import: a signal may come before
if TYPE_CHECKING:
    from types import FrameType

CTRL_C = 130  # the exit status after a Ctrl-C
STOP_SIGNALS = (signal.SIGINT, signal.SIGTERM)
_IMPORT = "<frozen importlib._bootstrap>"


def end_on_ctrl_c() -> None:
    """Makes a Ctrl-C end this process quietly, until something handles it otherwise.

    A process that ignores it, as those do that a shell starts in the background, still does.
    """
    if signal.getsignal(signal.SIGINT) is signal.default_int_handler:
        signal.signal(signal.SIGINT, _end)


def exit_if_importing(frame: FrameType | None, status: int) -> None:
    """Ends this process if its main thread, which is at a frame, is importing a module."""
    while frame is not None:
        if frame.f_code.co_filename == _IMPORT:
            os._exit(status)
        frame = frame.f_back


def _end(_: int, frame: FrameType | None) -> None:
    exit_if_importing(frame, CTRL_C)
    raise KeyboardInterrupt


def outlast_sigterm() -> None:
    """Makes SIGTERM change nothing in this process, whose work is done.

    It has yet to show its results and to clean up. Processes that it starts do not inherit this.
    """
    with suppress(ValueError):  # not the main thread
        signal.signal(signal.SIGTERM, lambda *_: None)


def ignore_stop_signals() -> None:
    """Makes this process, which is about to end, ignore Ctrl-C and SIGTERM.

    Python removes handlers before its last steps, and those of torch's libraries take a second.
    """
    for number in STOP_SIGNALS:
        signal.signal(number, signal.SIG_IGN)
