"""The checks of ``distca selftest``: a test suite that runs on the ranks at hand.

Every check compares distca with a plain reference: torch's attention over each whole document, or
one process that trains on the documents one by one.
"""

from __future__ import annotations

import statistics
import sys
import time
from collections.abc import Callable, Iterable, Sequence
from dataclasses import asdict, dataclass, replace
from functools import partial
from pathlib import Path
from shutil import rmtree
from typing import Any

import numpy as np
import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import Tensor
from torch.nn.attention import SDPBackend, sdpa_kernel

from distca.attention.core import CoreAttention
from distca.data.documents import Batch, Document
from distca.model.config import ModelConfig
from distca.model.initialize import initialize
from distca.model.llama import Arriving, Llama, on_meta, plainly
from distca.pipeline.mesh import MeshShape
from distca.pipeline.step_planner import StepPlanner
from distca.planning.api import place_and_plan
from distca.planning.options import PlanOptions
from distca.planning.plan import Plan
from distca.planning.policies import Policy, policy_of
from distca.planning.spans import cumulative, expand
from distca.runtime.batches import Step
from distca.runtime.mesh import RankContext, join_mesh
from distca.runtime.parallelize import Precision, parallelize
from distca.runtime.step import StepRunner
from distca.train.checkpoints import Checkpoints

HEADS, KV_HEADS, HEAD_DIM = 4, 2, 64
FINE = PlanOptions(tile=16, min_shard=16, cost="pairs")  # so that short documents are cut often
OPTIONS = replace(FINE, heads=HEADS, kv_heads=KV_HEADS, head_dim=HEAD_DIM)
MODEL = ModelConfig(
    vocab_size=61, hidden=64, layers=2, heads=4, kv_heads=2, head_dim=HEAD_DIM, ffn=96
)


@dataclass(frozen=True)
class CheckResult:
    """The result of a check, on one rank or on all of them."""

    passed: bool | None  # None: the check was skipped
    error: float | None = None  # the largest relative error
    limit: float | None = None  # the largest error that passes
    bytes_per_s: float | None = None
    words: str | None = None  # why the check failed or was skipped

    @classmethod
    def worst(cls, outcomes: Iterable[CheckResult]) -> CheckResult:
        """Returns a failure if there is one; else the slowest or the least exact outcome."""
        ordered = sorted(outcomes, key=lambda one: (one.bytes_per_s or 0.0, -(one.error or 0.0)))
        return next((one for one in ordered if one.passed is False), ordered[0])

    def to_json(self) -> dict[str, Any]:
        known = {name: value for name, value in asdict(self).items() if value is not None}
        return {"passed": self.passed} | known


Check = Callable[[], CheckResult]


def checks_of(context: RankContext, out: Path) -> dict[str, Check]:
    """Returns all checks by name. Every rank calls each of them, in the same order."""
    ranks = context.parallel.num_ranks
    # Long documents next to short and odd ones, so that the attention of ranks is uneven.
    uneven = [[700, 3] if rank % 3 == 0 else [33, 120, 7][: 1 + rank % 3] for rank in range(ranks)]
    given, balanced = policy_of("distca"), policy_of("distca", "balanced")
    window, server = replace(OPTIONS, mask="window:100"), replace(OPTIONS, servers=1)
    one_rank: list[list[int]] = [[900, 40]] + [[]] * (ranks - 1)
    attention = partial(_attention, context)
    checks: dict[str, Check] = {
        "attention: in place, uneven": partial(attention, uneven, given),
        "attention: in place, balanced placement": partial(attention, uneven, balanced),
        "attention: in place, window of 100": partial(attention, uneven, given, window),
        "attention: ranks without tokens": partial(attention, one_rank, given),
        "attention: a dedicated server": partial(attention, uneven[:-1], given, server),
        "attention: dispatch, compute, combine": partial(
            attention, uneven, given, asynchronous=True
        ),
        "training step, FSDP": partial(_step, context, ping_pong=False),
        "training step, FSDP, ping-pong": partial(_step, context, ping_pong=True),
        "training step, pipeline of two stages": partial(_pipeline, context),
        "checkpoint, saved and loaded": partial(_checkpoint, context, out / "checkpoints"),
    }
    for size in (10**6, 10**7, 10**8) if context.device.type == "cuda" else (10**5, 10**6, 10**7):
        checks[f"all-to-all, {size / 1e6:g} MB to each rank"] = partial(_bandwidth, context, size)
    return checks


