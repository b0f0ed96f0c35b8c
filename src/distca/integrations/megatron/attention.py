"""Core attention of Megatron-Core's layers, planned over the data-parallel ranks.

    from distca.integrations.megatron import DistcaDotProductAttention

    spec = get_gpt_layer_local_spec()           # or that with Transformer Engine
    spec.submodules.self_attention.submodules.core_attention = DistcaDotProductAttention

Micro-batches that come with ``PackedSeqParams`` are shared: their documents are gathered over the
ranks of the data-parallel group (with those of context parallelism), once per micro-batch, and
planned together. Each pipeline stage and each tensor-parallel rank does so with its own peers.

[Note: local] Without ``PackedSeqParams`` rows are equally long on all ranks, and nothing is to be
gained by moving them. Nor is anything moved in evaluation. Context parallelism exchanges in any
case, since a rank has only parts of its documents.

Legend: S tokens in a row, B rows, T packed tokens, H heads, G key/value heads, D head size, all of
this rank.
"""

from __future__ import annotations

from typing import Any, ClassVar

import torch.distributed as dist
from torch import Tensor

try:
    from megatron.core import parallel_state
    from megatron.core.packed_seq_params import PackedSeqParams
    from megatron.core.transformer.enums import AttnMaskType
    from megatron.core.transformer.module import MegatronModule
    from megatron.core.transformer.utils import is_layer_window_attention
except ImportError as error:
    raise ImportError(
        "distca.integrations.megatron needs megatron-core: pip install 'distca[megatron]'"
    ) from error

from distca.integrations.megatron.sharing import Sharing
from distca.planning.masks import CAUSAL, Mask

_OTHERWISE = "leave Megatron's own core_attention in the spec of this layer"
_CAUSAL = (AttnMaskType.causal, AttnMaskType.padding_causal)


class DistcaDotProductAttention(MegatronModule):  # type: ignore[misc]
    """In place of ``DotProductAttention`` or ``TEDotProductAttention`` in a layer spec.

    The first layer that is built makes process groups, on all ranks of the world at the same point;
    a rank that builds no layer calls ``connect()`` there.
    """

    options: ClassVar[dict[str, Any]] = {}
    _shared: ClassVar[dict[dist.ProcessGroup, Sharing]] = {}

    @classmethod
    def configured(cls, **options: Any) -> type[DistcaDotProductAttention]:
        """This class with other options of ``PlannedAttention``, for layer specs."""
        body = {"options": cls.options | options, "_shared": {}}
        return type(cls.__name__, (cls,), body)

    @classmethod
    def connect(cls, pg_collection: Any = None) -> Sharing:
        """The ranks that share attention with this one, the same for all layers."""
        both = getattr(pg_collection, "dp_cp", None)
        if both is None:
            both = parallel_state.get_data_parallel_group(with_context_parallel=True)
        if both not in cls._shared:
            cp = getattr(pg_collection, "cp", None) or parallel_state.get_context_parallel_group()
            cls._shared[both] = Sharing(both, cp, cls.options)
        return cls._shared[both]

    @classmethod
    def plan_ahead(
        cls, packed_seq_params: PackedSeqParams, pg_collection: Any = None
    ) -> PackedSeqParams:
        """Gathers and plans in the background, from when a micro-batch is read.

        On all ranks, in the order in which their micro-batches will be learnt from.
        pg_collection: as the model has it, where it is not that of ``parallel_state``.
        """
        cls.connect(pg_collection).issue(packed_seq_params)
        return packed_seq_params

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
        self.scale = softmax_scale  # None: by the head size; scaling by layer cancels out
        self.mask = self._mask()
        self.sharing = self.connect(pg_collection)
        if config.context_parallel_size != self.sharing.cp_size:
            raise ValueError(
                f"{self.where} has context_parallel_size {config.context_parallel_size} in groups"
                f" of {self.sharing.cp_size}: give all layers the size of their groups"
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
        """query [S, B, H, D] or packed [T, H, D], key and value with G heads -> [S, B, H x D] or
        [T, H, D]."""
        self._refuse_call(query, key, attn_mask_type, attention_bias)
        packed = packed_seq_params is not None and packed_seq_params.qkv_format == "thd"
        if packed:
            batch = self.sharing.packed(self, packed_seq_params, [len(query)])
            return self.sharing.attend(query, key, value, batch, mask=self.mask, scale=self.scale)
        num_tokens, num_rows = query.shape[:2]
        rows = [num_tokens] * num_rows
        if packed_seq_params is not None:
            batch = self.sharing.packed(self, packed_seq_params, rows)
        else:
            batch = self.sharing.rows(self, rows, attention_mask)
        q, k, v = (x.transpose(0, 1).flatten(0, 1) for x in (query, key, value))  # [B x S, ...]
        out = self.sharing.attend(q, k, v, batch, mask=self.mask, scale=self.scale)
        return out.view(num_rows, num_tokens, -1).transpose(0, 1).contiguous()

    def _mask(self) -> Mask:
        config = self.config
        windows = config.window_size, config.window_attn_skip_freq
        if not is_layer_window_attention(*windows, self.layer_number):
            return Mask(CAUSAL)
        left, right = config.window_size
        if right != 0:
            raise ValueError(
                f"{self.where} has window_size {config.window_size}, which shows it later keys:"
                " distca is for causal attention, with windows (N, 0)"
            )
        return Mask(CAUSAL) if left < 0 else Mask(left + 1)  # itself besides the keys before

    def _refuse_config(self, mask: AttnMaskType, attention: str, dropout: float) -> None:
        config, softmax = self.config, getattr(self.config, "softmax_type", "vanilla")
        logits = ("qk_clip", "log_max_attention_logit")
        for refused, what, way_out in (
            (attention != "self", f"is {attention} attention", _OTHERWISE),
            (mask not in _CAUSAL, f"has attn_mask_type {mask.name}, not causal", _OTHERWISE),
            (dropout, f"drops attention weights ({dropout})", "set attention_dropout = 0.0"),
            (softmax != "vanilla", f"has attention sinks (softmax_type {softmax})", _OTHERWISE),
            (any(getattr(config, name, False) for name in logits), "asks for logits", _OTHERWISE),
        ):
            if refused:
                raise ValueError(f"{self.where} {what}, which distca does not do: {way_out}")

    def _refuse_call(
        self, query: Tensor, key: Tensor, mask: AttnMaskType | None, bias: Tensor | None
    ) -> None:
        if len(query) != len(key):
            raise ValueError(
                f"{self.where} is given {len(query)} queries for {len(key)} keys, as with a cache,"
                f" which distca does not do: {_OTHERWISE}"
            )
        if mask is not None and mask not in _CAUSAL:
            raise ValueError(
                f"{self.where} is called with attn_mask_type {mask.name}, not causal, which distca"
                f" does not do: {_OTHERWISE}"
            )
        if bias is not None:
            raise ValueError(
                f"{self.where} adds a bias to its scores, which distca does not do: {_OTHERWISE}"
            )
