"""Core attention of Megatron-Core's layers, planned over the data-parallel ranks.

    from distca.integrations.megatron import DistcaDotProductAttention

    spec = get_gpt_layer_local_spec()           # or that with Transformer Engine
    spec.submodules.self_attention.submodules.core_attention = DistcaDotProductAttention

The attention of micro-batches with ``PackedSeqParams`` is shared: their documents are gathered over
the data-parallel group (including context parallelism) once per micro-batch, and planned together.
Each pipeline stage and each tensor-parallel rank has a data-parallel group of its own.

[Note: local] Without ``PackedSeqParams`` rows have the same length on all ranks, so the load is
balanced and nothing is moved. In evaluation nothing is moved either. Context parallelism always
exchanges, since a rank has only parts of its documents.

Legend: S tokens in a row, B rows, T packed tokens, H heads, G key/value heads of this rank, D head
size.
"""

from __future__ import annotations

from typing import Any, ClassVar, NoReturn

import torch
import torch.distributed as dist
from torch import Tensor, nn

try:
    from megatron.core import parallel_state
    from megatron.core.packed_seq_params import PackedSeqParams
    from megatron.core.transformer.enums import AttnMaskType
    from megatron.core.transformer.module import MegatronModule
    from megatron.core.transformer.utils import (
        ensure_metadata_has_dp_cp_group,
        is_layer_window_attention,
        make_sharded_tensors_for_checkpoint,
    )
except ImportError as error:
    raise ImportError(
        "distca.integrations.megatron needs megatron-core: pip install 'distca[megatron]'"
    ) from error

from distca.integrations.megatron.group_attention import GroupAttention
from distca.integrations.shared.planned_batch import PlannedBatch
from distca.planning.masks import CAUSAL, Mask

_WAY_OUT = "leave Megatron's own core_attention in the spec of this layer"
_CAUSAL = (AttnMaskType.causal, AttnMaskType.padding_causal)
_SINKS = "softmax_offset"  # as in Megatron's local attention, whose checkpoints fit


