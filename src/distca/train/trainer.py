"""The training loop, which is the same on all ranks.

    trainer = Trainer(Config.read("run.toml"))
    trainer.fit()

A dedicated server has no weights. It runs the same steps with the same plans, and computes
attention.
"""

import math
import time
from collections.abc import Callable, Generator
from contextlib import AbstractContextManager, nullcontext
from itertools import islice
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist

from distca.model.checkpoints import load
from distca.model.initialize import initialize
from distca.model.llama import Llama, on_meta
from distca.pipeline.speeds import LearnedSpeeds
from distca.runtime.batches import Prefetched, Prefetcher
from distca.runtime.launched import RankFailedError, is_launched, mark_repeated
from distca.runtime.mesh import join_mesh
from distca.runtime.parallelize import parallelize
from distca.runtime.step import StepRunner
from distca.runtime.together import from_all_ranks, together
from distca.train import agreement, setup
from distca.train.checkpoints import Checkpoints
from distca.train.config import Config
from distca.train.evaluate import evaluate
from distca.train.flops import peak_flops, step_flops
from distca.train.metrics import ABANDONED, Record, Records, writing_to
from distca.train.optimizer import adamw, clip, freeze, is_finite, learning_rate
from distca.train.run_lock import RunLock
from distca.train.step_folders import newest
from distca.train.stop import StopRequest
from distca.train.trace import tracing

Show = Callable[[Record], None]
Tell = Callable[[str], None]


