"""What ranks run in the tests of training.

Gradients are made up, whole and by name, so that AdamW does the same on every mesh and results can
be compared bit by bit.
"""

from __future__ import annotations

import os
import zlib
from dataclasses import dataclass, field
from datetime import timedelta
from itertools import count
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from runtime.bodies import TINY
from torch import Tensor
from torch.distributed.tensor import DTensor

from distca.model.config import ModelConfig
from distca.model.initialize import fill, initialize
from distca.model.llama import Llama, on_meta
from distca.pipeline.mesh import MeshShape
from distca.runtime.mesh import RankContext, join_mesh
from distca.runtime.parallelize import Precision, parallelize
from distca.train.checkpoints import Checkpoints
from distca.train.config import TrainSection
from distca.train.digests import DigestWriter
from distca.train.extra import extra_of
from distca.train.optimizer import adamw, freeze

State = dict[str, Tensor]  # whole parameters and moments, by name


@dataclass(frozen=True)
class Run:
    """A model over a mesh and its checkpoints."""

    folder: Path
    parallel: MeshShape = field(default_factory=MeshShape)
    config: ModelConfig = TINY
    frozen: tuple[str, ...] = ()
    sharded: bool = True
    keep: int = 2
    weight_decay: float = 0.1

    def start(self, seed: int = 0) -> Trained:
        if self.parallel not in _contexts:  # groups are made once in a process
            _contexts[self.parallel] = join_mesh(self.parallel, torch.device("cpu"))
        context = _contexts[self.parallel]
        assert context.mesh is not None
        stage, layers = context.mesh.get_local_rank("pp"), self.config.layers
        cuts = [layers * i // self.parallel.pp for i in (stage, stage + 1)]
        model = on_meta(self.config, *cuts)
        if self.sharded:
            parallelize(model, context, Precision())
        initialize(model, seed)
        freeze(model, self.frozen)
        optimizer = adamw(model, TrainSection(weight_decay=self.weight_decay))
        return Trained(
            model, optimizer, Checkpoints(self.folder, model, optimizer, context, keep=self.keep)
        )


class Command:
    """Unpickling it creates a folder."""

    def __init__(self, marker: Path) -> None:
        self.marker = marker

    def __reduce__(self) -> Any:
        return os.mkdir, (str(self.marker),)


_contexts: dict[MeshShape, RankContext] = {}


@dataclass(frozen=True)
class Trained:
    model: Llama
    optimizer: torch.optim.Optimizer
    checkpoints: Checkpoints

    def step(self, number: int) -> None:
        for name, parameter in self.model.named_parameters():
            if parameter.requires_grad:
                generator = torch.Generator().manual_seed(zlib.crc32(f"{name} {number}".encode()))
                parameter.grad = torch.empty_like(parameter)
                fill(parameter.grad, torch.randn(parameter.shape, generator=generator))
        self.optimizer.step()
        self.optimizer.zero_grad()

    def state(self) -> State:
        state = {}
        for name, parameter in self.model.named_parameters():
            tensors = {"": parameter.detach(), **self.optimizer.state.get(parameter, {})}
            for moment, tensor in tensors.items():
                whole = tensor.full_tensor() if isinstance(tensor, DTensor) else tensor
                state[f"{name} {moment}".strip()] = whole.clone()
        return state

    def fill(self, number: float) -> None:
        """Every parameter and moment with one number."""
        with torch.no_grad():
            for parameter in self.model.parameters():
                for tensor in (parameter, *self.optimizer.state.get(parameter, {}).values()):
                    local = tensor.to_local() if isinstance(tensor, DTensor) else tensor
                    local.fill_(number)


def save_after(group: dist.ProcessGroup, run: Run, steps: int) -> tuple[State, State]:
    """The state that was saved, and that after one more step, taken while it is written."""
    trained = run.start()
    for number in range(steps):
        trained.step(number)
    saved = trained.state()
    trained.checkpoints.save(steps, {"step": steps, "loader": {"cursor": [1, 2]}})
    trained.step(steps)
    trained.checkpoints.wait()
    return saved, trained.state()


def load_newest(group: dist.ProcessGroup, run: Run) -> tuple[State, dict[str, Any], State]:
    """The state that was loaded, its extra, and the state after one more step."""
    trained = run.start(seed=1)
    path = trained.checkpoints.newest()
    assert path is not None
    extra = trained.checkpoints.load(path)
    loaded = trained.state()
    trained.step(extra["step"])
    return loaded, extra, trained.state()


def load(group: dist.ProcessGroup, run: Run, name: str) -> dict[str, Any]:
    return run.start().checkpoints.load(run.folder / name)


def resume(group: dist.ProcessGroup, run: Run, step: int | None = None) -> tuple[Path, list[str]]:
    """The path of what was loaded, and what was told."""
    resumed = run.start().checkpoints.resume(step)
    assert resumed is not None
    return resumed.path, resumed.notes


def weight_decays(group: dist.ProcessGroup, run: Run, name: str) -> list[float]:
    trained = run.start()
    trained.checkpoints.load(run.folder / name)
    return [values["weight_decay"] for values in trained.optimizer.param_groups]


def change_after_save(group: dist.ProcessGroup, run: Run) -> None:
    """Numbers change as soon as each save returns; saved are steps 1 to 3."""
    trained = run.start()
    trained.step(0)
    for step in (1, 2, 3):
        trained.fill(step)
        trained.checkpoints.save(step, {"step": step})
        trained.fill(-1.0)
    trained.checkpoints.wait()


def save_steps(group: dist.ProcessGroup, run: Run, steps: list[int]) -> list[list[str]]:
    """The names in the folder whenever a save is complete."""
    trained, names = run.start(), []
    for step in steps:
        trained.fill(step)
        trained.checkpoints.save(step, {"step": step})
        newest = trained.checkpoints.newest()
        assert newest is not None
        assert newest.name == f"step-{step:08d}"
        dist.barrier(group)
        names.append(sorted(path.name for path in run.folder.iterdir()))
        dist.barrier(group)
    return names


def save_steps_of(group: dist.ProcessGroup, run: Run, steps: list[int]) -> None:
    """Saves checkpoints with moments that say from which model they are."""
    trained = run.start()
    trained.step(0)
    for step in steps:
        trained.checkpoints.save(step, extra_of(step, {}, run.config))
    trained.checkpoints.wait()


def save_extra(group: dist.ProcessGroup, run: Run, extra: dict[str, Any]) -> None:
    run.start().checkpoints.save(1, extra)


def fail_to_write(
    group: dist.ProcessGroup, run: Run, step: int, method: str = "write_data", rank: int = 1
) -> tuple[str, str]:
    """The words of a save in which a rank fails before it writes, and the newest after it.

    method: where it fails. In ``finish`` it fails after everything was written.
    """
    trained, original = run.start(), getattr(DigestWriter, method)

    def fail(self: DigestWriter, *args: Any, **kwargs: Any) -> Any:
        if method == "finish":
            original(self, *args, **kwargs)
        raise RuntimeError("the cable is out")

    if dist.get_rank(group) == rank:
        setattr(DigestWriter, method, fail)
    try:
        trained.checkpoints.save(step, {"step": step})
        trained.checkpoints.wait()
    except RuntimeError as error:
        return str(error), str(trained.checkpoints.newest())
    finally:
        setattr(DigestWriter, method, original)
    raise AssertionError("the save should have failed")


def save_forever(rank: int, size: int, store: str, run: Run) -> None:
    """A process of its own: goes on from the newest, saves without a pause, until it is killed.

    One that outlives the other ends with an error, which is kept beside the store.
    """
    with Path(f"{store}-{rank}.txt").open("w") as words:
        os.dup2(words.fileno(), 2)
    torch.set_num_threads(1)
    timeout = timedelta(seconds=20)
    dist.init_process_group(
        "gloo", init_method=f"file://{store}", rank=rank, world_size=size, timeout=timeout
    )
    trained = run.start()
    trained.step(0)
    first, newest = 1, trained.checkpoints.newest()
    if newest is not None:
        first += trained.checkpoints.load(newest)["step"]
    for step in count(first):
        trained.fill(step)
        trained.checkpoints.save(step, {"step": step})
