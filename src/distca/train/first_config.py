"""A config for a machine and a model: sizes that fit its memory, for a first run.

Candidates are tried in the order of their speed: micro-batches cost least, then recomputing linear
layers, then tensor parallelism.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, replace
from itertools import product
from pathlib import Path

import torch

from distca.model.checkpoints import read_config
from distca.model.config import ModelConfig
from distca.model.sizes import MODEL_CONFIGS
from distca.pipeline.memory import GIB, Memory
from distca.schema import choose
from distca.train.config import Config, DataSection, ModelSection, ParallelSection, TrainSection
from distca.train.memory import available_bytes, memory_of
from distca.train.setup import parallel_of

CPU_CONTEXT, GPU_CONTEXT = 4096, 32768  # unless another one is given, or the model's is shorter
SPARE = 0.85  # of the memory of a rank: the estimate is not exact
TENSOR_PARALLEL = (1, 2, 4, 8)
TOKENIZER = "tokenizer.json"


@dataclass(frozen=True)
class Chosen:
    config: Config
    memory: Memory
    available: int


def first_config(
    model: str, sources: tuple[str, ...], context: int | None, num_ranks: int, device: torch.device
) -> Chosen:
    """Returns the fastest config that fits the ranks. Raises ValueError if none does.

    model: a name, or a folder of weights.
    """
    section, known = _model(model)
    shown = context or min(known.context, GPU_CONTEXT if device.type == "cuda" else CPU_CONTEXT)
    data = DataSection(context=shown)
    data = replace(data, sources=sources) if sources else data
    if section.path and (Path(section.path) / TOKENIZER).is_file():
        data = replace(data, tokenizer=section.path)
    available = available_bytes(device, num_ranks if device.type == "cpu" else 1)
    best: Chosen | None = None
    for config in _candidates(section, data, known, num_ranks, device):
        memory = memory_of(config, parallel_of(config, num_ranks), known, device)
        if memory.total <= SPARE * available:
            return Chosen(config, memory, available)
        if best is None or memory.total < best.memory.total:
            best = Chosen(config, memory, available)
    assert best is not None
    raise ValueError(
        f"{model} with a context of {shown} needs about {best.memory.total / GIB:.1f} GiB on each"
        f" of {num_ranks} ranks, and {SPARE * available / GIB:.1f} of {available / GIB:.1f} GiB may"
        " be planned: use more ranks, a shorter --context, or a smaller model"
    )


def _model(name: str) -> tuple[ModelSection, ModelConfig]:
    if name in MODEL_CONFIGS or not Path(name).is_dir():
        found = choose(MODEL_CONFIGS, name, "model", ", or give a folder of Hugging Face weights")
        return ModelSection(name=name), found
    return ModelSection(path=name), read_config(Path(name))


def _candidates(
    section: ModelSection,
    data: DataSection,
    model: ModelConfig,
    num_ranks: int,
    device: torch.device,
) -> Iterator[Config]:
    """Yields configs, the fastest first.

    A worker has one sequence of full length in a step, or in each of two half-batches.
    """
    on_gpu = device.type == "cuda"
    often = 100 if on_gpu else 20
    sizes = (model.heads, model.kv_heads, model.ffn, num_ranks)
    for tp, recompute in product(TENSOR_PARALLEL, (False, True)):
        if any(size % tp for size in sizes):
            continue
        workers = num_ranks // tp
        ping_pong = on_gpu and workers > 1  # half-batches hide communication, if there is any
        train = TrainSection(
            steps=10 * often,
            tokens_per_step=workers * (1 + ping_pong) * data.context,
            warmup=often // 2,
            eval_every=often,
            checkpoint_every=often,
        )
        for micro_batches in (count for count in range(1, workers + 1) if workers % count == 0):
            parallel = ParallelSection(
                tp=tp, recompute=recompute, ping_pong=ping_pong, micro_batches=micro_batches
            )
            yield Config(model=section, data=data, parallel=parallel, train=train)
