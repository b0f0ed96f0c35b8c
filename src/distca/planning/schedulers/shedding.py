"""Step 4 of the scheduler: ranks with a surplus shed it into the headroom of other servers.

Many ranks shed at once, because one numpy operation on the cuts of many shards takes little longer
than on those of one. Each rank of a batch *reserves* the servers that it would take if ranks came
one after the other. If another rank of the batch takes one of them all the same, it waits for the
next batch. Ranks share dedicated servers, which have headroom for many of them.
"""

import bisect
from collections.abc import Container, Iterator, Sequence

from distca.planning.schedulers.budget import MANY_RANKS, Budget
from distca.planning.schedulers.cuts import Cut
from distca.planning.schedulers.ledger import Ledger
from distca.planning.schedulers.loads import Headroom
from distca.planning.schedulers.questions import Found, Request, Shedding, Wanted, evaluate
from distca.planning.schedulers.server_sets import fewest_servers, server_sets
from distca.planning.schedulers.short_documents import shed_whole_documents
from distca.planning.schedulers.taken_servers import TakenServers, may_share

# Each value is the smallest beyond which plans hardly change (docs/planning-experiments.md).
NUM_SHARDS = 2  # heaviest shards of a rank that are tried
MAX_SPARE = 3  # servers beyond the fewest that are tried, because cuts at tiles leave remainders
# If a rank cannot shed its surplus out of one shard, it fills these shares of large headrooms.
# Shares are below 1, because short pieces cost more than their share of the load.
NUM_PARTIAL = 8  # how many of the largest headrooms are filled
SHARES = (0.95, 0.85, 0.7, 0.5)
SPARES = (0, 2)  # instead of all up to ``MAX_SPARE``


def shed(
    ledger: Ledger, waiting: dict[int, int], ranks: Sequence[int], budget: Budget
) -> Shedding[None]:
    """Moves the surplus of ranks, out of one of their heaviest shards if possible.

    waiting: rank -> servers beyond the fewest that it needs. A batch of ranks joins those of
        earlier batches that still wait, and ends once fewer wait; without ranks, once none does.
    budget: it also ends where this is spent.
    """
    waiting |= dict.fromkeys(ranks, 0)
    while len(waiting) >= max(len(ranks), 1) and not budget.is_spent:
        yield from _shed_once(ledger, waiting, budget)


def _shed_once(ledger: Ledger, waiting: dict[int, int], budget: Budget) -> Shedding[None]:
    """Lets each of some ranks cut one shard; those that are done are removed from ``waiting``."""
    shed_whole_documents(ledger, waiting)
    _drop_done(ledger, waiting)
    requests, reserved = _requests(ledger, waiting)
    found = yield ledger, requests
    moves, taken, stuck = [], TakenServers(ledger), []
    limit = ledger.peak_traffic
    for rank, options in found.items():
        best = [choices.best(row, limit) for choices, row in options]
        for option in sorted(best, key=lambda option: option.score):
            cut = option.cut()
            cut = _fit_remainder(ledger, cut, max(limit, cut.peak), taken, reserved)
            if taken.leave_room_for(cut):
                taken.add(cut)
                moves.append((cut.shard, cut.pieces))
                limit, waiting[rank] = max(limit, cut.peak), 0
                break
        if not options:
            waiting[rank] = _next_spare(ledger, rank, waiting[rank])
            if waiting[rank] > MAX_SPARE:
                stuck.append(rank)
    ledger.move(moves)
    many = ledger.problem.devices.num_ranks > MANY_RANKS
    for rank in stuck:
        if budget.is_spent:
            break
        if many:  # each would take an evaluation, and single moves do as well
            del waiting[rank]
        elif (yield from _shed_some(ledger, int(ledger.uncut(rank)[0]))):
            waiting[rank] = 0
        elif not moves:
            del waiting[rank]
        else:
            waiting[rank] = MAX_SPARE
    _drop_done(ledger, waiting)


