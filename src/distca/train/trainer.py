"""The training loop, which is the same on all ranks.

    trainer = Trainer(Config.read("run.toml"))
    trainer.fit()

A dedicated server has no weights. It runs the same steps with the same plans, and computes
attention.
"""

import os
import signal
import time
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager, nullcontext
from itertools import islice
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist

from distca.model.checkpoints import load
from distca.model.initialize import initialize
from distca.model.llama import Llama, on_meta
from distca.pipeline.memory import Memory
from distca.pipeline.mesh import MeshShape
from distca.runtime.batches import Prefetched, Prefetcher
from distca.runtime.mesh import join_mesh
from distca.runtime.parallelize import parallelize
from distca.runtime.step import StepRunner
from distca.train import setup
from distca.train.checkpoints import Checkpoints
from distca.train.config import Config
from distca.train.evaluate import evaluate
from distca.train.flops import peak_flops, step_flops
from distca.train.metrics import Record, Records
from distca.train.optimizer import adamw, clip, freeze, learning_rate
from distca.train.trace import tracing

Show = Callable[[Record], None]


class Trainer:
    """One rank of a run. Raises ValueError with one sentence for a config that cannot run."""

    def __init__(self, config: Config, show: Show | None = None) -> None:
        self.config, self._show = config, show
        self.device = setup.join_world()
        parallel = setup.parallel_of(config, dist.get_world_size())
        tokenizer = setup.tokenizer_of(config)
        self.model_config = setup.model_of(config, tokenizer)
        self.loader = setup.loader_of(config, tokenizer)
        self.planner = setup.planner_of(config, parallel, self.model_config, self.device)
        self.memory = self._check_memory(parallel)
        self.context = join_mesh(parallel, self.device)
        self.runner = StepRunner.of(
            self.context,
            halves=1 + config.parallel.ping_pong,
            recompute=config.parallel.recompute,
            backend=config.parallel.backend,
            deterministic=config.train.deterministic,
            dtype=setup.precision_of(config, self.device).compute,
        )
        self.folder = Path(config.out)
        self.first_step = 0
        self._stop = False
        self.model: Llama | None = None
        if not self.context.only_serves:
            self._build()
        self._agree_on_start()

    def fit(self) -> list[Record]:
        """Trains until the last step or a signal; returns the records of the steps on rank 0."""
        train, taken = self.config.train, []
        records = self._open_records()
        batches = Prefetcher(self.loader, self.planner)
        with _on_sigterm(self._request_stop):
            for step in range(self.first_step, train.steps):
                with self._tracing(step):
                    record = self._step(step, batches.next())
                last = step + 1 == train.steps or record["stopped"]
                if train.eval_every and ((step + 1) % train.eval_every == 0 or last):
                    record |= self.evaluate()
                if records is not None:
                    records.write(record)
                    taken.append(record)
                if self._show is not None and self.context.rank == 0:
                    self._show(record)
                due = train.checkpoint_every and ((step + 1) % train.checkpoint_every == 0 or last)
                if due or record["stopped"]:
                    self._save(step + 1)
                if record["stopped"]:
                    break
            batches.close()
            if self.model is not None:
                self.checkpoints.wait()  # still inside the handler: a signal must not end it
        if records is not None:
            records.close()
        return taken

    def evaluate(self) -> dict[str, float]:
        """Returns losses of the first ``eval_tokens`` tokens of held-out documents."""
        tokens = max(self.config.train.tokens_per_step, self.config.data.context)
        count = -(-self.config.train.eval_tokens // tokens)
        batches = islice(self.loader.evaluation(tokens), count)
        return evaluate(self.model, self.runner, self.planner, batches)

    def _build(self) -> None:
        config, train = self.config, self.config.train
        assert self.context.stage is not None
        self.model = on_meta(self.model_config, *self.planner.stages[self.context.stage])
        precision = setup.precision_of(config, self.device)
        parallelize(self.model, self.context, precision, compile=config.parallel.compile)
        if config.model.path:
            load(self.model, Path(config.model.path), device=self.device)
        else:
            initialize(self.model, train.seed, device=self.device)
        freeze(self.model, train.frozen)
        self.optimizer = adamw(self.model, train)
        folder = self.folder / "checkpoints"
        self.checkpoints = Checkpoints(
            folder, self.model, self.optimizer, self.context, keep=train.keep
        )

    def _check_memory(self, parallel: MeshShape) -> Memory:
        """Returns the estimate for a worker. Raises ValueError if it exceeds the memory."""
        memory = setup.memory_of(self.config, parallel, self.model_config, self.device)
        local = int(os.environ.get("LOCAL_WORLD_SIZE", dist.get_world_size()))
        limit = setup.available_bytes(self.device, local, self.config.parallel.memory_gib)
        setup.check_memory(memory, limit)
        return memory

    def _agree_on_start(self) -> None:
        """Continues on all ranks from the step and the data position that rank 0 has loaded."""
        found: list[Any] = [None]
        if self.model is not None and self.config.resume and (path := self.checkpoints.newest()):
            found = [self.checkpoints.load(path)]
        dist.broadcast_object_list(found, src=0, group=self.context.world_group)
        if found[0] is not None:
            self.first_step = found[0]["step"]
            self.loader.restore(found[0]["loader"])
            self._loader_state = found[0]["loader"]

    def _open_records(self) -> Records | None:
        if self.context.rank:
            return None
        self.folder.mkdir(parents=True, exist_ok=True)
        self.config.save(self.folder / "config.json")
        return Records(self.folder, self.first_step)

    def _step(self, step: int, fetched: Prefetched) -> Record:
        start = time.perf_counter()
        self._loader_state = fetched.loader_state
        loss = float(self.runner.train(self.model, fetched.step))
        norm = 0.0 if self.model is None else self._update(step)
        taken = time.perf_counter() - start
        return self._record(step, fetched, loss, norm, taken)

    def _update(self, step: int) -> float:
        """Updates the weights; returns the norm of the gradients."""
        assert self.model is not None
        norm = clip(self.model, self.config.train.clip, self.context.pipeline_group)
        for group in self.optimizer.param_groups:
            group["lr"] = learning_rate(step, self.config.train)
        self.optimizer.step()
        self.optimizer.zero_grad()
        return norm

    def _record(
        self, step: int, fetched: Prefetched, loss: float, norm: float, taken: float
    ) -> Record:
        spent = [attention.meter.take() for attention in self.runner.attentions]
        attention, exposed = (
            sum(seconds.get(name, 0.0) for seconds in spent) for name in ("attention", "exposed")
        )
        memory = torch.cuda.max_memory_allocated() if self.device.type == "cuda" else 0
        mine = torch.tensor(
            [loss, norm, taken, attention, exposed, fetched.waited_s, memory, float(self._stop)],
            dtype=torch.float64,
        )
        everyone = [torch.empty_like(mine) for _ in range(dist.get_world_size())]
        dist.all_gather(everyone, mine, group=self.context.world_group)
        losses, norms, seconds, busy, exposures, waits, bytes_, stops = torch.stack(everyone).T
        batch, plan = fetched.step.batch, fetched.step.plan
        flops = step_flops(self.model_config, batch.lengths)
        wall, peak = float(seconds.max()), peak_flops(self.device)
        rate = flops / wall / len(everyone)
        return {
            "step": step,
            "loss": float(losses.sum()),
            "grad_norm": float(norms.max()),
            "lr": learning_rate(step, self.config.train),
            "seconds": wall,
            "tokens": batch.num_tokens,
            "tokens_per_s": batch.num_tokens / wall,
            "tflops_per_rank": rate / 1e12,
            "mfu": rate / peak if peak else None,
            "imbalance_before": plan.imbalance_before,
            "imbalance_planned": plan.imbalance,
            "imbalance_measured": float(busy.max() / busy.mean()) if busy.sum() else 1.0,
            "bytes": plan.num_bytes,
            "exposed_s": float(exposures.max()),
            "plan_s": fetched.plan_s,
            "planning_waited_s": float(waits.max()),
            "memory_bytes": int(bytes_.max()),
            "stopped": bool(stops.max()),
        }

    def _tracing(self, step: int) -> AbstractContextManager[None]:
        if step != self.config.train.trace:
            return nullcontext()
        return tracing(self.folder / "traces", self.context.world_group)

    def _save(self, step: int) -> None:
        if self.model is not None:
            self.checkpoints.save(step, {"step": step, "loader": self._loader_state})

    def _request_stop(self) -> None:
        self._stop = True


@contextmanager
def _on_sigterm(react: Callable[[], None]) -> Iterator[None]:
    """Calls ``react`` on SIGTERM, so that the run ends after its step and saves a checkpoint."""
    try:
        before = signal.signal(signal.SIGTERM, lambda *_: react())
    except ValueError:  # not the main thread, so signals are handled elsewhere
        yield
        return
    try:
        yield
    finally:
        signal.signal(signal.SIGTERM, before)
