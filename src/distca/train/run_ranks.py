"""The ranks of a run, and everything that depends on which of them are left.

Dedicated servers have no weights, so a run goes on when one of them is lost: at once, without a
restart, and with the same numbers.

    ranks.survive("step 7", work)

does the work of all ranks, and does it again from the start if servers are lost in it. Work has to
be such that it can be repeated, and that it ends with the same outcome on all ranks (``HostRanks``
promises that): all of them return from it, or all raise.

1. The ranks that are left agree on who they are, and make new groups (``runtime.regroup``).
2. Batches that are planned ahead are planned again for them, and so is the current one.
3. All ranks do the work again.
"""

from __future__ import annotations

import gc
import logging
import time
from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import Any, TypeVar

import torch

from distca.data.loader import Loader
from distca.dispatch.peers import PeerLostError
from distca.dispatch.transports.base import ExchangeError
from distca.dispatch.transports.surviving import NEWS_S
from distca.pipeline.speeds import LearnedSpeeds
from distca.pipeline.step_planner import StepPlanner
from distca.runtime import lost_ranks
from distca.runtime.batches import Prefetched, Prefetcher
from distca.runtime.launched import is_launched
from distca.runtime.mesh import RankContext
from distca.runtime.regroup import without_lost_servers
from distca.runtime.step import StepRunner

_log = logging.getLogger(__name__)
Result = TypeVar("Result")


@dataclass(frozen=True)
class Loss:
    """A dedicated server that a run has lost and done without.

    noticed_at: in seconds since 1970.
    during: what was repeated without it.
    seconds: from the notice until that was done.
    servers: how many are left.
    """

    rank: int
    how: str
    noticed_at: float
    during: str
    seconds: float
    servers: int

    def __str__(self) -> str:
        s = "" if self.servers == 1 else "s"
        left = f"with {self.servers} server{s}" if self.servers else "without servers"
        return (
            f"rank {self.rank}, a dedicated server, was lost in {self.during} ({self.how}), which"
            f" was done again {left} {self.seconds:.1f} s later"
        )


class RunRanks:
    """This rank's view of all ranks of a run.

    runner_options: those of ``StepRunner.of``.
    learn_speed: whether plans follow the measured speed of each rank.
    tell: called with a sentence for each server that is lost.
    """

    def __init__(
        self,
        context: RankContext,
        planner: StepPlanner,
        runner_options: dict[str, Any],
        *,
        learn_speed: bool,
        tell: Callable[[str], None],
    ) -> None:
        self.context, self.planner = context, planner
        self.runner = StepRunner.of(context, **runner_options)
        self._speeds = LearnedSpeeds(planner.speed) if learn_speed else None
        self._runner_options, self._tell = runner_options, tell
        self._batches: Prefetcher | None = None
        self._losses: list[Loss] = []

    def start(self, loader: Loader) -> Prefetcher:
        """Starts to load and plan batches; from now on servers may be lost."""
        if self.context.host.peers is not None:
            lost_ranks.spare(self.context.servers)
        self._batches = Prefetcher(loader, self.planner, self.runner.prepare)
        return self._batches

    @property
    def batch(self) -> Prefetched:
        """The current batch, planned for the ranks that are left."""
        assert self._batches is not None
        assert self._batches.current is not None
        return self._batches.current

    def survive(self, during: str, work: Callable[[], Result]) -> Result:
        """Returns the result of work that all ranks do; repeats it without lost servers."""
        lost: list[PeerLostError] = []
        while True:
            try:
                result = work()
                break
            except ExchangeError:
                if not self._can_go_on():
                    raise
            lost += self._go_on()
            gc.collect()  # closes the connections of the old groups now
        for one in lost:
            seconds, servers = time.time() - one.noticed_at, len(self.context.servers)
            loss = Loss(one.rank, one.how, one.noticed_at, during, seconds, servers)
            self._losses.append(loss)
            # Ranks that the launcher has started have a log each, others share a screen.
            _log.log(logging.WARNING if is_launched() else logging.INFO, "%s", loss)
            self._tell(str(loss))
        return result

    def take_losses(self) -> list[Loss]:
        """Returns the losses since the last call."""
        losses, self._losses = self._losses, []
        return losses

    def learn_speed(self, planned_s: torch.Tensor, measured_s: torch.Tensor) -> None:
        """Plans later steps with the speeds that follow from the attention [ranks] of a step.

        The ranks of a tensor-parallel group have the same plans, and its slowest rank counts.
        """
        if self._speeds is None:
            return
        groups = (-1, self.context.parallel.tp)
        planned, measured = (x.view(groups).amax(1).numpy() for x in (planned_s, measured_s))
        speed = self._speeds.update(planned, measured)
        if speed != tuple(self.planner.speed):
            self.planner = self.planner.with_speed(speed)

    def _can_go_on(self) -> bool:
        """Returns whether an exchange has failed because servers are lost."""
        peers, workers = self.context.host.peers, range(self.context.parallel.num_workers)
        if peers is None or peers.lost_within(NEWS_S) is None:
            return False
        return not any(lost.rank in workers for lost in peers.losses)

    def _go_on(self) -> list[PeerLostError]:
        """Continues without the servers that are lost; returns their losses."""
        before, peers = self.context, self.context.host.peers
        assert peers is not None
        self.context = context = without_lost_servers(before)
        self._keep_plan_ranks(before, context)
        runner = StepRunner.of(context, **self._runner_options)
        for old, new in zip(self.runner.attentions, runner.attentions, strict=True):
            new.watch = old.watch
        self.runner = replace(runner, observe=self.runner.observe)
        if self._batches is not None:
            self._batches.plan_again(self.planner, self.runner.prepare)
        return [lost for lost in peers.losses if lost.rank not in context.servers]

    def _keep_plan_ranks(self, before: RankContext, after: RankContext) -> None:
        tp = before.parallel.tp
        workers = range(before.parallel.num_workers // tp)
        sets = enumerate(before.servers[::tp], len(workers))
        kept = [*workers, *(number for number, rank in sets if rank in after.servers)]
        self.planner = self.planner.with_ranks(kept, after.parallel.servers)
        self._speeds = None if self._speeds is None else self._speeds.of_ranks(kept)
