"""A pool of processes that stay: ranks of one world, for many distributed tests.

They use gloo on the CPU, or NCCL on a GPU that they share.

Starting processes costs seconds; asking ones that wait costs milliseconds. What they run is named
by import, so it lives in modules, not in tests.
"""

from __future__ import annotations

import faulthandler
import gc
import multiprocessing as mp
import os
import pickle
import sys
import tempfile
import time
import traceback
from collections.abc import Callable
from datetime import timedelta
from multiprocessing import resource_tracker
from multiprocessing.connection import Connection
from typing import Any
from unittest import mock

import torch
import torch.distributed as dist

from distca.runtime.rank_device import local_device, shares_gpu
from distca.runtime.shared_gpu import SharedGpu

START_S, RUN_S = 60, 60
END_S = 10  # a rank that is killed on a shared GPU may leave it unusable for the others
# Imported once, before ranks are forked: each of them takes a second or more.
PRELOADED = [
    "torch._dynamo",
    "torch.distributed.tensor.parallel",
    "torch.distributed.fsdp",
    "torch.distributed.checkpoint.state_dict",
    "torch.utils.checkpoint",
    "distca.train.trainer",
]
if not torch.cuda.is_available():  # they wake it, which nobody may before a fork
    PRELOADED += ["transformers.models.llama.modeling_llama"]
    PRELOADED += ["megatron.core.models.gpt.gpt_layer_specs"]

IMPATIENT: dict[dist.ProcessGroup, dist.ProcessGroup] = {}


class RankFailedError(Exception):
    """A rank raised; the text is its traceback."""


class RankPool:
    """Ranks 0..size-1; each call runs on the first few of them, in a group of just those.

    ``IMPATIENT`` has the same groups again, over gloo with a timeout of a few seconds.

    shared_gpu: the GPU that all ranks use; None for the CPU.
    """

    def __init__(self, size: int, shared_gpu: SharedGpu | None = None) -> None:
        context: Any
        if shared_gpu is None:
            context, variables = mp.get_context("forkserver"), {}
            context.set_forkserver_preload(PRELOADED)
        else:  # variables such as LD_PRELOAD are for new programs, but not for this one
            resource_tracker.ensure_running()
            context, variables = mp.get_context("spawn"), dict(shared_gpu.variables)
        self._ends_by_itself = shared_gpu is not None
        self.is_usable = True
        self._folder = tempfile.TemporaryDirectory()
        self._pipes: list[Connection] = []
        self._processes = []
        for rank in range(size):
            ours, theirs = context.Pipe()
            store = f"file://{self._folder.name}/store"
            process = context.Process(
                target=_serve, args=(theirs, rank, size, store, sys.path), daemon=True
            )
            with mock.patch.dict(os.environ, variables):
                process.start()
            theirs.close()
            self._pipes.append(ours)
            self._processes.append(process)

    def run(self, body: Callable[..., Any], *args: Any, ranks: int) -> list[Any]:
        """body(group, *args) on each rank; its results, or the first error."""
        answers = self.answers(body, *args, ranks=ranks)
        for rank, (error, value) in enumerate(answers):
            if error is not None:
                raise RankFailedError(f"rank {rank}: {value}")
        return [value for _, value in answers]

    def answers(
        self, body: Callable[..., Any], *args: Any, ranks: int
    ) -> list[tuple[str | None, Any]]:
        """(None, result), or (the error's words, the traceback), of each rank."""
        call = pickle.dumps((body, args, ranks))
        for pipe in self._pipes[:ranks]:
            pipe.send_bytes(call)
        deadline = time.monotonic() + START_S + RUN_S
        answers = []
        for rank, pipe in enumerate(self._pipes[:ranks]):
            if not pipe.poll(max(deadline - time.monotonic(), 0)):
                self._kill()
                raise TimeoutError(f"rank {rank} of {ranks} hangs in {body.__name__}")
            try:
                answers.append(pickle.loads(pipe.recv_bytes()))
            except EOFError:
                self._processes[rank].join(1)
                code = self._processes[rank].exitcode
                self.is_usable = False
                raise RankFailedError(f"rank {rank} died with exit code {code}") from None
        return answers

    def close(self) -> None:
        if self._ends_by_itself and self.is_usable:
            for pipe in self._pipes:
                pipe.close()
            for process in self._processes:
                process.join(END_S)
        self._kill()
        self._folder.cleanup()

    def _kill(self) -> None:
        self.is_usable = False
        for process in self._processes:
            process.kill()
        for process in self._processes:
            process.join()


World = Callable[[int], RankPool]  # the pool whose world has so many ranks


_device = torch.device("cpu")


def rank_device() -> torch.device:
    """Returns the device of this rank, or the CPU in a process that is none."""
    return _device


def _serve(pipe: Connection, rank: int, size: int, store: str, path: list[str]) -> None:
    global _device
    faulthandler.enable()
    gc.freeze()  # or each collection would visit all that was imported before the fork
    sys.path[:] = path
    torch.set_num_threads(1)
    backend = "gloo"
    if shares_gpu():
        os.environ |= {"LOCAL_RANK": str(rank), "LOCAL_WORLD_SIZE": str(size)}
        _device, backend = local_device(), "cpu:gloo,cuda:nccl"
    timeout = timedelta(seconds=RUN_S)
    dist.init_process_group(backend, init_method=store, rank=rank, world_size=size, timeout=timeout)
    groups = {n: dist.new_group(list(range(n)), timeout=timeout) for n in range(1, size + 1)}
    for n, group in groups.items():
        impatient = timedelta(seconds=3)
        IMPATIENT[group] = dist.new_group(list(range(n)), timeout=impatient, backend="gloo")
    while True:
        try:
            body, args, ranks = pickle.loads(pipe.recv_bytes())
        except EOFError:  # the pool is closed
            dist.destroy_process_group()
            return
        try:
            answer = (None, body(groups[ranks], *args))
        except Exception as error:
            answer = (f"{type(error).__name__}: {error}", traceback.format_exc())
        pipe.send_bytes(pickle.dumps(answer))
