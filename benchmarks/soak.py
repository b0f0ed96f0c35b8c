"""A long run with random faults, compared with one that nothing happens to.

    python benchmarks/soak.py               1,000 steps
    python benchmarks/soak.py --steps 60    a quick try
    python benchmarks/soak.py --ranks 4 --servers 2     dedicated servers are lost and come back
    python benchmarks/soak.py --steps 200 --ranks 4 --servers 2 --share-gpu     over NCCL

Ranks train on the CPU, over gloo, or in turns on one GPU, over NCCL (with MPS, the death of a rank
would reach the others), on documents whose lengths change from step to step. Every 20 to 50 steps a
fault comes (``distca train --inject``): a worker is killed in the attention of some layer and
direction, and all ranks restart from the last checkpoint; a rank freezes for some seconds; the
attention of a rank is slow for some steps; a dedicated server is killed from outside, at whatever
it does then, and joins again after its restart. Afterwards the same steps are trained without
faults.

*Survived*: the run went on to another step. *To the next good step*: seconds from the fault until a
step is recorded, which for a killed rank includes the start of all ranks. *Losses*: the largest
relative difference of any step. *Growth*: memory, open files and threads of the rank processes,
the median of the last quarter of their samples over that of the second quarter, and over that of
the same rank of the undisturbed run: a rank has fewer connections while a server is missing.

Exits with 1 if a fault was not survived, if losses differ, or if something grows.
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
from collections import defaultdict
from collections.abc import Sequence
from datetime import date
from pathlib import Path
from random import Random
from statistics import median
from threading import Event, Thread
from typing import Any, NamedTuple

import torch

RESULTS = Path(__file__).parent / "results"
LAYERS = 2
SMALL = f"{{layers={LAYERS}, hidden=32, heads=4, kv_heads=2, head_dim=8, ffn=48}}"
ON_GPU = f"{{layers={LAYERS}, hidden=256, heads=4, kv_heads=2, head_dim=64, ffn=512}}"
SETTINGS = (
    "parallel.precision=float32",
    "data.sources=lognormal:300:1.0",
    "data.tokenizer=ids:61",
    "data.context=1024",
    "train.tokens_per_step=4096",
    "train.checkpoint_every=10",
)
LOSE = "lose server"  # by a SIGKILL of this script
KINDS = ("kill", "stop", "slow", "lose")
LOSS_TOLERANCE = 1e-6
GROWTH = {"memory": 1.1, "files": 1.0, "threads": 1.0}  # that counts as flat
POLL_S = 0.05
SAMPLE_S = 0.5
WARM_UP = 3  # steps of the run before a process is sampled
WARM_UP_S = 40.0  # of a process, such as a server that starts and waits for its place
FEWEST_SAMPLES = 20  # of a process whose growth is judged
Records = list[dict[str, Any]]
Samples = dict[tuple[int, int], list[dict[str, float]]]  # by process and rank


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--steps", type=int, default=1000)
    parser.add_argument("--ranks", type=int, default=2)
    parser.add_argument("--servers", type=int, default=0, help="of the ranks, dedicated ones")
    parser.add_argument("--seed", type=int, default=0, help="of documents, weights and faults")
    parser.add_argument("--every", type=int, nargs=2, default=(20, 50), metavar=("FROM", "TO"))
    parser.add_argument("--kinds", nargs="+", choices=KINDS, default=KINDS, help="of faults")
    parser.add_argument("--share-gpu", action="store_true", help="ranks take turns on one GPU")
    parser.add_argument("--folder", type=Path, help="of both runs; it is kept")
    parser.add_argument("--out", type=Path, default=RESULTS)
    options = parser.parse_args()
    faults = random_faults(options)
    with tempfile.TemporaryDirectory() as folder:
        runs = options.folder or Path(folder)
        disturbed = watch(options, runs / "disturbed", faults)
        undisturbed = watch(options, runs / "undisturbed", [])
    result = compared(options, faults, disturbed, undisturbed)
    text = report(result)
    print(text)
    name = "soak_servers" if options.servers else "soak"
    name += "_nccl" if options.share_gpu else ""
    options.out.joinpath(f"{name}.md").write_text(text)
    options.out.joinpath(f"{name}.json").write_text(json.dumps(result, indent=1) + "\n")
    sys.exit(bool(result["failures"]))


def random_faults(options: argparse.Namespace) -> list[str]:
    """Draws faults that today's trainer survives, so many steps apart."""
    draw, faults, step = Random(options.seed), [], 0
    workers = options.ranks - options.servers
    kinds = [kind for kind in options.kinds if kind != "lose" or options.servers]
    while (step := step + draw.randint(*options.every)) < options.steps - 1:
        kind = kinds[len(faults) % len(kinds)]  # in turns, so that a short run has each of them
        if kind == "kill":
            direction = draw.choice(["forward", "backward"])
            where = f"step {step} layer {draw.randrange(LAYERS)} {direction}"
            faults.append(f"kill worker {draw.randrange(workers)} {where}")
        elif kind == "stop":
            rank, seconds = draw.randrange(options.ranks), draw.randint(1, 3)
            faults.append(f"stop rank {rank} for {seconds}s step {step}")
        elif kind == "lose":
            faults.append(f"{LOSE} {draw.randrange(options.servers)} step {step}")
        else:  # with dedicated servers, workers compute no attention
            rank = draw.randrange(workers if options.servers else 0, options.ranks)
            last = min(step + draw.randint(3, 10), options.steps - 1)
            faults.append(f"slow rank {rank} x{draw.randint(2, 8) / 10:g} steps {step}-{last}")
    return faults


