"""Step 3 of balanced placement: slices and medium documents go to workers.

The largest net load comes first, and goes to the worker with the most net headroom. As long as each
of the next slices goes to another worker, they are dealt at once, because numpy takes less time for
hundreds of them than Python for ten.
"""

from __future__ import annotations

import heapq
from collections.abc import Sequence
from dataclasses import dataclass
from typing import NamedTuple

import numpy as np

from distca.planning.placers.senders import even_out_senders
from distca.planning.placers.slices import Slice, SliceLimits, Slicer
from distca.planning.problem import DocumentLoads
from distca.planning.spans import Bools, Floats, Ints, as_ints

WORTH_A_CUT = 0.02  # share of the largest net headroom up to which no slice is cut to fill it
FEW_AT_ONCE = 16  # slices; where fewer can be dealt at once, so many follow one by one


@dataclass(eq=False)
class DealtShards:
    """The shards that workers have got so far, and what workers can still take."""

    headroom: Floats  # [workers]
    tokens_left: Floats  # [workers]
    short: Bools  # [documents] whether a document is to fill up the workers, uncut
    table: Ints  # [shards, 4] worker, document, start, stop

    @classmethod
    def none(cls, capacity: Floats, tokens: float, short: Bools) -> DealtShards:
        return cls(capacity.copy(), np.full_like(capacity, tokens), short, as_ints([[]] * 4).T)

    def put(self, worker: Ints, slices: Sequence[Slice]) -> None:
        """Puts slices on their workers."""
        document, start, stop = (
            as_ints([getattr(one, name) for one in slices])
            for name in ("document", "start", "stop")
        )
        table = np.stack([worker, document, start, stop], axis=1)
        self.table = np.concatenate([self.table, table])
        np.subtract.at(self.headroom, worker, np.array([one.load for one in slices], np.float64))
        np.subtract.at(self.tokens_left, worker, (stop - start).astype(np.float64))

    def net_headroom(self, density: float) -> Floats:
        """[workers] Returns headroom less density x tokens left.

        That is what the tokens that will fill up a worker leave of its headroom.
        """
        return self.headroom - density * self.tokens_left


class LongDocuments(NamedTuple):
    """Slices and medium documents on their workers, before short documents fill these up."""

    documents: DocumentLoads
    capacity: Floats  # [workers]
    tokens: float  # the share of a worker
    short: Bools  # [documents] the others
    worker: Ints  # [slices]
    slices: list[Slice]
    traffic_limit: float  # see ``Slicer.cut_from_the_tail``

    def dealt(self) -> DealtShards:
        """Returns the shards that workers have got, and what they can still take."""
        dealt = DealtShards.none(self.capacity, self.tokens, self.short)
        dealt.put(self.worker, self.slices)
        return dealt

    def with_even_senders(self) -> LongDocuments:
        """Returns the same slices, some of them swapped."""
        num_workers = len(self.capacity)
        worker = even_out_senders(
            self.worker, self.slices, num_workers, self.tokens, self.traffic_limit
        )
        return self._replace(worker=worker)


def deal_slices(
    slicer: Slicer, slices: list[Slice], dealt: DealtShards, traffic_limit: float
) -> tuple[Ints, list[Slice]]:
    """Deals slices, the largest net load first, to the worker with the most net headroom.

    A slice that is too large for it is cut, and its lower end is dealt like the others. Returns the
    worker of each slice, and the slices.

    slices: the largest net load first, as ``Slicer`` cuts them.
    """
    workers = _Workers(dealt, slicer.density, traffic_limit, slicer.grain.spacing)
    demands = _Demands.of(slices)
    lower_ends: list[tuple[float, int, int, Slice]] = []  # a heap
    chosen: list[int] = []
    parts: list[Slice] = []
    first = 0  # of the slices that are left
    one_by_one = 0  # how many are dealt before the next ones at once
    while first < len(slices) or lower_ends:
        if one_by_one == 0:
            heaviest_end = lower_ends[0][0] if lower_ends else np.inf
            last = int(demands.negative_net.searchsorted(heaviest_end))
            at_once = workers.take_at_once(demands.part(first, last))
            chosen += at_once
            parts += slices[first : first + len(at_once)]
            first += len(at_once)
            one_by_one = 1 if len(at_once) >= FEW_AT_ONCE else FEW_AT_ONCE
            continue
        one_by_one -= 1
        if not lower_ends or (
            first < len(slices) and _heaviest_first(slices[first]) < lower_ends[0]
        ):
            upper, first = slices[first], first + 1
        else:
            *_, upper = heapq.heappop(lower_ends)
        worker = workers.best(upper)
        headroom = float(workers.net_headroom[worker])
        tokens_left = float(workers.tokens_left[worker])
        net_load = headroom if headroom > workers.worth_a_cut else np.inf
        if upper.size > tokens_left or upper.net > net_load:
            upper, *lower = slicer.split(upper, SliceLimits(net_load, tokens_left))
            for one in lower:
                heapq.heappush(lower_ends, (*_heaviest_first(one), one))
        chosen.append(worker)
        parts.append(upper)
        workers.take(worker, upper)
    return as_ints(chosen), parts


