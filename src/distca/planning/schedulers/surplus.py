"""Which ranks have to shed, in which order, and what this will cost: estimates before any cut."""

from collections.abc import Sequence

import numpy as np

from distca.planning.schedulers.ledger import Ledger
from distca.planning.spans import Floats, Ints, as_ints, cumulative

# Ranks shed in this many batches, and are sorted again after each. Few ranks come one by one.
NUM_ROUNDS = 8  # docs/planning-experiments.md has the figures for others


class SurplusRanks:
    """The ranks with a surplus, in the order in which they should shed it.

    Ranks that will send the most come first, while all headroom is left, because they determine the
    peak traffic. Then come those that are closest to needing one server more; they are sorted again
    as headroom shrinks.
    """

    _first: list[int]  # those whose turn is known
    _others: Ints

    def __init__(self, ledger: Ledger, senders_first: float, seed: int) -> None:
        """Divides the ranks into senders and others.

        senders_first: the share of the largest estimate of sent bytes from which a rank comes
            first.
        seed: if above 0, the order is random instead.
        """
        ranks = workers_above_capacity(ledger)
        self._size = max(len(ranks) // NUM_ROUNDS, 1)
        self._first, self._others = ranks.tolist(), ranks[:0]
        if len(ranks) <= 1:
            return
        if seed:
            self._first = np.random.default_rng(seed).permutation(ranks).tolist()
            return
        estimate = _estimate_sent(ledger, ranks)
        is_sender = estimate >= senders_first * estimate.max()
        order = np.argsort(-estimate[is_sender], kind="stable")
        self._first, self._others = ranks[is_sender][order].tolist(), ranks[~is_sender]

    def next_batch(self, ledger: Ledger) -> list[int]:
        """Returns the next ranks; none at the end."""
        if self._first or not len(self._others):
            return self._first[: self._size]
        surplus = ledger.loads.above_capacity[self._others]
        filled = np.cumsum(_largest_first(ledger))
        num_servers = np.searchsorted(filled, surplus)
        slack = np.append(filled, np.iinfo(np.int64).max)[num_servers] - surplus
        batch: list[int] = self._others[np.argsort(slack, kind="stable")[: self._size]].tolist()
        return batch

    def remove(self, batch: Sequence[int]) -> None:
        """Removes ranks that have had their turn."""
        if self._first:
            self._first = self._first[len(batch) :]
        else:
            self._others = as_ints([rank for rank in self._others.tolist() if rank not in batch])


def workers_above_capacity(ledger: Ledger) -> Ints:
    """Returns the workers with a surplus that have a shard."""
    above = np.flatnonzero(ledger.loads.above_capacity > 0).tolist()
    return as_ints([rank for rank in above if len(ledger.shards.heaviest_first(rank))])


def _largest_first(ledger: Ledger) -> Ints:
    return as_ints([headroom.load for headroom in reversed(ledger.loads.headrooms)])


def _estimate_sent(ledger: Ledger, ranks: Ints) -> Floats:
    """[ranks] Estimates what ranks will send, if every piece lies at its cheapest place.

    The cheapest place of a piece is proportional to the square root of its load.
    """
    headrooms, surplus = _largest_first(ledger), ledger.loads.above_capacity[ranks]
    filled, roots = cumulative(headrooms), np.append(0.0, np.cumsum(np.sqrt(headrooms)))
    full = np.searchsorted(filled[1:], surplus)
    full = np.where(full < len(headrooms), full, 0)
    root = roots[full] + np.sqrt(surplus - filled[full])
    heaviest = [int(ledger.shards.heaviest_first(rank)[0]) for rank in ranks.tolist()]
    shape, one = ledger.problem.shape, as_ints(1)
    stops = root * ledger.shards.cuttable(heaviest).cheapest_stop(one, shape)[:, 0]
    q, kv = shape.q_bytes, shape.kv_bytes
    sent: Floats = stops * (q * kv / (shape.qo_bytes + kv) + kv) + ledger.sent[ranks]
    return sent


def estimate_added_load(ledger: Ledger) -> int:
    """Estimates by how much cutting will raise the total load.

    Every rank with a surplus is taken to cut pieces of equal load out of its heaviest shard.
    """
    ranks, shards = workers_above_capacity(ledger), ledger.shards
    headrooms, surplus = _largest_first(ledger), ledger.loads.above_capacity[ranks][:, None]
    if not len(ranks) or not len(headrooms):
        return 0
    heaviest = shards.cuttable([int(shards.heaviest_first(rank)[0]) for rank in ranks.tolist()])
    surplus = np.minimum(surplus, heaviest.total_load)
    piece = np.minimum(int(headrooms[: len(headrooms) // 4 + 1].mean()), surplus)
    num_pieces = np.ceil(surplus / np.maximum(piece, 1))
    stop_cut = heaviest.nearest_cut(heaviest.cheapest_stop(piece, ledger.problem.shape))
    start_cut = heaviest.lowest_start(stop_cut, piece)
    cuts = [np.zeros_like(stop_cut), start_cut, stop_cut, heaviest.last_cut]
    places = heaviest.position(np.concatenate(cuts, axis=1))
    parts = heaviest.load(places[:, :-1], places[:, 1:]).sum(axis=1, keepdims=True)
    added = num_pieces * np.maximum(parts - heaviest.total_load, 0)
    return int(added.sum())
