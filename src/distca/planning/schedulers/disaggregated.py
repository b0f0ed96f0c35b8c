"""The scheduler for tokens that stay where they are: shed what is above the bound, move the least.

1. Every rank may hold its capacity, (1 + tolerance) x mean. What lies above it must go.
2. Ranks that serve nothing give all they have, heaviest shards first, to the largest rooms.
3. A shard whose keys mostly live elsewhere goes to them where that moves less.
4. The hottest senders choose first, so that their ports stay as cool as they can; then always the
   tightest ranks, those nearest to needing one server more.
"""

from __future__ import annotations

import bisect
from collections.abc import Iterable, Iterator, Sequence
from typing import NamedTuple

import numpy as np

from distca.planning.costs.base import OneDirectionCost
from distca.planning.problem import Assignment, DoesNotFitError, Price, Problem
from distca.planning.schedulers.cuts import Carving, Piece, carve
from distca.planning.schedulers.ledger import Ledger, Room, common
from distca.planning.schedulers.repair import repair
from distca.planning.spans import as_ints
from distca.planning.tasks import Tasks

NUM_TRIES = 6
RETRY = 0.002  # margin on the mean from one try to the next
NUM_ROUNDS = 64  # in which the tightest ranks are sought anew
NUM_SHARDS = 2  # of a rank, heaviest first, that are tried
NUM_HOLDERS = 3  # servers that have keys of the document already, largest rooms first
NUM_SPARE = 2  # servers beyond the fewest, for when rounding to tiles leaves a rest
NUM_PARTIAL = 8  # rooms that a rank fills at most where it cannot shed enough
PARTS = (0.95, 0.85, 0.7, 0.5)  # of those rooms, tried in turn: pieces cost more than their share


class Strategy(NamedTuple):
    """Choices that no rule settles for every batch."""

    hot: float  # ranks with this share of the hottest sender's estimate choose before the others
    adopt: float  # of a rank's capacity: the heaviest shard that it may take above its bound
    shuffle: int = 0  # > 0: surplus ranks choose in a random order of this seed instead


STRATEGIES = (
    Strategy(0.75, 0.25),
    Strategy(2.0, 0.25),
    Strategy(0.75, 0.0),
    Strategy(2.0, 0.0),
    *(Strategy(0.0, 0.25, shuffle=seed) for seed in range(1, 5)),
)
FEW_RANKS = 32  # up to which all of them are tried, and the one that moves least is taken


def disaggregated(problem: Problem) -> Assignment:
    """Returns one set of tasks if it meets the bounds of both directions, else one for each."""
    devices = problem.devices
    backward = schedule(problem, problem.cost.backward_ps)
    work, _ = backward.work_ps(problem.placement, problem.reach, problem.cost, devices.num_ranks)
    # With the costs of one direction only, a second set of tasks would be the same again.
    one_direction = isinstance(problem.cost, OneDirectionCost)
    if one_direction or devices.imbalance(work) <= 1.0 + problem.tolerance:
        return Assignment(backward, backward)
    forward = schedule(problem, problem.cost.forward_ps, expected_work=int(work.sum()))
    return Assignment(forward, backward)


def schedule(
    problem: Problem,
    price: Price,
    strategies: Sequence[Strategy] = STRATEGIES,
    expected_work: int = 0,
) -> Tasks:
    """Tasks on servers for one direction. Meets the bound wherever the cuts allow it.

    expected_work: what the work may come to once it is cut, if anything is known of that.
    """
    first, *others = strategies[: problem.search_orders]
    candidates = [_schedule(problem, price, first, int(expected_work * (1.0 - RETRY)))]
    # Where the bound is out of reach, or nothing moves, the others would do no better.
    missed, moved = candidates[0].quality
    if problem.devices.num_ranks <= FEW_RANKS and missed == 0.0 and moved > 0:
        total = candidates[0].total_work
        candidates += [_schedule(problem, price, strategy, total) for strategy in others]
    return min(candidates, key=lambda candidate: candidate.quality).tasks


class _Candidate(NamedTuple):
    tasks: Tasks
    quality: tuple[float, int]  # imbalance above the bound; bytes of the worst rank x all bytes
    total_work: int  # that its mean was taken of


