"""A run whose ranks end at chosen moments."""

from __future__ import annotations

import os
import signal
from collections import Counter
from dataclasses import asdict, dataclass
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any
from unittest.mock import patch

import torch
import torch.distributed as dist

from distca.attention.passes import BackwardPass, ForwardPass
from distca.runtime import new_groups
from distca.runtime.lost_ranks import naming_lost_ranks, watch_ranks
from distca.runtime.step import StepRunner
from distca.train.config import Config
from distca.train.trainer import Trainer

FILES = Path("/proc/self/fd")
# Where a rank ends, by name: the functions at whose call it does.
MOMENTS: dict[str, tuple[Any, str]] = {
    "start": (StepRunner, "train"),
    "forward": (ForwardPass, "compute"),
    "backward": (BackwardPass, "compute"),
    "record": (Trainer, "_record"),
    "evaluation": (StepRunner, "losses"),
    "checkpoint": (Trainer, "_save"),
    "regrouping": (new_groups, "_build"),
    "regrouped": (new_groups, "_all_have_come"),
}


@dataclass(frozen=True)
class Death:
    rank: int
    moment: str
    number: int  # at which call, from 1
    raises: bool = False  # an error, instead of being killed


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
    try:
        with naming_lost_ranks():
            trainer = Trainer(Config.read(None, settings), tell=told.append)
            for record in trainer.steps():
                records.append(record)
                files.append(len(list(FILES.iterdir())) if FILES.exists() else 0)
    except Exception as raised:
        error = f"{type(raised).__name__}: {raised}"
    pipe.send(asdict(Seen(records, told, error, files)))
    dist.destroy_process_group()


def _die_at(death: Death) -> None:
    owner, name = MOMENTS[death.moment]
    method, calls = getattr(owner, name), Counter[str]()

    def dying(*args: Any, **kwargs: Any) -> Any:
        calls[name] += 1
        if calls[name] == death.number:
            if death.raises:
                raise MemoryError("no memory")
            os.kill(os.getpid(), signal.SIGKILL)
        return method(*args, **kwargs)

    patch.object(owner, name, dying).start()
