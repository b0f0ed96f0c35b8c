"""torchtitan's layers with distca on one process: exact results, or errors."""

from __future__ import annotations

import json
from copy import deepcopy
from dataclasses import replace
from importlib import import_module
from typing import TYPE_CHECKING, Any

import pytest
import torch
from torch import Tensor

if TYPE_CHECKING:
    from integrations import torchtitan_bodies as bodies
else:
    pytest.importorskip(
        "torchtitan",
        reason="torchtitan is not installed: pip install 'distca[torchtitan]' in a venv of its own",
    )
    from integrations import torchtitan_bodies as bodies

from integrations.torchtitan_attention import OwnAttention
from torchtitan.config import OverrideConfig
from torchtitan.config.override import apply_overrides
from torchtitan.distributed import utils
from torchtitan.models.common.attention import (
    VarlenAttention,
    VarlenMetadata,
    create_varlen_metadata_for_document,
)
from torchtitan.models.llama3 import config_registry as llama3

from distca.integrations import torchtitan
from distca.integrations.torchtitan import InnerAttention, adopt

LENGTHS = ((150, 1, 49), (60, 140))  # documents in two rows


def masks(lengths: tuple[tuple[int, ...], ...] = LENGTHS) -> VarlenMetadata:
    rows = [torch.cat([torch.arange(length) for length in row]) for row in lengths]
    return create_varlen_metadata_for_document(torch.stack(rows))


def inputs(heads: int = 4, kv_heads: int = 2, size: int = 16, v_size: int = 16) -> list[Tensor]:
    draw = torch.Generator().manual_seed(0)
    sizes = [(heads, size), (kv_heads, size), (kv_heads, v_size)]
    made = [torch.randn(2, 200, *given, generator=draw) for given in sizes]
    return [x.requires_grad_() for x in made]


def layer(window_size: tuple[int, int] = (-1, 0), name: str = "test", **options: Any) -> Any:
    options = {"cost": "pairs", **options}
    return InnerAttention.Config(window_size=window_size, name=name, options=options).build()


@pytest.mark.parametrize("window", [(-1, 0), (30, 0), (0, 0), (-1, -1)])
@pytest.mark.parametrize("sizes", [{}, {"kv_heads": 4, "size": 24, "v_size": 16}])
@pytest.mark.parametrize("scale", [None, 0.3])
def test_same_as_own(window: tuple[int, int], sizes: dict[str, int], scale: float | None) -> None:
    results = []
    for attention in (layer(window_size=window), OwnAttention.Config(window_size=window).build()):
        given = inputs(**sizes)
        out = attention(*given, attention_masks=masks(), scale=scale, enable_gqa=True)
        (out * torch.linspace(-1, 1, out.shape[-1])).sum().backward()
        results.append([out, *(x.grad for x in given)])
    for mine, theirs in zip(*results, strict=True):
        torch.testing.assert_close(mine, theirs, rtol=1e-5, atol=1e-5)


def learnt(name: str, override: str) -> tuple[Tensor, dict[str, Tensor]]:
    """Returns the outputs of a small model of torchtitan, and its gradients."""
    spec = import_module(f"torchtitan.models.{name}").model_registry("debugmodel", "varlen")
    assert apply_overrides(OverrideConfig(imports=[override]), spec)
    with torch.device("meta"):
        model = spec.model.build()
    model.to_empty(device="cpu")
    torch.manual_seed(0)
    with torch.no_grad():
        model.init_weights(buffer_device=None)
    positions = torch.cat([torch.arange(length) for length in (70, 3, 55)])[None]
    masks = model.get_attention_masks(positions=positions)
    out = model(torch.arange(128)[None], positions=positions, attention_masks=masks)
    out.float().logsumexp(-1).sum().backward()
    return out, {name: p.grad for name, p in model.named_parameters() if p.grad is not None}