def _schedule(problem: Problem, price: Price, strategy: Strategy, total_work: int) -> _Candidate:
    """One strategy. The mean is first taken of ``total_work``; 0: of what there is before any cut.

    Cutting changes what the work costs in all, and with it the mean that the bound refers to:
    where that spoils the bound, the next try starts from what the last one came to.
    """
    tries: list[tuple[float, Ledger, int]] = []
    bound = 1.0 + problem.tolerance
    for _ in range(NUM_TRIES):
        board = Ledger(problem, price, total_work)
        _empty_idle_ranks(board)
        _join_keys(board, strategy)
        for rank in _surplus_ranks(board, strategy):
            _shed(board, rank)
        imbalance = problem.devices.imbalance(board.work)
        stays = bool(tries) and imbalance == tries[-1][0]
        tries.append((imbalance, board, total_work))
        if imbalance <= bound or stays:
            break
        stuck = bool(np.any(board.work > board.capacity))
        total_work = int(int(board.work.sum()) * (1.0 + RETRY if stuck else 1.0 - RETRY))
    imbalance, board, total_work = min(tries, key=lambda attempt: attempt[0])
    tasks, moved = board.tasks(), board.port_limit * int(board.sent.sum())
    if imbalance > bound:
        tasks, imbalance = repair(problem, price, tasks)
    return _Candidate(tasks, (max(imbalance - bound, 0.0), moved), total_work)


def _empty_idle_ranks(board: Ledger) -> None:
    """Ranks that serve nothing give every shard, heaviest first, to the largest room."""
    idle = np.flatnonzero(board.devices.speed[board.placement.worker] == 0)
    for shard in idle[np.argsort(-board.loads[idle], kind="stable")].tolist():
        if _give_whole(board, shard):
            continue
        carving = _best_carving(board, shard, 0)
        if carving is not None:
            board.take(shard, carving.pieces)
        else:
            _give_whole(board, shard, above_bound=True)


def _give_whole(board: Ledger, shard: int, *, above_bound: bool = False) -> bool:
    """The whole shard to a rank that has its keys and room, else to the largest room."""
    load, document = int(board.loads[shard]), board.document(shard)
    candidates = [s for s in board.holders(document) if board.devices.speed[s] > 0]
    if above_bound:
        candidates = board.devices.serving.tolist()
    elif board.rooms:
        candidates.append(board.rooms[-1][1])
    for server in sorted(candidates, key=lambda s: (-board.room(s), s)):
        piece = Piece(*board.span(shard), server, load)
        weight = board.weight_bytes(document, piece)
        if (above_bound or load <= board.room(server)) and weight <= board.free_bytes[server]:
            board.take(shard, [piece])
            return True
    if above_bound:
        raise DoesNotFitError(
            f"tokens {board.span(shard)} of document {document} live on rank {board.home(shard)},"
            " which does not serve, and no server has the memory for them:"
            " give the servers more memory, or more servers"
        )
    return False


def _join_keys(board: Ledger, strategy: Strategy) -> None:
    """Shards that fetch more bytes of keys than moving them would cost go to the keys.

    Load that a move adds to a rank's surplus will have to be shed again, and load that it takes
    from one will not: both are priced as the cheapest pieces that would carry it.
    """
    placement, shape = board.placement, board.shape
    moves = []
    spanning = (placement.start > 0) & (board.devices.speed[placement.worker] > 0)
    for shard in np.flatnonzero(spanning).tolist():
        home, document, (start, stop) = board.home(shard), board.document(shard), board.span(shard)
        need = board.needs(document, (start, stop))
        there = {rank: common(spans, need) for rank, spans in board.owners(document).items()}
        fetched = need[1] - need[0] - there.pop(home)
        if there:
            most, rank = max((keys, -rank) for rank, keys in there.items())
            arriving = 2 * shape.q_bytes * (stop - start)
            arriving += shape.kv_bytes * (need[1] - need[0] - most)
            moves.append((shape.kv_bytes * fetched - arriving, shard, -rank))
    pieces = _PieceBytes(board)
    for saved, shard, rank in sorted(moves, reverse=True):
        home, load = board.home(shard), int(board.loads[shard])
        piece = Piece(*board.span(shard), rank, load)
        gain = float(saved)
        gain += pieces(board.surplus(home)) - pieces(max(board.surplus(home) - load, 0))
        gain -= pieces(max(load - board.room(rank), 0)) - pieces(board.surplus(rank))
        weight = board.weight_bytes(board.document(shard), piece)
        if (
            gain > 0
            and _may_adopt(board, rank, load, strategy.adopt)
            and weight <= board.free_bytes[rank]
        ):
            board.take(shard, [piece])


