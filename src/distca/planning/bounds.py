"""How few bytes any plan must move: lower bounds, so that a plan can say how far it may be off.

Let one pair cost at least ``u`` picoseconds. A rank of capacity C holds at most C / u pairs, in
any plan that keeps the bound. From there two bounds, of which the larger counts:

- *Placed tokens.* A rank with more pairs than it may hold sends the rest away. A server that takes
  P pairs of one document receives at least sqrt(2 P ((kv + q + o)^2 - (q + o)^2)) bytes, wherever
  they are cut (docs/planning.md), and takes at most C / u of them; the root is concave, so that few
  full servers are the cheapest. Keys of documents that span workers may be there already: for
  them only q and o count.
- *Free tokens.* Wherever tokens live, a document of L tokens needs sum(m_r) - L keys moved if its
  servers reach up to m_r; no server holds more than C / u pairs of it, so the m_r cannot all be
  small.
"""

from __future__ import annotations

import numpy as np

from distca.planning import masks
from distca.planning.problem import Problem
from distca.planning.spans import Floats, Ints


def traffic_lower_bound(problem: Problem, total_work: int, *, free_placement: bool) -> int:
    """Bytes of one layer's forward that no plan of this total work within the bound can save."""
    capacity = problem.devices.capacity(total_work, problem.tolerance)
    pairs = capacity / problem.cost.min_forward_ps_per_pair
    held = np.maximum(pairs, 1.0)  # what a rank can hold
    free = _free_tokens(problem, float(held.max()))
    return int(free if free_placement else max(free, _placed_tokens(problem, held)))


def _free_tokens(problem: Problem, held: float) -> float:
    """Keys that travel when every document is cut from its tail into the largest slices."""
    lengths = problem.placement.lengths.astype(np.float64)
    causal = problem.reach >= problem.placement.lengths
    full = problem.reach == masks.FULL
    others = np.ceil(lengths[full] ** 2 / held) - 1  # servers beside the first, all need all keys
    keys = float(np.sum(np.maximum(others, 0) * lengths[full]))
    reach = (lengths[causal] + 0.5) ** 2
    while len(reach):
        reach = reach - 2 * held
        reach = reach[reach > 0.25]
        keys += float(np.sum(np.sqrt(reach) - 0.5))
    return keys * problem.shape.kv_bytes


def _placed_tokens(problem: Problem, held: Floats) -> float:
    """What surplus ranks must send, and what tails of documents must fetch or be sent to."""
    placement, shape = problem.placement, problem.shape
    document, workers = placement.document, placement.num_workers
    length, reach = placement.lengths[document], problem.reach[document]
    pairs = masks.pairs(placement.start, placement.stop, length, reach)
    size = placement.stop - placement.start
    spanning = size < length
    seen = np.where(reach == masks.FULL, length, np.minimum(reach, length))  # keys of one query

    def added(values: Ints) -> Floats:
        total: Floats = np.bincount(placement.worker, values, minlength=workers).astype(np.float64)
        return total

    def largest(values: Ints) -> Ints:
        result = np.ones(workers, np.int64)
        np.maximum.at(result, placement.worker, values)
        return result

    q, kv = 2 * shape.q_bytes, shape.kv_bytes
    root = np.sqrt(2.0 * ((q + kv) ** 2 - q**2))
    room = float(held.max())
    surplus = np.maximum(added(pairs) - held[:workers], 0.0)
    full, rest = np.divmod(surplus, room)
    causal = added((reach < length).astype(np.int64)) == 0

    # 1. Documents that live whole on the rank: few full servers; and a line that lies below.
    rounding = kv * (full + 1)
    concave = root * (full * np.sqrt(room) + np.sqrt(rest)) - rounding
    slope = np.where(causal, root / np.sqrt(room), (q + kv) / largest(seen))
    linear = slope * surplus - rounding
    # 2. Documents that span workers: their keys may be on the server already.
    moved = np.minimum(surplus, added(pairs * spanning))
    tails = slope * (surplus - moved) - rounding + moved * q / largest(seen * spanning)
    shed = np.where(moved > 0, np.minimum(linear, tails), np.where(causal, concave, linear))
    # 3. A worker's only shard of a document fetches the keys it lacks, or sends all its queries.
    _, where, count = np.unique(
        document * workers + placement.worker, return_inverse=True, return_counts=True
    )
    first = masks.first_key(placement.start, reach)
    last = masks.last_key(placement.stop, length, reach)
    lacking = np.maximum(placement.start - first, 0) + np.maximum(last - placement.stop, 0)
    fetch = added(np.minimum(lacking * kv, size * q) * (count[where] == 1))
    # 4. A worker that serves nothing sends every query, and the keys that only it has.
    idle = (problem.devices.speed[:workers] == 0) * added(size * (q + kv * ~spanning))
    return float(np.sum(np.maximum.reduce([shed, fetch, idle, np.zeros(workers)])))