def _drop_done(ledger: Ledger, waiting: dict[int, int]) -> None:
    """Removes the ranks that have no surplus any more, or nothing left that a server can take."""
    headrooms, least_piece = ledger.loads.headrooms, ledger.shards.least_piece
    most = headrooms[-1].load if headrooms else 0
    for rank in list(waiting):
        heaviest = ledger.uncut(rank)[:NUM_SHARDS]
        if not ledger.loads.surplus(rank) or not (least_piece[heaviest] <= most).any():
            del waiting[rank]


def _requests(
    ledger: Ledger, waiting: dict[int, int]
) -> tuple[dict[int, list[Request]], dict[int, int]]:
    """Returns the requests of each rank, and who reserved which server.

    Ranks whose shards belong to one document come one after the other, to share its keys. So do
    ranks for which nothing is left.
    """
    shards, headrooms = ledger.shards, ledger.loads.headrooms
    requests: dict[int, list[Request]] = {}
    reserved: dict[int, int] = {}
    documents: set[int] = set()
    for rank, spare in waiting.items():
        heaviest = _shards_to_cut(ledger, rank)
        shared = {shards.document[shard] for shard in heaviest if shards.shares_keys[shard]}
        if not documents.isdisjoint(shared):
            continue
        surplus = min(ledger.loads.surplus(rank), int(shards.load[heaviest[0]]))
        fewest = fewest_servers(headrooms, surplus, spare=spare, without=reserved)
        if not fewest and requests:
            break
        requests[rank] = _requests_of(ledger, heaviest, spare, reserved)
        documents |= shared
        servers = _reserve(headrooms, surplus, fewest, reserved)
        reserved |= {one: rank for one in servers if not may_share(ledger, one, surplus)}
    return requests, reserved


def _requests_of(
    ledger: Ledger, heaviest: Sequence[int], spare: int, reserved: dict[int, int]
) -> list[Request]:
    """Returns the requests of a rank for some servers beyond the fewest."""
    return [
        Request(shard, keep, servers)
        for shard in heaviest
        for keep in _loads_to_keep(ledger, shard)
        for servers in server_sets(
            ledger, shard, int(ledger.shards.load[shard]) - keep, spare, reserved
        )
    ]


def _next_spare(ledger: Ledger, rank: int, spare: int) -> int:
    """Returns how many servers more a rank asks for that found nothing.

    More make no difference if there are no more, as is the case with few ranks.
    """
    heaviest = _shards_to_cut(ledger, rank)
    asked = _requests_of(ledger, heaviest, spare, {})
    spares = range(spare + 1, MAX_SPARE + 1)
    others = (more for more in spares if _requests_of(ledger, heaviest, more, {}) != asked)
    return next(others, MAX_SPARE + 1)


def _shards_to_cut(ledger: Ledger, rank: int) -> list[int]:
    """Returns the heaviest shards of a rank.

    If these are whole causal documents of many tiles, every piece of the lighter ones is as good as
    one of the heaviest, which alone is returned. A short document may be cheaper to move as a whole
    than any piece that starts and ends at a tile. Shards that are lighter than the surplus wait
    until all heavier ones have left.
    """
    shards, surplus = ledger.shards, ledger.loads.surplus(rank)
    heaviest: list[int] = ledger.uncut(rank)[:NUM_SHARDS].tolist()
    heaviest = [shard for shard in heaviest if shards.load[shard] >= surplus] or heaviest[:1]
    if all(shards.is_long_document[shard] for shard in heaviest):
        return heaviest[:1]
    return heaviest


def _reserve(
    headrooms: Sequence[Headroom], load: int, servers: Sequence[Headroom], reserved: dict[int, int]
) -> Iterator[int]:
    """Yields the servers that a rank will take: the remainder goes to one that just holds it."""
    yield from (server for _, server in servers[:-1])
    rest = load - sum(headroom.load for headroom in servers[:-1])
    taken = {server for _, server in servers[:-1]}
    for headroom in headrooms[bisect.bisect_left(headrooms, (rest, -1)) :]:
        if headroom.server not in reserved and headroom.server not in taken:
            yield headroom.server
            return


