"""How the process of a command ends."""

from __future__ import annotations

import os
import subprocess
import sys
from signal import SIGABRT

import pytest

# What torch's threads do now and then, when their peers have gone: abort in the finalization.
ABORTS_LATE = """
import atexit, os, sys
import distca.cli
from distca import __main__

class AbortsLate:
    def __del__(self): os.abort()

def run():
    global kept
    kept = AbortsLate()
    sys.exit({status})

distca.cli.main = run
atexit.register(print, "told the others")
__main__.main()
"""


@pytest.mark.parametrize(
    ("rank", "status", "ended"), [("0", 2, 2), ("0", 1, 1), ("0", 0, -SIGABRT), ("", 2, -SIGABRT)]
)
def test_a_rank_ends_with_its_status_after_an_error(rank: str, status: int, ended: int) -> None:
    environment = {name: value for name, value in os.environ.items() if name != "RANK"}
    process = subprocess.run(
        [sys.executable, "-c", ABORTS_LATE.format(status=status)],
        env=environment | ({"RANK": rank} if rank else {}),
        stdout=subprocess.PIPE,
        text=True,
        timeout=60,
    )
    assert process.returncode == ended
    assert process.stdout == "told the others\n"
