"""The configuration of a run: frozen dataclasses, read from TOML and ``--set a.b=c``.

Names, types and limits are checked when a configuration is read, so a run either starts as written
or reports what is wrong in one sentence. The configuration is saved in the run's folder. The
meaning of each key stands beside its default; ``distca train --print-config`` and
docs/reference/config.md show it (``train.config_text``).
"""

from __future__ import annotations

import dataclasses
import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from distca import schema
from distca.planning.policies import PLACEMENTS, POLICIES
from distca.schema import Limits, key, meaning

# Upper limits are far above all that is in use, and keep computations within memory and types.
_FROM_MINUS_1, _FROM_0, _FROM_1, _FROM_2 = (Limits(least, 10**9) for least in (-1, 0, 1, 2))
_FACTOR, _SHARE = Limits(0, 1e6), Limits(0, below=1)


@dataclass(frozen=True)
class ModelSection:
    """The model: by name, with other sizes where given, or from a folder of weights."""

    name: str = key("debug", "Name of a model: debug, 150m, 1b, llama3-8b, qwen3-8b, ...")
    path: str = key(
        "",
        "Folder of Hugging Face weights (config.json and safetensors) to start from, instead of"
        " name.",
    )
    sizes: Mapping[str, Any] = field(
        default_factory=dict,
        metadata=meaning(
            "Sizes other than those of the model, as in { layers = 2, hidden = 512 }."
        ),
    )


@dataclass(frozen=True)
class DataSection:
    """The documents, and how they are read."""

    sources: tuple[str, ...] = key(
        ("stdlib",),
        "Where documents come from: text, JSONL, .npy or Megatron files, folders, globs, stdlib or"
        " a distribution of lengths.",
    )
    weights: tuple[float, ...] = key(
        (), "Share of the tokens of each source, in any unit; empty: equal shares.", Limits(0, 1e15)
    )
    tokenizer: str = key(
        "bytes",
        "Tokenizer: bytes, a tokenizer.json or its folder, or ids:N for files of token ids below"
        " N.",
    )
    bos: str = key("", "Token that starts a document, instead of the tokenizer's own.")
    eos: str = key(
        "",
        "Token that ends a document, instead of the tokenizer's own; with ids:N, the number that"
        " ends documents in a .npy file.",
    )
    add_bos: bool = key(False, "Whether each document of text starts with bos.")
    add_eos: bool = key(True, "Whether each document of text ends with eos.")
    context: int = key(4096, "Tokens of the longest document.", _FROM_2)
    overlong: str = key(
        "split", "What happens to documents longer than the context: split or drop."
    )
    held_out: float = key(
        0.02,
        "Documents that are kept for evaluation: their share if below 1, else their number.",
        _FROM_0,
    )


