"""Functions that ranks run in the tests of Megatron-Core: a step with its own schedules, and the
same step in one process with its own attention, document by document.

Legend: M micro-batches, R data-parallel ranks.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import AbstractContextManager, contextmanager, nullcontext
from dataclasses import dataclass, field
from itertools import accumulate
from typing import Any
from unittest.mock import patch

import torch
import torch.distributed as dist
from integrations.counting import counted
from megatron.core import parallel_state
from megatron.core.models.gpt import GPTModel
from megatron.core.models.gpt.gpt_layer_specs import get_gpt_layer_local_spec
from megatron.core.packed_seq_params import PackedSeqParams
from megatron.core.pipeline_parallel import get_forward_backward_func
from megatron.core.transformer.transformer_config import TransformerConfig
from megatron_on_cpu import on_cpu
from torch import Tensor

from distca.integrations.megatron import DistcaDotProductAttention

LAYERS, VOCABULARY, TOKENS = 4, 96, 192
LENGTHS = [  # [M][R] documents of one micro-batch, TOKENS together
    [[192], [48, 8, 64, 40, 32]],
    [[16, 160, 16], [96, 96]],
    [[24, 24, 144], [192]],
    [[64, 64, 64], [8, 184]],
]
SCALE = 100.0  # losses are divided by it


@dataclass(frozen=True)
class Case:
    tp: int = 1
    pp: int = 1
    cp: int = 1
    chunks: int = 1  # model chunks on each stage
    form: str = "thd"  # of micro-batches: thd, sbhd, rows (one document each) or mask
    num_rows: int = 1
    ahead: bool = False
    config: dict[str, Any] = field(default_factory=dict)
    ours: dict[str, Any] = field(default_factory=dict)  # more of the config, not in the reference
    lengths: Any = field(default_factory=lambda: LENGTHS)


@dataclass
class Reference:
    losses: list[list[float]]  # [M][R]
    grads: dict[str, Tensor]  # summed over all ranks
    weights: dict[str, Tensor]


_references: dict[str, Reference] = {}


def config_of(**changes: Any) -> TransformerConfig:
    sizes = {"num_layers": LAYERS, "hidden_size": 32, "ffn_hidden_size": 64}
    heads = {"num_attention_heads": 4, "num_query_groups": 2}
    none = {"attention_dropout": 0.0, "hidden_dropout": 0.0}
    fused = ("masked_softmax_fusion", "bias_activation_fusion", "bias_dropout_fusion")
    return TransformerConfig(
        **{
            **sizes,
            **heads,
            **none,
            **dict.fromkeys(fused, False),
            "gradient_accumulation_fusion": False,
            "use_cpu_initialization": True,
            "pipeline_dtype": torch.float32,
            **changes,
        }
    )


def spec_of(attention: type | None) -> Any:
    spec = get_gpt_layer_local_spec()
    if attention is not None:
        spec.submodules.self_attention.submodules.core_attention = attention
    return spec


def model_of(config: TransformerConfig, attention: type | None, **options: Any) -> GPTModel:
    torch.manual_seed(0)
    sizes = {"vocab_size": VOCABULARY, "max_sequence_length": TOKENS}
    options = {"position_embedding_type": "rope", **options}
    return GPTModel(config, spec_of(attention), **sizes, **options)


@contextmanager
def groups(case: Case, device: str = "cpu") -> Iterator[None]:
    """Makes Megatron's process groups and destroys them, since each has threads of gloo."""
    made: list[Any] = []
    new_group = dist.new_group

    def recording(*args: Any, **kwargs: Any) -> Any:
        made.append(new_group(*args, **kwargs))
        return made[-1]

    chunks = case.chunks if case.chunks > 1 else None
    with patch("torch.distributed.new_group", recording), _shim(device):
        parallel_state.initialize_model_parallel(
            case.tp, case.pp, chunks, context_parallel_size=case.cp
        )
        try:
            yield
            dist.barrier()  # a peer may still be connecting
            for group in made:
                if group is not dist.GroupMember.NON_GROUP_MEMBER:
                    dist.destroy_process_group(group)
        finally:
            parallel_state.destroy_model_parallel()