class Watched(NamedTuple):
    """A run that has ended.

    steps_at: when each step was recorded, in seconds since the epoch.
    samples: of each rank process, in order: memory in MiB, open files, threads.
    """

    status: int
    error: str
    records: Records
    delivered: Records
    steps_at: list[float]
    samples: Samples
    seconds: float


def watch(options: argparse.Namespace, out: Path, faults: Sequence[str]) -> Watched:
    """Trains, and samples the processes of the ranks in the meantime."""
    parallel = (f"parallel.servers={options.servers}",) if options.servers else ()
    sizes = f"model.sizes={ON_GPU if options.share_gpu else SMALL}"
    length = (f"train.steps={options.steps}", f"train.seed={options.seed}")
    given = (sizes, *length, *SETTINGS, *parallel)
    command = [
        *(sys.executable, "-m", "distca", "train", f"--ranks={options.ranks}", f"--out={out}"),
        *("--fresh", "--json", f"--max-restarts={len(faults)}"),
        *(("--share-gpu", "--in-turns") if options.share_gpu else ()),
        *(f"--server-restarts={len(faults)}" for _ in parallel),
        *(f"--set={setting}" for setting in given),
        *(f"--inject={fault}" for fault in faults if not fault.startswith(LOSE)),
    ]
    to_lose = [fault for fault in faults if fault.startswith(LOSE)]
    lost: Records = []
    began, over = time.monotonic(), Event()
    steps_at: list[float] = []
    samples: Samples = defaultdict(list)
    starts: dict[int, tuple[int, float]] = {}  # of each process: steps recorded before, and when
    with tempfile.TemporaryFile("w+") as errors:
        process = subprocess.Popen(command, stdout=subprocess.DEVNULL, stderr=errors, text=True)
        follower = Thread(target=_follow, args=(out, over, steps_at))
        follower.start()
        try:
            while process.poll() is None:
                for pid in _children(process.pid):
                    steps, at = starts.setdefault(pid, (len(steps_at), time.monotonic()))
                    is_warm = len(steps_at) >= steps + WARM_UP
                    if (
                        not is_warm
                        or time.monotonic() - at <= WARM_UP_S
                        or (rank := _rank(pid)) < 0
                    ):
                        continue
                    if sample := _sample(pid):
                        samples[pid, rank].append(sample)
                if to_lose and len(steps_at) > int(to_lose[0].split()[-1]):
                    number = options.ranks - options.servers + int(to_lose[0].split()[2])
                    if _kill(process.pid, number):  # otherwise it is being restarted
                        now = {"time": time.time(), "step": len(steps_at)}
                        lost.append({"fault": to_lose.pop(0)} | now)
                time.sleep(SAMPLE_S)
        finally:  # also after a Ctrl-C
            over.set()
            follower.join()
            process.terminate()
            process.wait()
        errors.seek(0)
        error = errors.read()
    return Watched(
        process.returncode,
        error,
        _lines(out / "metrics.jsonl"),
        [line for line in _lines(out / "faults.jsonl") if "fault" in line] + lost,
        steps_at,
        dict(samples),
        time.monotonic() - began,
    )


