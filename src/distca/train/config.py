"""What a run is: frozen dataclasses, read from TOML and from ``--set a.b=c``, saved beside it.

Every value is checked when it is read, so that a run either starts as written or says what is wrong
in one sentence.
"""

from __future__ import annotations

import dataclasses
import difflib
import json
import tomllib
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, cast, get_args, get_origin, get_type_hints


@dataclass(frozen=True)
class ModelSection:
    """A model by name with other sizes where given, or a folder of Hugging Face weights."""

    name: str = "debug"
    path: str = ""  # a folder with config.json and safetensors; its weights are loaded
    sizes: Mapping[str, Any] = field(default_factory=dict)  # layers = 2, hidden = 512, ...


@dataclass(frozen=True)
class DataSection:
    sources: tuple[str, ...] = ("stdlib",)
    weights: tuple[float, ...] = ()  # shares of tokens; equal by default
    tokenizer: str = "bytes"
    context: int = 4096
    overlong: str = "split"
    held_out: float = 0.02


@dataclass(frozen=True)
class ParallelSection:
    """0 for dp: as many as ranks are left over by the others."""

    dp: int = 0
    cp: int = 1
    tp: int = 1
    pp: int = 1
    stage_layers: tuple[int, ...] = ()  # of each of the pp stages; an even split by default
    servers: int = 0
    policy: str = "distca"
    placement: str = "balanced"
    tolerance: float = 0.02
    cost: str = "auto"  # h200 on GPUs, cpu on CPUs; or any that ``distca plan`` knows
    ping_pong: bool = False
    micro_batches: int = 1
    recompute: bool = False
    keep_weights: bool = False  # gathered and reduced once a step; needs room for all of them
    compile: bool = False
    backend: str = "auto"
    precision: str = "auto"  # bfloat16 on GPUs, float32 on CPUs
    memory_gib: float = 0.0  # of a rank; 0 asks the device
    attention_memory_gib: float = 0.0  # of a rank for one layer's q, k, v and o; 0: no limit
    speed: tuple[float, ...] = ()  # relative speed of each plan rank; equal by default
    ranks_per_node: int = 0  # plan ranks that share a node; 0 asks the launcher


@dataclass(frozen=True)
class TrainSection:
    steps: int = 100
    tokens_per_step: int = 16384
    lr: float = 3e-4
    min_lr: float = 3e-5
    warmup: int = 10
    betas: tuple[float, float] = (0.9, 0.95)
    weight_decay: float = 0.1
    clip: float = 1.0
    seed: int = 0
    frozen: tuple[str, ...] = ()  # patterns of parameter names that do not learn
    eval_every: int = 0
    eval_tokens: int = 65536
    checkpoint_every: int = 0
    keep: int = 2
    deterministic: bool = False
    trace: int = -1  # the step of which a timeline over all ranks is written; -1 for none


