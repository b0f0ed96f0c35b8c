"""Which servers are asked to take a load together."""

from collections.abc import Iterable, Iterator, Sequence
from itertools import islice

from distca.planning.schedulers.ledger import Ledger
from distca.planning.schedulers.loads import Headroom

NUM_HOLDERS = 3  # servers with keys of the document that are tried (docs/planning.md)
MANY_HOLDERS = 0.25  # of all servers with headroom, among which some are then found at once


def server_sets(
    ledger: Ledger, shard: int, load: int, spare: int, reserved: dict[int, int]
) -> list[list[Headroom]]:
    """Returns sets of servers that can take a load together.

    These are the largest headrooms, the same after a server that has keys of the document, and the
    largest headrooms of the shard's node.
    """
    shards, loads, home = ledger.shards, ledger.loads, ledger.shards.home[shard]
    sets = [fewest_servers(loads.headrooms, load, spare=spare, without=reserved)]
    if not shards.is_document[shard]:
        for holder in islice(_holders(ledger, shard), NUM_HOLDERS):
            if holder.server not in reserved:
                sets.append(fewest_servers(loads.headrooms, load, [holder], spare, reserved))
    if shards.several_nodes:
        own = [Headroom(loads.headroom(one), one) for one in shards.ranks_of_node(home)]
        near = sorted(one for one in own if one.load > 0 and loads.serves(one.server))
        sets.append(fewest_servers(near, load, spare=spare, without=reserved))
    return [one for index, one in enumerate(sets) if one and one not in sets[:index]]


def _holders(ledger: Ledger, shard: int) -> Iterator[Headroom]:
    """Yields the servers that have keys of a shard's document, the largest headroom first."""
    keys, loads, home = ledger.keys, ledger.loads, ledger.shards.home[shard]
    document = ledger.shards.document[shard]
    possible, largest = keys.possible_holders(document), reversed(loads.headrooms)
    if len(possible) < MANY_HOLDERS * len(loads.headrooms):  # sorting these takes less time
        some = [Headroom(loads.headroom(server), server) for server in possible]
        largest = iter(sorted((one for one in some if one.load > 0), reverse=True))
    for one in largest:
        if one.server != home and one.server in possible and keys.holds(document, one.server):
            yield one


def fewest_servers(
    headrooms: Sequence[Headroom],
    load: int,
    first: Sequence[Headroom] = (),
    spare: int = 0,
    without: Iterable[int] = (),
) -> list[Headroom]:
    """Returns ``first`` and the fewest of the largest headrooms that together hold a load.

    If ``spare`` is 1, an eighth more are added, and one; if it is 2, half as many more, and two:
    each piece may be smaller than its headroom. Returns an empty list if all of them do not hold
    the load.
    """
    chosen = list(first)
    total, skipped = sum(h.load for h in chosen), {h.server for h in chosen}.union(without)
    wanted = 0  # once the load fits
    for headroom in reversed(headrooms):
        if total >= load:
            wanted = wanted or len(chosen) + spare * (1 + spare * len(chosen) // 8)
            if len(chosen) >= wanted:
                break
        if headroom.server not in skipped:
            chosen.append(headroom)
            total += headroom.load
    return chosen if total >= load else []
