"""A run whose ranks end at chosen moments, and which others join."""

from __future__ import annotations

import errno
import os
import signal
import time
from collections import Counter
from dataclasses import asdict, dataclass, field
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any
from unittest.mock import patch

import torch
import torch.distributed as dist

import distca
from distca.attention.passes import BackwardPass, ForwardPass
from distca.runtime import new_groups
from distca.runtime.joining import Run
from distca.runtime.lost_ranks import naming_lost_ranks, watch_ranks
from distca.runtime.step import StepRunner
from distca.train import agreement, run_ranks, trainer
from distca.train.config import Config
from distca.train.faults import parse_all
from distca.train.injector import steps_with_faults
from distca.train.serve import serve
from distca.train.trainer import Trainer

FILES = Path("/proc/self/fd")
# Where a rank ends, by name: the functions at whose call it does.
MOMENTS: dict[str, tuple[Any, str]] = {
    "start": (StepRunner, "train"),
    "forward": (ForwardPass, "compute"),
    "backward": (BackwardPass, "compute"),
    "record": (trainer, "gathered_record"),
    "evaluation": (StepRunner, "losses"),
    "checkpoint": (Trainer, "_save"),
    "regrouping": (new_groups, "_build"),
    "regrouped": (new_groups, "_all_have_come"),
}


ERRORS = {
    "no memory": MemoryError("no memory"),
    "no disk": OSError(errno.EIO, "Input/output error"),
    "a mistake": ValueError("a mistake"),
}


SIGNALS = {"hangs": signal.SIGSTOP, "is asked to stop": signal.SIGTERM}


@dataclass(frozen=True)
class Death:
    rank: int
    moment: str
    number: int  # at which call, from 1
    how: str = "is killed"


@dataclass(frozen=True)
class Plan:
    """When servers join and leave, which faults come, and how long one may be silent.

    waits: the steps after which the run waits until so many processes have come to join it, of
        which some may have joined.
    leaves: servers that are asked to leave, and after which step.
    """

    waits: dict[int, int] = field(default_factory=dict)
    leaves: dict[int, int] = field(default_factory=dict)
    faults: tuple[str, ...] = ()
    silent_s: float = run_ranks.SILENT_S


@dataclass(frozen=True)
class Newcomer:
    """A process that joins a run.

    after: so many steps.
    version: of distca, which it says to have.
    """

    wish: int | None = None
    after: int = 2
    version: str = distca.__version__
    death: Death | None = None


@dataclass(frozen=True)
class Seen:
    """What a rank has seen of its run."""

    records: list[dict[str, Any]]
    told: list[str]
    error: str
    files: list[int]  # how many are open after each step


def run(
    pipe: Connection,
    rank: int,
    size: int,
    folder: Path,
    settings: list[str],
    deaths: list[Death],
    plan: Plan,
) -> None:
    with (folder / f"err-{rank}").open("w") as err:
        os.dup2(err.fileno(), 2)
    torch.set_num_threads(1)
    os.environ |= {"RANK": str(rank), "WORLD_SIZE": str(size)}
    store = f"file://{folder}/store"
    dist.init_process_group("gloo", init_method=store, rank=rank, world_size=size)
    watch_ranks()
    for death in deaths:
        if death.rank == rank:
            _die_at(death)
    told: list[str] = []
    files: list[int] = []
    records: list[dict[str, Any]] = []
    error = ""
    run_ranks.SILENT_S = plan.silent_s
    try:
        with naming_lost_ranks():
            trainer = Trainer(Config.read(None, settings), tell=told.append)
            trainer.faults = plan.faults
            with trainer.stop.on_sigterm():
                for record in steps_with_faults(trainer, parse_all(plan.faults)):
                    records.append(record)
                    peers = trainer.context.host.peers
                    joined = sum(len(one.get("joined_servers", ())) for one in records)
                    missing = plan.waits.get(record["step"], 0) - joined
                    while rank == 0 and peers.num_candidates < missing:
                        time.sleep(0.01)
                    if plan.leaves.get(rank) == record["step"]:
                        trainer.stop.request()
                    files.append(len(list(FILES.iterdir())) if FILES.exists() else 0)
    except Exception as raised:
        error = f"{type(raised).__name__}: {raised}"
    pipe.send(asdict(Seen(records, told, error, files)))
    dist.destroy_process_group()


def join(pipe: Connection, folder: Path, newcomer: Newcomer) -> None:
    """Joins a run; what it has told, and its error at the end."""
    with (folder / f"err-{newcomer}".replace("/", " ")[:200]).open("w") as err:
        os.dup2(err.fileno(), 2)
    torch.set_num_threads(1)
    if newcomer.death is not None:
        _die_at(newcomer.death)
    told: list[str] = []
    recorded = folder / "metrics.jsonl"
    while not recorded.exists() or len(recorded.read_text().splitlines()) < newcomer.after:
        time.sleep(0.01)
    try:
        with patch.object(agreement, "__version__", newcomer.version), naming_lost_ranks():
            found = Run(dist.FileStore(f"{folder}/store", -1), "here")
            serve(found, wish=newcomer.wish, tell=told.append)
    except Exception as raised:
        told.append(f"{type(raised).__name__}: {raised}")
    pipe.send(told)


def _die_at(death: Death) -> None:
    owner, name = MOMENTS[death.moment]
    method, calls = getattr(owner, name), Counter[str]()

    def dying(*args: Any, **kwargs: Any) -> Any:
        calls[name] += 1
        if calls[name] == death.number:
            if death.how in ERRORS:
                raise ERRORS[death.how]
            os.kill(os.getpid(), SIGNALS.get(death.how, signal.SIGKILL))
        return method(*args, **kwargs)

    patch.object(owner, name, dying).start()