def _loads_to_keep(ledger: Ledger, shard: int) -> list[int]:
    """Returns loads of a shard that may stay: all but the surplus, or none, to fetch no keys."""
    shards, headrooms = ledger.shards, ledger.loads.headrooms
    load = int(shards.load[shard])
    keep = max(load - ledger.loads.surplus(shards.home[shard]), 0)
    fetches_keys = shards.span(shard)[0] > 0
    fits_whole = bool(headrooms) and load <= headrooms[-1].load
    return [keep, 0] if keep and fetches_keys and fits_whole else [keep]


def _shed_some(ledger: Ledger, shard: int) -> Shedding[bool]:
    """Moves all of a shard, or as much of it as other servers have headroom for."""
    headroom = sum(headroom.load for headroom in ledger.loads.headrooms[-NUM_PARTIAL:])
    loads = (int(ledger.shards.load[shard] - share * headroom) for share in SHARES)
    keeps = [keep for keep in dict.fromkeys((0, *loads)) if keep >= 0]
    cut = _first_cut(ledger, (yield ledger, _tries(ledger, shard, keeps)))
    if cut is not None:
        ledger.move([(shard, cut.pieces)])
    return cut is not None


def find_cut(ledger: Ledger, shard: int) -> Cut | None:
    """Returns the cheapest cut of all of a shard, for the fewest servers."""
    (found,) = evaluate([(ledger, _tries(ledger, shard, [0]))])
    return _first_cut(ledger, found)


def _tries(ledger: Ledger, shard: int, keeps: Sequence[int]) -> Wanted:
    """Returns requests to keep the first possible load, for the fewest servers, by number."""
    load = int(ledger.shards.load[shard])
    tries = [
        [
            Request(shard, keep, servers)
            for servers in server_sets(ledger, shard, load - keep, spare, {})
        ]
        for keep in keeps
        for spare in SPARES
    ]
    return {n: one for n, one in enumerate(tries) if not n or one != tries[n - 1]}


def _first_cut(ledger: Ledger, found: Found) -> Cut | None:
    """Returns the cheapest cut of the first try that has any."""
    limit = ledger.peak_traffic
    for options in found.values():
        if options:
            best = [choices.best(row, limit) for choices, row in options]
            cut = min(best, key=lambda option: option.score).cut()
            return _fit_remainder(ledger, cut, max(limit, cut.peak), {}, {})
    return None


def _fit_remainder(
    ledger: Ledger, cut: Cut, limit: int, taken: Container[int], reserved: dict[int, int]
) -> Cut:
    """Moves the last piece of a cut to the smallest headroom that holds it, to save large ones.

    A server that holds keys of the document keeps it. Servers that are taken, or that another rank
    reserved, are left alone.
    """
    shards, headrooms = ledger.shards, ledger.loads.headrooms
    piece, document, home = cut.pieces[-1], shards.document[cut.shard], shards.home[cut.shard]
    if not shards.is_document[cut.shard] and ledger.keys.held(document, piece.server):
        return cut
    need, shape = shards.keys_needed(document, piece.span), ledger.problem.shape
    arriving = (piece.stop - piece.start) * shape.q_bytes + (need[1] - need[0]) * shape.kv_bytes
    memory_bytes = shards.memory_bytes(document, piece.span)
    same_node = shards.same_node(piece.server, home)
    own = {other.server for other in cut.pieces}
    for headroom in headrooms[bisect.bisect_left(headrooms, (piece.load, -1)) :]:
        server = headroom.server
        if server == piece.server:
            break
        if (
            server not in taken
            and server not in own
            and reserved.get(server, home) == home
            and ledger.received[server] + arriving <= limit
            and ledger.free_bytes[server] >= memory_bytes
            and shards.same_node(server, home) == same_node
        ):
            return cut._replace(pieces=[*cut.pieces[:-1], piece._replace(server=server)])
    return cut
