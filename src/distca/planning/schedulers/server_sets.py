"""Which servers are asked to take a load together."""

from collections.abc import Iterable, Sequence
from itertools import islice

from distca.planning.schedulers.ledger import Ledger
from distca.planning.schedulers.loads import Headroom

NUM_HOLDERS = 3  # servers with keys of the document that are tried (docs/planning.md)


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
        keys, document = ledger.keys, shards.document[shard]
        possible = [
            Headroom(headroom, server)
            for server in keys.possible_holders(document)
            if (headroom := loads.headroom(server)) > 0 and server != home
        ]
        holders = (
            one for one in sorted(possible, reverse=True) if keys.holds(document, one.server)
        )
        for holder in islice(holders, NUM_HOLDERS):
            if holder.server not in reserved:
                sets.append(fewest_servers(loads.headrooms, load, [holder], spare, reserved))
    if shards.several_nodes:
        near = [headroom for headroom in loads.headrooms if shards.same_node(headroom.server, home)]
        sets.append(fewest_servers(near, load, spare=spare, without=reserved))
    return [one for index, one in enumerate(sets) if one and one not in sets[:index]]


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
