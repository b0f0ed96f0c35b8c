"""TRL's trainers on uneven completions: its own modes and attention, against distca.

    python benchmarks/trl_speed.py --cpu             2 gloo ranks, ten minutes on two busy cores
    python benchmarks/trl_speed.py --share-gpu       2 NCCL ranks on one GPU
    python benchmarks/trl_speed.py --own sdpa ...    which attention TRL's own sides use

Every side is a trainer of TRL with the same weights; their updates alternate. An update is the
loss, the backward pass and DDP's reduction of gradients: neither generation nor the optimizer,
which are the same on all sides. SFT has three modes: padded rows, documents without padding
(padding-free) and packing, which are given about equally many tokens. GRPO has one, padded rows.
*colocated* computes with distca's kernels but moves nothing, so that the gain of *distca* over it
comes from balance. Gradients are compared, since the loss of GRPO's first update is the same for
any weights. On CPU ranks, CPU seconds are reported too: other load on the machine does not affect
them, but they leave out waiting.
"""

from __future__ import annotations

import argparse
import gc
import json
import os
import platform
import sys
import time
from contextlib import nullcontext
from datetime import date
from importlib.metadata import version
from importlib.util import find_spec
from pathlib import Path
from typing import Any, NamedTuple

import torch
import torch.distributed as dist
from trl_sides import MODES, SCRATCH, Case, Side, trainer_of

from distca.integrations.transformers import register
from distca.runtime import launch, launched
from distca.runtime.shared_gpu import share_gpu
from distca.runtime.world import join_world

RESULTS = Path(__file__).parent / "results"
PACKAGES = ("torch", "transformers", "trl", "accelerate", "datasets")
WARM_UP = 2
CLOCKS = {"seconds": "tokens/s", "cpu_seconds": "tokens per CPU second of the busiest rank"}
MASKS = ("attention_mask", "prompt_mask", "completion_mask")


class Update(NamedTuple):
    seconds: float  # of the slowest rank
    cpu_seconds: float  # that the busiest rank has computed, in all of its threads
    tokens: int  # of the rows of all ranks, without padding
    loss: float  # the mean of all ranks
    norm: float  # of the gradients


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--ranks", type=int, default=2)
    parser.add_argument("--steps", type=int, default=8, help="updates of a side, after the warm-up")
    parser.add_argument("--context", type=int, default=0, help="2,048 with --cpu, else 16,384")
    parser.add_argument("--layers", type=int, default=2, help="of the model")
    parser.add_argument("--own", nargs="+", default=[], help="TRL's side: attn_implementation")
    parser.add_argument("--modes", nargs="+", choices=MODES, default=[*MODES], help="of SFT")
    parser.add_argument("--only", choices=("SFT", "GRPO"), help="one of the trainers")
    parser.add_argument("--trace", action="store_true", help="then profile an update of each side")
    parser.add_argument("--cpu", action="store_true")
    parser.add_argument("--share-gpu", action="store_true")
    parser.add_argument("--out", type=Path, default=RESULTS)
    options = parser.parse_args()
    options.context = options.context or (2048 if options.cpu else 16384)
    options.own = options.own or ["sdpa"] + ["flash_attention_4"] * bool(find_spec("flash_attn"))
    if launched.is_rank():
        with launched.reporting():
            run_rank(options)
            dist.destroy_process_group()
        return
    print(*(f"{name} {version(name)}" for name in PACKAGES), flush=True)
    os.environ |= {"HF_HUB_OFFLINE": "1", "TQDM_DISABLE": "1", "TOKENIZERS_PARALLELISM": "false"}
    if options.cpu:
        os.environ |= {"OMP_NUM_THREADS": "1", "ACCELERATE_USE_CPU": "true"}
    logs = SCRATCH / "logs"
    with share_gpu(options.ranks, logs / "mps") if options.share_gpu else nullcontext() as gpu:
        # Accelerate chooses the GPU of a rank by LOCAL_RANK.
        local = [0] * options.ranks if options.share_gpu else None
        launch.launch([sys.executable, *sys.argv], options.ranks, logs, gpu, local_ranks=local)


