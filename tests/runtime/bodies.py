"""What ranks run in the tests of the runtime, and the plain loop that is their reference."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

import numpy as np
import torch
import torch.distributed as dist
from ranks import rank_device
from torch import Tensor
from torch.distributed.tensor import DTensor

from distca.data.documents import Batch, Document
from distca.model.config import ModelConfig
from distca.model.initialize import initialize
from distca.model.llama import Arriving, Llama, on_meta, plainly
from distca.pipeline.mesh import MeshShape
from distca.pipeline.step_planner import StepPlanner
from distca.planning.masks import CAUSAL
from distca.planning.options import PlanOptions
from distca.planning.policies import policy_of
from distca.runtime.batches import Step
from distca.runtime.mesh import RankContext, join_mesh
from distca.runtime.parallelize import Precision, parallelize
from distca.runtime.step import StepRunner

TINY = ModelConfig(vocab_size=61, hidden=32, layers=3, heads=4, kv_heads=2, head_dim=8, ffn=48)
LENGTHS = (150, 9, 64, 1, 33, 90, 20, 5)


def batch_of(lengths: tuple[int, ...] = LENGTHS, seed: int = 0, vocab: int = 61) -> Batch:
    rng = np.random.default_rng(seed)
    return Batch(tuple(Document.from_tokens(rng.integers(0, vocab, n)) for n in lengths))


@dataclass(frozen=True)
class Case:
    parallel: MeshShape = field(default_factory=MeshShape)
    config: ModelConfig = TINY
    ping_pong: bool = False
    placement: str = "given"
    policy: str = "distca"
    micro_batches: int = 1
    recompute: bool = False
    stage_layers: tuple[int, ...] = ()
    frozen: int = 0  # the embedding and as many layers are not trained
    compile: bool = False
    dtype: torch.dtype = torch.float32
    backend: str = "sdpa"

    def planner(self) -> StepPlanner:
        return StepPlanner(
            parallel=self.parallel,
            masks=tuple(self.config.mask_of(layer) for layer in range(self.config.layers)),
            micro_batches=self.micro_batches,
            ping_pong=self.ping_pong,
            policy=policy_of(self.policy, self.placement),
            stage_sizes=self.stage_layers,
            first_trained_part=2 * self.frozen + 1 if self.frozen else 0,
            options=PlanOptions(model=self.config.shape, tile=8, min_shard=8, cost="pairs"),
        )


_contexts: dict[MeshShape, RankContext] = {}


def context_of(parallel: MeshShape) -> RankContext:
    """Returns the context of a mesh; process groups are made once in a process."""
    if parallel not in _contexts:
        _contexts[parallel] = join_mesh(parallel, rank_device())
    return _contexts[parallel]


def one_step(
    group: dist.ProcessGroup, case: Case, batch: Batch
) -> tuple[float, dict[str, Tensor]] | None:
    """Returns the mean loss over all targets and its gradients by parameter; None on a server."""
    context = context_of(case.parallel)
    runner = StepRunner.of(
        context,
        halves=1 + case.ping_pong,
        recompute=case.recompute,
        backend=case.backend,
        dtype=case.dtype,
    )
    planner = case.planner()
    model = None
    if context.stage is not None:
        model = on_meta(case.config, *planner.stages[context.stage])
        parallelize(model, context, Precision(case.dtype), compile=case.compile)
        initialize(model, seed=0, device=context.device)
        freeze(model, case.frozen)
    total = runner.train(model, Step.of(planner, batch)).cpu()
    dist.all_reduce(total, group=context.world_group)
    if model is None:
        return None
    grads = {model.whole_name(name): whole(p.grad) for name, p in model.named_parameters()}
    return total.item(), grads


def freeze(model: Llama, layers: int) -> None:
    if not layers:
        return
    for name, parameter in model.named_parameters():
        seam, part = name.split(".")[1:3]
        layer = int(seam) - 1 if part == "after" else int(seam)
        parameter.requires_grad_(not (part == "embed" or (part != "head" and layer < layers)))


def whole(grad: Tensor | None) -> Tensor:
    if grad is None:
        return torch.empty(0)
    return (grad.full_tensor() if isinstance(grad, DTensor) else grad).cpu()


def plain_step(
    group: dist.ProcessGroup, case: Case, batch: Batch
) -> tuple[float, dict[str, Tensor]]:
    """Runs the plain loop on the device of a rank, on which weights are drawn as in its steps."""
    return plain_loop(case, batch)


def plain_loop(case: Case, batch: Batch) -> tuple[float, dict[str, Tensor]]:
    """Runs one process, document by document, with dense attention."""
    model = Llama(case.config).to(rank_device())
    initialize(model, seed=0)
    freeze(model, case.frozen)
    total: Any = 0.0
    for document in batch.documents:
        tokens, labels = (
            torch.from_numpy(x).to(rank_device()) for x in (document.tokens, document.labels)
        )
        half = Arriving(tokens, torch.arange(len(tokens), device=tokens.device), labels=labels)
        (leaving,) = model([half], plainly(dense_attention(case.config)))
        total = total + leaving.loss.total
    mean = total / batch.num_targets
    mean.backward()
    return mean.item(), {name: whole(p.grad) for name, p in model.named_parameters()}


def dense_attention(config: ModelConfig) -> Any:
    def attend(layer: int, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        group = q.shape[1] // k.shape[1]
        k, v = (t.repeat_interleave(group, 1) for t in (k, v))
        position = torch.arange(len(q), device=q.device)
        behind = position[:, None] - position
        reach = config.mask_of(layer).reach
        seen = (behind >= 0) & ((behind < reach) | (reach == CAUSAL))
        scores = torch.einsum("nhd,mhd->hnm", q, k) * q.shape[-1] ** -0.5
        return torch.einsum("hnm,mhd->nhd", scores.masked_fill(~seen, -torch.inf).softmax(-1), v)

    return attend
