"""What ``distca selftest`` checks: each function does its part on this rank and says how it went.

Every comparison is with the obvious: one softmax over a whole document, one process going through
the documents one by one.
"""

# torch is imported inside the functions: `distca --help` must not wait for it.
import time
from collections.abc import Callable
from functools import partial
from pathlib import Path
from shutil import rmtree
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from torch import Tensor

    from distca.model.config import ModelConfig
    from distca.planning.plan import Plan
    from distca.runtime.mesh import RankContext

HEADS, KV_HEADS, HEAD_DIM = 4, 2, 64
GRAIN: dict[str, Any] = {"tile": 16, "min_shard": 16, "cost": "pairs"}  # so that little is cut much

Row = dict[str, Any]  # see ``distca.report.checks``


def checks_of(context: "RankContext", out: Path) -> dict[str, Callable[[], Row]]:
    ranks = context.parallel.num_ranks
    # One long document, or several, and odd short ones; as many as there are ranks, and uneven.
    uneven = [[700, 3] if rank % 3 == 0 else [33, 120, 7][: 1 + rank % 3] for rank in range(ranks)]
    attention: dict[str, Row] = {
        "in place, uneven": {"ranks": uneven},
        "in place, balanced placement": {"ranks": uneven, "placement": "balanced"},
        "in place, window of 100": {"ranks": uneven, "mask": "window:100"},
        "ranks without tokens": {"ranks": [[900, 40]] + [[]] * (ranks - 1)},
        "a dedicated server": {"ranks": uneven[:-1], "servers": 1},
    }
    checks: dict[str, Callable[[], Row]] = {
        f"attention: {name}": partial(_attention, context, options)
        for name, options in attention.items()
    }
    checks["attention: dispatch, compute, combine"] = partial(
        _attention, context, {"ranks": uneven}, in_steps=True
    )
    checks["training step, FSDP"] = partial(_step, context, ping_pong=False)
    checks["training step, FSDP, ping-pong"] = partial(_step, context, ping_pong=True)
    checks["training step, pipeline of two stages"] = partial(_pipeline, context)
    checks["checkpoint, saved and loaded"] = partial(_checkpoint, context, out / "checkpoints")
    for size in (10**6, 10**7, 10**8) if context.device.type == "cuda" else (10**5, 10**6, 10**7):
        checks[f"all-to-all, {size / 1e6:g} MB to each rank"] = partial(_bandwidth, context, size)
    return checks


def _attention(context: "RankContext", options: Row, in_steps: bool = False) -> Row:
    """Output and gradients of this rank's rows, against one softmax over each whole document."""
    import torch

    from distca.attention.core import CoreAttention
    from distca.planning.api import place_and_plan
    from distca.planning.policies import policy_of

    given = dict(options)
    if not given["ranks"]:
        return {"passed": None, "words": "needs two ranks"}
    policy = policy_of("distca", given.pop("placement", "given"))
    plan = place_and_plan(
        given.pop("ranks"),
        policy,
        heads=HEADS,
        kv_heads=KV_HEADS,
        head_dim=HEAD_DIM,
        **GRAIN,
        **given,
    )
    attention = CoreAttention(context.attention_group, control=context.attention_cpu_group)
    if context.rank >= plan.placement.num_workers:
        attention.serve(plan, layers=1)
        return {"passed": True, "error": 0.0, "limit": 0.0}
    gpu = context.device.type == "cuda"
    dtype = torch.bfloat16 if gpu else torch.float32  # what training uses
    whole = [t.to(dtype) for t in _drawn(plan)]
    expected = _expected([t.double() for t in whole], plan)
    rows = _rows_of(plan, context.rank)
    q, k, v, grad_out = (t[rows].to(context.device) for t in whole)
    leaves = [t.requires_grad_() for t in (q, k, v)]
    if in_steps:
        pending = attention.dispatch(*leaves, plan)
        pending.compute()
        found = pending.combine()
    else:
        found = attention(*leaves, plan)
    found.backward(grad_out)
    pairs = zip((found.detach(), *(t.grad for t in leaves)), expected, strict=True)
    return exact([(ours, right[rows]) for ours, right in pairs], 2e-2 if gpu else 1e-5)


