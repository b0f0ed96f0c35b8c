"""Overrides with which torchtitan's models use distca's attention.

    from distca.integrations.torchtitan import adopt

    config = adopt(llama3_debugmodel_varlen_attn())     # a Trainer.Config of torchtitan

or, on its command line,

    --override.imports distca.integrations.torchtitan.inner_attention

[Note: local] Without gradients (torchtitan's validator) attention is computed on each rank without
any exchange, so that ranks may validate different numbers of batches.

Legend: B rows, L tokens in a row, N heads, H head size, as torchtitan names its tensors.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from itertools import count
from typing import Any

import torch
from torch import Tensor
from torch.distributed.tensor import DTensor

try:
    import spmd_types as spmd
    from spmd_types.runtime import get_partition_spec
    from torchtitan.components.dataloader import BaseDataLoader
    from torchtitan.components.metrics import MetricsProcessor
    from torchtitan.config.override import derive, override
    from torchtitan.distributed.activation_checkpoint import SelectiveAC
    from torchtitan.distributed.utils import get_spmd_backend
    from torchtitan.models.common.attention import VarlenAttention, VarlenMetadata
except ImportError as error:
    raise ImportError(
        "distca.integrations.torchtitan needs torchtitan 0.3 or newer, with triton:"
        " pip install 'distca[torchtitan]'"
    ) from error

from distca.integrations.torchtitan.metrics import AttentionMetrics
from distca.integrations.torchtitan.model_attention import DEFAULT_NAME, ModelAttention
from distca.integrations.torchtitan.prefetch import PlannedDataLoader
from distca.planning.masks import CAUSAL, FULL, Mask

_PACKAGE = "distca.integrations.torchtitan"
_NAME_COUNT = count()
_WAY_OUT = "train this model without distca's override inner_attention"
_COMPILED = (
    "distca plans on the host, which torchtitan's full graphs do not allow: leave 'model' out of"
    " compile.components"
)


class InnerAttention(VarlenAttention):  # type: ignore[misc]
    """Replaces torchtitan's varlen attention in every layer."""

    @dataclass(kw_only=True, slots=True)
    class Config(VarlenAttention.Config):  # type: ignore[misc]
        """The config of torchtitan's varlen attention, with its window, and two more fields.

        name: the attention that all layers of a model and its dataloader share.
        options: options of ``PlannedAttention``. ``speed`` has one value for each data-parallel
            rank. ``deterministic`` is also on if torch's own setting is.
        """

        name: str = DEFAULT_NAME
        options: dict[str, Any] = field(default_factory=dict)

    def __init__(self, config: Config) -> None:
        super(VarlenAttention, self).__init__()  # VarlenAttention's own would choose a kernel
        self.window_size = config.window_size
        self._shared = ModelAttention.for_layer(config.name, config.options)
        self._where = f"attention layer {self._shared.add_layer()} (of torchtitan)"
        self._mask = _mask(config.window_size, self._where)

    def parallelize(self, parallel_dims: Any) -> None:
        self._shared.use_mesh(parallel_dims)
        super().parallelize(parallel_dims)

    def forward(
        self,
        q_BLNH: Tensor,
        k_BLNH: Tensor,
        v_BLNH: Tensor,
        *,
        attention_masks: Any = None,
        scale: float | None = None,
        **asked: Any,
    ) -> Tensor:
        self._refuse(q_BLNH, k_BLNH, attention_masks, asked)
        with spmd.no_typecheck():
            out: Tensor = self._attend(q_BLNH, k_BLNH, v_BLNH, attention_masks, scale)
        if get_spmd_backend() == "spmd_types" and spmd.is_type_checking():
            spmd.assert_type(out, spmd.get_local_type(q_BLNH), get_partition_spec(q_BLNH))
        return out

    @torch.compiler.disable(reason=_COMPILED)  # type: ignore[no-untyped-call, untyped-decorator]
    def _attend(
        self, q: Tensor, k: Tensor, v: Tensor, masks: VarlenMetadata, scale: float | None
    ) -> Tensor:
        """Returns [B, L, N, H of v] of q [B, L, N, H], k and v [B, L, their heads, their size]."""
        num_tokens = q.shape[0] * q.shape[1]
        batch = self._shared.batch(masks.cu_seq_q, masks.cu_seq_k, num_tokens, self._where)
        dtype = torch.bfloat16 if q.is_cuda else q.dtype  # as in torchtitan: RoPE may widen q and k
        flat_q, flat_k, flat_v = (x.flatten(0, 1).to(dtype) for x in (q, k, v))
        attention = self._shared.attention
        out = attention.attend(flat_q, flat_k, flat_v, batch, mask=self._mask, scale=scale)
        return out.view(*q.shape[:2], *out.shape[1:]).to(q.dtype)

    def _refuse(self, q: Tensor, k: Tensor, masks: Any, asked: dict[str, Any]) -> None:
        what = ""
        if asked.pop("out_transform", None) is not None:
            what = "changes its outputs by their log-sum-exp (out_transform, as sinks do)"
        elif asked.pop("score_mod", None) is not None:
            what = "changes its scores (score_mod)"
        elif k.shape[1] != q.shape[1]:
            what = f"has {k.shape[1]} keys for {q.shape[1]} queries, as with a cache"
        elif isinstance(q, DTensor):
            what = "is given tensors that are sharded over ranks (DTensor)"
        elif rest := {name for name, value in asked.items() if value is not None} - {"enable_gqa"}:
            what = f"is given {', '.join(sorted(rest))}"
        if what:
            raise ValueError(f"{self._where} {what}, which distca does not support: {_WAY_OUT}")
        if not isinstance(masks, VarlenMetadata):
            raise ValueError(
                f"{self._where} is given {type(masks).__name__} instead of VarlenMetadata, so that"
                " documents cannot be told apart: use a dataloader that gives positions, and a"
                " model with attn_backend='varlen'"
            )
        if q.is_cuda and torch.cuda.is_current_stream_capturing():
            raise ValueError(
                f"{self._where} is captured in a CUDA graph, but every batch has other plans: set"
                " training.disable_cuda_graphs"
            )


