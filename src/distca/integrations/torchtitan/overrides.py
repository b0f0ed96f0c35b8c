"""Overrides by which torchtitan's models attend by distca.

    from distca.integrations.torchtitan import adopt

    config = adopt(llama3_debugmodel_varlen_attn())     # a Trainer.Config, as torchtitan makes them

or, on its command line,

    --override.imports distca.integrations.torchtitan.inner_attention

[Note: local] Without gradients (torchtitan's validator) attention is this rank's own affair, so
that ranks may validate different numbers of batches.

Legend: B rows, L tokens in a row, N heads, H head size, as torchtitan names its tensors.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor
from torch.distributed.tensor import DTensor

try:
    import spmd_types as spmd
    from spmd_types.runtime import get_partition_spec
    from torchtitan.components.dataloader import BaseDataLoader
    from torchtitan.config.override import derive, override
    from torchtitan.distributed.activation_checkpoint import SelectiveAC
    from torchtitan.distributed.utils import get_spmd_backend
    from torchtitan.models.common.attention import VarlenAttention, VarlenMetadata
except ImportError as error:
    raise ImportError(
        "distca.integrations.torchtitan needs torchtitan 0.3 or newer, with triton:"
        " pip install 'distca[torchtitan]'"
    ) from error

from distca.integrations.shared.planned import TIMEOUT_S
from distca.integrations.torchtitan.prefetch import PlannedDataLoader
from distca.integrations.torchtitan.sharing import Sharing
from distca.planning.masks import CAUSAL, FULL, Mask

OTHERWISE = "train this model without the override inner_attention of distca"
_COMPILED = (
    "distca plans on the host, which torchtitan's full graphs leave no room for: leave 'model' out"
    " of compile.components"
)


class InnerAttention(VarlenAttention):  # type: ignore[misc]
    """In the place of torchtitan's varlen attention, in every layer."""

    @dataclass(kw_only=True, slots=True)
    class Config(VarlenAttention.Config):  # type: ignore[misc]
        """The window is torchtitan's; all else is as ``PlannedAttention`` takes it."""

        backend: str = "auto"
        deterministic: bool = False
        cost: str = "auto"
        tolerance: float = 0.02
        policy: str = "distca"
        timeout_s: float = TIMEOUT_S

    def __init__(self, config: Config) -> None:
        super(VarlenAttention, self).__init__()  # not its own: that chooses a kernel for itself
        self.window_size = config.window_size
        self._sharing = Sharing.of({name: getattr(config, name) for name in _SETTINGS})
        self._where = f"attention layer {self._sharing.enrol()} (of torchtitan)"
        self._mask = _mask(config.window_size, self._where)

    def parallelize(self, parallel_dims: Any) -> None:
        self._sharing.tell(parallel_dims)
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
        """q [B, L, N, H], k and v [B, L, their heads, their size] -> [B, L, N, size of v]."""
        num_tokens = q.shape[0] * q.shape[1]
        batch = self._sharing.batch(masks.cu_seq_q, masks.cu_seq_k, num_tokens, self._where)
        dtype = torch.bfloat16 if q.is_cuda else q.dtype  # as torchtitan: rotary may widen q and k
        flat_q, flat_k, flat_v = (x.flatten(0, 1).to(dtype) for x in (q, k, v))
        attention = self._sharing.attention
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
            what = "is given tensors spread over ranks (DTensor)"
        elif rest := {name for name, value in asked.items() if value is not None} - {"enable_gqa"}:
            what = f"is given {', '.join(sorted(rest))}"
        if what:
            raise ValueError(f"{self._where} {what}, which distca cannot follow: {OTHERWISE}")
        if not isinstance(masks, VarlenMetadata):
            raise ValueError(
                f"{self._where} is given {type(masks).__name__} in the place of VarlenMetadata, so"
                " that documents cannot be told apart: use a dataloader that gives positions, and a"
                " model with attn_backend='varlen'"
            )
        if q.is_cuda and torch.cuda.is_current_stream_capturing():
            raise ValueError(
                f"{self._where} is captured in a CUDA graph, but every batch has other plans: set"
                " training.disable_cuda_graphs"
            )


class SavingAC(SelectiveAC):  # type: ignore[misc]
    """torchtitan's, which saves distca's attention as it does others: one exchange, not two."""

    @dataclass(kw_only=True, slots=True)
    class Config(SelectiveAC.Config):  # type: ignore[misc]
        pass

    def get_save_ops(self) -> set[Any]:
        return {*super().get_save_ops(), torch.ops.distca.core_attention.default}


_SETTINGS = ("backend", "deterministic", "cost", "tolerance", "policy", "timeout_s")
_HERE = "distca.integrations.torchtitan"


@override(target=VarlenAttention.Config, description="attention that all ranks share")  # type: ignore[untyped-decorator]
def inner_attention(config: Any, **settings: Any) -> Any:
    return derive(config, InnerAttention.Config, **settings)


@override(target=SelectiveAC.Config, exact=True, description="saves distca's attention")  # type: ignore[untyped-decorator]
def selective_ac(config: Any) -> Any:
    return derive(config, SavingAC.Config)


@override(target=BaseDataLoader.Config, fqns=["dataloader"], description="plans ahead")  # type: ignore[untyped-decorator]
def dataloader(config: Any, **settings: Any) -> Any:
    """With the same settings as ``inner_attention``."""
    full = InnerAttention.Config(**settings)
    known = {name: getattr(full, name) for name in _SETTINGS}
    return PlannedDataLoader.Config(loader=config, settings=known)


def adopt(config: Any, *, ahead: bool = True, **settings: Any) -> Any:
    """Adds the overrides to a ``Trainer.Config``, and turns CUDA graphs off, which hold no plans.

    ahead: batches are read and planned while the one before is learnt from.
    settings: of ``InnerAttention.Config``.
    """
    spec = config.model_spec
    if not any(True for _ in spec.traverse(VarlenAttention.Config)):
        raise ValueError(
            f"{spec.name} {spec.flavor} has no layer with varlen attention, the one that distca"
            " takes the place of: make its model_spec with attn_backend='varlen'"
        )
    if config.compile.enable and "model" in config.compile.components:
        raise ValueError(_COMPILED)
    config.training.disable_cuda_graphs = True
    config.override.imports += [(f"{_HERE}.inner_attention", settings), f"{_HERE}.selective_ac"]
    if ahead:
        config.override.imports.append((f"{_HERE}.dataloader", settings))
    return config


def _mask(window: tuple[int, int], where: str) -> Mask:
    """(-1, 0) is causal, (W, 0) the W keys before and its own, (-1, -1) all."""
    left, right = window
    if right == 0:
        return Mask(CAUSAL if left < 0 else left + 1)
    if left < 0 and right < 0:
        return Mask(FULL)
    raise ValueError(
        f"{where} has a window of {left} keys before and {right} after, and distca has causal"
        f" windows only: {OTHERWISE}"
    )
