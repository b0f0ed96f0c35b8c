"""Long runs on real text: a plain PyTorch loop and distca, step by step in turns.

    python benchmarks/curve.py                            1,000 steps on two gloo ranks
    python benchmarks/curve.py --share-gpu --ranks 4 --steps 300      bfloat16, ranks share a GPU
    python benchmarks/curve.py --redraw                   the picture of results that are there

All sides use the same documents (the Python standard library), seed, model and optimizer. The plain
loop has no plans, exchanges or sharding: every rank has all weights and computes whole documents of
its own with torch's attention, one after the other, and gradients are summed on the host. "plain,
reversed" deals the same documents to the ranks in reverse order, so its distance from the plain
loop shows what another order of floating-point additions does by itself. "distca" is
``distca train`` with balanced placement and ping-pong.

Writes NAME.json and NAME.md to ``--out`` after the first and every 25th step, so that a run that is
killed keeps what it has, and NAME.png to ``--images`` at the end; NAME is curve, or curve_gpu with
``--share-gpu``.
"""

from __future__ import annotations

import argparse
import json
import os
import sys
import time
from bisect import bisect_right
from collections.abc import Generator, Sequence
from contextlib import closing
from datetime import date
from itertools import islice
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from curve_report import Curves, draw, read, report
from torch import Tensor
from torch.func import functional_call
from torch.nn.functional import scaled_dot_product_attention

from distca.data.documents import IGNORE, Batch, Document
from distca.data.loader import Loader
from distca.model.initialize import initialize
from distca.model.llama import Arriving, Attend, Leaving, Llama, plainly
from distca.runtime import launch, launched
from distca.runtime.parallelize import Precision
from distca.runtime.shared_gpu import share_gpu
from distca.runtime.world import join_world
from distca.train import setup
from distca.train.config import Config
from distca.train.evaluate import EDGES, NAMES
from distca.train.stop import StopRequest
from distca.train.trainer import Trainer

ROOT = Path(__file__).parent.parent
RUNS = Path("runs/curve")
WRITE_EVERY = 25
COMMON = ("parallel.ping_pong=true", "train.warmup=20", "train.save_at_end=false")
CPU = (
    "model.sizes={layers=2, hidden=96, heads=4, kv_heads=2, head_dim=32, ffn=256}",
    "data.context=1024",
    "train.tokens_per_step=2048",
    "train.eval_tokens=65536",
    "train.lr=0.001",
)
GPU = (
    "model.sizes={layers=4, hidden=256, heads=4, kv_heads=2, head_dim=64, ffn=704}",
    "data.context=8192",
    "train.tokens_per_step=32768",
    "train.eval_tokens=131072",
    # With 0.001 and a larger model, two plain loops in bfloat16 differed by up to 40 % in a step.
    "train.lr=0.0003",
)


def options_of() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--steps", type=int, default=1000)
    parser.add_argument("--ranks", type=int, default=2)
    parser.add_argument("--share-gpu", action="store_true", help="NCCL and bfloat16 on one GPU")
    parser.add_argument("--cpu", action="store_true", help="try --share-gpu without a GPU")
    parser.add_argument("--redraw", action="store_true", help="train nothing")
    parser.add_argument("--out", type=Path, default=ROOT / "benchmarks/results")
    parser.add_argument("--images", type=Path, default=ROOT / "docs/images")
    options = parser.parse_args()
    options.name = "curve_gpu" if options.share_gpu else "curve"
    return options


