"""Kills a worker at a random moment of a run, many times, and compares the losses.

    python benchmarks/recoveries.py                20 tries
    python benchmarks/recoveries.py --tries 3      a quick look

Two ranks train on the CPU, with a checkpoint every two steps. At a random time after the first step
one of them is killed from outside (SIGKILL), whatever it does then: a step, an evaluation, or a
checkpoint. ``--max-restarts 1`` starts all ranks again from the newest complete checkpoint.

*Recovered*: the run has reached its end, and all its losses are those of a run that nothing
happened to, to a relative difference of 1e-6.

Exits with 1 unless every try has recovered.
"""

from __future__ import annotations

import argparse
import json
import os
import platform
import signal
import subprocess
import sys
import tempfile
import time
from datetime import date
from pathlib import Path
from random import Random
from typing import Any

import torch

RESULTS = Path(__file__).parent / "results"
RANKS, STEPS, TOLERANCE = 2, 24, 1e-6
SETTINGS = (
    "model.sizes={layers=2, hidden=32, heads=4, kv_heads=2, head_dim=8, ffn=48}",
    "data.sources=lognormal:300:1.0",
    "data.tokenizer=ids:61",
    "data.context=1024",
    "data.held_out=0.05",
    "train.tokens_per_step=4096",
    "train.checkpoint_every=2",
    "train.eval_every=3",
    "train.eval_tokens=4096",
    f"train.steps={STEPS}",
)
Records = list[dict[str, Any]]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--tries", type=int, default=20)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--out", type=Path, default=RESULTS)
    options = parser.parse_args()
    draw, tries = Random(options.seed), []
    with tempfile.TemporaryDirectory() as folder:
        whole = train(Path(folder) / "whole")
        assert whole.wait() == 0
        right = records(Path(folder) / "whole")
        # The first steps are slow, so the time of all others is that in which a run is killed.
        seconds = sum(record["seconds"] for record in right[2:])
        for number in range(options.tries):
            out = Path(folder) / str(number)
            tries.append(one_try(out, draw.randrange(RANKS), draw.uniform(0, seconds), right))
            print(json.dumps(tries[-1]), flush=True)
    recovered = sum(one["recovered"] for one in tries)
    text = report(options, tries, recovered)
    print(text)
    options.out.joinpath("recoveries.md").write_text(text)
    options.out.joinpath("recoveries.json").write_text(json.dumps(tries, indent=1) + "\n")
    sys.exit(recovered < options.tries)


def train(out: Path, *options: str) -> subprocess.Popen[str]:
    settings = [f"--set={setting}" for setting in SETTINGS]
    command = [sys.executable, "-m", "distca", "train", f"--out={out}", f"--ranks={RANKS}"]
    quiet = subprocess.DEVNULL
    return subprocess.Popen(
        [*command, *settings, *options], stdout=quiet, stderr=subprocess.PIPE, text=True
    )


def one_try(out: Path, victim: int, wait_s: float, right: Records) -> dict[str, Any]:
    """Returns what became of a run whose rank is killed some seconds after its first step."""
    process = train(out, "--max-restarts=1")
    while process.poll() is None and not records(out):
        time.sleep(0.01)
    time.sleep(wait_s)
    steps_before, killed_at = len(records(out)), time.monotonic()
    pids = Path(f"/proc/{process.pid}/task/{process.pid}/children").read_text().split()
    os.kill(int(pids[victim]), signal.SIGKILL)
    _, error = process.communicate(timeout=300)
    found = records(out)
    pairs = list(zip(found, right, strict=False))
    worst = max(abs(a["loss"] - b["loss"]) / abs(b["loss"]) for a, b in pairs)
    ended = process.returncode == 0 and len(found) == STEPS
    return {
        "victim": victim,
        "wait_s": round(wait_s, 3),
        "steps_before": steps_before,
        "restarted": "restart 1 of 1 from" in error,
        "seconds_to_the_end": round(time.monotonic() - killed_at, 1),
        "largest_difference": worst,
        "recovered": ended and "restart 1 of 1 from" in error and worst <= TOLERANCE,
    }


def records(out: Path) -> Records:
    path = out / "metrics.jsonl"
    lines = path.read_text().splitlines() if path.exists() else []
    return [json.loads(line) for line in lines if line.endswith("}")]


def report(options: argparse.Namespace, tries: list[dict[str, Any]], recovered: int) -> str:
    worst = max(one["largest_difference"] for one in tries)
    slowest = max(one["seconds_to_the_end"] for one in tries)
    where = f"{platform.machine()} CPU, torch {torch.__version__}, {date.today()}"
    command = f"python benchmarks/recoveries.py --tries {len(tries)} --seed {options.seed}"
    lines = (
        "# Recoveries",
        "",
        f"{recovered} of {len(tries)} runs whose worker was killed at a random moment have ended",
        "with the losses of an undisturbed run: the largest relative difference of any step is",
        f"{worst:.1e} ({TOLERANCE:g} is allowed). From the kill to the end of the run, with the",
        f"start of all ranks and the steps that were left, it took {slowest:.0f} s at most.",
        "",
        f"`{command}`: {RANKS} ranks over gloo, {STEPS} steps;",
        f"{where}.",
        "",
    )
    return "\n".join(lines)


if __name__ == "__main__":
    main()