@dataclass(frozen=True)
class ParallelSection:
    """The ranks, and how attention is planned and computed on them."""

    dp: int = key(0, "Data-parallel size; 0: all ranks that cp, tp, pp and servers leave.", _FROM_0)
    cp: int = key(
        1, "Context-parallel size: workers that share a sequence as it is given.", _FROM_1
    )
    tp: int = key(1, "Tensor-parallel size.", _FROM_1)
    pp: int = key(1, "Number of pipeline stages.", _FROM_1)
    stage_layers: tuple[int, ...] = key(
        (), "Layers of each pipeline stage; empty: an even split.", _FROM_1
    )
    servers: int = key(
        0, "Dedicated attention servers: ranks besides the workers, a multiple of tp.", _FROM_0
    )
    policy: str = key("distca", f"How attention is placed and scheduled: {', '.join(POLICIES)}.")
    placement: str = key(
        "balanced",
        "Where tokens live: balanced (the same number of tokens and about the same attention on"
        " each worker) or given.",
    )
    tolerance: float = key(
        0.02, "How far the slowest rank may be above the mean, as a share of the mean.", _SHARE
    )
    cost: str = key(
        "auto",
        "Cost model: auto (h200 on GPUs and cpu on CPUs), or any cost that distca plan accepts.",
    )
    ping_pong: bool = key(
        False, "Whether two half-batches overlap the communication of each other."
    )
    micro_batches: int = key(
        1,
        "Micro-batches of a step; pipelines need several, and more of them need less memory.",
        _FROM_1,
    )
    recompute: bool = key(
        False, "Whether linear layers are computed again in the backward pass, to save memory."
    )
    keep_weights: bool = key(
        False,
        "Whether weights are gathered and gradients reduced once per step; all weights must fit"
        " into the memory of a rank.",
    )
    compile: bool = key(False, "Whether linear layers are compiled by torch.compile; GPUs only.")
    backend: str = key(
        "auto",
        "Attention backend: auto (the first that fits), fa4, flash, sdpa, blocks, reference.",
    )
    precision: str = key(
        "auto",
        "Type of computations: float32, bfloat16 or auto (bfloat16 on GPUs, float32 on CPUs);"
        " weights and optimizer are float32.",
    )
    memory_gib: float = key(
        0.0,
        "Memory of a rank, against which a run is checked before it starts; 0: all of it.",
        _FACTOR,
    )
    attention_memory_gib: float = key(
        0.0, "Limit for one layer's q, k, v and o on a rank, for the planner; 0: none.", _FACTOR
    )
    speed: tuple[float, ...] = key(
        (), "Relative speed of each plan rank; empty: equal speeds.", _FACTOR
    )
    learn_speed: str = key(
        "auto",
        "Whether plans follow the measured speed of ranks: on, off or auto (on GPUs, and with"
        " compensate); not with train.deterministic.",
    )
    compensate: bool = key(
        False,
        "Whether a slow rank gets even less attention, for its slow linear layers; without a"
        " pipeline and dedicated servers.",
    )
    ranks_per_node: int = key(
        0, "Plan ranks that share a node; 0: those with the same host name.", _FROM_0
    )

    @property
    def num_sets(self) -> int:
        """The number of micro-batches or, with ping-pong, of their halves."""
        return self.micro_batches * (1 + self.ping_pong)


@dataclass(frozen=True)
class TrainSection:
    """Steps, optimizer, evaluation and checkpoints."""

    steps: int = key(
        100, "Number of steps of the whole run, including those before a resume.", _FROM_1
    )
    tokens_per_step: int = key(
        16384,
        "Tokens of a step over all ranks; at least context x micro_batches, and twice that with"
        " ping_pong.",
        _FROM_2,
    )
    lr: float = key(3e-4, "Learning rate after the warm-up.", _FACTOR)
    min_lr: float = key(
        3e-5, "Learning rate to which it falls, as a cosine, by the last step.", _FACTOR
    )
    warmup: int = key(10, "Steps in which the learning rate rises linearly to lr.", _FROM_0)
    betas: tuple[float, float] = key((0.9, 0.95), "The two decay rates of AdamW's moments.", _SHARE)
    weight_decay: float = key(0.1, "Weight decay of matrices; norms have none.", _FACTOR)
    clip: float = key(1.0, "Largest norm of the gradients; 0: no clipping.", _FACTOR)
    seed: int = key(
        0, "Seed of the initial weights and of the order of documents.", Limits(0, below=2**63)
    )
    frozen: tuple[str, ...] = key(
        (), 'Patterns of names of parameters that are not trained, such as "seams.0.*".'
    )
    eval_every: int = key(0, "Steps between evaluations of held-out documents; 0: none.", _FROM_0)
    eval_tokens: int = key(65536, "Tokens of an evaluation, rounded up to whole batches.", _FROM_1)
    checkpoint_every: int = key(0, "Steps between checkpoints; 0: only at the end.", _FROM_0)
    save_at_end: bool = key(
        True, "Whether the last state is saved, also when a signal stops the run."
    )
    keep: int = key(2, "Number of checkpoints to keep; older ones are deleted.", _FROM_1)
    skip_non_finite: int = key(
        0, "Steps in a row that may be skipped because the loss or norm is not finite.", _FROM_0
    )
    deterministic: bool = key(
        False, "Whether the gradients of attention are bitwise equal from run to run."
    )
    trace: int = key(
        -1,
        "Step, counted from 0, whose timeline over all ranks is written; -1: none.",
        _FROM_MINUS_1,
    )

    @property
    def saves(self) -> bool:
        """Whether the run writes any checkpoint."""
        return self.checkpoint_every > 0 or self.save_at_end

    def saves_after(self, step: int) -> bool:
        """Returns whether a checkpoint follows a step, if nothing stops the run."""
        last = step + 1 == self.steps
        return _is_due(step, self.checkpoint_every) or (last and self.save_at_end)

    def evaluates_after(self, step: int) -> bool:
        last = step + 1 == self.steps
        return self.eval_every > 0 and (_is_due(step, self.eval_every) or last)


