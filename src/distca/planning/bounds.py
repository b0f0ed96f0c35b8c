"""Lower bounds of the bytes that any plan must move, so that a plan can report how far it is off.

Let a pair cost at least u picoseconds. In a plan that keeps the bound, a rank of capacity C
computes at most H = C / u pairs. Every bound below follows from this. ``q`` is short for the bytes
of a query and its output, ``kv`` for those of a key and its value.
"""

import numpy as np

from distca.planning import masks
from distca.planning.problem import Problem
from distca.planning.spans import Bools, Floats, Ints


def traffic_lower_bound(problem: Problem, total_load: int, *, free_placement: bool) -> int:
    """Returns bytes of one layer's forward pass that every plan within the bound must move.

    free_placement: whether the bound is to hold for any placement of the tokens.
    """
    capacity = problem.devices.capacity(total_load, problem.tolerance)
    max_pairs = np.maximum(capacity / problem.cost.forward.min_ps_per_pair, 1.0)
    for_any_placement = _any_placement(problem, float(max_pairs.max()))
    if free_placement:
        return int(for_any_placement)
    return int(max(for_any_placement, _given_placement(problem, max_pairs)))


def _any_placement(problem: Problem, max_pairs: float) -> float:
    """Bounds the keys that are sent wherever the tokens live.

    If the servers of a document of L tokens need keys up to positions m_r, sum(m_r) - L of these
    keys live on another server. The sum is smallest if the document is cut from its tail into
    slices of H pairs. Causal queries [0, m) have ((m + 1/2)^2 - 1/4) / 2 pairs, so each slice
    lowers (m + 1/2)^2 by 2 H. Under a full mask, every server beyond the first needs all L keys.
    Keys of a prefix are not counted, since servers of several documents may share them.
    """
    prefix = problem.placement.prefixes.length
    lengths = problem.placement.lengths.astype(np.float64)
    causal = masks.is_causal(problem.placement.lengths, problem.reach)
    full = problem.reach == masks.FULL
    other_servers = np.ceil(lengths[full] ** 2 / max_pairs) - 1
    keys = float(np.sum(np.maximum(other_servers, 0) * lengths[full]))
    squares, first = (lengths[causal] + 0.5) ** 2, prefix[causal]
    # No document has more slices than there are ranks, unless costs per pair are far above the
    # lowest; with fewer slices, the bound is lower and still one.
    for _ in range(problem.devices.num_ranks):
        squares = squares - 2 * max_pairs
        left = squares > (first + 0.5) ** 2
        squares, first = squares[left], first[left]
        if not len(squares):
            break
        keys += float(np.sum(np.sqrt(squares) - 0.5 - first))
    return keys * problem.shape.kv_bytes


def _given_placement(problem: Problem, max_pairs: Floats) -> float:
    """Bounds the bytes that are sent for the queries of each worker, and adds them up.

    Several bounds hold for the same worker and may count the same bytes: the largest one is taken.
    """
    shards = _Shards(problem)
    workers = problem.placement.num_workers
    surplus = np.maximum(shards.total(shards.pairs) - max_pairs[:workers], 0.0)
    bounds = (
        _surplus(shards, surplus, float(max_pairs.max())),
        _fetched_keys(shards),
        _idle_workers(shards, problem.devices.speed[:workers] == 0),
        np.zeros(workers),
    )
    return float(np.sum(np.maximum.reduce(bounds)))


