"""Where the threads of a rank are, if a step does not end.

A rank that waits for another one looks the same as one that is waited for, and a collective tells
nothing until its timeout. So every rank writes its stacks to its log before that, in which they are
compared: the rank that is not inside a collective is the one that the others wait for.
"""

import faulthandler
import sys
from collections.abc import Iterator
from contextlib import contextmanager

from torch.distributed.distributed_c10d import default_pg_timeout

STALLED_S = default_pg_timeout.total_seconds() / 2


@contextmanager
def stacks_if_stalled(seconds: float = STALLED_S) -> Iterator[None]:
    """Writes the stacks of all threads to stderr if the context has not ended after some seconds.

    A thread of the interpreter does that, which needs neither the GIL nor an answer of the device.
    """
    faulthandler.dump_traceback_later(seconds, file=sys.__stderr__ or sys.stderr)
    try:
        yield
    finally:
        faulthandler.cancel_dump_traceback_later()
