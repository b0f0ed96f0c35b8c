"""Functions that ranks of Megatron-Core run: evaluation, plan options, refusals."""

from __future__ import annotations

from typing import Any

import torch
import torch.distributed as dist
from integrations.counting import counted, recorded_devices
from integrations.megatron_bodies import (
    Case,
    config_of,
    groups,
    loss_alone,
    mask_of,
    micro_batches,
    model_of,
    packed_of,
    tokens_of,
)
from megatron.core import parallel_state
from megatron.core.models.gpt import GPTModel
from megatron.core.packed_seq_params import PackedSeqParams
from megatron.core.transformer.dot_product_attention import DotProductAttention
from megatron.core.transformer.enums import AttnMaskType
from torch import Tensor

from distca.integrations.megatron import DistcaDotProductAttention


def evaluated(group: dist.ProcessGroup, form: str) -> float:
    """Evaluates the same object twice on the first rank only; returns its difference."""
    case = Case(form=form)
    with groups(case), counted() as sent:
        model = model_of(config_of(), DistcaDotProductAttention.configured(cost="pairs")).eval()
        apart = 0.0
        if dist.get_rank(group) == 0:
            data = next(micro_batches(case, DistcaDotProductAttention))
            del data["scale"]
            with torch.no_grad():
                losses = [model(**data).sum().item() for _ in range(2)]
            own = model_of(config_of(), None)
            right = sum(loss.item() for loss in loss_alone(own, case.lengths[0][0], 0, 0))
            apart = max(abs(loss / right - 1) for loss in losses)
    assert not sent
    dist.barrier(group)
    return apart


def devices_of(
    group: dist.ProcessGroup, case: Case, options: dict[str, Any]
) -> list[dict[str, list[Any]]]:
    """Returns the devices of the plans of one layer, with two ranks on each node."""
    attention = DistcaDotProductAttention.configured(cost="pairs", **options)
    q, k = torch.randn(8, 4, 8), torch.randn(8, 2, 8)
    sizes = {"tensor_model_parallel_size": case.tp, "pipeline_model_parallel_size": case.pp}
    with groups(case), recorded_devices(ranks_per_node=2) as found:
        layer = attention(config_of(**sizes), 1, AttnMaskType.causal, "self")
        layer(q, k, k, None, packed_seq_params=packed_of([3, 5]))
    return found


def sharded_sinks(group: dist.ProcessGroup) -> list[list[Any]]:
    """Returns how checkpoints store the sinks of two tensor-parallel ranks: ours and Megatron's."""
    case, sizes = Case(tp=2), {"tensor_model_parallel_size": 2, "softmax_type": "learnable"}
    found = []
    with groups(case):
        both = parallel_state.get_data_parallel_group(with_context_parallel=True)
        for kind in (DistcaDotProductAttention.configured(cost="pairs"), DotProductAttention):
            layer = kind(config_of(**sizes), 1, AttnMaskType.causal, "self")
            given = {"dp_cp_group": both}
            for name, one in sorted(layer.sharded_state_dict("layer.", (), given).items()):
                shapes = one.local_shape, one.global_shape, one.global_offset
                found.append([name, *shapes, one.replica_id, one.data.dtype])
    return found


def said(group: dist.ProcessGroup, what: str) -> str:
    """Returns the error of this rank, if the second rank makes a mistake."""
    bad = dist.get_rank(group) == 1
    with groups(Case()):
        attention = DistcaDotProductAttention.configured(cost="pairs")
        # RoPE reads the offsets too, before attention does.
        model = model_of(config_of(), attention, position_embedding_type="learned_absolute")
        packed = packed_of([100, 92])
        if what == "offsets" and bad:
            packed.cu_seqlens_q = packed.cu_seqlens_kv = torch.tensor([0, 100, 150])
        if what == "none" and bad:
            packed.cu_seqlens_q = packed.cu_seqlens_kv = None
        if what == "rows":
            packed = packed_of([100, 92] if bad else [96, 96], "sbhd", 2)
        if what == "reused" and bad:
            _call(model, packed)
        elif what == "reused":
            _call(model, packed_of([100, 92]))
        try:
            _call(model, packed, 2 if what == "rows" else 1)
        except ValueError as error:
            return str(error)
    return ""


def _call(model: GPTModel, packed: PackedSeqParams, num_rows: int = 1) -> Tensor:
    rows = tokens_of(0, 0)[:-1].view(num_rows, -1)
    return model(rows, rows, None, labels=rows, packed_seq_params=packed)


def refused(group: dist.ProcessGroup, all_changes: list[dict[str, Any]]) -> list[str]:
    """Returns the error of a layer for each of several features that are not supported."""
    with groups(Case()):
        return [_refused(dict(changes)) for changes in all_changes]


def _refused(changes: dict[str, Any]) -> str:
    call = {name: changes.pop(name, None) for name in ("bias", "cache", "called", "mask")}
    kind = AttnMaskType[changes.pop("attn_mask_type", "causal")]
    q, k = torch.randn(8, 1, 4, 8), torch.randn(8, 1, 2, 8)
    masks = {"later": torch.zeros(1, 1, 8, 8, dtype=torch.bool), "holes": mask_of([8])}
    masks["holes"][0, 0, 5, 2] = True
    try:
        layer = DistcaDotProductAttention(config_of(**changes), 1, kind, "self")
        layer(
            q[:1] if call["cache"] else q,
            k,
            k,
            masks.get(call["mask"]),
            attn_mask_type=AttnMaskType[call["called"]] if call["called"] else None,
            attention_bias=torch.zeros(1) if call["bias"] else None,
        )
    except ValueError as error:
        return str(error)
    return ""
