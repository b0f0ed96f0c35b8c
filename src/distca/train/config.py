"""The configuration of a run: frozen dataclasses, read from TOML and ``--set a.b=c``.

Names, types and limits are checked when a configuration is read, so a run either starts as written
or reports what is wrong in one sentence. The configuration is saved in the run's folder.
"""

from __future__ import annotations

import dataclasses
import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from distca import schema
from distca.planning.policies import PLACEMENTS

_LARGEST = 1e6  # of factors in the optimizer, far above all that train and within float32


@dataclass(frozen=True)
class ModelSection:
    """A model by name with other sizes where given, or a folder of Hugging Face weights."""

    name: str = "debug"
    path: str = ""  # a folder with config.json and safetensors, from which weights are loaded
    sizes: Mapping[str, Any] = field(default_factory=dict)  # layers = 2, hidden = 512, ...


@dataclass(frozen=True)
class DataSection:
    sources: tuple[str, ...] = ("stdlib",)
    weights: tuple[float, ...] = ()  # each source's share of the tokens; equal by default
    tokenizer: str = "bytes"
    bos: str = ""  # tokens instead of those of the tokenizer
    eos: str = ""  # with ids:N, the number that ends documents in a .npy file
    add_bos: bool = False  # before each document of text
    add_eos: bool = True  # after each document of text
    context: int = 4096  # tokens of the longest document
    overlong: str = "split"  # or drop: what happens to documents longer than the context
    held_out: float = 0.02  # share, or number, of the documents that are kept for evaluation


@dataclass(frozen=True)
class ParallelSection:
    dp: int = 0  # 0: all ranks that cp, tp, pp and servers leave
    cp: int = 1
    tp: int = 1
    pp: int = 1
    stage_layers: tuple[int, ...] = ()  # layers of each pipeline stage; an even split by default
    servers: int = 0  # dedicated attention servers
    policy: str = "distca"
    placement: str = "balanced"
    tolerance: float = 0.02  # how far the slowest rank may be above the mean
    cost: str = "auto"  # h200 on GPUs and cpu on CPUs; or any cost that ``distca plan`` accepts
    ping_pong: bool = False
    micro_batches: int = 1
    recompute: bool = False
    keep_weights: bool = False  # gather and reduce once per step; all weights must fit into memory
    compile: bool = False
    backend: str = "auto"
    precision: str = "auto"  # bfloat16 on GPUs, float32 on CPUs
    memory_gib: float = 0.0  # memory of a rank; 0: what the device has
    attention_memory_gib: float = 0.0  # limit for one layer's q, k, v and o on a rank; 0: none
    speed: tuple[float, ...] = ()  # relative speed of each plan rank; equal by default
    learn_speed: bool = False  # from measured attention; not with train.deterministic
    ranks_per_node: int = 0  # plan ranks that share a node; 0: as the launcher says


@dataclass(frozen=True)
class TrainSection:
    steps: int = 100
    tokens_per_step: int = 16384
    lr: float = 3e-4
    min_lr: float = 3e-5
    warmup: int = 10
    betas: tuple[float, float] = (0.9, 0.95)
    weight_decay: float = 0.1
    clip: float = 1.0  # largest norm of the gradients; 0: no clipping
    seed: int = 0
    frozen: tuple[str, ...] = ()  # patterns of the names of parameters that are not trained
    eval_every: int = 0  # steps between evaluations; 0: none
    eval_tokens: int = 65536
    checkpoint_every: int = 0  # steps between checkpoints; 0: only at the end
    save_at_end: bool = True  # save the last state, also when a signal stops the run
    keep: int = 2  # number of checkpoints to keep
    skip_non_finite: int = 0  # steps in a row that may be skipped for a loss or norm like NaN
    deterministic: bool = False
    trace: int = -1  # the step whose timeline over all ranks is written; -1: none

    def saves_after(self, step: int) -> bool:
        """Returns whether a checkpoint follows a step, if nothing stops the run."""
        last = step + 1 == self.steps
        return _is_due(step, self.checkpoint_every) or (last and self.save_at_end)

    def evaluates_after(self, step: int) -> bool:
        last = step + 1 == self.steps
        return self.eval_every > 0 and (_is_due(step, self.eval_every) or last)


