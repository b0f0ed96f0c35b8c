"""The estimate: counted by hand for a small model, and in proportion where it should be."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch

from distca.model.config import ModelConfig
from distca.model.sizes import model_config
from distca.pipeline.memory import GIB, Memory
from distca.pipeline.memory import estimate as estimate_shape
from distca.pipeline.mesh import MeshShape
from distca.train.config import Config
from distca.train.memory import available_bytes, check_host_memory, check_memory, memory_of

TINY = ModelConfig(vocab_size=10, hidden=8, layers=3, heads=2, kv_heads=1, head_dim=4, ffn=16)


def estimate(model: ModelConfig, parallel: MeshShape, tokens: int, *, recompute: bool) -> Memory:
    return estimate_shape(
        model.shape, parallel, tokens, recompute=recompute, parameters=model.num_parameters
    )


def test_by_hand() -> None:
    memory = estimate(TINY, MeshShape(), 100, recompute=False)
    # x 8; q and attended 8 each, k and v 4 each; inside 3 x 8 + 3 x 16; 2 bytes, 3 layers
    assert memory.activations == 100 * (8 + 24 + 72) * 2 * 3
    assert memory.state == 16 * TINY.num_parameters
    assert memory.logits == 2 * 100 * 10 * 4
    assert memory.total == sum(
        (memory.state, memory.gathered, memory.activations, memory.logits, memory.exchange)
    )


def test_what_helps_helps() -> None:
    model = model_config("llama3-8b")
    plain = estimate(model, MeshShape(dp=8), 65536, recompute=False)
    assert plain.state / GIB == pytest.approx(16 * model.num_parameters / 8 / GIB)
    assert estimate(model, MeshShape(dp=16), 65536, recompute=False).state < plain.state
    assert estimate(model, MeshShape(dp=8), 65536, recompute=True).total < plain.total
    assert estimate(model, MeshShape(dp=8, tp=2), 65536, recompute=False).total < plain.total
    assert estimate(model, MeshShape(dp=8), 32768, recompute=False).total < plain.total


def test_what_cannot_fit_is_refused_with_the_numbers() -> None:
    memory = estimate(model_config("llama3-8b"), MeshShape(), 65536, recompute=False)
    with pytest.raises(
        ValueError, match=r"needs about \d+\.\d GiB per rank .* and has 80\.0: use more ranks"
    ):
        check_memory(memory, available_bytes(torch.device("cpu"), 1, limit_gib=80.0))
    check_memory(memory, memory.total)


def test_ranks_share_a_host() -> None:
    cpu = torch.device("cpu")
    assert available_bytes(cpu, 2) == available_bytes(cpu, 1) // 2


def test_ranks_share_a_gpu(monkeypatch: pytest.MonkeyPatch) -> None:
    class Properties:
        total_memory = 100 << 30

    monkeypatch.setattr("torch.cuda.get_device_properties", lambda device: Properties)
    gpu = torch.device("cuda", 0)
    assert available_bytes(gpu, 1) == 95 << 30
    assert available_bytes(gpu, 4) == 24 << 30, "a quarter, less the context of a rank"
    assert available_bytes(gpu, 4, limit_gib=7) == 7 << 30
    with pytest.raises(ValueError, match=r"100 ranks need at least 125 GiB .* start at most 80,"):
        available_bytes(gpu, 100)


def test_a_checkpoint_is_copied_before_it_is_written() -> None:
    """Into the memory of the ranks on a CPU, and into that of the host from a GPU."""
    config = Config()
    model, mesh = model_config("debug"), MeshShape(dp=2)
    on_cpu = memory_of(config, mesh, model, torch.device("cpu"))
    assert on_cpu.checkpoint == on_cpu.saved == 12 * model.num_parameters // 2
    never = replace(config, train=replace(config.train, save_at_end=False))
    assert memory_of(never, mesh, model, torch.device("cpu")).checkpoint == 0
    assert memory_of(config, mesh, model, torch.device("cuda", 0)).checkpoint == 0
    check_host_memory(on_cpu.saved * 8, on_cpu.saved * 8)
    with pytest.raises(ValueError, match=r"takes 96\.0 GiB for .*, and it has 64\.0: use more"):
        check_host_memory(96 * GIB, 64 * GIB)
