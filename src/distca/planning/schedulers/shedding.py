"""Step 4 of the scheduler: ranks with a surplus shed it into the headroom of other servers."""

import bisect
from collections.abc import Iterator, Sequence

import numpy as np

from distca.planning.schedulers.cuts import Cut, best_cut
from distca.planning.schedulers.ledger import Headroom, Ledger
from distca.planning.schedulers.short_documents import shed_documents
from distca.planning.spans import as_ints

# Each value is the smallest beyond which plans hardly change (docs/planning.md, "What was tried").
NUM_ROUNDS = 64  # how often the ranks with a surplus are sorted again
NUM_SHARDS = 2  # heaviest shards of a rank that are tried
NUM_HOLDERS = 3  # servers with keys of the document that are tried
MAX_SPARE = 2  # servers beyond the fewest that are tried, because cuts at tiles leave remainders
# If a rank cannot shed its surplus out of one shard, it fills these shares of large headrooms.
# Shares are below 1, because short pieces cost more than their share of the load.
NUM_PARTIAL = 8  # how many of the largest headrooms are filled
SHARES = (0.95, 0.85, 0.7, 0.5)


def surplus_ranks(ledger: Ledger, senders_first: float, seed: int) -> Iterator[int]:
    """Yields the ranks with a surplus in the order in which they should shed it.

    Ranks that will send the most come first, while all headroom is left, because they determine the
    peak traffic. Then come those that are closest to needing one server more; they are sorted again
    as headroom shrinks.

    senders_first: the share of the largest estimate of sent bytes from which a rank comes first.
    seed: if above 0, the order is random instead.
    """
    heaviest_first = ledger.shards.heaviest_first
    above = np.flatnonzero(ledger.loads.above_capacity > 0).tolist()
    ranks = [rank for rank in above if rank < len(heaviest_first) and len(heaviest_first[rank])]
    if seed:
        yield from np.random.default_rng(seed).permutation(ranks).tolist()
        return
    estimate = {rank: _estimate_sent(ledger, rank) for rank in ranks}
    senders = [rank for rank in ranks if estimate[rank] >= senders_first * max(estimate.values())]
    yield from sorted(senders, key=lambda rank: (-estimate[rank], rank))
    others = as_ints(sorted(set(ranks) - set(senders)))
    per_round = 1 + len(others) // NUM_ROUNDS
    while len(others):
        surplus = ledger.loads.above_capacity[others]
        filled = np.cumsum(as_ints([h.load for h in reversed(ledger.loads.headrooms)]))
        num_servers = np.searchsorted(filled, surplus)
        slack = np.append(filled, np.iinfo(np.int64).max)[num_servers] - surplus
        others = others[np.argsort(slack, kind="stable")]
        yield from others[:per_round].tolist()
        others = np.sort(others[per_round:])


def _estimate_sent(ledger: Ledger, rank: int) -> float:
    """Estimates what a rank will send, if every piece lies at its cheapest place."""
    shards, surplus = ledger.shards, ledger.loads.surplus(rank)
    full = [headroom.load for headroom in _fewest(ledger.loads.headrooms, surplus)][:-1]
    loads = as_ints([*full, surplus - sum(full)])
    shape = ledger.problem.shape
    heaviest = int(shards.heaviest_first[rank][0])
    stops = shards.cuttable(heaviest).cheapest_stop(loads, shape)
    q, kv = shape.q_bytes, shape.kv_bytes
    return float(np.sum(stops) * (q * kv / (2 * q + kv) + kv)) + float(ledger.sent[rank])


def shed(ledger: Ledger, rank: int) -> None:
    """Moves the surplus of a rank, out of one of its heaviest shards if possible."""
    while ledger.loads.surplus(rank):
        if shed_documents(ledger, rank):
            continue
        heaviest = ledger.uncut(rank)[:NUM_SHARDS].tolist()
        cuts: list[tuple[int, float, int, Cut]] = []
        for shard in heaviest:
            for keep in _loads_to_keep(ledger, shard):
                cut = find_cut(ledger, shard, keep)
                if cut is not None:
                    cuts.append((*cut.score, shard, cut))
        if cuts:
            _, _, shard, cut = min(cuts, key=lambda entry: entry[:3])
            ledger.move(shard, cut.pieces)
        elif not heaviest or not _shed_some(ledger, heaviest[0]):
            return


def _loads_to_keep(ledger: Ledger, shard: int) -> list[int]:
    """Returns loads of a shard that may stay: all but the surplus, or none, to fetch no keys."""
    shards, headrooms = ledger.shards, ledger.loads.headrooms
    load = int(shards.load[shard])
    keep = load - ledger.loads.surplus(shards.home[shard])
    if keep < 0:
        return []
    fetches_keys = shards.span(shard)[0] > 0
    fits_whole = bool(headrooms) and load <= headrooms[-1].load
    return [keep, 0] if fetches_keys and fits_whole else [keep]