@dataclass(frozen=True)
class Config:
    model: ModelSection = field(default_factory=ModelSection)
    data: DataSection = field(default_factory=DataSection)
    parallel: ParallelSection = field(default_factory=ParallelSection)
    train: TrainSection = field(default_factory=TrainSection)
    out: str = "runs/latest"
    resume: bool = True  # from the newest complete checkpoint in ``out``, if there is one
    from_step: int = -1  # the checkpoint to resume from; -1: the newest

    def __post_init__(self) -> None:
        t, d, p = self.train, self.data, self.parallel
        _at_least("train.steps", t.steps, 1)
        _at_least("train.tokens_per_step", t.tokens_per_step, 2)
        _at_least("data.context", d.context, 2)
        _at_least("train.keep", t.keep, 1)
        _at_least("parallel.micro_batches", p.micro_batches, 1)
        for name in (
            "eval_every", "checkpoint_every", "warmup", "clip", "lr", "min_lr", "skip_non_finite",
            "weight_decay", "seed",
        ):  # fmt: skip
            _at_least(f"train.{name}", getattr(t, name), 0)
        for name in ("lr", "min_lr", "weight_decay"):
            if not getattr(t, name) <= _LARGEST:
                raise ValueError(
                    f"train.{name} = {getattr(t, name)}: it must be at most {_LARGEST}"
                )
        if not all(0 <= beta < 1 for beta in t.betas):
            raise ValueError(f"train.betas = {list(t.betas)}: each must be from 0 to below 1")
        _at_least("from_step", self.from_step, -1)
        if self.from_step >= 0 and not self.resume:
            raise ValueError(
                f"from_step = {self.from_step} with resume = false: choose one of them"
            )
        _one_of("data.overlong", d.overlong, ("split", "drop"))
        _one_of("parallel.placement", p.placement, PLACEMENTS)
        _one_of("parallel.precision", p.precision, ("auto", "float32", "bfloat16"))
        if d.weights and len(d.weights) != len(d.sources):
            raise ValueError(
                f"data.weights has {len(d.weights)} values for {len(d.sources)} sources: give one"
                " for each source, or none"
            )
        batches = p.micro_batches * (1 + p.ping_pong)
        if t.tokens_per_step < batches * d.context:
            parts = f" in each of its {batches} micro-batches or halves" if batches > 1 else ""
            raise ValueError(
                f"train.tokens_per_step = {t.tokens_per_step} is below {batches} x data.context ="
                f" {batches * d.context}: a step must hold a document of full length{parts}"
            )

    @classmethod
    def read(cls, path: str | Path | None, settings: Sequence[str] = ()) -> Config:
        """Reads a TOML file, or takes the defaults, and applies settings ``a.b=c`` on top."""
        values = {} if path is None else schema.read_toml(path, cls)
        for setting in settings:
            schema.assign(values, setting)
        return schema.build(cls, values)

    def to_json(self) -> dict[str, Any]:
        return dataclasses.asdict(self)

    def save(self, path: Path) -> None:
        path.write_text(json.dumps(self.to_json(), indent=1) + "\n")


def _is_due(step: int, every: int) -> bool:
    return every > 0 and (step + 1) % every == 0


def _at_least(name: str, value: float, least: float) -> None:
    if not value >= least:  # NaN too
        raise ValueError(f"{name} = {value}: it must be at least {least}")


def _one_of(name: str, value: str, known: Sequence[str]) -> None:
    if value not in known:
        raise ValueError(f"{name} = {value!r} is unknown: choose {' or '.join(known)}")