class _Shards:
    """Facts about each shard, and sums and maxima of them over workers. Arrays are [shards]."""

    def __init__(self, problem: Problem) -> None:
        self.placement = p = problem.placement
        self.q, self.kv = problem.shape.qo_bytes, problem.shape.kv_bytes
        self.length, self.reach = p.lengths[p.document], problem.reach[p.document]
        self.prefix = p.prefixes.length[p.document]
        self.size = p.stop - p.start
        self.pairs = masks.pairs(p.start, p.stop, self.length, self.reach)
        # Whether other workers hold a part of the document.
        self.spanning = self.size < self.length - self.prefix
        self.keys_per_query = masks.most_keys(self.length, self.reach)

    def total(self, values: Ints) -> Floats:
        """[workers] Returns the sum of ``values`` over the shards of each worker."""
        placement = self.placement
        total = np.bincount(placement.worker, values, minlength=placement.num_workers)
        return total.astype(np.float64)

    def largest(self, values: Ints) -> Ints:
        """[workers] Returns the largest of ``values`` on each worker, at least 1."""
        result = np.ones(self.placement.num_workers, np.int64)
        np.maximum.at(result, self.placement.worker, values)
        return result


def _surplus(shards: _Shards, surplus: Floats, max_pairs: float) -> Floats:
    """[workers] Bounds the bytes of the pairs above a worker's capacity.

    For P pairs of causal queries [a, b) of a document that lives elsewhere, a server receives
    q (b - a) + kv b bytes, where P = (b^2 - a^2) / 2. This is at least c sqrt(P), which it takes at
    a / b = q / (q + kv) (docs/planning.md).

    surplus: [workers] pairs that the worker cannot compute itself.
    """
    q, kv = shards.q, shards.kv
    c = float(np.sqrt(2.0 * ((q + kv) ** 2 - q**2)))
    other = ~masks.is_causal(shards.length, shards.reach) | (shards.prefix > 0)
    causal = shards.total(other.astype(np.int64)) == 0
    # Documents that live whole on the worker, causal: the chord of c sqrt(P) from 0 to H pairs lies
    # below the curve. Other masks, and documents whose prefix a server may have: a query sees at
    # most k keys and needs its own, so P pairs take P / k queries and as many keys.
    chord = c / np.sqrt(max_pairs)
    per_pair = np.where(causal, chord, (q + kv) / shards.largest(shards.keys_per_query))
    full, rest = np.divmod(surplus, max_pairs)
    # The bounds are continuous in positions; whole tokens save at most one key on each server.
    rounding = kv * (full + 1)
    linear = per_pair * surplus - rounding
    # c sqrt(P) is concave, so the cheapest way is to fill as few servers as possible with H pairs
    # each, and to send the rest to one more.
    concave = c * (full * np.sqrt(max_pairs) + np.sqrt(rest)) - rounding
    # Pairs of documents that span workers may go to servers that hold their keys already, and then
    # only q and o are sent. The bound is linear in how many of them go: an extreme is the smallest.
    moved = np.minimum(surplus, shards.total(shards.pairs * shards.spanning))
    queries_only = moved * q / shards.largest(shards.keys_per_query * shards.spanning)
    spanning = per_pair * (surplus - moved) - rounding + queries_only
    bound: Floats = np.where(
        moved > 0, np.minimum(linear, spanning), np.where(causal, concave, linear)
    )
    return bound


def _fetched_keys(shards: _Shards) -> Floats:
    """[workers] Bounds the bytes for shards whose keys live partly on other workers.

    A worker's only shard of a document either fetches the keys that it lacks, or sends its queries.
    """
    placement = shards.placement
    _, index, count = np.unique(
        placement.document * placement.num_workers + placement.worker,
        return_inverse=True,
        return_counts=True,
    )
    first = np.maximum(masks.first_key(placement.start, shards.reach), shards.prefix)
    last = masks.last_key(placement.stop, shards.length, shards.reach)
    lacking = np.maximum(placement.start - first, 0) + np.maximum(last - placement.stop, 0)
    return shards.total(
        np.minimum(lacking * shards.kv, shards.size * shards.q) * (count[index] == 1)
    )


def _idle_workers(shards: _Shards, idle: Bools) -> Floats:
    """[workers] Bounds the bytes of workers that compute no attention.

    They send every query, and the keys of every document that lives on them alone.
    """
    bound: Floats = idle * shards.total(shards.size * (shards.q + shards.kv * ~shards.spanning))
    return bound