def _shed_some(ledger: Ledger, shard: int) -> bool:
    """Moves all of a shard, or as much of it as other servers have headroom for."""
    headroom = sum(headroom.load for headroom in ledger.loads.headrooms[-NUM_PARTIAL:])
    loads = (int(ledger.shards.load[shard] - share * headroom) for share in SHARES)
    for keep in dict.fromkeys((0, *loads)):
        cut = find_cut(ledger, shard, keep) if keep >= 0 else None
        if cut is not None:
            ledger.move(shard, cut.pieces)
            return True
    return False


def find_cut(ledger: Ledger, shard: int, keep: int) -> Cut | None:
    """Returns the cheapest cut over a few sets of servers, each as small as possible."""
    cuttable, headrooms = ledger.shards.cuttable(shard), ledger.loads.headrooms
    if not headrooms or not cuttable.any_piece_fits(headrooms[-1].load):
        return None
    sources, limit = ledger.sources(shard), ledger.peak_traffic
    tried: list[list[Headroom]] = []
    for spare in range(MAX_SPARE + 1):
        cuts: list[Cut] = []
        for servers in _server_sets(ledger, shard, cuttable.total_load - keep, spare):
            if servers in tried:
                continue
            tried.append(servers)
            targets = [ledger.target(shard, headroom) for headroom in servers]
            cut = best_cut(cuttable, keep, targets, sources, ledger.problem.shape, limit)
            if cut is not None:
                cuts.append(cut if targets[-1].held else _fit_remainder(ledger, shard, cut))
        if cuts:
            return min(cuts, key=lambda cut: cut.score)
    return None


def _server_sets(ledger: Ledger, shard: int, load: int, spare: int) -> Iterator[list[Headroom]]:
    """Yields sets of servers that can take a load together.

    These are the largest headrooms, the same after a server that has keys of the document, and the
    largest headrooms of the shard's node.
    """
    shards, loads, home = ledger.shards, ledger.loads, ledger.shards.home[shard]
    holders = [
        Headroom(loads.headroom(server), server)
        for server in ledger.keys.holders(shards.document[shard])
        if server != home and loads.headroom(server) > 0 and loads.serves(server)
    ]
    sets = [_fewest(loads.headrooms, load, spare=spare)]
    for holder in sorted(holders, reverse=True)[:NUM_HOLDERS]:
        sets.append(_fewest(loads.headrooms, load, [holder], spare))
    if shards.several_nodes:
        near = [headroom for headroom in loads.headrooms if shards.same_node(headroom.server, home)]
        sets.append(_fewest(near, load, spare=spare))
    return filter(None, sets)


def _fewest(
    headrooms: Sequence[Headroom], load: int, first: Sequence[Headroom] = (), spare: int = 0
) -> list[Headroom]:
    """Returns ``first`` and the fewest of the largest headrooms that together hold a load.

    ``spare`` more are added. Returns an empty list if all of them do not hold the load.
    """
    chosen = list(first)
    total, servers = sum(h.load for h in chosen), {h.server for h in chosen}
    for headroom in reversed(headrooms):
        if total >= load:
            if spare == 0:
                break
            spare -= 1
        if headroom.server not in servers:
            chosen.append(headroom)
            total += headroom.load
    return chosen if total >= load else []


def _fit_remainder(ledger: Ledger, shard: int, cut: Cut) -> Cut:
    """Moves the last piece of a cut to the smallest headroom that holds it, to save large ones."""
    shards, headrooms = ledger.shards, ledger.loads.headrooms
    piece, document, home = cut.pieces[-1], shards.document[shard], shards.home[shard]
    need = shards.keys_needed(document, piece.span)
    missing = ledger.keys.num_missing(document, piece.server, need)
    shape, queries = ledger.problem.shape, piece.stop - piece.start
    arriving = queries * shape.q_bytes + missing * shape.kv_bytes
    limit = ledger.peak_traffic + cut.over_limit
    memory_bytes = shards.memory_bytes(document, piece.span)
    same_node = shards.same_node(piece.server, home)
    taken = {other.server for other in cut.pieces}
    for headroom in headrooms[bisect.bisect_left(headrooms, (piece.load, -1)) :]:
        server = headroom.server
        if server == piece.server:
            break
        if (
            server not in taken
            and ledger.received[server] + arriving <= limit
            and ledger.free_bytes[server] >= memory_bytes
            and shards.same_node(server, home) == same_node
        ):
            return cut._replace(pieces=[*cut.pieces[:-1], piece._replace(server=server)])
    return cut
