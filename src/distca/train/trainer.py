"""The training loop, which is the same on all ranks.

    trainer = Trainer(Config.read("run.toml"))
    trainer.fit()

A dedicated server has no weights. It runs the same steps with the same plans, and computes
attention.
"""

from __future__ import annotations

import math
import os
import time
from collections.abc import Callable, Generator, Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import replace
from functools import partial
from itertools import islice
from pathlib import Path
from typing import Any

import torch.distributed as dist

from distca.dispatch.ranges import named
from distca.dispatch.transports.base import ExchangeError
from distca.model.llama import Llama
from distca.runtime.host_ranks import HostRanks
from distca.runtime.joining import Description, Joined
from distca.runtime.launched import RankFailedError, mark_repeated
from distca.runtime.mesh import RankContext, join_mesh
from distca.runtime.nodes import Nodes
from distca.runtime.regroup import NotNeededError
from distca.runtime.stalls import stacks_if_stalled
from distca.runtime.step import StepRunner
from distca.runtime.together import together
from distca.runtime.world import join_world
from distca.train import agreement, setup
from distca.train.config import Config
from distca.train.evaluate import evaluate
from distca.train.extra import check_extra, extra_of
from distca.train.gathered_record import gathered_record
from distca.train.metrics import Record
from distca.train.optimizer import learning_rate
from distca.train.run_folder import RunFolder, Tell
from distca.train.run_ranks import RunRanks
from distca.train.stop import StopRequest
from distca.train.trace import tracing
from distca.train.weights import Weights

Show = Callable[[Record], None]


