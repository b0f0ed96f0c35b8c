"""A little cluster on one GPU: real training steps of all policies, in turns.

    python benchmarks/cluster_gpu.py --ranks 4 --lengths pretrain --context 128K --backend flash
    python benchmarks/cluster_gpu.py --cpu       two gloo ranks with tiny sizes, to try it out

Ranks share the GPU through MPS, each with its share of the SMs, and train over NCCL. Every side has
the same initial weights and the same batches of ranks x context tokens, so a rank has as many
tokens as the longest document. The order of sides rotates from step to step. A step is the slowest
rank's: all start together, and the device is synchronized at its end. Plans are made before.

A command is one cell of the results. It is written after every round, so that a run that is killed
keeps what it has; ``--resume`` adds the missing rounds, with new weights and the next batches, and
``--minutes`` ends a command in time.
"""

from __future__ import annotations

import argparse
import faulthandler
import os
import sys
import time
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import asdict
from datetime import date, datetime
from pathlib import Path
from threading import Timer
from typing import Any

import torch
import torch.distributed as dist
from cluster_options import batch_of, model_of, options_of, planners_of
from cluster_predict import predictor, transfer_sms_of, worst_tokens
from cluster_report import Cell, read_cell, table, write_cell
from cluster_sides import WAYS, TorchContextParallel

from distca.attention.core import CoreAttention
from distca.measure.sides import PlannedSide, Side
from distca.measure.steps import in_turns, train_step
from distca.model.config import ModelConfig
from distca.pipeline.mesh import MeshShape
from distca.runtime import launch, launched
from distca.runtime.lost_ranks import naming_lost_ranks
from distca.runtime.mesh import RankContext, join_mesh
from distca.runtime.nccl import loaded_version, version_text
from distca.runtime.parallelize import Precision
from distca.runtime.shared_gpu import share_gpu
from distca.runtime.world import join_world

LOGS = Path("runs/cluster_gpu")
END_S = 5  # from the stacks of a step that hangs to the end of the rank, so that all write theirs


def main() -> None:
    options = options_of()
    if launched.is_rank():
        with launched.reporting(), naming_lost_ranks():
            run_rank(options)
            dist.destroy_process_group()
        return
    command = [sys.executable, *sys.argv]
    logs = LOGS / f"{datetime.now():%Y-%m-%d_%H-%M-%S}"
    if options.cpu:
        os.environ["CUDA_VISIBLE_DEVICES"] = ""
        launch.launch(command, options.ranks, logs)
    else:
        with share_gpu(options.ranks, logs / "mps") as gpu:
            print(gpu, flush=True)
            launch.launch(command, options.ranks, logs, gpu)


# -- one rank ----------------------------------------------------------------------------------


def run_rank(options: argparse.Namespace) -> None:
    began = time.perf_counter()
    device = join_world()
    context = join_mesh(MeshShape(dp=options.ranks), device)
    config = model_of(options)
    cell = cell_of(options, device)
    predict = predictor(
        options.profile,
        config,
        options.ranks,
        recompute=not options.keep_activations,
        transfer_sms=transfer_sms_of(options.ranks, cell.about["SMs"]),
    )
    sides, refused = sides_of(options, config, context)
    first = context.rank == 0
    for name, reason in refused.items():
        cell.sides[name] = {"refused": reason}
    start = cell.num_steps
    for number in range(start - options.warm_up, options.steps):
        counts = number >= start
        batch = batch_of(options, seed=number if counts else 10**6 + number)
        for name in in_turns(sides, number):
            side = sides[name]
            with limited(options.step_limit, f"round {number + 1}, {name}"):
                ready = side.prepare(batch)
                figures = train_step(side, ready, context)
            if counts:
                plan = side.plan_of(ready)
                predicted = predict(plan, side.context.parallel)
                more = {"predicted": predicted, "worst_tokens": worst_tokens(plan)}
                cell.add(name, asdict(figures) | more)
        if first:
            if counts:
                write_cell(cell, options.out)
            told = f"round {number + 1} of {options.steps}: {cell.last_seconds}"
            print(told if counts else "warm-up", flush=True)
        if is_over(began + 60 * options.minutes, context):
            break
    if first:
        print(table(cell))
    if options.trace:
        trace(options, sides, context)


