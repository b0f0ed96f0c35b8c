"""Signals during imports, in processes of their own: the end is quiet, and at once."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import tomllib
from pathlib import Path

import pytest

READY = "print('ready', flush=True)"
# In short turns: a signal that comes just before a sleep is handled after it.
SLEEP = "for _ in range(600): time.sleep(0.1)"
# A module that swallows what is raised inside it, as some do.
SWALLOWS = f"import time\ntry:\n    {READY}\n    {SLEEP}\nexcept BaseException: pass\n"
CTRL_C = "from distca.runtime.interrupts import end_on_ctrl_c; end_on_ctrl_c()"
SIGTERM = "from distca.runtime.launched import stop_before_first_step; stop_before_first_step()"
STOPPED = "stopped before the next step: there was nothing new to save\n"


def stopped(folder: Path, *arguments: str, number: int = signal.SIGINT) -> tuple[int, str, str]:
    """The status and what is said, where modules of ``folder`` come before those installed."""
    path = os.pathsep.join([str(folder), *sys.path])
    process = subprocess.Popen(
        [sys.executable, *arguments],
        env=os.environ | {"PYTHONPATH": path},
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
    )
    assert process.stdout is not None
    assert process.stdout.readline() == "ready\n"
    process.send_signal(number)
    said, err = process.communicate(timeout=60)
    return process.returncode, said, err


@pytest.mark.parametrize(
    "start", [["-m", "distca"], ["-c", "from distca import __main__ as m; m.main()"]]
)
def test_ctrl_c_while_the_command_line_is_imported(start: list[str], tmp_path: Path) -> None:
    (tmp_path / "typer.py").write_text(SWALLOWS)
    assert stopped(tmp_path, *start, "--help") == (130, "", "")


def test_the_installed_script_is_that() -> None:
    project = tomllib.loads((Path(__file__).parents[2] / "pyproject.toml").read_text())
    assert project["project"]["scripts"] == {"distca": "distca.__main__:main"}


def test_ctrl_c_elsewhere_is_an_exception_as_usual(tmp_path: Path) -> None:
    (tmp_path / "sleeps.py").write_text(f"import time\ndef sleep():\n    {SLEEP}\n")
    code = (
        f"{CTRL_C}\nimport sleeps\n"
        f"try:\n    {READY}\n    sleeps.sleep()\nexcept KeyboardInterrupt: print(1)"
    )
    assert stopped(tmp_path, "-c", code) == (0, "1\n", "")


def test_what_is_ignored_stays_ignored(tmp_path: Path) -> None:
    ignore = "import signal; signal.signal(signal.SIGINT, signal.SIG_IGN)"
    code = f"{ignore}\n{CTRL_C}\nimport time\n{READY}\ntime.sleep(0.3)\nprint(1)"
    assert stopped(tmp_path, "-c", code) == (0, "1\n", "")


def test_sigterm_during_an_import_ends_with_a_sentence(tmp_path: Path) -> None:
    (tmp_path / "swallows.py").write_text(SWALLOWS)
    code = f"{SIGTERM}\nimport swallows\nprint('went on')"
    status, said, err = stopped(tmp_path, "-c", code, number=signal.SIGTERM)
    assert (status, said) == (0, "")
    assert err == STOPPED


@pytest.mark.parametrize(
    ("arguments", "variables", "end"),
    [
        (["train", "--out=x"], {}, (0, "", STOPPED)),
        (["train"], {"RANK": "1"}, (0, "", "")),  # of torchrun, where rank 0 says so
        (["train"], {"RANK": "0", "DISTCA_CHANNEL": "9"}, (-signal.SIGTERM, "", "")),
        (["train", "--print-config"], {}, (-signal.SIGTERM, "", "")),  # there is no config then
        (["plan", "train"], {}, (-signal.SIGTERM, "", "")),
    ],
)
def test_sigterm_while_the_command_line_is_imported(
    arguments: list[str],
    variables: dict[str, str],
    end: tuple[int, str, str],
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    for name, value in variables.items():
        monkeypatch.setenv(name, value)
    (tmp_path / "typer.py").write_text(SWALLOWS)
    assert stopped(tmp_path, "-m", "distca", *arguments, number=signal.SIGTERM) == end