class Trainer:
    """One rank of a run. Raises ValueError with one sentence for a config that cannot run.

    show: called with the record of each step, on rank 0.
    tell: called with sentences for the user, on rank 0, such as where a run continues.
    stop: ends the run after its step, on all ranks; by default ``fit`` makes SIGTERM do that.
    sides: runs that share the memory of a rank.
    """

    def __init__(
        self,
        config: Config,
        show: Show | None = None,
        tell: Tell | None = None,
        *,
        stop: StopRequest | None = None,
        sides: int = 1,
    ) -> None:
        self.config, self._show, self._tell = config, show, tell
        self.stop = stop or StopRequest()
        self.device = setup.join_world()
        own = self._prepare(sides)
        self.model_config, self.loader, self.planner = own.model, own.loader, own.planner
        self.memory = own.memory
        self._speeds = LearnedSpeeds(own.planner.speed) if setup.learns_speed(config) else None
        self.context = join_mesh(own.parallel, self.device)
        self.runner = StepRunner.of(
            self.context,
            halves=1 + config.parallel.ping_pong,
            recompute=config.parallel.recompute,
            backend=config.parallel.backend,
            deterministic=config.train.deterministic,
            dtype=setup.precision_of(config, self.device).compute,
        )
        self.folder = Path(from_all_ranks(config.out)[0])
        self._lock = self._lock_folder()
        self.first_step, self._skipped = 0, 0
        self.model: Llama | None = None
        try:
            if not self.context.only_serves:
                self._build()
            self._agree_on_start()
        except BaseException:
            self._unlock()
            raise

    def fit(self) -> list[Record]:
        """Trains until the last step or a signal; returns the records of the steps on rank 0."""
        with self.stop.on_sigterm():
            taken = list(self.steps())
        return [] if self.context.rank else taken

    def steps(self) -> Generator[Record]:
        """Trains, and yields the record of each step; saves and ends on a request to stop."""
        train = self.config.train
        batches = Prefetcher(self.loader, self.planner, self.runner.prepare)
        records = None
        try:
            records = self._open_records()
            for step in range(self.first_step, train.steps):
                with self._tracing(step):
                    record = self._step(step, batches.next(self.planner))
                if saved := train.saves_after(step):
                    self._save(step + 1)
                if train.evaluates_after(step):
                    record |= self.evaluate()
                    record["stopped"] = self._stopped()
                if record["stopped"] and train.save_at_end and not saved:
                    self._save(step + 1)
                if records is not None:
                    records.write(record)
                if self._show is not None and self.context.rank == 0:
                    self._show(record)
                yield record
                if record["stopped"]:
                    break
            if self.model is not None:
                self.checkpoints.wait()
        finally:
            batches.close()
            if records is not None:
                records.close()
            self._unlock()

    def evaluate(self) -> dict[str, float]:
        """Returns losses of the first ``eval_tokens`` tokens of held-out documents.

        If a stop is requested on any rank, it ends after the current batch and returns none.
        """
        tokens = max(self.config.train.tokens_per_step, self.config.data.context)
        count = -(-self.config.train.eval_tokens // tokens)
        batches = islice(self.loader.evaluation(tokens), count)
        return evaluate(self.model, self.runner, self.planner, batches, self._stopped)

    def _prepare(self, sides: int) -> setup.Components:
        """Returns this rank's components. Raises ValueError on all ranks if one has others."""
        agreement.agree(agreement.config_of(self.config))
        with together():
            own = setup.Components.of(self.config, dist.get_world_size(), self.device, sides=sides)
        agreement.agree(agreement.components_of(own.model, own.loader.fingerprints, own.weights))
        return own

    def _lock_folder(self) -> RunLock | None:
        """Locks the folder on rank 0, unless the launcher has done so."""
        lock = None
        with together(self.context.world_group):
            if self.context.rank == 0 and not is_launched():
                lock = RunLock(self.folder)
        return lock

    def _unlock(self) -> None:
        if self._lock is not None:
            self._lock.release()

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

    def _agree_on_start(self) -> None:
        """Continues on all ranks from the step and the data position that rank 0 has loaded."""
        start: list[Any] = [None]
        with together(self.context.world_group):
            if self.model is not None and self.config.resume:
                chosen = None if self.config.from_step < 0 else self.config.from_step
                resumed = self.checkpoints.resume(chosen)
                start = [resumed and (resumed.extra, resumed.notes)]
        dist.broadcast_object_list(start, src=0, group=self.context.world_group)
        words = f"starting new in {self.folder}"
        notes: list[str] = []
        if start[0] is not None:
            extra, notes = start[0]
            with together(self.context.world_group):
                self._restore(extra)
            words = f"resumed from step {self.first_step} of {self.folder}"
        if self.model is not None:
            aside = self.checkpoints.set_aside_after(self.first_step if start[0] else -1)
            notes += [f"{name} is later, and is kept but not used" for name in aside]
        if self._tell is not None and self.context.rank == 0:
            for line in (*notes, words):
                self._tell(line)

    def _restore(self, extra: dict[str, Any]) -> None:
        try:
            self.first_step = int(extra["step"])
            self.loader.restore(extra["loader"])
        except (KeyError, TypeError, AttributeError, IndexError) as error:
            raise ValueError(
                f"extra.json of the checkpoint in {self.folder} is damaged ({error!r}): use --from"
                " with an earlier step"
            ) from None
        self._loader_state = extra["loader"]

    def _open_records(self) -> Records | None:
        if self.context.rank:
            return None
        with writing_to(self.folder):
            self.folder.mkdir(parents=True, exist_ok=True)
            self.config.save(self.folder / "config.json")
            records = Records(self.folder, self.first_step)
        if self._tell is not None and (count := records.num_abandoned):
            self._tell(f"{count} records of later steps were moved to {self.folder / ABANDONED}")
        return records

    def _step(self, step: int, fetched: Prefetched) -> Record:
        start = time.perf_counter()
        self._loader_state = fetched.loader_state
        loss = float(self.runner.train(self.model, fetched.step, fetched.prepared))
        norm = 0.0
        if self.model is not None:
            norm = clip(self.model, self.config.train.clip, self.context.pipeline_group)
        skipped = self._any(not (math.isfinite(loss) and math.isfinite(norm)))
        if self.model is not None:
            self._update(step, skipped)
        taken = time.perf_counter() - start
        record = self._record(step, fetched, loss, norm, taken) | {"skipped": skipped}
        self._skipped = self._skipped + 1 if skipped else 0
        if self._skipped > self.config.train.skip_non_finite:
            self._fail(
                f"step {step + 1} has a loss of {record['loss']:.4g} and a gradient norm of"
                f" {record['grad_norm']:.4g}, so weights were not updated"
            )
        return record

    def _update(self, step: int, skip: bool) -> None:
        """Updates the weights with the gradients, or only drops these."""
        for group in self.optimizer.param_groups:
            group["lr"] = learning_rate(step, self.config.train)
        if not skip:
            self.optimizer.step()
        self.optimizer.zero_grad()

    def _fail(self, what: str) -> None:
        """Ends the run on all ranks, after the save that is in progress."""
        if self.model is not None:
            self.checkpoints.wait()
        found = newest(self.folder / "checkpoints")
        where = f"the last checkpoint is {found}" if found else "there is no checkpoint"
        error = RankFailedError(
            f"{what}; {where}: lower train.lr or train.clip, look at the data of this step, or set"
            " train.skip_non_finite"
        )
        mark_repeated(error, self.context.rank > 0)
        raise error

    def _stopped(self) -> bool:
        return self._any(self.stop.requested)

    def _any(self, mine: bool) -> bool:
        """Returns whether it is true on any rank."""
        flag = torch.tensor(int(mine))
        dist.all_reduce(flag, dist.ReduceOp.MAX, group=self.context.world_group)
        return bool(flag)

    def _record(
        self, step: int, fetched: Prefetched, loss: float, norm: float, taken: float
    ) -> Record:
        spent = [attention.meter.take() for attention in self.runner.attentions]
        attention, planned, exposed = (
            sum(seconds.get(name, 0.0) for seconds in spent)
            for name in ("attention", "planned", "exposed")
        )
        memory = torch.cuda.max_memory_allocated() if self.device.type == "cuda" else 0
        batch, plan = fetched.step.batch, fetched.step.plan
        serves, stop = plan.serves(self.context.plan_rank), self.stop.requested
        mine = torch.tensor(
            [
                loss, norm, taken, attention, planned, serves, exposed, fetched.waited_s, memory,
                stop,
            ],
            dtype=torch.float64,
        )  # fmt: skip
        everyone = [torch.empty_like(mine) for _ in range(dist.get_world_size())]
        dist.all_gather(everyone, mine, group=self.context.world_group)
        columns = torch.stack(everyone).T
        losses, norms, seconds, busy, loads, serving, exposures, waits, bytes_, stops = columns
        self._learn_speed(loads, busy)
        busy = busy[serving > 0]  # workers that leave all attention to servers are not imbalanced
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
            "speeds": plan.speed,
            "imbalance_measured": float(busy.max() / busy.mean()) if busy.sum() else 1.0,
            "bytes": plan.num_bytes,
            "exposed_s": float(exposures.max()),
            "plan_s": fetched.plan_s,
            "planning_waited_s": float(waits.max()),
            "memory_bytes": int(bytes_.max()),
            "stopped": bool(stops.max()),
        }

    def _learn_speed(self, planned_s: torch.Tensor, measured_s: torch.Tensor) -> None:
        """Plans later steps with the speeds that follow from the attention [ranks] of this one.

        The ranks of a tensor-parallel group have the same plans, and its slowest rank counts.
        """
        if self._speeds is None:
            return
        groups = (-1, self.context.parallel.tp)
        planned, measured = (x.view(groups).amax(1).numpy() for x in (planned_s, measured_s))
        speed = self._speeds.update(planned, measured)
        if speed != tuple(self.planner.speed):
            self.planner = self.planner.with_speed(speed)

    def _tracing(self, step: int) -> AbstractContextManager[None]:
        if step != self.config.train.trace:
            return nullcontext()
        return tracing(self.folder / "traces", self.context.world_group)

    def _save(self, step: int) -> None:
        if self._any(self.model is not None and not is_finite(self.model)):
            self._fail(f"weights are not finite after step {step}, so they are not saved")
        if self.model is not None:
            self.checkpoints.save(step, {"step": step, "loader": self._loader_state})
