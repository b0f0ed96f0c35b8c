"""How the process of a command ends."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path
from signal import SIGABRT

import pytest

# A thread of gloo does this now and then: it aborts in the finalization.
ABORTS_LATE = """
import atexit, os, sys
import torch.distributed as dist
import distca.cli
from distca import __main__

class AbortsLate:
    def __del__(self): os.abort()

def run():
    global kept
    kept = AbortsLate()
    dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
    {end}

distca.cli.main = run
atexit.register(print, "told the others")
__main__.main()
"""
SUCCESS = "dist.destroy_process_group(); sys.exit(0)"


@pytest.mark.parametrize(
    ("end", "status", "said"),
    [
        ("sys.exit(0)", 0, ""),  # such as a server that has left
        ("sys.exit(2)", 2, ""),
        ("raise RuntimeError('a defect')", 1, "RuntimeError: a defect\n"),
        (SUCCESS, -SIGABRT, ""),  # threads of gloo have ended, so Python finalizes as usual
    ],
)
def test_a_process_with_groups_ends_with_its_status(end: str, status: int, said: str) -> None:
    process = subprocess.run(
        [sys.executable, "-c", ABORTS_LATE.format(end=end)],
        capture_output=True,
        text=True,
        timeout=60,
    )
    assert process.returncode == status
    assert process.stdout == "told the others\n"
    assert process.stderr.endswith(said)
    assert process.stderr.count("Traceback") == bool(said)


@pytest.mark.skipif(not Path("/dev/full").exists(), reason="needs a disk that is full")
@pytest.mark.parametrize(("end", "status"), [("sys.exit(0)", 1), ("sys.exit(2)", 2)])
def test_output_that_is_lost_is_no_success(end: str, status: int) -> None:
    with open("/dev/full", "w") as full:
        process = subprocess.run(
            [sys.executable, "-c", ABORTS_LATE.format(end=end)],
            env={name: value for name, value in os.environ.items() if name != "PYTHONUNBUFFERED"},
            stdout=full,
            stderr=subprocess.PIPE,
            text=True,
            timeout=60,
        )
    assert (process.returncode, process.stderr) == (status, "")


# It signals itself when its command has ended: before and after Python removes its handlers.
SIGNALS_LATE = """
import atexit, signal, sys
import distca.cli
from distca import __main__

def signals(raise_signal=signal.raise_signal, numbers=(signal.SIGINT, signal.SIGTERM)):
    for number in numbers:
        raise_signal(number)

class SignalsLate:
    def __del__(self, signals=signals): signals(); print("last")

def run():
    global kept
    kept = SignalsLate()
    {end}

distca.cli.main = run
atexit.register(print, "first")
atexit.register(signals)
__main__.main()
"""


@pytest.mark.parametrize(
    ("end", "status", "said"),
    [
        ("sys.exit(0)", 0, ""),
        ("sys.exit(130)", 130, ""),
        ("signal.raise_signal(signal.SIGINT)", 130, ""),  # not caught by the command line any more
        ("raise RuntimeError('a defect')", 1, "RuntimeError: a defect\n"),
    ],
)
def test_signals_after_the_end_of_the_command_change_nothing(
    end: str, status: int, said: str
) -> None:
    process = subprocess.run(
        [sys.executable, "-c", SIGNALS_LATE.format(end=end)],
        capture_output=True,
        text=True,
        timeout=60,
    )
    assert (process.returncode, process.stdout) == (status, "first\nlast\n")
    assert process.stderr.endswith(said)
    assert process.stderr.count("Traceback") == bool(said)
