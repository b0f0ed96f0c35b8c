"""Attention inside another library's trainer, planned over all ranks once per batch.

The trainer brings its own packed batches, one for each rank. The ranks gather the documents of all
of them once per batch, and every rank makes the same plans from them.

    attention = PlannedAttention()              # for all ranks; process groups are made when needed
    batch = attention.gather(documents)         # on every rank: the documents of all ranks
    out = attention.attend(q, k, v, batch)      # in every layer, in forward and in recomputation
    batch = attention.local(documents)          # of this rank only: nothing is exchanged

``submit`` gathers and plans in a background thread, in the order of its calls;
``prefetch.prefetch`` calls it for the batches of a loader. An integration that knows when a forward
pass has been launched defers this work until then, and calls ``start``. [Note: deferred work]

Legend: T tokens of this rank, H heads, G key/value heads, D head size.
"""

import logging
from collections.abc import Sequence
from concurrent.futures import Future
from copy import deepcopy
from dataclasses import replace
from datetime import timedelta
from functools import partial
from typing import Any

import numpy as np
import torch
import torch.distributed as dist
from torch import Tensor

from distca.attention.backends.base import Scoring
from distca.attention.core import CoreAttention
from distca.attention.inputs import Inputs
from distca.dispatch.agreement import gather_or_raise
from distca.dispatch.background import DaemonExecutor, on_this_stream
from distca.dispatch.latent import Latent
from distca.dispatch.transports.local import LocalTransport, LocalWorld
from distca.integrations.shared.documents import Documents
from distca.integrations.shared.figures import AttentionFigures
from distca.integrations.shared.groups import PlanGroups
from distca.integrations.shared.planned_batch import (
    AttentionSpec,
    BatchPlans,
    PlannedBatch,
    RankBatch,
)
from distca.pipeline.speeds import LearnedSpeeds
from distca.planning.devices import Devices
from distca.planning.masks import Mask
from distca.planning.options import PlanOptions
from distca.planning.policies import policy_of

_WARN_AFTER_S = 30.0

_log = logging.getLogger(__name__)


BatchFuture = Future[PlannedBatch | None]