def _drawn(plan: "Plan") -> list["Tensor"]:
    """q, k, v and the gradient of the output, of all documents; the same on every rank."""
    import torch

    generator = torch.Generator().manual_seed(0)
    total = int(plan.placement.lengths.sum())
    return [
        torch.randn(total, heads, HEAD_DIM, generator=generator)
        for heads in (HEADS, KV_HEADS, KV_HEADS, HEADS)
    ]


def _rows_of(plan: "Plan", rank: int) -> "Tensor":
    """Which rows of all documents a rank holds."""
    import numpy as np
    import torch

    placement = plan.placement
    first = np.cumsum([0, *placement.lengths])
    spans = [np.zeros(0, np.int64)]
    for shard in np.flatnonzero(placement.worker == rank):
        begin = first[placement.document[shard]]
        spans.append(begin + np.arange(placement.start[shard], placement.stop[shard]))
    return torch.from_numpy(np.concatenate(spans))


def _expected(whole: list["Tensor"], plan: "Plan") -> list["Tensor"]:
    import torch

    *leaves, grad_out = whole
    q, k, v = (t.requires_grad_() for t in leaves)
    outputs, first = [], 0
    for length, reach in zip(plan.placement.lengths.tolist(), plan.reach.tolist(), strict=True):
        rows = slice(first, first + length)
        outputs.append(dense(q[rows], k[rows], v[rows], reach))
        first += length
    out = torch.cat(outputs)
    return [out.detach(), *torch.autograd.grad(out, (q, k, v), grad_out)]


def dense(q: "Tensor", k: "Tensor", v: "Tensor", reach: int) -> "Tensor":
    """Returns textbook attention of one whole document, [T, H, D].

    Its gradients come from autograd, which no backend uses.
    """
    from distca.attention.backends.reference import dense_forward
    from distca.planning.masks import Mask

    return dense_forward(q, k, v, Mask(reach), q.shape[-1] ** -0.5).out


def exact(pairs: list[tuple["Tensor", "Tensor"]], limit: float) -> Row:
    """The largest relative error; a NaN passes nothing."""
    errors = []
    for ours, right in pairs:
        size = right.double().norm().clamp_min(1e-6).cpu()
        errors.append(float((ours.double().cpu() - right.double().cpu()).norm() / size))
    worst = max(errors, key=lambda error: (error != error, error), default=0.0)
    return {"passed": worst <= limit, "error": worst, "limit": limit}