@contextmanager
def limited(seconds: float, what: str) -> Iterator[None]:
    """Ends this rank after some seconds, and says in its log where it was."""
    print(what, file=sys.stderr, flush=True)
    faulthandler.dump_traceback_later(seconds)
    end = Timer(seconds + END_S, end_rank)
    end.daemon = True
    end.start()
    try:
        yield
    finally:
        end.cancel()
        faulthandler.cancel_dump_traceback_later()


def end_rank() -> None:
    """Ends this rank, and says which collectives over NCCL have not ended."""
    dump = getattr(torch._C._distributed_c10d, "_dump_nccl_trace_json", None)
    if dump is not None:
        print(dump(includeCollectives=True, onlyActive=True).decode(), file=sys.stderr, flush=True)
    os._exit(1)


def trace(options: argparse.Namespace, sides: Mapping[str, Side], context: RankContext) -> None:
    """Prints which kernels of rank 0 take longest in the step after the last, for each side.

    Also writes traces for Perfetto into ``--out``.
    """
    batch = batch_of(options, seed=options.steps)
    for name, side in sides.items():
        if context.rank:
            train_step(side, side.prepare(batch), context)
            continue
        with torch.profiler.profile() as profiled:
            train_step(side, side.prepare(batch), context)
        profiled.export_chrome_trace(str(options.out / f"trace-{name}.json"))
        order = "self_device_time_total" if context.device.type == "cuda" else "self_cpu_time_total"
        print(name, profiled.key_averages().table(order, row_limit=25), sep="\n", flush=True)


def is_over(deadline: float, context: RankContext) -> bool:
    """Returns on all ranks whether the deadline is over on one of them."""
    over = torch.tensor(int(time.perf_counter() > deadline))
    dist.all_reduce(over, dist.ReduceOp.MAX, group=context.world_group)
    return bool(over)


def cell_of(options: argparse.Namespace, device: torch.device) -> Cell:
    """Returns the cell of this command: a new one, or the one to continue with ``--resume``."""
    gpu = device.type == "cuda"
    about: dict[str, Any] = {
        "ranks": options.ranks,
        "lengths": options.lengths,
        "context": options.context,
        "backend": options.backend,
        "model": f"{options.layers} layers of {options.model}",
        "recompute": not options.keep_activations,
        "card": torch.cuda.get_device_name() if gpu else "CPU",
        "SMs": torch.cuda.get_device_properties(device).multi_processor_count if gpu else 0,
        "torch": torch.__version__,
        "NCCL": version_text(loaded_version()) if gpu else "none",
        "sides": options.sides,
        "profile": options.profile or "",
    }
    command = f"python benchmarks/cluster_gpu.py {' '.join(sys.argv[1:])}"
    known = read_cell(about, options.out) if options.resume else None
    if known is not None:
        return known
    return Cell(
        about | {"date": str(date.today()), "command": command}, options.ranks * options.tokens
    )


def sides_of(
    options: argparse.Namespace, config: ModelConfig, context: RankContext
) -> tuple[dict[str, Side], dict[str, str]]:
    """Returns the sides by name, and why others cannot run."""
    gpu, recompute = context.device.type == "cuda", not options.keep_activations
    precision = Precision(torch.bfloat16 if gpu else torch.float32)
    attentions = tuple(
        CoreAttention(context.attention_group, backend=options.backend) for _ in range(2)
    )
    assert len(attentions) == 2
    sides: dict[str, Side] = {}
    refused: dict[str, str] = {}
    for name in options.sides.split(","):
        way = WAYS[name]
        if way is None:
            try:
                sides[name] = TorchContextParallel(
                    config, context, precision, options.tokens, recompute=recompute
                )
            except ValueError as error:
                refused[name] = str(error)
            continue
        sides[name] = PlannedSide(
            config,
            context,
            precision,
            planners_of(options, config, way),
            attentions,
            recompute=recompute,
        )
    return sides, refused


if __name__ == "__main__":
    main()
