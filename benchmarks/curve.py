"""The loss of 200 steps: a plain one-process PyTorch loop, and distca on two ranks.

    python benchmarks/curve.py     about eight minutes on two cores

Both use the same data (the Python standard library), seed, model and optimizer. The plain loop has
no plans, exchanges or sharding: it processes the documents of a batch one by one, with torch's own
attention. The other run is ``distca train`` with two ranks, balanced placement and ping-pong.
Writes docs/images/curve.png and results/curve.json.
"""

from __future__ import annotations

import json
import os
import tempfile
from pathlib import Path

os.environ["OMP_NUM_THREADS"] = "1"

import torch
import torch.distributed as dist
import torch.multiprocessing as mp
from torch import Tensor
from torch.nn.functional import cross_entropy, scaled_dot_product_attention

from distca.model.initialize import initialize
from distca.model.llama import Arriving, Llama, plainly
from distca.train import setup
from distca.train.config import Config
from distca.train.trainer import Trainer

ROOT = Path(__file__).parent.parent
STEPS = 200
SETTINGS = [
    f"train.steps={STEPS}",
    "train.tokens_per_step=4096",
    "train.lr=0.001",
    "train.warmup=20",
    "data.context=2048",
    "parallel.ping_pong=true",
]


def main() -> None:
    torch.set_num_threads(1)
    curves = {"plain loop, one process": plain(), "distca, two ranks": disaggregated()}
    pairs = list(zip(*curves.values(), strict=True))
    apart = max(abs(a - b) / a for a, b in pairs)
    result = {"largest relative difference": apart, "curves": curves}
    (ROOT / "benchmarks/results/curve.json").write_text(json.dumps(result) + "\n")
    draw(curves, apart)
    first, last = pairs[0], pairs[-1]
    print(f"{STEPS} steps: {first} -> {last}; at most {apart:.1e} apart")


def plain() -> list[float]:
    config = Config.read(None, SETTINGS).train
    tokenizer = setup.tokenizer_of(Config.read(None, SETTINGS))
    loader = setup.loader_of(Config.read(None, SETTINGS), tokenizer)
    model = Llama(setup.model_of(Config.read(None, SETTINGS), tokenizer))
    initialize(model, config.seed)
    decayed = [p for p in model.parameters() if p.ndim > 1]
    rest = [p for p in model.parameters() if p.ndim == 1]
    groups = [{"params": decayed}, {"params": rest, "weight_decay": 0.0}]
    optimizer = torch.optim.AdamW(
        groups, lr=config.lr, betas=config.betas, weight_decay=config.weight_decay
    )
    warm_up = torch.optim.lr_scheduler.LinearLR(
        optimizer, 1 / config.warmup, 1.0, total_iters=config.warmup - 1
    )
    cosine = torch.optim.lr_scheduler.CosineAnnealingLR(
        optimizer, STEPS - config.warmup, eta_min=config.min_lr
    )
    schedule = torch.optim.lr_scheduler.SequentialLR(
        optimizer, [warm_up, cosine], milestones=[config.warmup]
    )
    losses = []
    for _ in range(STEPS):
        batch = loader.next_batch()
        total = 0.0
        for document in batch.documents:
            tokens, labels = (torch.from_numpy(x) for x in (document.tokens, document.labels))
            half = Arriving(tokens, torch.arange(len(tokens)))
            (leaving,) = model([half], plainly(attend))
            loss = cross_entropy(leaving.x, labels, reduction="sum") / batch.num_targets
            loss.backward()
            total += loss.item()
        torch.nn.utils.clip_grad_norm_(model.parameters(), config.clip)
        optimizer.step()
        optimizer.zero_grad()
        schedule.step()
        losses.append(total)
    return losses


def attend(layer: int, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    q, k, v = (t.transpose(0, 1)[None] for t in (q, k, v))
    out = scaled_dot_product_attention(q, k, v, is_causal=True, enable_gqa=True)
    return out[0].transpose(0, 1)


def disaggregated() -> list[float]:
    with tempfile.TemporaryDirectory() as folder:
        mp.spawn(_rank, (folder,), nprocs=2)
        lines = Path(folder, "metrics.jsonl").read_text().splitlines()
    return [json.loads(line)["loss"] for line in lines]


def _rank(rank: int, folder: str) -> None:
    torch.set_num_threads(1)
    dist.init_process_group("gloo", init_method=f"file://{folder}/store", rank=rank, world_size=2)
    Trainer(Config.read(None, [*SETTINGS, f"out={folder}"])).fit()
    dist.destroy_process_group()


def draw(curves: dict[str, list[float]], apart: float) -> None:
    import matplotlib

    matplotlib.use("Agg")
    import matplotlib.pyplot as plt

    figure, axis = plt.subplots(figsize=(7, 3.6), layout="constrained")
    (plain_name, plain_curve), (name, curve) = curves.items()
    axis.plot(plain_curve, color="#bbbbbb", linewidth=5, label=plain_name)
    axis.plot(curve, color="#1f4e79", linewidth=1.2, label=name)
    axis.set_xlabel("step")
    axis.set_ylabel("loss per token (bytes)")
    axis.set_title(f"The same curve: at most {apart:.1e} apart (relative)", fontsize=10, loc="left")
    axis.legend(frameon=False)
    axis.spines[["top", "right"]].set_visible(False)
    figure.savefig(ROOT / "docs/images/curve.png", dpi=140)


if __name__ == "__main__":
    main()