class DistcaDotProductAttention(MegatronModule):  # type: ignore[misc]
    """Replaces ``DotProductAttention`` or ``TEDotProductAttention`` in a layer spec.

    The first layer that is built makes process groups, on all ranks of the world at the same point.
    A rank that builds no layer calls ``connect()`` at that point.

    Megatron builds layers from their class alone, so the class owns what its layers share: the
    options, and one ``GroupAttention`` for each data-parallel group.
    """

    options: ClassVar[dict[str, Any]] = {}
    _by_group: ClassVar[dict[dist.ProcessGroup, GroupAttention]] = {}

    @classmethod
    def configured(cls, **options: Any) -> type[DistcaDotProductAttention]:
        """Returns this class with other options of ``PlannedAttention``, for layer specs.

        ``speed`` has one value for each rank of a data-parallel group with context parallelism.
        """
        body = {"options": cls.options | options, "_by_group": {}}
        return type(cls.__name__, (cls,), body)

    @classmethod
    def connect(cls, pg_collection: Any = None) -> GroupAttention:
        """Returns the attention of this rank's data-parallel group, which all layers share."""
        group = getattr(pg_collection, "dp_cp", None)
        if group is None:
            group = parallel_state.get_data_parallel_group(with_context_parallel=True)
        if group not in cls._by_group:
            cp = getattr(pg_collection, "cp", None) or parallel_state.get_context_parallel_group()
            cls._by_group[group] = GroupAttention(group, cp, cls.options)
        return cls._by_group[group]

    @classmethod
    def plan_ahead(
        cls, packed_seq_params: PackedSeqParams, pg_collection: Any = None
    ) -> PackedSeqParams:
        """Gathers and plans a micro-batch in the background, as soon as it is read.

        All ranks call it in the order in which their micro-batches will be trained on.

        pg_collection: that of the model, if it is not ``parallel_state``'s.
        """
        cls.connect(pg_collection).submit(packed_seq_params)
        return packed_seq_params

    @classmethod
    def take_figures(cls, pg_collection: Any = None) -> dict[str, float]:
        """Returns figures for the trainer's log since the last call: ``AttentionFigures.take``."""
        return cls.connect(pg_collection).planned.take_figures()

    def __init__(
        self,
        config: Any,
        layer_number: int,
        attn_mask_type: AttnMaskType,
        attention_type: str,
        attention_dropout: float | None = None,
        softmax_scale: float | None = None,
        k_channels: int | None = None,
        v_channels: int | None = None,
        cp_comm_type: str | None = None,
        pg_collection: Any = None,
    ) -> None:
        super().__init__(config=config)
        self.layer_number = max(1, layer_number)
        self.where = f"layer {self.layer_number} ({type(self).__name__})"
        dropout = config.attention_dropout if attention_dropout is None else attention_dropout
        self._refuse_config(attn_mask_type, attention_type, dropout)
        self.scale = softmax_scale  # None: from the head size; query-key layer scaling cancels out
        self.mask = self._mask()
        self.softmax_type = getattr(config, "softmax_type", "vanilla")
        self.tp_group = getattr(pg_collection, "tp", None)
        if self.tp_group is None:
            self.tp_group = parallel_state.get_tensor_model_parallel_group()
        if self.softmax_type == "learnable":
            self.register_parameter(_SINKS, self._new_sinks())
        self.shared = self.connect(pg_collection)
        if config.context_parallel_size != self.shared.cp_size:
            raise ValueError(
                f"{self.where} has context_parallel_size {config.context_parallel_size}, but its"
                f" context-parallel group has {self.shared.cp_size} ranks: both must be equal"
            )

    def forward(
        self,
        query: Tensor,
        key: Tensor,
        value: Tensor,
        attention_mask: Tensor | None,
        attn_mask_type: AttnMaskType | None = None,
        attention_bias: Tensor | None = None,
        packed_seq_params: PackedSeqParams | None = None,
    ) -> Tensor:
        """Returns [S, B, H x D] of query [S, B, H, D], or [T, H, D] of a packed one [T, H, D].

        key and value have the same shape with G heads.
        """
        self._refuse_call(query, key, attn_mask_type, attention_bias)
        packed = packed_seq_params is not None and packed_seq_params.qkv_format == "thd"
        if packed:
            batch = self.shared.packed(self, packed_seq_params, [len(query)])
            return self._attend(query, key, value, batch)
        num_tokens, num_rows = query.shape[:2]
        rows = [num_tokens] * num_rows
        if packed_seq_params is not None:
            batch = self.shared.packed(self, packed_seq_params, rows)
        else:
            batch = self.shared.rows(self, rows, attention_mask)
        q, k, v = (x.transpose(0, 1).flatten(0, 1) for x in (query, key, value))  # [B x S, ...]
        out = self._attend(q, k, v, batch)
        return out.view(num_rows, num_tokens, -1).transpose(0, 1).contiguous()

    def sharded_state_dict(
        self,
        prefix: str = "",
        sharded_offsets: tuple[tuple[int, int, int], ...] = (),
        metadata: dict[str, Any] | None = None,
    ) -> Any:
        """Tells checkpoints that each tensor-parallel rank has the sinks of its own heads."""
        return make_sharded_tensors_for_checkpoint(
            self.state_dict(keep_vars=True),
            prefix,
            {_SINKS: 0},
            sharded_offsets,
            tp_group=self.tp_group,
            dp_cp_group=ensure_metadata_has_dp_cp_group(metadata)["dp_cp_group"],
        )

    def _attend(self, q: Tensor, k: Tensor, v: Tensor, batch: PlannedBatch) -> Tensor:
        sinks = None
        if self.softmax_type == "learnable":
            sinks = getattr(self, _SINKS)
        elif self.softmax_type == "off-by-one":  # 1 is added to the sum of exponentials
            sinks = q.new_zeros(q.shape[1])
        return self.shared.attend(q, k, v, batch, mask=self.mask, scale=self.scale, sinks=sinks)

    def _new_sinks(self) -> nn.Parameter:
        """Returns the sinks of this rank's heads, initialized as Megatron does it."""
        config = self.config
        device = "cpu" if config.use_cpu_initialization else torch.cuda.current_device()
        num_heads = config.num_attention_heads // dist.get_world_size(self.tp_group)
        sinks = nn.Parameter(torch.empty(num_heads, device=device, dtype=config.params_dtype))
        if config.perform_initialization:
            config.init_method(sinks)
        return sinks

    def _mask(self) -> Mask:
        config = self.config
        windows = config.window_size, config.window_attn_skip_freq
        if not is_layer_window_attention(*windows, self.layer_number):
            return Mask(CAUSAL)
        return mask_of_window(config.window_size, self.where)

    def _refuse_config(self, mask: AttnMaskType, attention: str, dropout: float) -> None:
        config = self.config
        logits = [n for n in ("qk_clip", "log_max_attention_logit") if getattr(config, n, False)]
        for refused, what, way_out in (
            (attention != "self", f"is {attention} attention", _WAY_OUT),
            (mask not in _CAUSAL, f"has attn_mask_type {mask.name}, not causal", _WAY_OUT),
            (dropout, f"uses attention dropout ({dropout})", "set attention_dropout = 0.0"),
            (logits, f"needs the attention logits ({', '.join(logits)})", _WAY_OUT),
        ):
            if refused:
                self._refuse(what, way_out)

    def _refuse_call(
        self, query: Tensor, key: Tensor, mask: AttnMaskType | None, bias: Tensor | None
    ) -> None:
        if len(query) != len(key):
            self._refuse(f"is given {len(query)} queries for {len(key)} keys, as with a cache")
        if mask is not None and mask not in _CAUSAL:
            self._refuse(f"is called with attn_mask_type {mask.name}, not causal")
        if bias is not None:
            self._refuse("adds a bias to its scores")

    def _refuse(self, what: str, way_out: str = _WAY_OUT) -> NoReturn:
        raise ValueError(f"{self.where} {what}, which distca does not support: {way_out}")


def mask_of_window(window: tuple[int, int], where: str) -> Mask:
    """Returns the mask of a causal layer with N keys before and 0 after its own (N, 0).

    -1 is infinite on either side. The layer is causal, so an infinite window after its own key adds
    nothing: Transformer Engine also takes (-1, -1) as causal. (In torchtitan, which has no mask
    beside the window, it is full attention.)
    """
    left, right = window
    if right > 0:
        raise ValueError(
            f"{where} has window_size {window}, which includes later keys: distca supports causal"
            " attention only, with windows (N, 0)"
        )
    return Mask(CAUSAL) if left < 0 else Mask(left + 1)  # the token itself is one more key