def exact(pairs: Iterable[tuple[Tensor, Tensor]], limit: float) -> CheckResult:
    """Compares (found, expected) tensors by their relative error; a NaN never passes."""
    errors = []
    for found, expected in pairs:
        size = expected.double().norm().clamp_min(1e-6).cpu()
        errors.append(float((found.double().cpu() - expected.double().cpu()).norm() / size))
    worst = max(errors, key=lambda error: (error != error, error), default=0.0)
    return CheckResult(worst <= limit, error=worst, limit=limit)


def dense(q: Tensor, k: Tensor, v: Tensor, reach: int) -> Tensor:
    """Computes the attention of one document with torch: [T, H, D] -> [T, H, D]."""
    position = torch.arange(len(q), device=q.device)
    behind = position[:, None] - position
    mask = (behind >= 0) & (behind < reach)
    q, k, v = (t.transpose(0, 1)[None] for t in (q, k, v))  # [1, H, T, D]
    with sdpa_kernel(SDPBackend.MATH):
        out = F.scaled_dot_product_attention(q, k, v, attn_mask=mask, enable_gqa=True)
    return out[0].transpose(0, 1)


def _attention(
    context: RankContext,
    ranks: list[list[int]],
    policy: Policy,
    options: PlanOptions = OPTIONS,
    asynchronous: bool = False,
) -> CheckResult:
    """Compares output and gradients of this rank's rows with attention over whole documents."""
    if not ranks:
        return CheckResult(None, words="needs two ranks")
    plan = place_and_plan(ranks, policy, options)
    attention = CoreAttention(context.attention_group)
    if context.rank >= plan.placement.num_workers:
        attention.serve(plan, layers=1)
        return CheckResult(True, error=0.0, limit=0.0)
    gpu = context.device.type == "cuda"
    dtype = torch.bfloat16 if gpu else torch.float32  # what training uses
    whole = [t.to(dtype) for t in _random_inputs(plan)]
    expected = _expected([t.double() for t in whole], plan)
    rows = _rows_of(plan, context.rank)
    q, k, v, grad_out = (t[rows].to(context.device) for t in whole)
    inputs = [t.requires_grad_() for t in (q, k, v)]
    if asynchronous:
        pending = attention.dispatch(*inputs, plan)
        pending.compute()
        found = pending.combine()
    else:
        found = attention(*inputs, plan)
    found.backward(grad_out)
    pairs = zip((found.detach(), *(t.grad for t in inputs)), expected, strict=True)
    return exact([(ours, right[rows]) for ours, right in pairs], 2e-2 if gpu else 1e-5)


def _random_inputs(plan: Plan) -> list[Tensor]:
    """Returns q, k, v and the gradient of the output of all documents, the same on every rank."""
    generator = torch.Generator().manual_seed(0)
    total = int(plan.placement.lengths.sum())
    return [
        torch.randn(total, heads, HEAD_DIM, generator=generator)
        for heads in (HEADS, KV_HEADS, KV_HEADS, HEADS)
    ]


def _rows_of(plan: Plan, rank: int) -> Tensor:
    """Returns the rows of the concatenated documents that a rank holds."""
    placement = plan.placement
    own = np.flatnonzero(placement.worker == rank)
    first = cumulative(placement.lengths)[placement.document[own]] + placement.start[own]
    return torch.from_numpy(expand(first, placement.stop[own] - placement.start[own]))


def _expected(whole: Sequence[Tensor], plan: Plan) -> list[Tensor]:
    """Returns the output and the gradients of q, k and v, of all documents."""
    *inputs, grad_out = whole
    q, k, v = (t.requires_grad_() for t in inputs)
    outputs, first = [], 0
    for length, reach in zip(plan.placement.lengths.tolist(), plan.reach.tolist(), strict=True):
        rows = slice(first, first + length)
        outputs.append(dense(q[rows], k[rows], v[rows], reach))
        first += length
    out = torch.cat(outputs)
    return [out.detach(), *torch.autograd.grad(out, (q, k, v), grad_out)]