def _pipeline(context: "RankContext") -> Row:
    from distca.pipeline.mesh import MeshShape
    from distca.runtime.mesh import join_mesh

    ranks = context.parallel.num_ranks
    if ranks % 2:
        return {"passed": None, "words": "needs an even number of ranks"}
    return _step(join_mesh(MeshShape(pp=2, dp=ranks // 2), context.device), True, micro_batches=2)


def _step(context: "RankContext", ping_pong: bool, micro_batches: int = 1) -> Row:
    """Loss and gradients of the sharded model, against one process and document by document."""
    import numpy as np
    import torch
    import torch.distributed as dist

    from distca.data.documents import Batch, Document
    from distca.model.initialize import initialize
    from distca.model.llama import Arriving, on_meta, plainly
    from distca.pipeline.step_planner import StepPlanner
    from distca.planning.options import PlanOptions
    from distca.planning.policies import policy_of
    from distca.runtime.batches import Step
    from distca.runtime.step import StepRunner

    config = _tiny()
    draw = np.random.default_rng(0)
    lengths = [300, 9, 64, 1, 33, 90, 20, 5] * (1 + context.parallel.num_ranks // 4)
    batch = Batch(tuple(Document.from_tokens(draw.integers(0, 61, n)) for n in lengths))
    masks = tuple(config.mask_of(layer) for layer in range(config.layers))
    planner = StepPlanner(
        context.parallel,
        masks,
        PlanOptions(model=config.shape, **GRAIN),
        policy_of("distca", "balanced"),
        micro_batches=micro_batches,
        ping_pong=ping_pong,
    )
    step = Step.of(planner, batch)
    assert context.stage is not None
    model = _sharded(context, config, *planner.stages[context.stage])
    total = StepRunner.of(context, halves=1 + ping_pong).train(model, step).cpu()
    dist.all_reduce(total, group=context.world_group)

    def attend(layer: int, q: "Tensor", k: "Tensor", v: "Tensor") -> "Tensor":
        return dense(q, k, v, masks[layer].reach)

    plain = on_meta(config)
    initialize(plain, seed=0, device=context.device)  # another kind of device draws other weights
    expected = torch.zeros((), device=context.device)
    for document in batch.documents:
        tokens, positions, labels = (
            torch.from_numpy(x).to(context.device)
            for x in (document.tokens, np.arange(len(document)), document.labels)
        )
        half = Arriving(tokens, positions, labels=labels)
        (leaving,) = plain([half], plainly(attend))
        assert leaving.loss is not None
        expected = expected + leaving.loss.total / step.batch.num_targets
    expected.backward()  # type: ignore[no-untyped-call]
    pairs = [(total, expected.detach())]
    for name, ours in model.named_parameters():
        right = plain.get_parameter(name)
        assert right.grad is not None
        pairs.append((ours.grad.full_tensor(), right.grad))
    return exact(pairs, 1e-4)


def _tiny() -> "ModelConfig":
    from distca.model.config import ModelConfig

    return ModelConfig(
        vocab_size=61, hidden=64, layers=2, heads=4, kv_heads=2, head_dim=HEAD_DIM, ffn=96
    )


def _sharded(
    context: "RankContext", config: "ModelConfig", start: int = 0, stop: int | None = None
) -> Any:
    from distca.model.initialize import initialize
    from distca.model.llama import on_meta
    from distca.runtime.parallelize import Precision, parallelize

    model = on_meta(config, start, stop)
    parallelize(model, context, Precision())
    initialize(model, seed=0, device=context.device)
    return model


def _checkpoint(context: "RankContext", folder: Path) -> Row:
    """Weights and moments come back bit by bit."""
    import torch
    import torch.distributed as dist

    from distca.train.checkpoints import Checkpoints

    model = _sharded(context, _tiny())
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.1)
    for parameter in model.parameters():
        parameter.grad = torch.ones_like(parameter)
    optimizer.step()
    state = [*model.parameters(), *(optimizer.state[p]["exp_avg"] for p in model.parameters())]
    before = [t.detach().to_local().clone() for t in state]
    checkpoints = Checkpoints(folder, model, optimizer, context, keep=1)
    checkpoints.save(1, {"step": 1})
    checkpoints.wait()
    optimizer.step()
    extra = checkpoints.load(folder / "step-00000001")
    state = [*model.parameters(), *(optimizer.state[p]["exp_avg"] for p in model.parameters())]
    after = [t.detach().to_local() for t in state]
    dist.barrier(context.world_group)
    if context.rank == 0:
        rmtree(folder)
    found = exact(list(zip(after, before, strict=True)), 0.0)
    return found | {"passed": found["passed"] and extra == {"step": 1}}


def _bandwidth(context: "RankContext", size: int) -> Row:
    """Bytes a second that this rank sends, while it receives as many."""
    import statistics

    import torch
    import torch.distributed as dist

    ranks = context.parallel.num_ranks
    if ranks == 1:
        return {"passed": None, "words": "needs two ranks"}
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
    return {"passed": bool((received == 1).all()), "bytes_per_s": speed}
