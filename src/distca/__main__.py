"""``python -m distca`` and the script ``distca``: the command line, with signals from the start."""

import atexit
import os
import sys
from collections.abc import Sequence

from distca.runtime.interrupts import CTRL_C, end_on_ctrl_c, ignore_stop_signals


def main() -> None:
    end_on_ctrl_c()
    if _trains(sys.argv[1:]):
        from distca.runtime.launched import stop_before_first_step

        stop_before_first_step()
    try:
        _run()
    except SystemExit as end:
        if isinstance(end.code, int) and _has_process_groups():
            _end(end.code)
        raise
    except Exception:
        if _has_process_groups():
            sys.excepthook(*sys.exc_info())  # as Python does afterwards
            _end(1)
        raise


def _trains(arguments: Sequence[str]) -> bool:
    """Returns whether a run is started, before anything is imported that reads the arguments."""
    return arguments[:1] == ["train"] and not {"--help", "--print-config"} & set(arguments)


def _run() -> None:
    """Runs the command line; at its end the status is decided, and signals change nothing."""
    try:
        try:
            from distca.cli import main as run  # takes a moment

            run()
        finally:
            ignore_stop_signals()
    except KeyboardInterrupt:  # between the end of the command line and this
        ignore_stop_signals()
        sys.exit(CTRL_C)


def _has_process_groups() -> bool:
    """Returns whether process groups have not been destroyed, as after an error."""
    torch_groups = sys.modules.get("torch.distributed.distributed_c10d")
    return torch_groups is not None and bool(torch_groups._world.pg_map)


def _end(status: int) -> None:
    """Ends this process with a status, and without Python's finalization.

    A thread of gloo may hold the last reference to a tensor of a collective that is over. If it
    gives it up while Python finalizes, it gets no GIL, and the process is aborted: its status would
    be that of SIGABRT.
    """
    atexit._run_exitfuncs()
    for stream in (sys.stdout, sys.stderr):
        try:
            stream.flush()
        except OSError:  # a full disk, or a reader that is gone
            status = status or 1
    os._exit(status)


if __name__ == "__main__":
    main()