def _pipeline(context: RankContext) -> CheckResult:
    ranks = context.parallel.num_ranks
    if ranks % 2:
        return CheckResult(None, words="needs an even number of ranks")
    return _step(join_mesh(MeshShape(pp=2, dp=ranks // 2), context.device), True, micro_batches=2)


def _step(context: RankContext, ping_pong: bool, micro_batches: int = 1) -> CheckResult:
    """Compares loss and gradients of a sharded model with one process, document by document."""
    draw = np.random.default_rng(0)
    lengths = [300, 9, 64, 1, 33, 90, 20, 5] * (1 + context.parallel.num_ranks // 4)
    documents = (Document.from_tokens(draw.integers(0, MODEL.vocab_size, n)) for n in lengths)
    batch = Batch(tuple(documents))
    planner = StepPlanner(
        context.parallel,
        tuple(MODEL.mask_of(layer) for layer in range(MODEL.layers)),
        replace(FINE, model=MODEL.shape),
        policy_of("distca", "balanced"),
        micro_batches=micro_batches,
        ping_pong=ping_pong,
    )
    assert context.stage is not None
    model = _sharded(context, *planner.stages[context.stage])
    runner = StepRunner.of(context, halves=1 + ping_pong)
    loss = runner.train(model, Step.of(planner, batch)).cpu()
    dist.all_reduce(loss, group=context.world_group)
    whole, expected = _train_alone(batch, context.device)
    pairs = [(loss, expected)]
    for name, ours in model.named_parameters():
        right = whole.get_parameter(name)
        assert right.grad is not None
        pairs.append((ours.grad.full_tensor(), right.grad))  # type: ignore[union-attr]
    return exact(pairs, 1e-4)


def _train_alone(batch: Batch, device: torch.device) -> tuple[Llama, Tensor]:
    """Returns the whole model with its gradients, and the loss of the batch."""

    def attend(layer: int, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        return dense(q, k, v, MODEL.mask_of(layer).reach)

    model = on_meta(MODEL)
    initialize(model, seed=0, device=device)  # other kinds of devices draw other weights
    loss = torch.zeros((), device=device)
    for document in batch.documents:
        tokens, positions, labels = (
            torch.from_numpy(x).to(device)
            for x in (document.tokens, np.arange(len(document)), document.labels)
        )
        (leaving,) = model([Arriving(tokens, positions, labels=labels)], plainly(attend))
        assert leaving.loss is not None
        loss = loss + leaving.loss.total / batch.num_targets
    loss.backward()  # type: ignore[no-untyped-call]
    return model, loss.detach()


def _sharded(context: RankContext, start: int = 0, stop: int | None = None) -> Llama:
    model = on_meta(MODEL, start, stop)
    parallelize(model, context, Precision())
    initialize(model, seed=0, device=context.device)
    return model


def _checkpoint(context: RankContext, folder: Path) -> CheckResult:
    """Checks that weights and moments are loaded bit for bit."""
    model = _sharded(context)
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.1)
    for parameter in model.parameters():
        parameter.grad = torch.ones_like(parameter)
    optimizer.step()

    def state() -> list[Any]:
        moments = [optimizer.state[p]["exp_avg"] for p in model.parameters()]
        return [t.detach().to_local() for t in (*model.parameters(), *moments)]

    before = [t.clone() for t in state()]
    checkpoints = Checkpoints(folder, model, optimizer, context, keep=1)
    checkpoints.save(1, {"step": 1})
    checkpoints.wait()
    optimizer.step()
    extra = checkpoints.load(folder / "step-00000001")
    found = exact(zip(state(), before, strict=True), 0.0)
    dist.barrier(context.world_group)
    if context.rank == 0:
        rmtree(folder)
    return replace(found, passed=found.passed and extra == {"step": 1})


def _bandwidth(context: RankContext, size: int) -> CheckResult:
    """Measures the bytes per second that this rank sends while it receives as many."""
    ranks = context.parallel.num_ranks
    if ranks == 1:
        return CheckResult(None, words="needs two ranks")
    needed = 2 * size * ranks
    if (free := _free_bytes(context)) < needed:
        words = f"needs {needed / 1e9:.2g} GB on each rank, and one has {free / 1e9:.2g} left"
        return CheckResult(None, words=words)
    sent = torch.ones(size * ranks, dtype=torch.uint8, device=context.device)
    received = torch.empty_like(sent)
    seconds = []
    for _ in range(6):
        dist.barrier(context.world_group)
        began = time.perf_counter()
        dist.all_to_all_single(received, sent, group=context.attention_group)
        if context.device.type == "cuda":
            torch.cuda.synchronize()
        seconds.append(time.perf_counter() - began)
    speed = size * (ranks - 1) / statistics.median(seconds[1:])
    least, most = received.aminmax()  # which takes no memory, as a comparison would
    return CheckResult(least.item() == most.item() == 1, bytes_per_s=speed)


def _free_bytes(context: RankContext) -> int:
    """Returns the bytes that a rank can still allocate, of the rank with the least."""
    device = context.device
    if device.type == "cpu":
        return sys.maxsize  # the sizes for CPU ranks are small
    free, total = torch.cuda.mem_get_info(device)
    allocated = torch.cuda.memory_allocated(device)
    limit = int(total * torch.cuda.get_per_process_memory_fraction(device))
    cached = torch.cuda.memory_reserved(device) - allocated
    least = torch.tensor(min(free + cached, limit - allocated))
    dist.all_reduce(least, dist.ReduceOp.MIN, group=context.world_group)
    return int(least)