def _shim(device: str) -> AbstractContextManager[None]:
    return on_cpu() if device == "cpu" else nullcontext()


def tokens_of(number: int, rank: int, size: int = TOKENS) -> Tensor:
    draw = torch.Generator().manual_seed(100 * number + rank)
    row = torch.randint(VOCABULARY, (size + 1,), generator=draw, device="cpu")
    return row.to(torch.get_default_device())


def loss_alone(model: GPTModel, lengths: list[int], number: int, rank: int) -> list[Tensor]:
    """Returns losses by Megatron's own attention, with one document in each row."""
    row, begin, losses = tokens_of(number, rank, sum(lengths)), 0, []
    for length in lengths:
        span = row[begin : begin + length + 1]
        positions = torch.arange(length)[None]
        losses.append(model(span[None, :-1], positions, None, labels=span[None, 1:]).sum())
        begin += length
    return losses


def reference(case: Case, num_ranks: int) -> Reference:
    """Returns what Megatron's own attention computes in this process; once for equal cases.

    All ranks are asked for the same cases in the same order, so they find the same ones.
    """
    known = repr((case.config, case.lengths, num_ranks))
    if known not in _references:
        _references[known] = _reference(case, num_ranks)
    return _references[known]


def _reference(case: Case, num_ranks: int) -> Reference:
    with groups(Case()):
        model = model_of(config_of(**case.config), None)
        losses = []
        for number, ranks in enumerate(case.lengths):
            losses.append([0.0] * num_ranks)
            for rank, lengths in enumerate(ranks[:num_ranks]):
                for loss in loss_alone(model, lengths, number, rank):
                    (loss / SCALE).backward()
                    losses[-1][rank] += loss.item() / SCALE
        grads = {name: p.grad for name, p in model.named_parameters()}
        weights = {name: p.detach() for name, p in model.named_parameters()}
    return Reference(losses, grads, weights)


def stepped(group: dist.ProcessGroup, case: Case, exchanges: bool = True) -> float:
    """Returns the largest relative difference of losses and gradients from the reference."""
    num_ranks = dist.get_world_size(group) // (case.tp * case.pp * case.cp)
    right = reference(case, num_ranks)
    with groups(case), counted() as sent:
        losses, grads = _step(case, right.weights)
        rank = parallel_state.get_data_parallel_rank()
    assert bool(sent) == exchanges
    apart = [abs(loss / right.losses[number][rank] - 1) for number, loss in enumerate(losses)]
    for name, (grad, exact) in grads.items():
        apart.append(((grad - exact(right.grads[name])).norm() / right.grads[name].norm()).item())
    return max(apart)


def _step(case: Case, weights: dict[str, Tensor]) -> tuple[list[float], dict[str, Any]]:
    """Returns losses of micro-batches (none before the last stage), and for each gradient also a
    function that cuts the same part from a gradient of the whole model."""
    attention = DistcaDotProductAttention.configured(cost="pairs")
    sizes = {"tensor_model_parallel_size": case.tp, "pipeline_model_parallel_size": case.pp}
    if case.chunks > 1:
        sizes["virtual_pipeline_model_parallel_size"] = case.chunks
    sizes["context_parallel_size"] = case.cp
    config = config_of(**sizes, **case.config, **case.ours)
    models = [_chunk(case, config, attention, number) for number in range(case.chunks)]
    named = dict(_global_names(models))
    cuts = {name: _cut(name, p) for name, p in named.items()}
    with torch.no_grad():
        for name, p in named.items():
            p.copy_(cuts[name](weights[name]))
    iterators = [micro_batches(case, attention) for _ in models]
    data = get_forward_backward_func()(
        forward_step_func=_forward,
        data_iterator=iterators if case.chunks > 1 else iterators[0],
        model=models if case.chunks > 1 else models[0],
        num_microbatches=len(case.lengths),
        seq_length=TOKENS,
        micro_batch_size=case.num_rows if case.form != "rows" else len(case.lengths[0][0]),
        forward_only=False,
    )
    both = parallel_state.get_data_parallel_group(with_context_parallel=True)
    losses = torch.tensor([one["loss"] for one in data])
    dist.all_reduce(losses, group=parallel_state.get_context_parallel_group())
    for p in named.values():
        dist.all_reduce(p.grad, group=both)
    return losses.tolist(), {name: (p.grad, cuts[name]) for name, p in named.items()}