def cases(options: argparse.Namespace) -> list[Case]:
    context, completion = options.context, options.context // 4
    every = [
        Case("SFT", "chat", context),
        Case("SFT", "reasoning", context),
        Case("GRPO", "reasoning", completion, prompt=completion // 8),
        Case("GRPO", "reasoning", completion, prompt=completion),
    ]
    return [case for case in every if options.only in (None, case.trainer)]


def run_rank(options: argparse.Namespace) -> None:
    device = join_world()
    registered = {
        "colocated": register("colocated", policy="colocated", timeout_s=300.0),
        "distca": register("distca", timeout_s=300.0),
    }
    rows = []
    for case in cases(options):
        found = measure(case, options, registered, device)
        rows += found
        gc.collect()  # the models of the sides
        if dist.get_rank() == 0:
            for row in found:
                print({name: value for name, value in row.items() if name != "updates"}, flush=True)
            write(options, rows, device)  # after every case, so that a killed run keeps those


def measure(
    case: Case, options: argparse.Namespace, registered: dict[str, Any], device: torch.device
) -> list[dict[str, Any]]:
    modes = options.modes if case.trainer == "SFT" else ["padded"]
    own = [Side(mode, attention) for attention in options.own for mode in modes]
    sides = own + [Side(mode, attention) for attention in registered for mode in modes]
    steps = options.steps + WARM_UP
    trainers = {}
    for side in sides:
        trainer = trainer_of(case, side, steps + options.trace, options.layers, device)
        if side.attention in registered:
            registered[side.attention].adopt(trainer)
        trainers[side] = Updates(trainer, device)
    updates: dict[Side, list[Update]] = {side: [] for side in sides}
    for _ in range(steps):
        for side in sides:
            updates[side].append(trainers[side].step())
    if options.trace:
        for side in sides:
            trace(case, side, trainers[side], options.out)
    measured = {side: updates[side][WARM_UP:] for side in sides}
    rows = []
    for side in sides:
        # The first one with the same documents; the modes without packing have the same.
        exact = next(one for one in own if (one.mode == "packing") == (side.mode == "packing"))
        pairs = list(zip(updates[side], updates[exact], strict=True))
        figures = {
            "loss_difference": max(abs(a.loss - b.loss) for a, b in pairs),
            "gradient_difference": max(abs(a.norm / b.norm - 1) for a, b in pairs),
            "updates": [one._asdict() for one in measured[side]],
        }
        for clock in CLOCKS:
            speeds = {one: speed(measured[one], clock) for one in sides}
            figures[f"tokens_per_{clock}"] = speeds[side]
            figures[f"over_fastest_{clock}"] = speeds[side] / max(speeds[one] for one in own)
        rows.append(case._asdict() | side._asdict() | figures)
    return rows


def trace(case: Case, side: Side, updates: Updates, out: Path) -> None:
    """Prints what takes longest in one more update of rank 0; writes a timeline for Perfetto."""
    if dist.get_rank():
        updates.step()
        return
    with torch.profiler.profile() as profiled:
        updates.step()
    out.mkdir(parents=True, exist_ok=True)
    name = f"{case.trainer}-{case.lengths}-{case.prompt}-{side.mode}-{side.attention}"
    profiled.export_chrome_trace(str(out / f"trace-{name}.json"))
    for order in ("self_cpu_time_total", "self_device_time_total"):
        print(name, profiled.key_averages().table(order, row_limit=25), sep="\n", flush=True)


def speed(updates: list[Update], clock: str) -> float:
    """Returns the tokens of all updates over their seconds, since their documents differ."""
    return sum(one.tokens for one in updates) / sum(getattr(one, clock) for one in updates)


class Updates:
    """The updates of a trainer, as its ``train`` computes them, but one at a time."""

    def __init__(self, trainer: Any, device: torch.device) -> None:
        self._trainer, self._device = trainer, device
        trainer.current_gradient_accumulation_steps = 1  # which ``train`` sets
        self._model = trainer.accelerator.prepare(trainer.model.train())
        handler = trainer.callback_handler
        handler.train_dataloader = loader = trainer.get_train_dataloader()
        handler.on_train_begin(trainer.args, trainer.state, trainer.control)  # distca plans ahead
        self._batches = iter(loader)

    def step(self) -> Update:
        trainer = self._trainer
        (batch,), num_items = trainer.get_batch_samples(self._batches, 1, self._device)
        inputs = trainer._prepare_inputs(batch)  # in GRPO, it generates and scores completions
        self._finish()
        dist.barrier()
        start = torch.tensor([time.perf_counter(), time.process_time()], dtype=torch.float64)
        loss = trainer.compute_loss(self._model, inputs, num_items_in_batch=num_items)
        trainer.accelerator.backward(loss)
        self._finish()
        end = torch.tensor([time.perf_counter(), time.process_time()], dtype=torch.float64)
        taken = (end - start).to(self._device)
        dist.all_reduce(taken, dist.ReduceOp.MAX)
        grads = [p.grad.float() for p in self._model.parameters()]
        norm = torch.stack([grad.norm() for grad in grads]).norm()
        self._model.zero_grad()
        sums = torch.tensor([num_tokens(inputs), loss.item()], device=self._device)
        dist.all_reduce(sums)
        mean = sums[1].item() / dist.get_world_size()
        return Update(*taken.tolist(), int(sums[0]), mean, norm.item())

    def _finish(self) -> None:
        if self._device.type == "cuda":
            torch.cuda.synchronize()


def num_tokens(inputs: dict[str, Any]) -> int:
    masks = [inputs[name] for name in MASKS if name in inputs]
    return sum(int(mask.sum()) for mask in masks) if masks else inputs["input_ids"].numel()


def write(options: argparse.Namespace, rows: list[dict[str, Any]], device: torch.device) -> None:
    gpu = device.type == "cuda"
    card = torch.cuda.get_device_name() if gpu else f"CPU ({platform.machine()})"
    name = f"trl_{'gpu' if gpu else 'cpu'}_{options.ranks}"
    clocks = ["seconds"] if gpu else [*CLOCKS]  # the CPU of a GPU rank mostly waits
    versions = ", ".join(f"{package} {version(package)}" for package in PACKAGES)
    lines = [
        "# TRL on uneven completions\n",
        f"`python benchmarks/trl_speed.py {' '.join(sys.argv[1:])}`, {date.today()}, {card},"
        f" {options.ranks} ranks, {options.layers} layers, {versions}."
        f" {options.steps} updates of each side, in turns, without generation and optimizer."
        " Tokens are those of TRL's rows without padding; differences are the"
        " largest ones from TRL's first attention on the same documents.\n",
        "| trainer | lengths | up to | prompt | mode | attention"
        + "".join(f" | {CLOCKS[clock]} | over TRL's fastest" for clock in clocks)
        + " | difference of losses | of gradient norms, relative |",
        "|---" * (8 + 2 * len(clocks)) + "|",
    ]
    for r in rows:
        speeds = "".join(
            f" | {r[f'tokens_per_{clock}']:,.0f} | {r[f'over_fastest_{clock}']:.2f}"
            for clock in clocks
        )
        lines.append(
            f"| {r['trainer']} | {r['lengths']} | {r['context']:,} | {r['prompt'] or ''}"
            f" | {r['mode']} | {r['attention']}{speeds} | {r['loss_difference']:.1e}"
            f" | {r['gradient_difference']:.1e} |"
        )
    text = "\n".join(lines) + "\n"
    options.out.mkdir(parents=True, exist_ok=True)
    (options.out / f"{name}.md").write_text(text)
    (options.out / f"{name}.json").write_text(json.dumps(rows, indent=1) + "\n")


if __name__ == "__main__":
    main()
