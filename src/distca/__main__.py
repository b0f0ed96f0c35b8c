"""``python -m distca`` and the script ``distca``: the command line, with Ctrl-C from the start."""

import atexit
import os
import sys

from distca.runtime.interrupts import end_on_ctrl_c


def main() -> None:
    end_on_ctrl_c()
    from distca.cli import main as run  # takes a moment

    try:
        run()
    except SystemExit as end:
        if end.code and isinstance(end.code, int) and "RANK" in os.environ:
            _end_rank(end.code)
        raise


def _end_rank(status: int) -> None:
    """Ends a rank after an error with its status, and without Python's finalization.

    Threads of torch whose peers have gone may abort the process meanwhile, and hide the status.
    """
    atexit._run_exitfuncs()
    sys.stdout.flush()
    sys.stderr.flush()
    os._exit(status)


if __name__ == "__main__":
    main()