class SavingAC(SelectiveAC):  # type: ignore[misc]
    """Saves distca's attention like torchtitan's own, so that its exchange runs once, not twice."""

    @dataclass(kw_only=True, slots=True)
    class Config(SelectiveAC.Config):  # type: ignore[misc]
        pass

    def get_save_ops(self) -> set[Any]:
        return {*super().get_save_ops(), torch.ops.distca.core_attention.default}


def _of_package(function: Any) -> Any:
    """Sets a function's module, by which torchtitan finds overrides, to the one that users name."""
    function.__module__ = _PACKAGE
    return function


@override(target=VarlenAttention.Config, description="attention that all ranks share")  # type: ignore[untyped-decorator]
@_of_package
def inner_attention(config: Any, *, name: str = DEFAULT_NAME, **options: Any) -> Any:
    """Replaces varlen attention. name, options: fields of ``InnerAttention.Config``."""
    return derive(config, InnerAttention.Config, name=name, options=options)


@override(target=SelectiveAC.Config, exact=True, description="saves distca's attention")  # type: ignore[untyped-decorator]
@_of_package
def selective_ac(config: Any) -> Any:
    return derive(config, SavingAC.Config)


@override(target=BaseDataLoader.Config, fqns=["dataloader"], description="plans ahead")  # type: ignore[untyped-decorator]
@_of_package
def dataloader(config: Any, *, name: str = DEFAULT_NAME) -> Any:
    """Wraps the training dataloader. name: that given to ``inner_attention``."""
    return PlannedDataLoader.Config(loader=config, name=name)


@override(target=MetricsProcessor.Config, exact=True, description="figures of attention")  # type: ignore[untyped-decorator]
@_of_package
def metrics(config: Any, *, name: str = DEFAULT_NAME) -> Any:
    """Adds figures to what is logged. name: that given to ``inner_attention``."""
    return derive(config, AttentionMetrics.Config, name=name)


def adopt(config: Any, *, ahead: bool = True, name: str | None = None, **options: Any) -> Any:
    """Adds the overrides to a ``Trainer.Config``, and turns CUDA graphs off, which hold no plans.

    ahead: reads and plans each batch while the model trains on the previous one.
    name, options: fields of ``InnerAttention.Config``; by default the name is a new one.
    """
    spec = config.model_spec
    if not any(True for _ in spec.traverse(VarlenAttention.Config)):
        raise ValueError(
            f"{spec.name} {spec.flavor} has no layer with varlen attention, which distca replaces:"
            " make its model_spec with attn_backend='varlen'"
        )
    if config.compile.enable and "model" in config.compile.components:
        raise ValueError(_COMPILED)
    config.training.disable_cuda_graphs = True
    shared = {"name": name or f"{DEFAULT_NAME}-{next(_NAME_COUNT)}"}  # [Note: names]
    config.override.imports += [
        (f"{_PACKAGE}.inner_attention", shared | options),
        f"{_PACKAGE}.selective_ac",
        (f"{_PACKAGE}.metrics", shared),
    ]
    if ahead:
        config.override.imports.append((f"{_PACKAGE}.dataloader", shared))
    return config


def _mask(window: tuple[int, int], where: str) -> Mask:
    """Returns the mask of a window: (-1, 0) is causal, (-1, -1) full, (W, 0) has W keys before."""
    left, right = window
    if right == 0:
        return Mask(CAUSAL if left < 0 else left + 1)
    if left < 0 and right < 0:
        return Mask(FULL)
    raise ValueError(
        f"{where} has a window of {left} keys before and {right} after, but distca supports only"
        f" causal windows: {_WAY_OUT}"
    )