def _follow(out: Path, over: Event, steps_at: list[float]) -> None:
    """Notes when records are written; a file that a restart has written anew is none."""
    file, size = 0, 0
    while not over.wait(POLL_S):
        try:
            found = (out / "metrics.jsonl").stat()
        except FileNotFoundError:
            continue
        if found.st_ino == file and found.st_size > size:
            steps_at.append(found.st_mtime)
        file, size = found.st_ino, found.st_size


def _children(pid: int) -> list[int]:
    try:
        return [int(one) for one in Path(f"/proc/{pid}/task/{pid}/children").read_text().split()]
    except OSError:
        return []


def _kill(launcher: int, rank: int) -> bool:
    """Kills a rank; returns whether it was there."""
    for pid in _children(launcher):
        if _rank(pid) == rank:
            os.kill(pid, signal.SIGKILL)
            return True
    return False


def _rank(pid: int) -> int:
    """Returns the rank of a process; -1 if it has none, or has ended."""
    try:
        variables = Path(f"/proc/{pid}/environ").read_bytes().split(b"\0")
    except OSError:
        return -1
    found = [one.removeprefix(b"RANK=") for one in variables if one.startswith(b"RANK=")]
    return int(found[0]) if found else -1


def _sample(pid: int) -> dict[str, float] | None:
    try:
        status = Path(f"/proc/{pid}/status").read_text()
        values = dict(line.split(":", 1) for line in status.splitlines())
        return {
            "memory": int(values["VmRSS"].split()[0]) / 1024,
            "files": len(os.listdir(f"/proc/{pid}/fd")),
            "threads": int(values["Threads"]),
        }
    except (OSError, KeyError):  # it has ended
        return None


def _lines(path: Path) -> Records:
    return [json.loads(line) for line in path.read_text().splitlines()] if path.exists() else []


def growth(samples: Samples) -> Records:
    """Returns, of each process that lived long enough, its rank and its values early and late."""
    rows = []
    for (_, rank), taken in samples.items():
        if len(taken) < FEWEST_SAMPLES:
            continue
        quarter = len(taken) // 4
        early, late = taken[quarter : 2 * quarter], taken[-quarter:]
        parts = (early, late)
        values = {name: [median(one[name] for one in part) for part in parts] for name in GROWTH}
        rows.append({"rank": rank} | values)
    return rows