class PlannedAttention:
    """Core attention of a trainer's layers, planned over all ranks once per batch.

    group: the ranks that share their attention; None is the whole world. Without
        ``torch.distributed``, or in a group of one rank, every batch is local.
    backend, deterministic: options of ``CoreAttention``.
    learn_speed: whether plans give less to ranks whose measured attention is slow; None where
        ranks exchange over NCCL, since what CPUs measure depends on what else they do. Not if
        ``deterministic``: such plans differ from run to run.
    latents: whether latents travel instead of keys and values (MLA), where that is fewer bytes and
        the trainer's layers tell them. Gradients of weights must then be summed over all ranks that
        share their attention, as data parallelism does.
    policy: ``distca``, ``colocated`` or ``greedy``; the trainer's tokens stay where they are.
    timeout_s: how long a rank waits for a batch of the other ranks.
    plan_options: options of ``distca.plan`` by name, such as ``cost``, ``tolerance``,
        ``memory_bytes`` and ``speed`` (one value for each rank of the group). ``ranks_per_node`` is
        by default derived from the host names of the ranks.

    Its process groups are its own, so that its collectives never mix with the trainer's. For the
    whole world they are made at the first batch, or by ``connect``. If a group is given, they are
    made by the constructor: then all ranks of the world construct this object at the same point,
    each with its own group.
    """

    def __init__(
        self,
        group: dist.ProcessGroup | None = None,
        *,
        backend: str = "auto",
        deterministic: bool = False,
        learn_speed: bool | None = None,
        latents: bool = True,
        policy: str = "distca",
        timeout_s: float = 600.0,
        **plan_options: Any,
    ) -> None:
        self._group, self._timeout = group, timedelta(seconds=timeout_s)
        self._options, self._latents = PlanOptions.of(None, plan_options), latents
        self._scheduler = policy_of(policy).scheduler
        self._shares = policy_of(policy).disaggregated
        self._learn_speed = learn_speed if self._shares and not deterministic else False
        self._speeds: LearnedSpeeds | None = None
        self._untaken: dict[str, float] = {}  # seconds that ``take_seconds`` has yet to return
        self._untold: dict[str, float] = {}  # seconds that this rank has yet to tell the others
        self._figures = AttentionFigures()
        self._core_options: dict[str, Any] = {"backend": backend, "deterministic": deterministic}
        self._cores: dict[tuple[bool, Scoring], CoreAttention] = {}
        # The layers so far, in order: what plans depend on, and their scores.
        self._layers: dict[tuple[AttentionSpec, Scoring], None] = {}
        self._groups: PlanGroups | None = None
        self._last: dict[bool, BatchPlans] = {}  # of the last batch, by whether it was local
        self._executor = DaemonExecutor()
        if group is not None:
            self.connect()

    def connect(self) -> None:
        """Makes the process groups now, on all ranks of the world at the same point."""
        self._peers()

    def local(self, documents: Documents) -> PlannedBatch:
        """Returns a batch of this rank only: layers that attend by it exchange nothing."""
        options = replace(self._options, speed=None, busy_s=None, ranks_per_node=None)
        # Nothing is shared: every task is at home, and there are no figures to show.
        return PlannedBatch(self._plans([documents], options, local=True), 0, None, local=True)

    def gather(self, documents: Documents, error: str = "") -> PlannedBatch:
        """Returns the batch of all ranks.

        Every rank of the group calls it at the same point with its own documents, in the order in
        which they are packed; a rank may have none. An ``error`` on one rank is raised on all. A
        policy that moves nothing returns the local batch: no rank waits for another.
        """
        if self._peers() is None or not self._shares:
            if error:
                raise ValueError(error)
            return self.local(documents)
        batch = self.wait(self.submit(documents, error=error))
        assert batch is not None, "this rank is not done"
        return batch

    def submit(
        self,
        documents: Documents,
        *,
        done: bool = False,
        error: str = "",
        deferred: bool = False,
    ) -> BatchFuture:
        """Gathers a batch, and plans and prepares it for all layers so far, in the background.

        A rank that is ``done`` has no batch left, and takes part with filler documents until all
        ranks are done. Then the result is None on every rank.

        deferred: whether to plan only at ``start``, or when it is waited for. The documents are
            gathered at once: a rank may wait for that before the others call ``start``.
        """
        groups, submit = self._peers(), self._executor.submit
        if groups is None:
            work = partial(self._plan_local, tuple(documents), done, error)
        else:
            mine = RankBatch(tuple(documents), done, error, *self._attention_s())
            gathered = submit(partial(gather_or_raise, groups.planning, mine))
            work = partial(self._plan_shared, groups, gathered)
        return submit(on_this_stream(work), deferred=deferred)

    def start(self) -> None:
        """Begins to plan the next batch that was deferred."""
        self._executor.start()

    def wait(self, future: BatchFuture) -> PlannedBatch | None:
        """Returns the result of ``submit``, and logs a warning if it takes long."""
        self._executor.start(future)
        with self._figures.timing("plan_wait_s"):
            try:
                return future.result(_WARN_AFTER_S)
            except TimeoutError:
                if not future.done():
                    _log.warning(
                        "waited %.0f s for the documents of all ranks, and will wait for up to"
                        " %.0f s: every rank must call the model equally often",
                        _WARN_AFTER_S,
                        self._timeout.total_seconds(),
                    )
                return future.result()

    def attend(
        self,
        q: Tensor,
        k: Tensor,
        v: Tensor,
        batch: PlannedBatch,
        *,
        mask: str | Mask = "causal",
        scale: float | None = None,
        softcap: float = 0.0,
        sinks: Tensor | None = None,
        latent: Latent | None = None,
    ) -> Tensor:
        """Returns core attention [T, H, V] of q [T, H, D], k [T, G, D], v [T, G, V] and sinks [H].

        Every rank of the batch calls it, in the same order of layers. It is differentiable. Under
        autocast q, k, v and the latent are cast, as in torch's own attention.

        latent: the factors of k and v, which travel instead of them if they are fewer bytes.
        """
        scoring = Scoring(q.shape[-1] ** -0.5 if scale is None else scale, softcap)
        q, k, v, *factors = _autocast(q, k, v, *(latent or ()))
        inputs = Inputs(q, k, v, sinks, Latent(*factors) if factors else None)
        if not self._latents or not inputs.spec.latents_save_bytes:
            inputs = inputs._replace(latent=None)
        spec = AttentionSpec(Mask.parse(mask), inputs.spec)
        self._layers.setdefault((spec, scoring))
        core = self._core(batch.is_local, scoring)
        latent = None if batch.is_local else inputs.latent
        out: Tensor = core(q, k, v, batch.use(spec), sinks=sinks, latent=latent)
        return out

    def take_seconds(self) -> dict[str, float]:
        """Returns seconds since the last call.

        They are those of "attention", those "planned" for it on a device of speed 1, and those of
        "exposed" communication.
        """
        self._read_meters(wait=True)
        seconds, self._untaken = self._untaken, {}
        return seconds

    def take_figures(self) -> dict[str, float]:
        """Returns what logs show of the batches since the last call, see ``AttentionFigures.take``.

        It takes what ``take_seconds`` would return.
        """
        return self._figures.take(self.take_seconds())

    def close(self) -> None:
        """Ends the background thread after all submitted work; the next ``submit`` restarts it."""
        self._executor.shutdown()

    def _plan_local(self, documents: Documents, done: bool, error: str) -> PlannedBatch | None:
        if error:
            raise ValueError(error)
        return None if done else self._prepared(self.local(documents))

    def _plan_shared(
        self, groups: PlanGroups, gathered: Future[list[RankBatch]]
    ) -> PlannedBatch | None:
        batches = gathered.result()  # which is there, since the thread gathered it before
        if all(one.done for one in batches):
            return None
        options, ranks = self._learned(batches), [one.documents for one in batches]
        if options.ranks_per_node is None:
            options = replace(options, ranks_per_node=groups.ranks_per_node)
        plans = self._plans(ranks, options, local=False)
        rank = groups.planning.rank
        return self._prepared(PlannedBatch(plans, rank, self._figures, local=False))

    def _plans(
        self, ranks: Sequence[Documents], options: PlanOptions, *, local: bool
    ) -> BatchPlans:
        """Returns the plans of a batch: those of the last one, if it had the same documents.

        So have rows of one length, and a batch that goes through several models or iterations.
        """
        last = self._last.get(local)
        if last is None or not last.are_for(ranks, options):
            # Copied, since a trainer may change its own records for the next batch.
            documents = tuple(tuple(map(deepcopy, of_rank)) for of_rank in ranks)
            last = BatchPlans(documents, options, "home" if local else self._scheduler)
            self._last[local] = last
        return last

    def _prepared(self, batch: PlannedBatch) -> PlannedBatch:
        """Plans and prepares a batch for all layers so far."""
        for spec, scoring in list(self._layers):
            planned = batch.plan(spec)
            if not batch.is_local:  # cached by the plan: handshakes and figures need them
                _ = planned.fingerprint, planned.traffic, planned.backward_traffic
            if core := self._cores.get((batch.is_local, scoring)):
                # Nothing travels in local attention, so that it does not need latents.
                tensors = spec.tensors.expanded if batch.is_local else spec.tensors
                for backward in (False, True):
                    core.layouts.of(planned, tensors, backward=backward)
        return batch

    def _attention_s(self) -> tuple[float, float]:
        """Returns planned and measured seconds of shared attention that ended since the last call.

        It does not wait for the device.
        """
        self._read_meters(wait=False)
        seconds, self._untold = self._untold, {}
        return seconds.get("planned", 0.0), seconds.get("attention", 0.0)

    def _read_meters(self, *, wait: bool) -> None:
        for (local, _), core in list(self._cores.items()):
            for name, seconds in core.meter.take(wait=wait).items():
                for total in (self._untaken,) if local else (self._untaken, self._untold):
                    total[name] = total.get(name, 0.0) + seconds

    def _learned(self, batches: Sequence[RankBatch]) -> PlanOptions:
        """Returns the options with the speeds that follow from what the ranks have measured."""
        if self._speeds is None:  # refuses speeds that do not fit the ranks
            start = Devices.of(len(batches), speed=self._options.speed).speed
            self._speeds = LearnedSpeeds(start)
        groups = self._groups
        assert groups is not None, "several ranks have groups"
        if not (groups.use_nccl if self._learn_speed is None else self._learn_speed):
            return self._options
        planned, measured = np.array([(one.planned_s, one.measured_s) for one in batches]).T
        return replace(self._options, speed=self._speeds.update(planned, measured))

    def _core(self, local: bool, scoring: Scoring) -> CoreAttention:
        if (local, scoring) not in self._cores:
            options = self._core_options | scoring._asdict()
            if local:
                core = CoreAttention(transport=LocalTransport(LocalWorld(1), 0), **options)
            else:
                groups = self._peers()
                assert groups is not None, "a batch of all ranks needs their groups"
                core = CoreAttention(groups.layers, **options)
            self._cores[local, scoring] = core
        return self._cores[local, scoring]

    def _peers(self) -> PlanGroups | None:
        """Returns the groups, made on all ranks at the same point; None if there is one rank."""
        world = dist.group.WORLD if dist.is_available() and dist.is_initialized() else None
        if world is None or dist.get_world_size(world) == 1:
            return None
        # The default process group may have been destroyed and initialized again.
        if self._groups is None or self._groups.world is not world:
            self._groups = PlanGroups.make(world, self._group, self._timeout)
            self._cores = {key: core for key, core in self._cores.items() if key[0]}
            self._speeds, self._last = None, {}  # these may be other ranks
        return None if self._groups.planning.num_ranks == 1 else self._groups


def _autocast(*tensors: Tensor) -> tuple[Tensor, ...]:
    device = tensors[0].device.type
    if not torch.is_autocast_enabled(device):
        return tensors
    dtype = torch.get_autocast_dtype(device)
    return tuple(tensor.to(dtype) for tensor in tensors)
