"""The commands of the tutorial are run in order in an empty folder, and print what it says.

A ``bash`` block is run, and the lines of the plain block behind it appear in its output in their
order; ``...`` stands for any lines between them.
"""

import os
import re
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parent.parent
STEP = re.compile(r"```bash\n(.*?)```\n(?:\n*```\n(.*?)```)?", re.DOTALL)
STEPS = STEP.findall((ROOT / "docs" / "tutorial.md").read_text())
NUM_FAST = 3  # lengths, a plan, its page


def check(steps: list[tuple[str, str]], folder: Path) -> None:
    programs = folder / "bin"
    programs.mkdir()
    for program, call in (("distca", "-m distca "), ("python", "")):
        (programs / program).write_text(f'#!/bin/sh\nexec {sys.executable} {call}"$@"\n')
        (programs / program).chmod(0o755)
    environment = os.environ | {
        "PATH": f"{programs}:{os.environ['PATH']}",
        "PYTHONPATH": f"{ROOT / 'src'}",
        "CUDA_VISIBLE_DEVICES": "",
        "COLUMNS": "80",
    }
    for command, printed in steps:
        done = subprocess.run(
            ["bash", "-e", "-c", command], cwd=folder, env=environment, text=True,
            capture_output=True, timeout=840,
        )  # fmt: skip
        assert done.returncode == 0, f"{command}{done.stdout}{done.stderr}"
        assert missing(printed, done.stdout) is None, f"{command}{done.stdout}"


def missing(printed: str, output: str) -> str | None:
    """Returns the first line that does not follow those before it, if there is one."""
    lines = iter(line.rstrip() for line in output.splitlines())
    shown = (line.rstrip() for line in printed.splitlines())
    return next((one for one in shown if one != "..." and one not in lines), None)


def test_a_line_that_is_not_printed_is_missed() -> None:
    assert missing("a\n...\nc\n", "a \nb\nc\n") is None
    assert missing("c\na\n", "a\nb\nc\n") == "a"


def test_lengths_and_plan(tmp_path: Path) -> None:
    pytest.importorskip("plotly", reason="plotly is not installed")
    check(STEPS[:NUM_FAST], tmp_path)


@pytest.mark.slow
@pytest.mark.timeout(1800)
def test_simulation_and_training(tmp_path: Path) -> None:
    assert len(STEPS) == NUM_FAST + 2
    check([STEPS[0], *STEPS[NUM_FAST:]], tmp_path)