def _heaviest_first(one: Slice) -> tuple[float, int, int]:
    return -one.net, one.document, one.start


class _Demands(NamedTuple):
    """What slices take of their workers, [slices], the largest net load first."""

    negative_net: Floats
    size: Floats
    sent_keys: Floats
    received_keys: Floats

    @classmethod
    def of(cls, slices: Sequence[Slice]) -> _Demands:
        columns = (
            [-one.net for one in slices],
            [one.size for one in slices],
            [one.num_above * one.size for one in slices],
            [one.start for one in slices],
        )
        return cls(*(np.array(column, np.float64) for column in columns))

    def part(self, first: int, last: int) -> _Demands:
        return _Demands(*(column[first:last] for column in self))


class _Workers:
    """What workers can still take while slices are dealt, [workers]."""

    def __init__(
        self, dealt: DealtShards, density: float, traffic_limit: float, shortest: int
    ) -> None:
        self.net_headroom = dealt.net_headroom(density)
        self.worth_a_cut = WORTH_A_CUT * float(self.net_headroom.max())  # if it is more
        self.tokens_left = dealt.tokens_left.copy()
        self._sent_keys = np.zeros_like(self.tokens_left)
        self._received_keys = np.zeros_like(self.tokens_left)
        self._traffic_limit = traffic_limit
        self._shortest = shortest  # tokens of a slice, about

    def take_at_once(self, demands: _Demands) -> list[int]:
        """Puts the first slices on workers, as many as each go to another worker.

        Returns their workers, which are those that ``best`` would find for one after the other: no
        worker that has taken a slice has the most net headroom again before all of these have.
        """
        worker = np.argsort(-self.net_headroom, kind="stable")[: len(demands.size)]
        negative_net, size, sent_keys, received_keys = demands.part(0, len(worker))
        headroom = self.net_headroom[worker]
        after = headroom + negative_net
        fits = after >= 0.0
        fits &= self.tokens_left[worker] >= size
        fits &= self._sent_keys[worker] <= self._traffic_limit - sent_keys
        fits &= self._received_keys[worker] <= self._traffic_limit - received_keys
        fits[1:] &= np.maximum.accumulate(after)[:-1] < headroom[1:]
        worker = worker[: len(fits) if fits.all() else int(fits.argmin())]
        count = len(worker)
        self.net_headroom[worker] = after[:count]
        self.tokens_left[worker] -= size[:count]
        self._sent_keys[worker] += sent_keys[:count]
        self._received_keys[worker] += received_keys[:count]
        chosen: list[int] = worker.tolist()
        return chosen

    def take(self, worker: int, taken: Slice) -> None:
        """Puts a slice on a worker."""
        self.net_headroom[worker] -= taken.net
        self.tokens_left[worker] -= taken.size
        self._sent_keys[worker] += taken.num_above * taken.size
        self._received_keys[worker] += taken.start

    def best(self, taken: Slice) -> int:
        """Returns the worker with the most net headroom that can take a slice.

        It has net headroom and tokens left for the slice, and stays within the traffic limit. If
        there is none, the traffic limit is given up, then the tokens, then the headroom: the slice
        is cut to fill either, unless the headroom is not worth a cut.
        """
        best = int(self.net_headroom.argmax())
        headroom = float(self.net_headroom[best])
        sent = self._traffic_limit - taken.num_above * taken.size
        received = self._traffic_limit - taken.start
        if taken.net > headroom > self.worth_a_cut or (
            self.tokens_left[best] >= taken.size
            and self._sent_keys[best] <= sent
            and self._received_keys[best] <= received
        ):
            return best
        # Compare all workers, since that with the most net headroom cannot take the slice.
        fits = self.net_headroom >= min(taken.net, headroom - self.worth_a_cut)
        has_tokens = fits & (self.tokens_left >= taken.size)
        if not has_tokens.any():
            longest = int(np.where(fits, self.tokens_left, -np.inf).argmax())
            if self.tokens_left[longest] >= self._shortest:
                return longest
            # No worker gets more tokens than it may have, which would have to move again later.
            has_tokens = self.tokens_left >= taken.size
            if not has_tokens.any():
                return int(self.tokens_left.argmax())
        within_limit = has_tokens & (self._sent_keys <= sent) & (self._received_keys <= received)
        chosen = within_limit if within_limit.any() else has_tokens
        return int(np.where(chosen, self.net_headroom, -np.inf).argmax())