class Trainer:
    """One rank of a run. Raises ValueError with one sentence for a config that cannot run.

    show: called with the record of each step, on rank 0.
    tell: called with sentences for the user, on rank 0, such as where a run continues.
    stop: ends the run after its step, on all ranks; by default ``fit`` makes SIGTERM do that.
    sides: runs that share the memory of a rank.
    survives: whether the run goes on without dedicated servers that are lost (``RunRanks``).
    """

    weights: Weights | None  # None on a dedicated server

    def __init__(
        self,
        config: Config,
        show: Show | None = None,
        tell: Tell | None = None,
        *,
        stop: StopRequest | None = None,
        sides: int = 1,
        survives: bool = True,
    ) -> None:
        self._begin(config, show, tell, stop)
        self.device = join_world()
        own = self._prepare(sides)
        survives = survives and config.parallel.servers > 0
        self._take_place(own, join_mesh(own.parallel, self.device, survives=survives))
        self.folder = RunFolder.of_ranks(config, self.context, self._tell_user)
        try:
            if not self.context.only_serves:
                self.weights = self._build()
            check = partial(check_extra, model=self.model_config, loader=self.loader)
            self.folder.resume(self.weights, self.context.world_group, check, self._restore)
        except BaseException:
            self.folder.unlock()
            raise

    @classmethod
    def of_new_server(
        cls, config: Config, own: setup.Components, joined: Joined, stop: StopRequest
    ) -> Trainer:
        """Returns the trainer of a dedicated server that has joined a run between two steps."""
        trainer = cls.__new__(cls)
        trainer._begin(config, None, None, stop)
        trainer.device = joined.context.device
        trainer._take_place(own, joined.context)
        rank = joined.context.rank
        trainer.folder = RunFolder(Path(config.out), config, rank, trainer._tell_user)
        trainer._skipped = joined.state["skipped"]
        trainer._restore(joined.state)
        trainer.ranks.restore(joined.state)
        return trainer

    def _begin(
        self, config: Config, show: Show | None, tell: Tell | None, stop: StopRequest | None
    ) -> None:
        self.config, self._show, self._tell = config, show, tell
        self.stop = stop or StopRequest()
        self.first_step, self._skipped = 0, 0
        self.before_step: Callable[[int], None] | None = None  # also if it is taken again
        self.faults: Sequence[str] = ()  # of ``--inject``, for servers that join
        self.weights = None
        self.is_needed = True  # until a server of the same set is lost

    def _take_place(self, own: setup.Components, context: RankContext) -> None:
        self.own, self.model_config, self.loader = own, own.model, own.loader
        self.memory = own.memory
        self.ranks = RunRanks(
            context,
            own.planner,
            setup.runner_options(self.config, self.device),
            learn_speed=setup.learns_speed(self.config, self.device),
            compensate=self.config.parallel.compensate,
            tell=self._tell_user,
        )

    @property
    def context(self) -> RankContext:
        return self.ranks.context

    @property
    def runner(self) -> StepRunner:
        return self.ranks.runner

    def fit(self) -> list[Record]:
        """Trains until the last step or a signal; returns the records of the steps on rank 0."""
        with self.stop.on_sigterm():
            taken = list(self.steps())
        return [] if self.context.rank else taken

    def steps(self) -> Generator[Record]:
        """Trains, and yields the record of each step; saves and ends on a request to stop."""
        train = self.config.train
        batches, records = self.ranks.start(self.loader, self._description()), None
        if self._host.peers is not None and "MASTER_PORT" in os.environ:
            store = f"{os.environ['MASTER_ADDR']}:{os.environ['MASTER_PORT']}"
            self._tell_user(f"servers can join: distca serve --join {store}")
        try:
            records = self.folder.open_records(self.first_step)
            for step in range(self.first_step, train.steps):
                if step > self.first_step:
                    self._change_servers(step)
                batches.next(self.ranks.planner)
                with self._tracing(step), named(f"step {step}"), stacks_if_stalled():
                    record = self._step(step)
                # A skipped step changes no weights, and must not replace what was saved before it.
                is_last = step + 1 == train.steps
                if saved := train.saves_after(step) and (is_last or not self._skipped):
                    self._save(step)
                if train.evaluates_after(step):
                    record |= self.evaluate()
                    record["stopped"] = self.ranks.survive("a request to stop", self._stop_now)
                if record["stopped"] and train.save_at_end and not saved:
                    self._save(step)
                record |= self.ranks.take_changes()
                if records is not None:
                    records.write(record)
                if self._show is not None and self.context.rank == 0:
                    self._show(record)
                yield record
                if record["stopped"]:
                    break
        except NotNeededError:
            self.is_needed = self.stop.requested  # otherwise it has not left by itself
        else:
            if self.weights is not None:
                self.weights.checkpoints.wait()
        finally:
            self.ranks.end()
            batches.close()
            if records is not None:
                records.close()
            self.folder.unlock()

    def evaluate(self) -> dict[str, float]:
        """Returns losses of the first ``eval_tokens`` tokens of held-out documents.

        If a stop is requested on any rank, it ends after the current batch and returns none.
        """
        tokens = max(self.config.train.tokens_per_step, self.config.data.context)
        count = -(-self.config.train.eval_tokens // tokens)

        def once() -> dict[str, float]:
            batches = islice(self.loader.evaluation(tokens), count)
            return evaluate(self._model, self.runner, self.ranks.planner, batches, self._stop_now)

        return self.ranks.survive("an evaluation", once)

    def _prepare(self, sides: int) -> setup.Components:
        """Returns this rank's components. Raises ValueError on all ranks if one has others."""
        agreement.agree(agreement.config_of(self.config))
        nodes = Nodes.of_world()
        with together():
            own = setup.Components.of(
                self.config, dist.get_world_size(), self.device, nodes=nodes, sides=sides
            )
        agreement.agree(own.to_json())
        return own

    def _description(self) -> Description | None:
        """Returns what a process has to know that wants to join; the first rank publishes it."""
        if self._host.peers is None or self.context.rank:
            return None
        config = replace(self.config, out=str(self.folder.path.absolute()))
        return Description(
            config=config.to_json(),
            num_ranks=self.own.parallel.num_ranks,
            ranks_per_node=self.own.planner.options.ranks_per_node,
            facts=setup.facts_of(self.config, self.own, self.device),
            faults=list(self.faults),
        )

    def _change_servers(self, step: int) -> None:
        """Lets servers leave and join before a step."""
        state = {"step": step, "loader": self._loader_state, "skipped": self._skipped}
        self.ranks.change_servers(f"step {step}", state)

    def _tell_user(self, sentence: str) -> None:
        if self._tell is not None and self.context.rank == 0:
            self._tell(sentence)

    def _build(self) -> Weights:
        assert self.context.stage is not None
        layers = self.ranks.planner.stages[self.context.stage]
        path = self.folder.path
        return Weights.build(self.config, self.model_config, layers, self.context, path)

    def _restore(self, extra: dict[str, Any]) -> int:
        """Continues at the step and the data position of a checkpoint; returns the step."""
        self.first_step, self._loader_state = extra["step"], extra["loader"]
        self.loader.restore(self._loader_state)
        return self.first_step

    def _step(self, step: int) -> Record:
        self.runner.warm_up(self._model, self.ranks.batch.step.plan)
        start = time.perf_counter()
        self._loader_state = self.ranks.batch.loader_state
        compute = partial(self._compute_gradients, step)
        loss, norm, skipped = self.ranks.survive(f"step {step}", compute)
        if self.weights is not None and skipped:
            self.weights.drop_gradients()
        elif self.weights is not None:
            self.weights.update(step)
        taken = time.perf_counter() - start
        record = {"step": step, "lr": learning_rate(step, self.config.train), "skipped": skipped}
        record |= gathered_record(
            self.ranks,
            self.model_config,
            loss=loss,
            grad_norm=norm,
            seconds=taken,
            stop=self.stop.requested and not self._leaves,
            leaves=self._leaves,
        )
        self._skipped = self._skipped + 1 if skipped else 0
        if self._skipped > self.config.train.skip_non_finite:
            self._fail(
                f"step {step} has a loss of {record['loss']:.4g} and a gradient norm of"
                f" {record['grad_norm']:.4g}, so weights were not updated"
            )
        return record

    def _compute_gradients(self, step: int) -> tuple[float, float, bool]:
        """Returns this rank's loss, the norm of all gradients, and whether to drop these."""
        if self.before_step is not None:
            self.before_step(step)
        fetched, norm = self.ranks.batch, 0.0
        try:
            launched = self.runner.train(self._model, fetched.step, fetched.prepared)
            self.ranks.plan_ahead()
            loss = float(launched)  # waits for the device
            if self.weights is not None:
                norm = self.weights.clip()
            skip = self._host.any(not (math.isfinite(loss) and math.isfinite(norm)))
        except ExchangeError:
            if self.weights is not None:
                self.weights.drop_gradients()
            raise
        return loss, norm, skip

    def _fail(self, what: str) -> None:
        """Ends the run on all ranks, after the save that is in progress."""
        if self.weights is not None:
            self.weights.checkpoints.wait()
        error = RankFailedError(
            f"{what}; {self.folder.newest_checkpoint}: lower train.lr or train.clip, look at the"
            " data of this step, or set train.skip_non_finite"
        )
        mark_repeated(error, self.context.rank > 0)
        raise error

    @property
    def _model(self) -> Llama | None:
        return None if self.weights is None else self.weights.model

    @property
    def _host(self) -> HostRanks:
        return self.context.host

    def _stop_now(self) -> bool:
        return self._host.any(self.stop.requested and not self._leaves)

    @property
    def _leaves(self) -> bool:
        """Whether a request to stop concerns this rank alone: a server that others can replace."""
        return self.stop.requested and self.context.only_serves and self._host.peers is not None

    def _tracing(self, step: int) -> AbstractContextManager[None]:
        def all_ranks() -> list[int]:
            self.ranks.survive("a timeline", lambda: self._host.any(False))
            return self._host.ranks

        if step != self.config.train.trace:
            return nullcontext()
        return tracing(self.folder.path / "traces", self.context.rank, all_ranks)

    def _save(self, step: int) -> None:
        """Writes the checkpoint after a step; it is named by how many steps were taken."""
        bad = self.weights is not None and not self.weights.are_finite
        if self.ranks.survive("a checkpoint", lambda: self._host.any(bad)):
            self._fail(f"weights are not finite after step {step}, so they are not saved")
        if self.weights is not None:
            extra = extra_of(step + 1, self._loader_state, self.model_config)
            self.weights.checkpoints.save(step + 1, extra)
