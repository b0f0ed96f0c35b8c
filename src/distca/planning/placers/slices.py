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
        prefix = self.documents.prefix
        traffic_limit = np.inf
        num_above = 0
        while len(document):
            longest = min(limits.tokens, traffic_limit / max(num_above, 1))
            start = self._starts(document, stop, SliceLimits(limits.net_load, longest))
            load = self.documents.load_of_shards(document, start, stop)
            parts.append(np.stack([document, start, stop, load, np.full_like(start, num_above)]))
            left = start > prefix[document]
            if num_above == 0 and left.any():
                traffic_limit = float(start[left].max())
            document, stop = document[left], start[left]
            num_above += 1
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
        if whole.net <= limits.net_load:  # the slice is only too long
            highest = lowest
        if highest - lowest > MANY_CUTS:
            lowest, highest = self._narrow(whole, lowest, highest, limits.net_load)
        # Both ends for all cuts at once take less time than a search for the cut does.
        cut = np.arange(lowest, highest + 1) * grain.spacing
        start, stop = np.stack([cut, np.full_like(cut, whole.start)]), np.stack([cut, cut])
        stop[0] = whole.stop
        load = self.documents.load(np.full_like(cut, whole.document), start, stop)
        net = load - self.density * (stop - start)
        best = int(np.append(net[0, :-1] <= limits.net_load, True).argmax())
        start, stop, load = start[:, best], stop[:, best], load[:, best]  # of the upper, the lower
        num_above = whole.num_above + np.arange(2)
        return self._slices(np.full(2, whole.document), start, stop, load, num_above)

    def _narrow(self, whole: Slice, lowest: int, highest: int, net_load: float) -> tuple[int, int]:
        """Returns closer bounds of the first cut whose upper end fits, by a look at a few cuts."""
        cut = np.linspace(lowest, highest, NUM_LOOKS, dtype=np.int64)
        document, stop = np.full_like(cut, whole.document), np.full_like(cut, whole.stop)
        fits = self._net_load(document, cut * self.grain.spacing, stop) <= net_load
        fits[-1] = True  # the highest is taken if none fits
        first = max(int(fits.argmax()), 1)
        return int(cut[first - 1]), int(cut[first])

    def _starts(self, document: Ints, stop: Ints, limits: SliceLimits) -> Ints:
        """[documents] Returns the start of the largest slice that ends at ``stop`` and fits.

        The start is that of the document if all tokens before ``stop`` fit, or are too few to be
        cut.
        """
        grain, starts = self.grain, self.documents.prefix[document]
        net = self._net_load(document, starts, stop)
        fits = (net <= limits.net_load) & (stop - starts <= limits.tokens)
        cut = np.flatnonzero(~fits & (grain.last_cut(stop) >= grain.first_cut(starts)))
        if not len(cut):
            return starts
        document, stop, net, first = document[cut], stop[cut], net[cut], starts[cut]
        # 1. The longest slices, where their net load fits. With many slices, most are as long.
        lowest = np.ceil((stop - limits.tokens) / grain.spacing).astype(np.int64)
        lowest = np.minimum(np.maximum(lowest, grain.first_cut(first)), grain.last_cut(stop))
        heavy = self._net_load(document, lowest * grain.spacing, stop) > limits.net_load
        # 2. A search for the others.
        if heavy.any():
            of = document[heavy], first[heavy], stop[heavy], net[heavy]
            lowest[heavy] = np.maximum(lowest[heavy], self._heaviest(*of, limits.net_load))
        starts[cut] = lowest * grain.spacing
        return starts

    def _heaviest(
        self, document: Ints, first: Ints, stop: Ints, net: Floats, net_load: float
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

    def _slices(
        self, document: Ints, start: Ints, stop: Ints, load: Ints, num_above: Ints
    ) -> list[Slice]:
        size = stop - start
        net = load - self.density * size
        columns = (net, document, start, stop, load, num_above, size)
        return list(map(Slice, *(column.tolist() for column in columns)))