@pytest.mark.slow
@pytest.mark.parametrize("name", ["qwen3", "muse_glimmer", "deepseek_v3"])
def test_models(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(utils, "_spmd_backend", "partial_dtensor")
    own, theirs = learnt(name, f"{OwnAttention.__module__}.own_attention")
    out, grads = learnt(name, f"{torchtitan.__name__}.inner_attention")
    torch.testing.assert_close(out, own, rtol=1e-4, atol=1e-5)
    assert grads.keys() == theirs.keys()
    if name != "deepseek_v3":  # experts multiply in bfloat16
        for parameter, grad in grads.items():
            assert (grad - theirs[parameter]).norm() <= 1e-5 * theirs[parameter].norm() + 1e-9


def test_layers_share_one_attention() -> None:
    first, second = layer(), layer()
    assert first._shared is second._shared
    assert "attention layer 1" in second._where
    assert layer(name="another", tolerance=0.1)._shared is not first._shared
    with pytest.raises(ValueError, match="give all layers of a model the same options"):
        layer(tolerance=0.1)


def test_layers_that_are_built_after_training_began_belong_to_another_model() -> None:
    first = layer()
    first(*inputs(), attention_masks=masks())
    second = layer(tolerance=0.1)
    assert second._shared is not first._shared
    assert "attention layer 0" in second._where


@pytest.mark.parametrize(
    ("asked", "words"),
    [
        ({"out_transform": lambda out, lse: out}, "changes its outputs by their log-sum-exp"),
        ({"score_mod": lambda score, *_: score}, "changes its scores"),
        ({"block_table": torch.zeros(1)}, "is given block_table, which distca does not support"),
        ({"attention_masks": None}, "is given NoneType instead of VarlenMetadata"),
        ({"attention_masks": {"a": 1}}, "is given dict instead of VarlenMetadata"),
    ],
)
def test_refused(asked: dict[str, Any], words: str) -> None:
    with pytest.raises(ValueError, match=r"^attention layer \d+ \(of torchtitan\) ") as raised:
        layer()(*inputs(), **{"attention_masks": masks(), **asked})
    assert words in str(raised.value)
    assert str(raised.value).count(": ") == 1  # the problem and the way out


def test_a_cache_is_refused() -> None:
    q, k, v = inputs()
    with pytest.raises(ValueError, match="has 200 keys for 1 queries, as with a cache, which"):
        layer()(q[:, -1:], k, v, attention_masks=masks())


def test_other_documents_for_keys_are_refused() -> None:
    given = masks()
    with pytest.raises(ValueError, match="other documents for its keys than for its queries"):
        layer()(*inputs(), attention_masks=given._replace(cu_seq_k=given.cu_seq_k + 1))


def test_windows_to_the_right_are_refused() -> None:
    with pytest.raises(ValueError, match="a window of 8 keys before and 8 after"):
        layer(window_size=(8, 8))


def test_graphs_are_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    attention = layer()
    q, k, _ = inputs()
    monkeypatch.setattr(Tensor, "is_cuda", True)
    monkeypatch.setattr(torch.cuda, "is_current_stream_capturing", lambda: True)
    with pytest.raises(ValueError, match=r"set training\.disable_cuda_graphs$"):
        attention._refuse(q, k, masks(), {})


def test_compiling_is_refused() -> None:
    attention = layer()
    compiled = torch.compile(lambda *qkv: attention(*qkv, attention_masks=masks()), fullgraph=True)
    with pytest.raises(Exception, match=r"leave 'model' out of compile\.components"):
        compiled(*inputs())


def test_context_parallel_is_refused() -> None:
    from torchtitan.distributed import ParallelDims

    degrees = {"dp_replicate": 1, "dp_shard": 1, "tp": 1, "pp": 1, "ep": 1}
    with pytest.raises(ValueError, match="context parallelism of degree 2"):
        layer().parallelize(ParallelDims(cp=2, world_size=2, **degrees))


def test_a_pipeline_whose_ranks_are_unknown(monkeypatch: pytest.MonkeyPatch) -> None:
    stage = deepcopy(layer())  # as a pipeline does with the model
    monkeypatch.setattr(torch.distributed, "is_initialized", lambda: True)
    with pytest.raises(ValueError, match="add distca's override of the dataloader too"):
        stage(*inputs(), attention_masks=masks())


def test_adopting() -> None:
    options = {"tolerance": 0.1, "speed": [1.0, 0.5], "memory_bytes": 1 << 30}
    config = adopt(llama3.llama3_debugmodel_varlen_attn(), **options)
    apply_overrides(config.override, config)
    found = [inner for _, inner, _, _ in config.traverse(VarlenAttention.Config)]
    assert len(found) == 6
    assert all(isinstance(one, InnerAttention.Config) and one.options == options for one in found)
    assert {one.name for one in found} == {config.dataloader.name}
    another = adopt(llama3.llama3_debugmodel_varlen_attn())
    assert another.override.imports[0][1]["name"] != config.dataloader.name
    assert type(config.dataloader).__qualname__ == "PlannedDataLoader.Config"
    assert type(config.validator.dataloader).__qualname__ == "HuggingFaceTextDataLoader.Config"
    saved = config.activation_checkpoint.build(dump_folder="").get_save_ops()
    assert torch.ops.distca.core_attention.default in saved
    assert config.training.disable_cuda_graphs
    json.dumps(config.to_dict())  # as torchtitan logs it


def test_adopting_is_refused() -> None:
    with pytest.raises(ValueError, match="attn_backend='varlen'"):
        adopt(llama3.llama3_debugmodel())
    config = llama3.llama3_debugmodel_varlen_attn()
    config.compile.enable = True
    with pytest.raises(ValueError, match=r"compile\.components"):
        adopt(config)


def test_a_name_that_no_layer_has() -> None:
    config = bodies.config_of("distca", "")
    config.override = OverrideConfig(imports=[(f"{torchtitan.__name__}.dataloader", {})])
    apply_overrides(config.override, config)
    with pytest.raises(ValueError, match="add the override inner_attention with this name"):
        build(config)


def build(config: Any) -> Any:
    sizes = {"dp_world_size": 1, "dp_rank": 0, "seq_len": 64, "local_batch_size": 2}
    tokenizer = bodies.Bytes.Config().build()
    return config.dataloader.build(tokenizer=tokenizer, snapshot_every_n_steps=1, **sizes)


def test_state_of_a_loader_is_that_of_the_batch_in_use() -> None:
    config = bodies.config_of("distca", "")
    apply_overrides(config.override, config)
    kept = layer(name=config.dataloader.name)
    reading = iter(loader := build(config))
    for _ in range(3):
        next(reading)
    state = loader.state_dict()
    resumed = build(config)
    resumed.load_state_dict(state)
    for (mine, _), (theirs, _), _ in zip(resumed, reading, range(5), strict=False):
        assert torch.equal(mine["input"], theirs["input"])
    assert kept._shared.attention is resumed._shared.attention


def test_batches_out_of_order_are_refused() -> None:
    attention = layer()
    attention._shared.enqueue(attention._shared.attention.submit([10, 20]))
    with pytest.raises(
        ValueError, match="given 5 documents, but the next batch that was read has 2 others"
    ):
        attention(*inputs(), attention_masks=masks())


def test_fused_configs_keep_their_sharding() -> None:
    config = replace(VarlenAttention.Config(), param_init={"x": 1}, window_size=(7, 0))
    made = torchtitan.inner_attention(config, policy="colocated")
    assert (made.param_init, made.window_size) == ({"x": 1}, (7, 0))
    assert made.options == {"policy": "colocated"}
