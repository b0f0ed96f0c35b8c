"""Delivers the faults of a run on the rank that has them, each once and at its place.

    records = fit_with_faults(trainer, faults)

The injector follows a run by what the run tells: the attention that is dispatched and computed
(``attention.prepared.Watch``), the end of each tick (``StepRunner.observe``), checkpoints that are
written (``Checkpoints.before_write``), and the end of each step. A run without faults has none of
them.
"""

from __future__ import annotations

import errno
import os
import signal
import subprocess
from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext
from dataclasses import replace
from math import prod

import torch

from distca.dispatch.peers import drop_connections
from distca.pipeline.schedule import Tick
from distca.runtime.launched import num_restarts
from distca.runtime.together import together
from distca.train.fault_log import FaultLog
from distca.train.fault_places import TickSlots, check_faults
from distca.train.faults import (
    BETWEEN,
    CHECKPOINT,
    DROP,
    EVALUATION,
    KILL,
    REFUSE,
    SLOW,
    STOP,
    Fault,
)
from distca.train.metrics import Record
from distca.train.slowed import prepare, slowed
from distca.train.trainer import Trainer


def fit_with_faults(trainer: Trainer, faults: Sequence[Fault]) -> list[Record]:
    """Trains as ``Trainer.fit`` does, with faults. Raises ValueError for one that cannot come."""
    with together(trainer.context.world_group):
        check_faults(faults, trainer.ranks.planner, trainer.config.train)
        prepare_faults(faults, trainer.device)
    trainer.faults = [str(fault) for fault in faults]
    with trainer.stop.on_sigterm():
        taken = list(steps_with_faults(trainer, faults))
    return [] if trainer.context.rank else taken


def prepare_faults(faults: Sequence[Fault], device: torch.device) -> None:
    """Loads what faults need, at a point where no rank waits for another on its device.

    Raises ValueError for a fault that is not possible there.
    """
    if any(fault.action == SLOW for fault in faults):
        prepare(device)


def steps_with_faults(trainer: Trainer, faults: Sequence[Fault]) -> Iterator[Record]:
    """Trains as ``Trainer.steps`` does, with the faults of this rank that have not come yet.

    A server that has joined a run later calls it too, after ``prepare_faults``.
    """
    rank, planner, log = trainer.context.rank, trainer.ranks.planner, FaultLog(trainer.folder.path)
    mine = [one for one in log.missing(faults) if one.rank(trainer.own.parallel) == rank]
    injector = Injector(mine, rank, TickSlots.of(planner), planner.ping_pong, log)
    if mine:
        injector.follow(trainer)
    restarted = num_restarts() > 0
    for record in trainer.steps():
        if not rank and (restarted or "lost_servers" in record):
            log.recovered(record["step"])
        restarted = False
        yield record
        injector.end(record["step"])


class Injector:
    """The faults of one rank, and where in the run the rank is.

    ticks: those of every step, from which follows which layers a dispatch belongs to.
    ping_pong: whether each slot is dispatched twice, once for each half.
    """

    def __init__(
        self,
        faults: Sequence[Fault],
        rank: int,
        ticks: Sequence[TickSlots],
        ping_pong: bool,
        log: FaultLog,
    ) -> None:
        self._pending = list(faults)
        self._begun = set[Fault]()  # of those that last for several steps
        self._rank, self._ticks, self._halves, self._log = rank, ticks, 1 + ping_pong, log
        self._step = self._tick = self._dispatched = 0

    def follow(self, trainer: Trainer) -> None:
        """Lets a run tell this injector where it is, from its first step on."""
        trainer.before_step = self.begin
        trainer.ranks.runner = replace(trainer.runner, observe=self._end_tick)
        for attention in trainer.runner.attentions:
            attention.watch = self
        if trainer.weights is not None:
            trainer.weights.checkpoints.before_write = self._write_checkpoint

    def begin(self, step: int) -> None:
        """Is called before a step, and again before one that is taken again."""
        self._step, self._tick, self._dispatched = step, 0, 0

    def end(self, step: int) -> None:
        self._deliver(step, lambda fault: fault.place == BETWEEN)

    def dispatch(self) -> None:
        """Implements ``Watch``: slots are dispatched in order, and each in all its halves."""
        if self._tick >= len(self._ticks):  # all ticks of the step are done
            self._deliver(self._step, lambda fault: fault.place == EVALUATION)
            return
        number, tick = self._tick, self._ticks[self._tick]
        slot, self._dispatched = self._dispatched // self._halves, self._dispatched + 1

        def is_here(fault: Fault) -> bool:
            here = fault.before_attention and fault.tick in (None, number)
            return here and tick.matches(fault, slot)

        layers, direction = sorted(tick.slots[slot]), tick.direction
        self._deliver(
            self._step, is_here, tick=number, slot=slot, layers=layers, direction=direction
        )

    @contextmanager
    def kernels(self, timed: AbstractContextManager[None], device: torch.device) -> Iterator[None]:
        """Implements ``Watch``: a kernel call of a slow rank takes longer.

        What the device had to do before the call is not slowed.
        """
        slow = [fault for fault in self._pending if self._is_slow(fault)]
        for fault in slow:
            if fault not in self._begun:
                self._begun.add(fault)
                self._log.delivered(fault, self._rank, self._step)
        speed = prod(fault.speed or 1.0 for fault in slow)
        with timed, slowed(speed, device) if slow else nullcontext():
            yield

    def _is_slow(self, fault: Fault) -> bool:
        return fault.action == SLOW and fault.steps.first <= self._step <= fault.steps.last

    def _end_tick(self, number: int, tick: Tick) -> None:
        self._tick, self._dispatched = self._tick + 1, 0

    def _write_checkpoint(self, step: int) -> None:
        """Is called in the background, for the checkpoint after ``step`` steps."""
        self._deliver(step - 1, lambda fault: fault.place == CHECKPOINT)

    def _deliver(self, step: int, is_here: Callable[[Fault], bool], **where: object) -> None:
        for fault in [one for one in self._pending if one.steps.first == step and is_here(one)]:
            self._pending.remove(fault)
            self._log.delivered(fault, self._rank, step, **where)
            strike(fault)


def strike(fault: Fault) -> None:
    """Does to this process what a fault says, unless it is one that lasts."""
    action = fault.action
    if action == KILL:
        os.kill(os.getpid(), signal.SIGKILL)
    elif action == STOP:
        _stop(fault.seconds)
    elif action == DROP:
        drop_connections()
    elif action == REFUSE:
        raise OSError(errno.ENOSPC, "No space left on device")


def _stop(seconds: float | None) -> None:
    """Stops this process; another one, in the same session, wakes it after some seconds."""
    waker = None
    if seconds is not None:
        wake = f"sleep {seconds:g}; kill -CONT {os.getpid()}"
        waker = subprocess.Popen(["/bin/sh", "-c", wake], stdin=subprocess.DEVNULL)
    os.kill(os.getpid(), signal.SIGSTOP)
    if waker is not None:
        waker.wait()