def compared(
    options: argparse.Namespace, faults: Sequence[str], disturbed: Watched, undisturbed: Watched
) -> dict[str, Any]:
    rows = []
    lost = (loss for record in disturbed.records for loss in record.get("lost_servers", ()))
    noticed_at = [loss["noticed_at"] for loss in lost]
    for line in disturbed.delivered:
        after = [at - line["time"] for at in disturbed.steps_at if at > line["time"]]
        row = {"fault": line["fault"], "step": line["step"], "good_s": min(after, default=None)}
        if line["fault"].startswith(LOSE):
            notices = (at - line["time"] for at in noticed_at if at > line["time"])
            row["noticed_s"] = min(notices, default=None)
        rows.append(row)
    losses = [[record["loss"] for record in run.records] for run in (disturbed, undisturbed)]
    differences = [abs(a - b) / abs(b) for a, b in zip(*losses, strict=False)]
    processes = {
        name: growth(run.samples)
        for name, run in (("disturbed", disturbed), ("undisturbed", undisturbed))
    }
    failures = [
        f"the {name} run ended with status {run.status}: {run.error.strip().splitlines()[-1:]}"
        for name, run in (("disturbed", disturbed), ("undisturbed", undisturbed))
        if run.status
    ]
    if missing := sorted(set(faults) - {row["fault"] for row in rows}):
        failures.append(f"never came: {', '.join(missing)}")
    failures += [f"not survived: {row['fault']}" for row in rows if row["good_s"] is None]
    if {len(one) for one in losses} != {options.steps}:
        failures.append(f"{[len(one) for one in losses]} steps were recorded, not {options.steps}")
    if not max(differences, default=1.0) <= LOSS_TOLERANCE:
        failures.append(f"losses differ by up to {max(differences, default=1.0):.1e}")
    usual = {row["rank"]: row for row in processes["undisturbed"]}
    for name, found in processes.items():
        for row in found:
            for what, most in GROWTH.items():
                early, late = row[what]
                before = max(early, usual.get(row["rank"], row)[what][0])
                if late > before * most:
                    of = f"rank {row['rank']} of the {name} run"
                    failures.append(f"{what} of {of}: {before:g}, then {late:g}")
    return {
        "command": " ".join(["python benchmarks/soak.py", *sys.argv[1:]]),
        "date": str(date.today()),
        "versions": {"python": platform.python_version(), "torch": str(torch.__version__)},
        "hardware": f"{os.cpu_count()} cores, {platform.machine()}, load {os.getloadavg()[2]:.0f}"
        + (f", {torch.cuda.get_device_name()}" if options.share_gpu else ""),
        "backend": "NCCL" if options.share_gpu else "gloo",
        "steps": options.steps,
        "ranks": options.ranks,
        "servers": options.servers,
        "joined": sum(len(record.get("joined_servers", ())) for record in disturbed.records),
        "planned": len(faults),
        "faults": rows,
        "loss_difference": max(differences, default=None),
        "seconds": [disturbed.seconds, undisturbed.seconds],
        "processes": processes,
        "failures": failures,
    }


def report(result: dict[str, Any]) -> str:
    rows = result["faults"]
    lines = [
        "# A long run with faults",
        "",
        f"`{result['command']}`, {result['date']}, {result['hardware']}, torch"
        f" {result['versions']['torch']}: {result['steps']} steps on {result['ranks']}"
        f" {result['backend']} ranks ({result['servers']} dedicated servers),"
        f" {result['seconds'][0]:.0f} s with faults and {result['seconds'][1]:.0f} s without.",
        "",
        "| fault | delivered | survived | s to the next good step, median | worst |",
        "|---|---|---|---|---|",
    ]
    for kind in KINDS:
        mine = [row["good_s"] for row in rows if row["fault"].startswith(kind)]
        if not mine:
            continue
        good = [seconds for seconds in mine if seconds is not None]
        times = f"{median(good):.1f} | {max(good):.1f}" if good else "- | -"
        lines.append(f"| {kind} | {len(mine)} | {len(good)} | {times} |")
    survived = sum(row["good_s"] is not None for row in rows)
    lines += [f"| all {result['planned']} planned | {len(rows)} | {survived} | | |", ""]
    if notices := [row["noticed_s"] for row in rows if row.get("noticed_s") is not None]:
        lines += [
            f"Ranks noticed the loss of a server within {median(notices):.2f} s (median),"
            f" {max(notices):.2f} s at worst.",
            "",
        ]
    if result["joined"]:
        lines += [f"Servers have joined the run again {result['joined']} times.", ""]
    if result["loss_difference"] is not None:
        lines += [
            f"Losses of all steps differ by at most {result['loss_difference']:.1e} of their size"
            f" from those of the undisturbed run ({LOSS_TOLERANCE:g} is allowed).",
            "",
        ]
    lines += [
        "| process | memory, MiB, early | late | open files | late | threads | late |",
        "|---|---|---|---|---|---|---|",
    ]
    for name, found in result["processes"].items():
        for row in found:
            values = (f"{value:.0f}" for what in GROWTH for value in row[what])
            lines.append(f"| {name} run, rank {row['rank']} | {' | '.join(values)} |")
    lines += ["", *(f"FAILED: {failure}" for failure in result["failures"] or ())]
    return "\n".join(lines).rstrip() + "\n"


if __name__ == "__main__":
    main()