def config_of(options: argparse.Namespace) -> Config:
    sizes = GPU if options.share_gpu and not options.cpu else CPU
    every = max(options.steps // 5, 1)
    steps = (f"train.steps={options.steps}", f"train.eval_every={every}", f"out={RUNS}")
    return Config.read(None, [*COMMON, *sizes, *steps, "resume=false"])


def main() -> None:
    options = options_of()
    if launched.is_rank():
        with launched.reporting():
            run_rank(options)
            dist.destroy_process_group()
        return
    if not options.redraw:
        train(options)
    found = options.out / f"{options.name}.json"
    if not found.exists():
        sys.exit(
            f"{found} does not exist: the run ended before its first step, or leave --redraw out"
        )
    curves = read(found)
    draw(curves, options.images / f"{options.name}.png")
    write(options, curves)
    print(report(curves))


def train(options: argparse.Namespace) -> None:
    command = [sys.executable, *sys.argv]
    if options.share_gpu and not options.cpu:
        with share_gpu(options.ranks, RUNS / "mps") as gpu:
            print(gpu, flush=True)
            launch.launch(command, options.ranks, RUNS / "logs", gpu)
    else:
        os.environ |= {"CUDA_VISIBLE_DEVICES": "", "OMP_NUM_THREADS": "1"}
        launch.launch(command, options.ranks, RUNS / "logs")


def write(options: argparse.Namespace, curves: Curves) -> None:
    options.out.mkdir(parents=True, exist_ok=True)
    options.out.joinpath(f"{options.name}.json").write_text(json.dumps(curves) + "\n")
    options.out.joinpath(f"{options.name}.md").write_text(report(curves))


# -- one rank ----------------------------------------------------------------------------------

Record = dict[str, Any]


def run_rank(options: argparse.Namespace) -> None:
    """Trains all sides in turns; rank 0 writes their figures."""
    config, device = config_of(options), join_world()
    sides: dict[str, Generator[Record]] = {
        "plain": Plain(config, device).steps(),
        "plain, reversed": Plain(config, device, order=-1).steps(),
        "distca": Trainer(config, stop=StopRequest(), sides=3, survives=False).steps(),
    }
    gpu = device.type == "cuda"
    curves: Curves = {
        "command": command_of(options),
        "date": str(date.today()),
        "where": torch.cuda.get_device_name() if gpu else "CPU",
        "torch": torch.__version__,
        "ranks": options.ranks,
        "precision": "bfloat16" if gpu else "float32",
        "steps": options.steps,
        "tokens per step": config.train.tokens_per_step,
        "context": config.data.context,
        "sides": {name: {"loss": [], "grad_norm": [], "seconds": [], "eval": {}} for name in sides},
    }
    with closing(sides["distca"]):  # releases the folder of the run if another side fails
        for step in range(options.steps):
            for name, side in sides.items():
                record = next(side)
                settle(device)
                add(curves["sides"][name], record, step)
            is_due = (step + 1) % WRITE_EVERY == 0 or step in (0, options.steps - 1)
            if dist.get_rank() == 0 and is_due:
                write(options, curves)
                losses = {name: side["loss"][-1] for name, side in curves["sides"].items()}
                print(f"step {step + 1}: {losses}", flush=True)


def command_of(options: argparse.Namespace) -> str:
    """Returns the command without the folders of the results."""
    switches = " --share-gpu" * options.share_gpu + " --cpu" * options.cpu
    return f"python benchmarks/curve.py{switches} --ranks {options.ranks} --steps {options.steps}"


def add(side: Record, record: Record, step: int) -> None:
    for name in ("loss", "grad_norm", "seconds"):
        side[name].append(float(f"{record[name]:.9g}"))
    if found := {name: record[name] for name in record if name.startswith("eval_loss")}:
        side["eval"][step + 1] = found


def settle(device: torch.device) -> None:
    """Waits until no rank has work on its device.

    On a shared GPU, a kernel that is loaded while another rank waits in a collective deadlocks.
    """
    if device.type == "cuda":
        torch.cuda.synchronize()
    dist.all_reduce(torch.zeros(1))


class Plain:
    """Data-parallel training with torch alone; the model is distca's, its attention is torch's."""

    def __init__(self, config: Config, device: torch.device, order: int = 1) -> None:
        self.train, self.device, self.order = config.train, device, order
        tokenizer = setup.tokenizer_of(config)
        self.loader: Loader = setup.loader_of(config, tokenizer)
        self.model = Llama(setup.model_of(config, tokenizer)).to(device)
        initialize(self.model, config.train.seed)
        self.dtype = Precision.named(config.parallel.precision, device).compute
        self.eval_batch = max(config.train.tokens_per_step, config.data.context)

    def steps(self) -> Generator[Record]:
        train, parameters = self.train, self.weights()
        groups = [
            {"params": [p for p in parameters if p.ndim > 1], "weight_decay": train.weight_decay},
            {"params": [p for p in parameters if p.ndim == 1], "weight_decay": 0.0},
        ]
        optimizer = torch.optim.AdamW(groups, lr=train.lr, betas=train.betas)
        warm_up = torch.optim.lr_scheduler.LinearLR(
            optimizer, 1 / train.warmup, 1.0, total_iters=train.warmup - 1
        )
        cosine = torch.optim.lr_scheduler.CosineAnnealingLR(
            optimizer, max(train.steps - train.warmup, 1), eta_min=train.min_lr
        )
        schedule = torch.optim.lr_scheduler.SequentialLR(
            optimizer, [warm_up, cosine], milestones=[train.warmup]
        )
        for step in range(train.steps):
            start = time.perf_counter()
            loss = self.gradients(self.loader.next_batch())
            norm = torch.nn.utils.clip_grad_norm_(parameters, train.clip)
            optimizer.step()
            optimizer.zero_grad()
            schedule.step()
            record = {"loss": loss, "grad_norm": float(norm)}
            record["seconds"] = time.perf_counter() - start
            if train.evaluates_after(step):
                record |= self.evaluate()
            yield record

    def gradients(self, batch: Batch) -> float:
        """Computes the gradients of the mean loss over the targets of all ranks; returns it."""
        mean = torch.zeros(1)
        if mine := self.share(batch):
            loss = self.forward(mine).loss.total / batch.num_targets
            loss.backward()
            mean = loss.detach().cpu()[None]
        grads = [p.grad if p.grad is not None else torch.zeros_like(p) for p in self.weights()]
        # Over the host, so that no rank waits in a collective on the GPU: see ``settle``.
        summed = torch.cat([mean, *(grad.flatten().cpu() for grad in grads)])
        dist.all_reduce(summed)
        sizes = [p.numel() for p in self.weights()]
        for p, grad in zip(self.weights(), summed[1:].split(sizes), strict=True):
            p.grad = grad.view_as(p).to(self.device)
        return float(summed[0])

    @torch.no_grad()
    def evaluate(self) -> Record:
        """Returns the loss of held-out documents by their length, under the names of distca's."""
        sums, counts = torch.zeros(2, len(NAMES), dtype=torch.float64)
        num_batches = -(-self.train.eval_tokens // self.eval_batch)
        for batch in islice(self.loader.evaluation(self.eval_batch), num_batches):
            if mine := self.share(batch):
                each = self.forward(mine).loss.each.cpu().double()
                for document, losses in zip(mine, each.split([*map(len, mine)]), strict=True):
                    kind = bisect_right(EDGES, len(document))
                    sums[kind] += losses.sum()
                    counts[kind] += int((document.labels != IGNORE).sum())
        both = torch.stack([sums, counts])
        dist.all_reduce(both)
        sums, counts = both
        found = {"eval_loss": float(sums.sum() / counts.sum())}
        for name, total, count in zip(NAMES, sums, counts, strict=True):
            if count:
                found[f"eval_loss_{name}"] = float(total / count)
        return found

    def weights(self) -> list[torch.nn.Parameter]:
        return list(self.model.parameters())

    def share(self, batch: Batch) -> list[Document]:
        """Returns the documents of this rank."""
        return list(batch.documents[:: self.order][dist.get_rank() :: dist.get_world_size()])

    def forward(self, documents: Sequence[Document]) -> Leaving:
        """Runs the model on whole documents, packed into one row."""
        lengths = [*map(len, documents)]
        tokens, labels = (
            torch.cat([torch.from_numpy(getattr(one, name)) for one in documents]).to(self.device)
            for name in ("tokens", "labels")
        )
        positions = torch.cat([torch.arange(n) for n in lengths]).to(self.device)
        # As FSDP's mixed precision: weights are cast for the computation, and kept in float32.
        cast = {name: p.to(self.dtype) for name, p in self.model.named_parameters()}
        row = [Arriving(tokens, positions, labels=labels)]
        (leaving,) = functional_call(self.model, cast, (row, plainly(own_attention(lengths))))
        return leaving


def own_attention(lengths: list[int]) -> Attend:
    """Returns torch's attention, document by document."""

    def attend(layer: int, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        outs = []
        for document in zip(*(t.split(lengths) for t in (q, k, v)), strict=True):
            q_, k_, v_ = (t.transpose(0, 1)[None] for t in document)
            out = scaled_dot_product_attention(q_, k_, v_, is_causal=True, enable_gqa=True)
            outs.append(out[0].transpose(0, 1))
        return torch.cat(outs)

    return attend


if __name__ == "__main__":
    main()