def _chunk(case: Case, config: Any, attention: type, number: int) -> GPTModel:
    stage, last = parallel_state.get_pipeline_model_parallel_rank(), case.chunks - 1
    return model_of(
        config,
        attention,
        pre_process=stage == 0 and number == 0,
        post_process=stage == case.pp - 1 and number == last,
        vp_stage=number if case.chunks > 1 else None,
    )


def _global_names(models: list[GPTModel]) -> Iterator[tuple[str, Tensor]]:
    for model in models:
        for name, p in model.named_parameters():
            parts = name.split(".")
            if parts[:2] == ["decoder", "layers"]:
                parts[2] = str(model.decoder.layers[int(parts[2])].layer_number - 1)
            yield ".".join(parts), p


def _cut(name: str, p: Any) -> Any:
    """Returns a function that cuts this tensor-parallel rank's part from a whole parameter."""
    rank = parallel_state.get_tensor_model_parallel_rank()
    size = parallel_state.get_tensor_model_parallel_world_size()
    if name.endswith("softmax_offset"):  # which Megatron does not mark
        return lambda whole: whole.chunk(size)[rank]
    if not getattr(p, "tensor_model_parallel", False):
        return lambda whole: whole
    return lambda whole: whole.chunk(size, p.partition_dim)[rank]


def _forward(data: Iterator[dict[str, Any]], model: GPTModel) -> tuple[Tensor, Any]:
    given = next(data)
    scale = given.pop("scale")

    def loss_of(tokens: Tensor) -> tuple[Tensor, dict[str, float]]:
        loss = tokens.sum() / SCALE
        return loss * scale, {"loss": loss.item()}  # the schedule divides by micro-batches

    return model(**given), loss_of


def micro_batches(case: Case, attention: type[DistcaDotProductAttention]) -> Iterator[Any]:
    rank = parallel_state.get_data_parallel_rank()
    scale = len(case.lengths) / case.cp
    ready = []
    for number, ranks in enumerate(case.lengths):
        lengths = ranks[rank]
        row = tokens_of(number, rank, sum(lengths))
        positions = torch.cat([torch.arange(length) for length in lengths])
        columns = {"input_ids": row[:-1], "labels": row[1:], "position_ids": positions}
        shape = (len(lengths) if case.form == "rows" else case.num_rows, -1)
        index = _rows_here(case, lengths)
        batch: dict[str, Any] = {name: x[index].view(shape) for name, x in columns.items()}
        batch |= {"scale": scale, "attention_mask": None}
        if case.form == "mask":
            batch["attention_mask"] = mask_of(lengths)
        elif case.form != "rows":
            batch["packed_seq_params"] = packed_of(lengths, case.form, case.num_rows)
            if case.ahead:
                attention.plan_ahead(batch["packed_seq_params"])
        ready.append(batch)
    yield from ready


def _rows_here(case: Case, lengths: list[int]) -> Tensor:
    """Returns the indices of this rank's tokens: two of 2C chunks of each document."""
    rank, begin, index = parallel_state.get_context_parallel_rank(), 0, []
    for length in lengths:
        chunks = torch.arange(begin, begin + length).chunk(2 * case.cp)
        index += [chunks[rank], chunks[-1 - rank]] if case.cp > 1 else list(chunks)
        begin += length
    return torch.cat(index)


def packed_of(lengths: list[int], form: str = "thd", num_rows: int = 1) -> PackedSeqParams:
    offsets = torch.tensor([0, *accumulate(lengths)], dtype=torch.int32)
    longest = max(lengths) if form == "thd" else sum(lengths) // num_rows  # of a row
    return PackedSeqParams(form, offsets, offsets, max_seqlen_q=longest, max_seqlen_kv=longest)


def mask_of(lengths: list[int]) -> Tensor:
    """Returns a mask as in Megatron's datasets, true where a key is masked."""
    document = torch.repeat_interleave(torch.arange(len(lengths)), torch.tensor(lengths))
    seen = (document[:, None] == document[None, :]).tril()
    return ~seen[None, None]
