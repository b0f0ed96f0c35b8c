"""Whole runs, as ranks of the tests do them."""

from __future__ import annotations

import math
import os
import threading
from collections.abc import Iterator
from itertools import count
from pathlib import Path
from types import SimpleNamespace
from typing import Any
from unittest.mock import patch

import torch
import torch.distributed as dist
from recorded import preparing_threads
from slow_rank import timed_attention
from torch.distributed.tensor import DTensor

from distca.data.documents import Batch
from distca.planning.spans import as_ints
from distca.runtime import nodes
from distca.runtime.step import StepRunner
from distca.train import trainer as trainer_module
from distca.train.config import Config
from distca.train.trainer import Trainer


def fit(group: dist.ProcessGroup, settings: list[str]) -> list[dict[str, Any]]:
    """Returns the records; ``stop_after=n`` stops this rank as SIGTERM would, after n steps."""
    return _trainer(settings).fit()


def _trainer(settings: list[str]) -> Trainer:
    stops = [int(s.split("=")[1]) for s in settings if s.startswith("stop_after=")]
    config = Config.read(None, [s for s in settings if not s.startswith("stop_after=")])
    trainer = Trainer(config)

    def show(record: dict[str, Any]) -> None:
        if stops and record["step"] + 2 == stops[0]:
            trainer.stop.request()

    trainer._show = show
    return trainer


def fit_on_nodes(
    group: dist.ProcessGroup, settings: list[str], node_of: list[int]
) -> tuple[list[dict[str, Any]], list[int], int]:
    """The records, the node of each rank in plans, and how many ranks are on this rank's node."""
    with patch.object(nodes, "node_name", lambda: f"node {node_of[dist.get_rank(group)]}"):
        where = nodes.Nodes.of_world()
        trainer = _trainer(settings)
    planned = trainer.own.planner.plan(as_ints([600] * 4)).slots[0][0][0].devices
    return trainer.fit(), planned.node.tolist(), where.num_local


def clocked(group: dist.ProcessGroup, settings: list[str]) -> list[str]:
    """In which order a run reads the clock and loads kernels for its steps."""
    events: list[str] = []
    clock = SimpleNamespace(perf_counter=lambda: float(events.append("clock") or len(events)))
    warm_up = patch.object(StepRunner, "warm_up", lambda *_: events.append("kernels"))
    with patch.object(trainer_module, "time", clock), warm_up:
        fit(group, settings)
    return events


def preparing(group: dist.ProcessGroup, settings: list[str]) -> dict[str, int]:
    """How many layouts each thread made in a run."""
    with preparing_threads() as counts:
        fit(group, settings)
    return dict(counts)


def stop_in_evaluation(
    group: dist.ProcessGroup, settings: list[str]
) -> tuple[list[dict[str, Any]], int]:
    """The records, and the batches of an evaluation in whose second batch rank 1 is stopped."""
    trainer = Trainer(Config.read(None, settings))
    evaluation, numbers = trainer.loader.evaluation, count(1)

    def batches(tokens: int) -> Iterator[Batch]:
        for batch in evaluation(tokens):
            yield batch
            if next(numbers) == 2 and dist.get_rank(group) == 1:
                trainer.stop.request()

    trainer.loader.evaluation = batches  # type: ignore[method-assign]
    return trainer.fit(), next(numbers) - 1


def start_each(group: dist.ProcessGroup, settings: list[list[list[str]]]) -> list[str]:
    """The error of each start, with the settings of this rank."""
    errors = []
    for start in settings:
        try:
            Trainer(Config.read(None, start[dist.get_rank(group)]))
        except ValueError as error:
            errors.append(str(error))
        else:
            errors.append("")
    return errors


def start_in(group: dist.ProcessGroup, settings: list[str], folder: str) -> str:
    """The error of a start in a working directory of this rank."""
    before = Path.cwd()
    os.chdir(f"{folder}/{dist.get_rank(group)}")
    try:
        return start_each(group, [[settings, settings]])[0]
    finally:
        os.chdir(before)


def told(group: dist.ProcessGroup, settings: list[str]) -> tuple[list[str], int, list[str]]:
    """What is told, the first step, and the names of threads that are left after the run."""
    sentences: list[str] = []
    trainer = Trainer(Config.read(None, settings), tell=sentences.append)
    trainer.fit()
    return sentences, trainer.first_step, [thread.name for thread in threading.enumerate()]


def fit_with_nan(
    group: dist.ProcessGroup, settings: list[str], steps: list[int]
) -> tuple[list[dict[str, Any]], str, list[str]]:
    """The records, the error and the threads left; the loss of rank 1 is NaN in ``steps``."""
    records: list[dict[str, Any]] = []
    trainer = Trainer(Config.read(None, settings), records.append)
    train, numbers = trainer.runner.train, iter(range(1000))

    def broken(*args: Any) -> Any:
        loss = train(*args)
        return loss * math.nan if next(numbers) in steps and dist.get_rank(group) == 1 else loss

    object.__setattr__(trainer.runner, "train", broken)
    error = ""
    try:
        trainer.fit()
    except RuntimeError as raised:
        error = f"{type(raised).__name__}: {raised}"
    return records, error, [thread.name for thread in threading.enumerate()]


def save_with_nan(group: dist.ProcessGroup, settings: list[str]) -> str:
    """The error of a save after one weight has become NaN."""
    trainer = Trainer(Config.read(None, settings))
    assert trainer.weights is not None
    parameter = next(trainer.weights.model.parameters())
    with torch.no_grad():
        (parameter.to_local() if isinstance(parameter, DTensor) else parameter)[-1] = math.nan
    try:
        trainer._save(0)
    except RuntimeError as error:
        return str(error)
    finally:
        trainer.folder.unlock()
    return ""


def with_a_slow_rank(
    group: dist.ProcessGroup, settings: list[str], slow: tuple[int, int]
) -> list[dict[str, Any]]:
    """The records of a run in which rank 2 has 0.6 of its speed in steps [start, stop)."""
    trainer, records = _trainer(settings), []
    with timed_attention(pair_s=5e-7) as timed:
        for record in trainer.steps():
            records.append(record)
            is_slow = slow[0] <= record["step"] + 1 < slow[1]
            timed.speed = 0.6 if is_slow and dist.get_rank(group) == 2 else 1.0
    return records
