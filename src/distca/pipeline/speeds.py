"""Learns how fast each rank computes attention, from planned and measured seconds.

    speeds = LearnedSpeeds(np.ones(4))
    speeds.update(planned_s, measured_s)   # [ranks] each, after a step: returns the speeds now

Every rank passes the same numbers, so all ranks learn the same speeds and make the same plans.

Planned seconds are those on a device of speed 1, whatever speed the plan assumed. So the ratio of
planned to measured seconds is the speed of a rank itself, and giving the rank less attention does
not change it: there is no feedback that could oscillate.

A rank that is slow in attention is slow in its linear layers too, which cannot move. If the seconds
of other work are passed as well, a slow rank gets so much less attention that it ends together with
the others (``compensated``).
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np

from distca.planning.spans import Bools, Floats

WINDOW = 7  # updates whose median counts: three outliers among them change nothing
_ENOUGH = WINDOW // 2 + 1  # measurements without which a rank counts as the others do
_EQUAL = 0.05  # speeds that are this close to the others' are equal to them
_CHANGE = 0.03  # a speed stays as it is until the median is further away than this
_DIGITS = 2  # of a speed
_LEAST_S = 0.005  # of attention in an update, below which launches of kernels dominate
_LIMITS = (0.1, 10.0)  # so that every rank gets enough attention to be measured
_LEAST = 0.1  # of the attention that its speed allows, which a rank keeps for the same reason
_STEP = 1.2  # factor between two values of the share of other work, so that plans do not flap


class LearnedSpeeds:
    """The relative speed of each rank: the speeds at the start, times factors that are learnt.

    start: [ranks] the speeds that are assumed first. A rank of speed 0 computes no attention, and
        nothing is learnt about it.
    """

    def __init__(self, start: Floats) -> None:
        self._start = np.array(start, np.float64)
        self._factor = np.ones(len(self._start))
        self._window = np.full((WINDOW, len(self._start)), np.nan)
        self._other = np.full(WINDOW, np.nan)  # seconds of other work over those of attention

    def of_ranks(self, kept: Sequence[int | None], start: Sequence[float]) -> LearnedSpeeds:
        """Returns what is known about some of the ranks, with new ones (None) among them.

        start: the speeds that are assumed first of new ranks.
        """
        new = LearnedSpeeds(np.asarray(start))
        for rank, before in enumerate(kept):
            if before is not None:
                new._start[rank], new._factor[rank] = self._start[before], self._factor[before]
                new._window[:, rank] = self._window[:, before]
        new._other = self._other
        return new

    def state(self) -> list[list[Any]]:
        """Returns what is known as JSON."""
        parts = (self._start, self._factor, self._window, self._other)
        return [part.tolist() for part in parts]

    @classmethod
    def of_state(cls, state: list[list[Any]]) -> LearnedSpeeds:
        speeds = cls(np.asarray(state[0]))
        speeds._factor, speeds._window, speeds._other = map(np.asarray, state[1:])
        return speeds

    @property
    def speed(self) -> tuple[float, ...]:
        """[ranks] The speeds now, to plan with."""
        speed = self._start * self._factor
        if np.isnan(self._other).all():
            return tuple(speed.tolist())
        # The same on all ranks, since they have the same numbers.
        other = _STEP ** np.round(np.log(np.nanmedian(self._other)) / np.log(_STEP))
        return tuple(compensated(speed, float(other)).tolist())

    def update(
        self, planned_s: Floats, measured_s: Floats, other_s: Floats | None = None
    ) -> tuple[float, ...]:
        """Returns the speeds after one more measurement of each rank, [ranks].

        A rank that has computed nothing has 0 in both. Nothing is learnt from a tiny attention.

        other_s: seconds of other work of each rank, for which slow ranks are compensated; None if
            only attention counts.
        """
        busy_s = measured_s[measured_s > 0]
        if busy_s.size and np.median(busy_s) < _LEAST_S:
            return self.speed
        relative = _relative(planned_s, measured_s, self._start)
        if not np.isnan(relative).all():
            self._window = np.concatenate([self._window[1:], relative[None]])
            self._factor = _stepped(self._factor, self._window)
        if other_s is not None:
            busy = (measured_s > 0) & (other_s > 0)
            ratio = np.median(other_s[busy]) / np.median(measured_s[busy]) if busy.any() else np.nan
            self._other = np.append(self._other[1:], ratio)
        return self.speed


def compensated(speed: Floats, other: float) -> Floats:
    """[ranks] Returns speeds with which all ranks end attention and other work together.

    Other work stays where it is. A rank of speed v does it in other / v seconds, where the mean
    attention of a rank takes 1 s at speed 1; so a slow rank is late by the difference to the
    fastest one, and attention is divided such that all end after the same time T.

    speed: [ranks] of 0 for ranks that compute no attention.
    other: seconds of other work over those of attention, of a rank of speed 1.
    """
    serves = speed > 0
    v = speed[serves]
    late = other * (1 / v - 1 / v.max())
    end = (len(v) + np.sum(v * late)) / np.sum(v)
    planned = speed.copy()
    planned[serves] = v * np.clip(1 - late / end, _LEAST, 1.0)
    return np.round(planned, _DIGITS) if late.any() else planned


def _relative(planned_s: Floats, measured_s: Floats, start: Floats) -> Floats:
    """[ranks] Returns speeds relative to the median of all ranks; NaN where nothing was computed.

    A cost model that is wrong by a common factor therefore changes nothing.
    """
    computed: Bools = (planned_s > 0) & (measured_s > 0) & (start > 0)
    ratio = np.full(len(start), np.nan)
    ratio[computed] = planned_s[computed] / (measured_s[computed] * start[computed])
    return ratio / np.median(ratio[computed]) if computed.any() else ratio


def _stepped(factor: Floats, window: Floats) -> Floats:
    """[ranks] Returns the factors after an update of the window [updates, ranks].

    A rank that has hardly computed anything lately counts as the others do, and so is measured.
    """
    enough = np.count_nonzero(~np.isnan(window), axis=0) >= _ENOUGH
    median = np.ones(len(factor))
    median[enough] = np.nanmedian(window[:, enough], axis=0)
    target = np.clip(np.round(median, _DIGITS), *_LIMITS)
    target[np.abs(median - 1) <= _EQUAL] = 1.0
    leaves = np.abs(median / factor - 1) > np.where(factor == 1.0, _EQUAL, _CHANGE)
    return np.where(leaves, target, factor)
