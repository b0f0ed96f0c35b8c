"""Step 2 of balanced placement: documents are cut from the tail.

The *net* load of a slice is its load less density x tokens: the load beyond that of the short
documents that would otherwise take its place. ``balanced.py`` explains the density.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import NamedTuple

import numpy as np

from distca.planning.problem import DocumentLoads, Grain
from distca.planning.search import first_fitting
from distca.planning.spans import Floats, Ints, as_ints

MANY_CUTS, NUM_LOOKS = 192, 33  # cuts of a slice beyond which so many of them are looked at first
RUN = 64  # slices of a document that are cut at once where they are equally long
FEW_CUTS = 512  # of all documents together, up to which all are looked at instead of a search


class Slice(NamedTuple):
    """Tokens [start, stop) of a document that stay together, and their load."""

    net: float
    document: int
    start: int
    stop: int
    load: float
    num_above: int  # slices of the document further up, which need the keys of this one
    size: int  # tokens


class SliceLimits(NamedTuple):
    """What a slice may take of a worker."""

    net_load: float
    tokens: float

    def longest(self, num_above: Ints, traffic_limit: float) -> Floats:
        """Returns the most tokens of slices that are sent to those above them."""
        longest: Floats = np.minimum(self.tokens, traffic_limit / np.maximum(num_above, 1))
        return longest


@dataclass(frozen=True)
class Slicer:
    """Cuts documents into slices. Cuts are multiples of ``grain.spacing``."""

    documents: DocumentLoads
    density: float  # load per token of the short documents
    grain: Grain

    def cut_from_the_tail(self, chosen: Ints, limits: SliceLimits) -> tuple[list[Slice], float]:
        """Cuts documents into slices that fit the limits, the largest net load first.

        Also returns the most keys sent at once. These are the keys of the topmost slices, which
        receive all keys below them. Tokens with k slices above are sent k times, so such a slice is
        kept shorter than this number / k.
        """
        parts = [as_ints([[]] * 5)]  # [5, slices] document, start, stop, load, slices above
        document, stop = chosen, self.documents.lengths[chosen]
        num_above, before, traffic_limit = np.zeros_like(stop), np.zeros_like(stop), np.inf
        while len(document):
            longest = limits.longest(num_above, traffic_limit)
            start, load = self._starts(document, stop, limits.net_load, longest)
            parts.append(np.stack([document, start, stop, load, num_above]))
            left = np.flatnonzero(start > self.documents.prefix[document])
            if traffic_limit == np.inf and len(left):
                traffic_limit = float(start[left].max())
            size = (stop - start)[left]
            is_longest = size > longest[left] - self.grain.spacing
            in_run = np.flatnonzero(is_longest | (size == before[left]))
            document, stop, num_above, before = (
                document[left],
                start[left],
                num_above[left] + 1,
                size,
            )
            if len(in_run):
                most = np.where(is_longest, limits.tokens, size)[in_run]
                where = document[in_run], stop[in_run], num_above[in_run]
                slices, count = self._run(*where, most, limits, traffic_limit)
                parts.append(slices)
                num_above[in_run] += count
                np.minimum.at(stop, np.repeat(in_run, count), slices[1])
        columns = np.concatenate(parts, axis=1)
        document, start, stop, load, _ = columns
        order = np.lexsort((start, document, self.density * (stop - start) - load))
        return self._slices(*columns[:, order]), traffic_limit

    def split(self, whole: Slice, limits: SliceLimits) -> list[Slice]:
        """Returns the upper end of a slice, as large as the limits allow, and the lower end.

        Returns the slice alone if it cannot be cut.
        """
        grain = self.grain
        shortest = -int((limits.tokens - whole.stop) // grain.spacing)
        lowest = max(grain.first_cut(whole.start), shortest)
        highest = grain.last_cut(whole.stop)
        if lowest > highest:
            return [whole]
        document = as_ints(whole.document)
        if whole.net <= limits.net_load or lowest == highest:  # the slice is only too long
            at = lowest * grain.spacing
            upper, lower = self.documents.load(
                document, as_ints([at, whole.start]), as_ints([whole.stop, at])
            ).tolist()
        else:
            if highest - lowest > MANY_CUTS:
                lowest, highest = self._narrow(whole, lowest, highest, limits.net_load)
            # Both ends for all cuts at once take less time than a search for the cut does.
            cut = np.arange(lowest, highest + 1) * grain.spacing
            start, stop = np.empty((2, 2, len(cut)), np.int64)  # of the upper end, the lower end
            start[0], start[1], stop[0], stop[1] = cut, whole.start, whole.stop, cut
            load = self.documents.load(document, start, stop)
            fits = load[0] - self.density * (whole.stop - cut) <= limits.net_load
            fits[-1] = True  # the highest is taken if none fits
            best = int(fits.argmax())
            at, (upper, lower) = int(cut[best]), load[:, best].tolist()
        return [
            self._slice(whole.document, at, whole.stop, upper, whole.num_above),
            self._slice(whole.document, whole.start, at, lower, whole.num_above + 1),
        ]

    def _narrow(self, whole: Slice, lowest: int, highest: int, net_load: float) -> tuple[int, int]:
        """Returns closer bounds of the first cut whose upper end fits, by a look at a few cuts."""
        cut = np.linspace(lowest, highest, NUM_LOOKS, dtype=np.int64)
        document, stop = np.full_like(cut, whole.document), np.full_like(cut, whole.stop)
        fits = self._net_load(document, cut * self.grain.spacing, stop) <= net_load
        fits[-1] = True  # the highest is taken if none fits
        first = max(int(fits.argmax()), 1)
        return int(cut[first - 1]), int(cut[first])

    def _run(
        self,
        document: Ints,
        stop: Ints,
        num_above: Ints,
        most: Floats,
        limits: SliceLimits,
        traffic_limit: float,
    ) -> tuple[Ints, Ints]:
        """Cuts the next slices of documents at once, as many as are as long as expected.

        Returns them, [5, slices] as in ``cut_from_the_tail``, and how many there are of each
        document.

        stop: where they end, which is at a cut.
        most: the expected length, if slices may be as long.
        """
        spacing = self.grain.spacing
        above = num_above[:, None] + np.arange(RUN)
        longest = limits.longest(above, traffic_limit)
        size = np.maximum(np.minimum(longest, most[:, None]) // spacing, 1).astype(np.int64)
        size *= spacing
        stops = stop[:, None] - np.cumsum(size, axis=1) + size
        starts, first = stops - size, self.documents.prefix[document][:, None]
        longer = np.stack([starts, starts - spacing])
        load = self.documents.load(document[:, None], np.maximum(longer, 0), np.maximum(stops, 0))
        net, net_of_longer = load - self.density * (stops - longer)
        is_next = (net <= limits.net_load) | (size == spacing)  # the shortest need not fit
        is_next &= (net_of_longer > limits.net_load) | (size + spacing > longest)
        # What is left below does not fit into one slice, and is long enough to be cut.
        is_next &= (stops - first > longest) & (starts >= self.grain.first_cut(first) * spacing)
        is_next = np.logical_and.accumulate(is_next, axis=1)
        columns = (document[:, None], starts, stops, load[0], above)
        slices = np.stack([np.broadcast_to(each, is_next.shape)[is_next] for each in columns])
        return slices, is_next.sum(axis=1)

    def _starts(
        self, document: Ints, stop: Ints, net_load: float, longest: Floats
    ) -> tuple[Ints, Ints]:
        """[documents] Returns start and load of the largest slice that ends at ``stop`` and fits.

        The start is that of the document if all tokens before ``stop`` fit, or are too few to be
        cut.

        longest: the most tokens of a slice.
        """
        grain, first = self.grain, self.documents.prefix[document]
        # 1. All tokens, or the longest slices, where these fit. With many slices, most are as long.
        first_cut, last_cut = grain.first_cut(first), grain.last_cut(stop)
        lowest = np.ceil((stop - longest) / grain.spacing).astype(np.int64)
        lowest = np.minimum(np.maximum(lowest, first_cut), last_cut)
        start = np.stack([first, lowest * grain.spacing])
        load = self.documents.load(document, start, stop)
        net, net_of_longest = load - self.density * (stop - start)
        fits = (net <= net_load) & (stop - first <= longest)
        cut = ~fits & (last_cut >= first_cut)
        # 2. A search for the others.
        heavy = np.flatnonzero(cut & (net_of_longest > net_load))
        if len(heavy):
            of, least = (document[heavy], stop[heavy]), lowest[heavy]
            num_cuts = int((last_cut[heavy] - least).max()) + 1
            if len(heavy) * num_cuts <= FEW_CUTS:
                start[1, heavy], load[1, heavy] = self._first_fitting(
                    *of, least, num_cuts, net_load
                )
            else:
                cuts = self._heaviest(*of, first[heavy], net[heavy], net_load)
                start[1, heavy] = np.maximum(least, cuts) * grain.spacing
                load[1, heavy] = self.documents.load(of[0], start[1, heavy], of[1])
        return np.where(cut, start[1], start[0]), np.where(cut, load[1], load[0])

    def _first_fitting(
        self, document: Ints, stop: Ints, lowest: Ints, num_cuts: int, net_load: float
    ) -> tuple[Ints, Ints]:
        """[documents] Returns start and load of the slice from the first cut with which it fits.

        lowest: the first cut that is looked at; with ``num_cuts``, the last one.
        """
        last = self.grain.last_cut(stop)[:, None]
        start = np.minimum(lowest[:, None] + np.arange(num_cuts), last) * self.grain.spacing
        load = self.documents.load(document[:, None], start, stop[:, None])
        fits = load - self.density * (stop[:, None] - start) <= net_load
        fits[:, -1] = True  # the last is taken if none fits
        best = np.arange(len(stop)), fits.argmax(axis=1)
        return start[best], load[best]

    def _heaviest(
        self, document: Ints, stop: Ints, first: Ints, net: Floats, net_load: float
    ) -> Ints:
        """[documents] Returns the cut where the largest slice with at most some net load starts.

        net: that of all tokens from ``first`` to ``stop``.
        """
        spacing = self.grain.spacing
        kept = np.maximum(1.0 - net_load / np.maximum(net, 1.0), 0.0)
        # Net load grows like a square.
        kept += (1.0 - kept) * (first / stop) ** 2
        guess = stop * np.sqrt(kept) / spacing

        def excess(index: Ints) -> Ints:
            net = self._net_load(document, index * spacing, stop)
            return np.rint(net - net_load).astype(np.int64)

        last = self.grain.last_cut(stop)
        slope = net / np.maximum((stop / spacing) ** 2 - (first / spacing) ** 2, 1.0)
        return first_fitting(excess, guess.astype(np.int64), last, slope, np.zeros_like(last))

    def _net_load(self, document: Ints, start: Ints, stop: Ints) -> Floats:
        net: Floats = self.documents.load(document, start, stop) - self.density * (stop - start)
        return net

    def _slice(self, document: int, start: int, stop: int, load: int, num_above: int) -> Slice:
        size = stop - start
        return Slice(load - self.density * size, document, start, stop, load, num_above, size)

    def _slices(
        self, document: Ints, start: Ints, stop: Ints, load: Ints, num_above: Ints
    ) -> list[Slice]:
        size = stop - start
        net = load - self.density * size
        columns = (net, document, start, stop, load, num_above, size)
        return list(map(Slice, *(column.tolist() for column in columns)))
