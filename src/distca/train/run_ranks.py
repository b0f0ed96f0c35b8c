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

    ranks.change_servers("step 8", state)

lets servers leave and join between two steps, in the same way.
"""

from __future__ import annotations

import gc
import logging
import time
from collections.abc import Callable, Sequence
from dataclasses import asdict, replace
from typing import Any, TypeVar

import torch

from distca.data.loader import Loader
from distca.dispatch.peer_news import PeerLostError
from distca.dispatch.transports.base import ExchangeError
from distca.dispatch.transports.surviving import NEWS_S
from distca.pipeline.speeds import LearnedSpeeds
from distca.pipeline.step_planner import StepPlanner
from distca.runtime import lost_ranks
from distca.runtime.batches import Prefetched, Prefetcher
from distca.runtime.joining import Description, publish, publish_end
from distca.runtime.launched import is_launched, report_lost, report_started
from distca.runtime.mesh import RankContext
from distca.runtime.regroup import close, leave, regroup
from distca.runtime.step import StepRunner
from distca.train.server_changes import Change, Loss

SILENT_S = 30.0  # a server that lives but does not answer for so long is lost
_log = logging.getLogger(__name__)
Result = TypeVar("Result")


class RunRanks:
    """This rank's view of all ranks of a run.

    runner_options: those of ``StepRunner.of``.
    learn_speed: whether plans follow the measured speed of each rank.
    compensate: whether slow ranks get less attention for their other work too.
    tell: called with a sentence for each server that is lost.
    """

    def __init__(
        self,
        context: RankContext,
        planner: StepPlanner,
        runner_options: dict[str, Any],
        *,
        learn_speed: bool,
        compensate: bool,
        tell: Callable[[str], None],
    ) -> None:
        self.context, self.planner = context, planner
        self.runner = StepRunner.of(context, **runner_options)
        self._speeds = LearnedSpeeds(planner.speed) if learn_speed else None
        self._compensates = compensate
        self._runner_options, self._tell = runner_options, tell
        self._first_planner = planner
        self._batches: Prefetcher | None = None
        self._changes: list[Loss | Change] = []
        self._leaving: set[int] = set()
        self._admits = False

    def start(self, loader: Loader, description: Description | None = None) -> Prefetcher:
        """Starts to load and plan batches; from now on servers may be lost, and may join.

        description: of the run, for those that want to join it; needed on the first rank.
        """
        if self.context.host.peers is not None:
            lost_ranks.spare(self.context.servers)
            self._publish(description)
        report_started()
        self._batches = Prefetcher(loader, self.planner, self.runner.prepare)
        return self._batches

    def end(self) -> None:
        """Tells candidates that the run is over."""
        if self.context.host.peers is not None and self.context.rank == 0:
            publish_end(self.context)

    def state(self) -> dict[str, Any]:
        """Returns what a new server has to know to make the same plans."""
        speed = None if self.planner.options.speed is None else self.planner.speed.tolist()
        learned = None if self._speeds is None else self._speeds.state()
        return {"servers": self.context.servers, "speed": speed, "learned": learned}

    def restore(self, state: dict[str, Any]) -> None:
        """Continues on a new server with the state of the others before it has joined."""
        before = state["servers"]
        self.planner = self.planner.with_servers(len(before), state["speed"])
        if self._speeds is not None:
            self._speeds = LearnedSpeeds.of_state(state["learned"])
        self._keep_plan_ranks(before)

    @property
    def batch(self) -> Prefetched:
        """The current batch, planned for the ranks that are left."""
        assert self._batches is not None
        assert self._batches.current is not None
        return self._batches.current

    def plan_ahead(self) -> None:
        """Begins to plan the batches ahead, when the current one has been launched."""
        assert self._batches is not None
        self._batches.start()

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
        self._record_losses(lost, during)
        return result

    @property
    def admits(self) -> bool:
        """Whether enough candidates wait; known to the first rank."""
        peers = self.context.host.peers
        return peers is not None and peers.num_candidates >= self.context.parallel.tp

    def plan_change(self, leaving: torch.Tensor, admits: torch.Tensor) -> None:
        """Notes which ranks want to leave after a step [ranks], and whether candidates wait."""
        self._leaving = {
            rank for rank, leaves in zip(self.context.host.ranks, leaving, strict=True) if leaves
        }
        self._admits = bool(admits.any())

    def change_servers(self, before: str, state: dict[str, Any]) -> None:
        """Lets servers leave and join between two steps, as was noted.

        before: the step that follows.
        state: what new servers have to know of the run, beside ``RunRanks.state``.
        """
        leaving, admits = self._leaving, self._admits
        self._leaving, self._admits = set(), False
        if not leaving and not admits:
            return
        if self.context.rank in leaving:
            leave(self.context)
        start, servers = time.time(), self.context.servers
        lost = self._go_on({**state, **self.state()} if admits else None, repeats=False)
        now = self.context.servers
        self._record_losses(lost, f"a change before {before}")
        for rank in {*servers, *now} - {one.rank for one in lost}:
            if (rank in servers) != (rank in now):
                seconds = time.time() - start
                self._record(Change(rank, rank in now, start, before, seconds, len(now)))

    def take_changes(self) -> dict[str, list[dict[str, Any]]]:
        """Returns what has become of servers since the last call, by the name in a record."""
        changes, self._changes = self._changes, []
        named: dict[str, list[dict[str, Any]]] = {}
        for change in changes:
            if isinstance(change, Loss):
                name = "lost_servers"
            else:
                name = "joined_servers" if change.joined else "left_servers"
            named.setdefault(name, []).append(asdict(change))
        return named

    def _record_losses(self, lost: Sequence[PeerLostError], during: str) -> None:
        for one in lost:
            seconds, servers = time.time() - one.noticed_at, len(self.context.servers)
            self._record(Loss(one.rank, one.how, one.noticed_at, during, seconds, servers))
            if self.context.rank == 0:
                report_lost(one.rank, one.noticed_at)

    def _record(self, change: Loss | Change) -> None:
        self._changes.append(change)
        # Ranks that the launcher has started have a log each, others share a screen.
        _log.log(logging.WARNING if is_launched() else logging.INFO, "%s", change)
        self._tell(str(change))

    def learn_speed(
        self, planned_s: torch.Tensor, measured_s: torch.Tensor, other_s: torch.Tensor
    ) -> None:
        """Plans later steps with the speeds that follow from the attention [ranks] of a step.

        The ranks of a tensor-parallel group have the same plans, and its slowest rank counts.

        other_s: [ranks] seconds in which ranks neither computed attention nor waited.
        """
        if self._speeds is None:
            return
        groups = (-1, self.context.parallel.tp)
        planned, measured, other = (
            x.view(groups).amax(1).numpy() for x in (planned_s, measured_s, other_s)
        )
        speed = self._speeds.update(planned, measured, other if self._compensates else None)
        if speed != tuple(self.planner.speed):
            self.planner = self.planner.with_speed(speed)

    def _can_go_on(self) -> bool:
        """Returns whether an exchange has failed because servers are lost."""
        peers, workers = self.context.host.peers, range(self.context.parallel.num_workers)
        if peers is None or peers.lost_within(NEWS_S) is None:
            return False
        return not any(lost.rank in workers for lost in peers.losses)

    def _go_on(
        self, state: dict[str, Any] | None = None, *, repeats: bool = True
    ) -> list[PeerLostError]:
        """Continues with the servers that are left, and with new ones; returns losses.

        state: for new servers; None if they have to wait.
        repeats: whether the current batch is needed again.
        """
        before, peers = self.context, self.context.host.peers
        assert peers is not None
        self.context = context = regroup(before, state)
        self._publish()
        close(before)
        self._keep_plan_ranks(before.servers)
        runner = StepRunner.of(context, **self._runner_options)
        for old, new in zip(self.runner.attentions, runner.attentions, strict=True):
            new.watch = old.watch
        self.runner = replace(runner, observe=self.runner.observe)
        if self._batches is not None:
            self._batches.plan_again(self.planner, self.runner.prepare, repeats=repeats)
        return [lost for lost in peers.losses if lost.rank not in context.servers]

    def _publish(self, description: Description | None = None) -> None:
        """Lets servers join, and servers that do not answer be lost."""
        context = self.context
        if context.rank == 0:
            assert context.host.peers is not None
            context.host.peers.watch_answers(context.servers, SILENT_S)
            publish(context, description)

    def _keep_plan_ranks(self, before: Sequence[int]) -> None:
        """Plans for the servers that there are now; ``before`` are those that were planned for."""
        parallel, servers = self.context.parallel, self.context.servers
        workers = range(parallel.num_workers // parallel.tp)
        sets = {rank: number for number, rank in enumerate(before[:: parallel.tp], len(workers))}
        new = servers[:: parallel.tp]
        kept = [*workers, *(sets.get(rank) for rank in new)]
        start = [1.0] * len(workers) + [self._first_speed(rank) for rank in new]
        if self._speeds is not None:
            self._speeds = self._speeds.of_ranks(kept, start)
        speed = None
        if self.planner.options.speed is not None:
            known = [None if one is None else self.planner.speed[one] for one in kept]
            speed = [first if one is None else one for one, first in zip(known, start, strict=True)]
        self.planner = self.planner.with_servers(len(servers), speed)

    def _first_speed(self, server: int) -> float:
        """Returns the speed of a server in the config; 1 for one that the config does not know."""
        first, tp = self._first_planner, self.context.parallel.tp
        known = server < first.parallel.num_ranks
        return float(first.speed[server // tp]) if known else 1.0
