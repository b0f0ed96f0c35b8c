"""Functions that ranks run in the tests of torchtitan: its Trainer on short documents."""

from __future__ import annotations

import os
import random
import tempfile
import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, replace
from functools import partial, reduce
from typing import Any

import pytest
import torch
import torch.distributed as dist
from datasets import Dataset
from integrations import torchtitan_attention  # before torchtitan
from integrations.counting import counted, recorded_devices
from torchtitan.components.metrics import MetricsProcessor
from torchtitan.components.tokenizer import BaseTokenizer
from torchtitan.distributed.activation_checkpoint import FullAC, SelectiveAC
from torchtitan.hf_datasets import DatasetConfig
from torchtitan.hf_datasets.text_datasets import DATASETS
from torchtitan.models.common.attention import VarlenAttention, VarlenMetadata
from torchtitan.models.llama3 import config_registry as llama3

from distca.integrations.shared import planned
from distca.integrations.torchtitan import InnerAttention, adopt

LENGTHS = (700, 20, 45, 300, 9, 130, 64, 5)  # tokens of documents, drawn at random
CHECKPOINTING = {"none": None, "selective": SelectiveAC.Config(), "full": FullAC.Config()}


def texts(sizes: list[int], _: str) -> Dataset:
    draw = random.Random(0)
    return Dataset.from_list([{"text": "".join(draw.choices("abcdefgh", k=n))} for n in sizes])


for name, sizes in {
    "texts": random.Random(0).choices(LENGTHS, k=200),
    "longer": random.Random(0).choices([16 * length for length in LENGTHS], k=200),
    "long": [5000] * 8,  # every row is one document
    "few": [700] * 6 + [200] * 6,  # the first rank gets the first half
    "none": [700] * 2 + [50] * 2,  # the second rank gets less than a row
}.items():
    DATASETS[name] = DatasetConfig("", partial(texts, sizes), lambda row: row["text"])


class Bytes(BaseTokenizer):
    @dataclass(kw_only=True, slots=True)
    class Config(BaseTokenizer.Config):
        pass

    def __init__(self, config: Config, **_: Any) -> None:
        super().__init__()
        self.eos_id = 1

    def encode(self, text: str, add_bos: bool = False, add_eos: bool = False) -> list[int]:
        return [2] * add_bos + list(text.encode()) + [1] * add_eos

    def decode(self, tokens: list[int]) -> str:
        return bytes(tokens).decode()

    def get_vocab_size(self) -> int:
        return 2048


class Metrics(MetricsProcessor):
    """Records the metrics that torchtitan logs."""

    logged: list[tuple[float, float]]

    @dataclass(kw_only=True, slots=True)
    class Config(MetricsProcessor.Config):
        pass

    def __init__(self, *args: Any, **options: Any) -> None:
        super().__init__(*args, **options)
        self.logged, self.validated = [], []

    def log(self, step: int, loss: float, most: float, norm: float, **options: Any) -> None:
        self.logged.append((loss, norm))
        super().log(step, loss, most, norm, **options)

    def log_validation(self, loss: float, step: int, **options: Any) -> None:
        self.validated.append(loss)


def config_of(attention: str, folder: str) -> Any:
    config = llama3.llama3_debugmodel_varlen_attn()
    spec = config.model_spec
    spec.model.layers = spec.model.layers[:3]
    config.dump_folder = folder
    config.tokenizer = Bytes.Config()
    config.dataloader = replace(config.dataloader, dataset="texts")
    config.metrics = Metrics.Config(log_freq=1)
    config.checkpoint.enable = False
    config.validator.enable = False
    config.training = replace(
        config.training,
        local_batch_size=1,
        seq_len=512,
        steps=3,
        mixed_precision_param="float32",
    )
    config.parallelism.spmd_backend = "partial_dtensor"  # the others need a newer torch than 2.13
    config.debug.seed = 7
    if attention.startswith("distca"):
        return adopt(config, ahead=attention == "distca", cost="pairs", timeout_s=30.0)
    if attention != "none":
        config.override.imports.append(f"{torchtitan_attention.__name__}.{attention}_attention")
    return config


@contextmanager
def gathered() -> Iterator[list[Any]]:
    """Records the messages by which this rank announces its documents."""
    handshakes: list[Any] = []
    tell = planned.gather_or_raise

    def telling(transport: Any, mine: Any) -> Any:
        handshakes.append(mine)
        return tell(transport, mine)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(planned, "gather_or_raise", telling)
        yield handshakes


def mark() -> None:
    rank, size = str(dist.get_rank()), str(dist.get_world_size())
    local_rank = str(torch.cuda.current_device()) if torch.cuda.is_available() else rank
    os.environ |= {"RANK": rank, "LOCAL_RANK": local_rank, "WORLD_SIZE": size}


@dataclass
class Trained:
    steps: list[tuple[float, float]]  # loss and gradient norm
    validated: list[float]
    exchanges: int
    gatherings: int  # of documents
    fillers: int  # filler batches of this rank


def trained(
    group: dist.ProcessGroup, attention: str, checkpointing: str, options: dict[str, Any]
) -> Trained:
    """Trains with options of the config, by dotted names; "window" is of the second layer."""
    mark()
    with tempfile.TemporaryDirectory() as folder, counted() as sent, gathered() as handshakes:
        config = config_of(attention, folder)
        config.activation_checkpoint = CHECKPOINTING[checkpointing]
        given = dict(options)
        if window := given.pop("window", None):
            inner = VarlenAttention.Config(window_size=window)
            config.model_spec.model.layers[1].attention.inner_attention = inner
        for name, value in given.items():
            home, _, last = name.rpartition(".")
            setattr(reduce(getattr, home.split("."), config), last, value)
        trainer = config.build()
        trainer.train()
        trainer.close()
    metrics = trainer.metrics_processor
    fillers = sum(one.done for one in handshakes)
    return Trained(metrics.logged, metrics.validated, len(sent), len(handshakes), fillers)


def resumed(group: dist.ProcessGroup, folder: str) -> list[list[tuple[float, float]]]:
    """Trains four steps, then the last two again from the checkpoint after the second."""
    mark()
    runs = []
    for load_step in (-1, 2):
        config = config_of("distca", folder)
        config.checkpoint.enable, config.checkpoint.interval = True, 2
        config.checkpoint.load_step, config.training.steps = load_step, 4
        trainer = config.build()
        trainer.train()
        trainer.close()
        runs.append(trainer.metrics_processor.logged)
    return runs


def devices_of(group: dist.ProcessGroup, options: dict[str, Any]) -> list[dict[str, list[Any]]]:
    """Returns the devices of the plans of a training step, with one rank on each node."""
    mark()
    with tempfile.TemporaryDirectory() as folder, recorded_devices(ranks_per_node=1) as found:
        config = adopt(config_of("none", folder), cost="pairs", **options)
        config.training.steps = 1
        trainer = config.build()
        trainer.train()
        trainer.close()
    return found


def wrong_on_one(group: dist.ProcessGroup) -> tuple[str, float]:
    """Returns the error of this rank and its seconds, if the second rank's documents are wrong."""
    layer = InnerAttention.Config(options={"cost": "pairs", "timeout_s": 20.0}).build()
    q = torch.randn(1, 64, 2, 16, requires_grad=True)
    end = 64 - dist.get_rank()
    offsets = torch.tensor([0, 20, end], dtype=torch.int32)
    began = time.monotonic()
    try:
        layer(q, q, q, attention_masks=VarlenMetadata(offsets, offsets, 44, 44))
    except ValueError as error:
        return str(error), time.monotonic() - began
    return "", 0.0