def _may_adopt(board: Ledger, rank: int, load: int, share: float) -> bool:
    """Whether a rank has room, or can make it by cutting its own heaviest shard deeper."""
    capacity = int(board.capacity[rank])
    if load <= board.room(rank):
        return True
    own = board.heaviest[rank][0]
    rest = int(board.work[rank]) - int(board.loads[own]) + load
    return own not in board.cuts and load <= share * capacity and rest <= capacity


class _PieceBytes:
    """Bytes of shedding some load in as few pieces as rooms allow, each at its cheapest place."""

    def __init__(self, board: Ledger) -> None:
        placement, shape = board.placement, board.shape
        squares = placement.stop.astype(np.float64) ** 2 - placement.start.astype(np.float64) ** 2
        pairs_per_load = float(squares.sum()) / 2 / max(float(board.work.sum()), 1.0)
        largest = [room for room, _ in board.rooms[-(len(board.rooms) // 4 + 1) :]]
        self._room = 1 + sum(largest) // max(len(largest), 1)
        q, kv = 2 * shape.q_bytes, shape.kv_bytes
        self._per_root = float(np.sqrt(((q + kv) ** 2 - q**2) * 2.0 * pairs_per_load))

    def __call__(self, load: int) -> float:
        full, rest = divmod(load, self._room)
        return self._per_root * float(full * np.sqrt(self._room) + np.sqrt(rest))


def _surplus_ranks(board: Ledger, strategy: Strategy) -> Iterator[int]:
    """The hottest senders, hottest first; then the tightest, sought anew as rooms change."""
    above = np.flatnonzero(board.work > board.capacity).tolist()
    todo = [rank for rank in above if rank < len(board.heaviest) and board.heaviest[rank]]
    if strategy.shuffle:
        yield from np.random.default_rng(strategy.shuffle).permutation(todo).tolist()
        return
    heat = {rank: _least_sending(board, rank) for rank in todo}
    hot = [rank for rank in todo if heat[rank] >= strategy.hot * max(heat.values())]
    yield from sorted(hot, key=lambda rank: (-heat[rank], rank))
    ranks = as_ints(sorted(set(todo) - set(hot)))
    batch = 1 + len(ranks) // NUM_ROUNDS
    while len(ranks):
        need = board.work[ranks] - board.capacity[ranks]
        filled = np.cumsum(as_ints([room for room, _ in reversed(board.rooms)]))
        servers = np.searchsorted(filled, need)
        slack = np.append(filled, np.iinfo(np.int64).max)[servers] - need
        ranks = ranks[np.argsort(slack, kind="stable")]
        yield from ranks[:batch].tolist()
        ranks = np.sort(ranks[batch:])


def _least_sending(board: Ledger, rank: int) -> float:
    """An optimistic estimate of what a rank will send: every piece at its cheapest place."""
    need = board.surplus(rank)
    rooms = [room for room, _ in _fewest(board.rooms, need)]
    parts = as_ints([*rooms[:-1], need - sum(rooms[:-1])])
    stops = board.divisible(board.heaviest[rank][0]).cheapest_stop(parts, board.shape)
    q, kv = board.shape.q_bytes, board.shape.kv_bytes
    return float(np.sum(stops) * (q * kv / (2 * q + kv) + kv)) + float(board.sent[rank])


def _shed(board: Ledger, rank: int) -> None:
    """Moves what lies above the rank's capacity, out of one of its heaviest shards."""
    while board.surplus(rank):
        uncut = [shard for shard in board.heaviest[rank] if shard not in board.cuts][:NUM_SHARDS]
        options: list[tuple[int, float, int, Carving]] = []
        for shard in uncut:
            for keep in _amounts_to_keep(board, shard):
                carving = _best_carving(board, shard, keep)
                if carving is not None:
                    options.append((*carving.score, shard, carving))
        if options:
            _, _, shard, carving = min(options, key=lambda option: option[:3])
            board.take(shard, carving.pieces)
        elif not uncut or not _shed_partly(board, uncut[0]):
            return


def _amounts_to_keep(board: Ledger, shard: int) -> list[int]:
    """How much of a shard may stay at home; or nothing, so that home fetches no keys for it."""
    keep = int(board.loads[shard]) - board.surplus(board.home(shard))
    if keep < 0:
        return []
    fetches = board.placement.start[shard] > 0 and board.rooms
    return [keep, 0] if fetches and board.loads[shard] <= board.rooms[-1][0] else [keep]


def _shed_partly(board: Ledger, shard: int) -> bool:
    """No shard is heavy enough alone, or rooms are too small: all of it, or what rooms can hold."""
    most = sum(room for room, _ in board.rooms[-NUM_PARTIAL:])
    partly = (int(board.loads[shard] - part * most) for part in PARTS)
    for keep in dict.fromkeys((0, *partly)):  # tiny loads make several of them the same
        carving = _best_carving(board, shard, keep) if keep >= 0 else None
        if carving is not None:
            board.take(shard, carving.pieces)
            return True
    return False


def _best_carving(board: Ledger, shard: int, keep: int) -> Carving | None:
    """The cheapest over a few sets of targets, each the fewest that hold what must go."""
    divisible = board.divisible(shard)
    if not board.rooms or not divisible.some_fit(board.rooms[-1][0]):
        return None
    sources, limit = board.sources(shard), board.port_limit
    tried: list[list[Room]] = []  # few rooms make several sets the same
    for spare in range(NUM_SPARE + 1):
        found: list[Carving] = []
        for rooms in _target_sets(board, shard, divisible.load_all - keep, spare):
            if rooms in tried:
                continue
            tried.append(rooms)
            targets = [board.target(shard, room, server) for room, server in rooms]
            carving = carve(divisible, keep, targets, sources, board.shape, limit)
            if carving is not None:
                found.append(carving if targets[-1].held else _fit_last(board, shard, carving))
        if found:
            return min(found, key=lambda carving: carving.score)
    return None


def _target_sets(board: Ledger, shard: int, need: int, spare: int) -> Iterable[list[Room]]:
    """The largest rooms; the same with one that has keys of the document; those of the node."""
    home = board.home(shard)
    sets = [_fewest(board.rooms, need, spare=spare)]
    holders = [
        (board.room(server), server)
        for server in board.holders(board.document(shard))
        if server != home and board.room(server) > 0 and board.devices.speed[server] > 0
    ]
    for holder in sorted(holders, reverse=True)[:NUM_HOLDERS]:
        sets.append(_fewest(board.rooms, need, [holder], spare))
    if board.several_nodes:
        near = [room for room in board.rooms if board.near(room[1], home)]
        sets.append(_fewest(near, need, spare=spare))
    return filter(None, sets)


def _fewest(rooms: list[Room], need: int, first: Iterable[Room] = (), spare: int = 0) -> list[Room]:
    """After ``first``, the fewest of the largest rooms that hold ``need``, and ``spare`` more.

    Empty if all of them together do not hold it.
    """
    chosen = list(first)
    total, servers = sum(room for room, _ in chosen), {server for _, server in chosen}
    for room, server in reversed(rooms):
        if total >= need:
            if spare == 0:
                break
            spare -= 1
        if server not in servers:
            chosen.append((room, server))
            total += room
    return chosen if total >= need else []


def _fit_last(board: Ledger, shard: int, carving: Carving) -> Carving:
    """Sends the remainder to the smallest room that holds it, to keep large rooms whole."""
    piece, document = carving.pieces[-1], board.document(shard)
    taken = {other.server for other in carving.pieces}
    arriving, weight = board.arriving_bytes(document, piece), board.weight_bytes(document, piece)
    limit = board.port_limit + carving.over_limit
    home = board.home(shard)
    for _, server in board.rooms[bisect.bisect_left(board.rooms, (piece.load, -1)) :]:
        if server == piece.server:
            break
        if (
            server not in taken
            and board.received[server] + arriving <= limit
            and weight <= board.free_bytes[server]
            and board.near(server, home) == board.near(piece.server, home)
        ):
            moved = piece._replace(server=server)
            return carving._replace(pieces=[*carving.pieces[:-1], moved])
    return carving