@dataclass(frozen=True)
class Config:
    model: ModelSection = field(default_factory=ModelSection)
    data: DataSection = field(default_factory=DataSection)
    parallel: ParallelSection = field(default_factory=ParallelSection)
    train: TrainSection = field(default_factory=TrainSection)
    out: str = "runs/latest"
    resume: bool = True  # from the newest complete checkpoint in ``out``, if there is one

    def __post_init__(self) -> None:
        t, d, p = self.train, self.data, self.parallel
        _at_least("train.steps", t.steps, 1)
        _at_least("train.tokens_per_step", t.tokens_per_step, 2)
        _at_least("data.context", d.context, 2)
        _at_least("train.keep", t.keep, 1)
        _at_least("parallel.micro_batches", p.micro_batches, 1)
        for name in ("eval_every", "checkpoint_every", "warmup", "clip", "lr", "min_lr"):
            _at_least(f"train.{name}", getattr(t, name), 0)
        _one_of("data.overlong", d.overlong, ("split", "drop"))
        _one_of("parallel.placement", p.placement, ("given", "balanced"))
        _one_of("parallel.precision", p.precision, ("auto", "float32", "bfloat16"))
        if d.weights and len(d.weights) != len(d.sources):
            raise ValueError(
                f"data.weights has {len(d.weights)} values for {len(d.sources)} sources: give one"
                " each, or none"
            )
        sets = p.micro_batches * (1 + p.ping_pong)
        if t.tokens_per_step < sets * d.context:
            parts = f" in each of {sets} micro-batches or halves of them" if sets > 1 else ""
            raise ValueError(
                f"train.tokens_per_step = {t.tokens_per_step} is below {sets} x data.context ="
                f" {sets * d.context}: a step must hold a document of full length{parts}"
            )

    @classmethod
    def read(cls, path: str | Path | None, settings: Sequence[str] = ()) -> Config:
        """A TOML file, or the defaults, with ``a.b=c`` on top; c is read as TOML, or as text."""
        values: dict[str, Any] = {}
        if path is not None:
            try:
                values = tomllib.loads(Path(path).read_text())
            except OSError as error:
                raise ValueError(f"{path} cannot be read ({error.strerror}): give a file") from None
            except tomllib.TOMLDecodeError as error:
                raise ValueError(f"{path} is not TOML: {error}") from None
        for setting in settings:
            _set(values, setting)
        return cast(Config, _build(cls, values, ""))

    def to_json(self) -> dict[str, Any]:
        return dataclasses.asdict(self)

    def save(self, path: Path) -> None:
        path.write_text(json.dumps(self.to_json(), indent=1) + "\n")


def _set(values: dict[str, Any], setting: str) -> None:
    name, equals, text = setting.partition("=")
    if not equals or not name.strip():
        raise ValueError(f"--set {setting}: write it as section.name=value")
    *sections, last = name.strip().split(".")
    for section in sections:
        values = values.setdefault(section, {})
        if not isinstance(values, dict):
            raise ValueError(f"--set {setting}: {section} is a value, not a section")
    try:
        values[last] = tomllib.loads(f"x = {text}")["x"]
    except tomllib.TOMLDecodeError:
        values[last] = text.strip()


def _build(kind: Any, values: Any, where: str) -> Any:
    if not isinstance(values, Mapping):
        raise ValueError(f"{where} is {values!r}: it must be a section with names and values")
    hints = get_type_hints(kind)
    for name in values:
        if name not in hints:
            near = difflib.get_close_matches(name, hints, 1)
            hint = f"did you mean {near[0]}?" if near else f"there are {', '.join(hints)}"
            raise ValueError(f"{_path(where, name)} is unknown: {hint}")
    return kind(
        **{name: _value(hints[name], value, _path(where, name)) for name, value in values.items()}
    )


def _value(kind: Any, value: Any, where: str) -> Any:
    if dataclasses.is_dataclass(kind):
        return _build(kind, value, where)
    origin = get_origin(kind)
    if origin is tuple:
        items = [value] if isinstance(value, str) else value
        if not isinstance(items, Sequence):
            raise ValueError(f"{where} = {value!r}: it must be a list")
        inner = get_args(kind)
        if inner[-1] is not Ellipsis and len(inner) != len(items):
            raise ValueError(f"{where} has {len(items)} values: it must have {len(inner)}")
        return tuple(_value(inner[0], item, where) for item in items)
    if origin is not None:  # a mapping, checked by whoever reads it
        return value
    if kind is float and isinstance(value, int) and not isinstance(value, bool):
        return float(value)
    if not isinstance(value, kind) or isinstance(value, bool) != (kind is bool):
        words = {int: "a whole number", float: "a number", str: "text", bool: "true or false"}
        raise ValueError(f"{where} = {value!r}: it must be {words[kind]}")
    return value


def _path(where: str, name: str) -> str:
    return f"{where}.{name}" if where else name


def _at_least(name: str, value: float, least: float) -> None:
    if value < least:
        raise ValueError(f"{name} = {value}: it must be at least {least}")


def _one_of(name: str, value: str, known: Sequence[str]) -> None:
    if value not in known:
        raise ValueError(f"{name} = {value!r} is unknown: choose {' or '.join(known)}")
