"""The sides of ``cluster_gpu.py``: those of distca's runtime, and PyTorch's context parallelism."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

import numpy as np
import torch
import torch.nn.functional as F
from torch import Tensor
from torch.distributed.tensor.experimental import context_parallel

from distca.data.documents import Batch
from distca.measure import sides
from distca.measure.sides import Side, Way
from distca.model.config import ModelConfig
from distca.model.llama import Arriving, plainly
from distca.runtime.mesh import RankContext
from distca.runtime.parallelize import Precision

TORCH_CP = "torch-cp"
BASELINE = "packed-dp"
WAYS: Mapping[str, Way | None] = {
    BASELINE: sides.WAYS["colocated"],
    **{name: sides.WAYS[name] for name in ("wlb", "head-tail-cp", "per-document-cp", "kk")},
    "dynamic-cp": sides.WAYS["dynamic-cp"],
    TORCH_CP: None,
    **{name: way for name, way in sides.WAYS.items() if way.policy == "distca"},
}


@dataclass(frozen=True, eq=False)
class TorchStep:
    side: TorchContextParallel
    rows: tuple[Tensor, Tensor, Tensor]  # tokens, positions and labels, [rows, context]
    num_targets: int

    def run(self) -> Tensor:
        side, rows = self.side, [one.to(self.side.context.device) for one in self.rows]
        mesh = side.context.shard_mesh
        with context_parallel(
            mesh, buffers=rows, buffer_seq_dims=[1] * 3, no_restore_buffers={*rows}
        ):
            tokens, positions, labels = (one.flatten() for one in rows)
            arriving = Arriving(tokens, positions, labels=labels)
            attend = plainly(lambda layer, q, k, v: side.attend(q, k, v, len(rows[0])))
            (leaving,) = side.model([arriving], attend, recompute=side.recompute)
            assert leaving.loss is not None
            loss = leaving.loss.total / self.num_targets
            loss.backward()
        return loss.detach()


class TorchContextParallel(Side):
    """``torch.distributed.tensor.experimental.context_parallel`` with SDPA, as it ships.

    It knows no documents: a row of ``context`` tokens is one causal sequence, which all ranks
    share. So it computes attention across documents, and its loss is another one.
    """

    def __init__(
        self,
        config: ModelConfig,
        context: RankContext,
        precision: Precision,
        row_tokens: int,
        *,
        recompute: bool,
    ) -> None:
        self.grouped = grouped_heads(config, context, precision.compute)
        self.row_tokens, self.recompute = row_tokens, recompute
        super().__init__(config, context, precision)

    def prepare(self, batch: Batch) -> TorchStep:
        columns = [[d.tokens for d in batch.documents], [d.labels for d in batch.documents]]
        tokens, labels = (
            torch.from_numpy(np.concatenate(column)).view(-1, self.row_tokens) for column in columns
        )
        positions = torch.arange(self.row_tokens).expand_as(tokens).contiguous()
        return TorchStep(self, (tokens, positions, labels), batch.num_targets)

    def attend(self, q: Tensor, k: Tensor, v: Tensor, num_rows: int) -> Tensor:
        """q [T, H, D], k and v [T, G, D] of some rows -> [T, H, D]."""
        out = sdpa(*(_heads_first(one, num_rows) for one in (q, k, v)), grouped=self.grouped)
        return out.transpose(1, 2).flatten(0, 1)


def _heads_first(x: Tensor, num_rows: int) -> Tensor:
    return x.unflatten(0, (num_rows, -1)).transpose(1, 2)


def sdpa(q: Tensor, k: Tensor, v: Tensor, *, grouped: bool) -> Tensor:
    if grouped:
        return F.scaled_dot_product_attention(q, k, v, is_causal=True, enable_gqa=True)
    k, v = (one.repeat_interleave(q.shape[1] // k.shape[1], dim=1) for one in (k, v))
    return F.scaled_dot_product_attention(q, k, v, is_causal=True)


def grouped_heads(config: ModelConfig, context: RankContext, dtype: torch.dtype) -> bool:
    """Returns whether this torch takes fewer heads of keys than of queries, tried on few tokens.

    Raises ValueError if it cannot run at all, as on the CPU.
    """
    reasons = []
    for grouped in (True, False):
        mesh, tokens = context.shard_mesh, 256 * context.shard_mesh.size()
        buffer = torch.zeros(1, tokens, device=context.device)
        q, k, v = (
            torch.randn(
                1,
                heads,
                256,
                config.head_dim,
                dtype=dtype,
                device=context.device,
                requires_grad=True,
            )
            for heads in (config.heads, config.kv_heads, config.kv_heads)
        )
        try:
            with context_parallel(mesh, buffers=[buffer], buffer_seq_dims=[1]):
                out = sdpa(q, k, v, grouped=grouped)
                out.sum().backward()
        except Exception as error:  # whatever an experimental interface raises, on all ranks alike
            reasons.append(f"{type(error).__name__}: {str(error).splitlines()[0][:200]}")
        else:
            return grouped
    raise ValueError(reasons[-1])