@dataclass(frozen=True)
class LogSection:
    """Where figures go besides metrics.jsonl."""

    tensorboard: bool = key(False, "Whether figures are written for TensorBoard, in out.")
    wandb: str = key(
        "",
        "Project of Weights & Biases to which figures are sent; empty: none. They stay in out with"
        " WANDB_MODE=offline.",
    )
    prometheus: bool = key(
        False, "Whether the newest figures are in out/metrics.prom, as Prometheus reads them."
    )
    prometheus_port: int = key(
        0,
        "With prometheus: port of this machine (127.0.0.1) with the same figures; 0: none.",
        Limits(0, 65535),
    )


@dataclass(frozen=True)
class Config:
    """The configuration of a run."""

    model: ModelSection = field(default_factory=ModelSection)
    data: DataSection = field(default_factory=DataSection)
    parallel: ParallelSection = field(default_factory=ParallelSection)
    train: TrainSection = field(default_factory=TrainSection)
    log: LogSection = field(default_factory=LogSection)
    out: str = key("runs/latest", "Folder for records, logs and checkpoints.")
    resume: bool = key(
        True, "Whether to continue from the newest complete checkpoint in out, if there is one."
    )
    from_step: int = key(
        -1, "Step of the checkpoint to continue from; -1: the newest.", _FROM_MINUS_1
    )

    def __post_init__(self) -> None:
        t, d, p = self.train, self.data, self.parallel
        schema.check_limits(self)
        if t.trace >= t.steps:
            raise ValueError(
                f"train.trace = {t.trace} of train.steps = {t.steps}: steps are counted from 0, so"
                f" choose one from 0 to {t.steps - 1}, or -1 for none"
            )
        if t.min_lr > t.lr:
            raise ValueError(
                f"train.min_lr = {t.min_lr} is above train.lr = {t.lr}, which falls to it: lower"
                " min_lr"
            )
        if self.log.prometheus_port and not self.log.prometheus:
            raise ValueError(
                f"log.prometheus_port = {self.log.prometheus_port} without log.prometheus: set both"
            )
        if self.from_step >= 0 and not self.resume:
            raise ValueError(
                f"from_step = {self.from_step} with resume = false: choose one of them"
            )
        _one_of("parallel.learn_speed", p.learn_speed, ("auto", "on", "off"))
        if p.compensate and (p.learn_speed == "off" or p.pp > 1 or p.servers):
            raise ValueError(
                f"parallel.compensate = true with learn_speed = {p.learn_speed!r}, pp = {p.pp} and"
                f" servers = {p.servers}: it needs learned speeds, pp = 1 and no servers, or leave"
                " it out"
            )
        _one_of("data.overlong", d.overlong, ("split", "drop"))
        _one_of("parallel.placement", p.placement, PLACEMENTS)
        _one_of("parallel.precision", p.precision, ("auto", "float32", "bfloat16"))
        if d.weights and len(d.weights) != len(d.sources):
            raise ValueError(
                f"data.weights has {len(d.weights)} values for {len(d.sources)} sources: give one"
                " for each source, or none"
            )
        batches = p.num_sets
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


def _one_of(name: str, value: str, known: Sequence[str]) -> None:
    if value not in known:
        raise ValueError(f"{name} = {value!r} is unknown: choose {' or '.join(known)}")
