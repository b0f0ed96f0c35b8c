"""Which cuts the ranks of one or several ledgers ask for, all evaluated at once."""

from collections.abc import Generator, Sequence
from functools import cache, partial
from typing import NamedTuple, TypeVar

import numpy as np

from distca.planning.schedulers.cuts import NUM_TOPS, Choices, evaluate_requests
from distca.planning.schedulers.ledger import Ledger
from distca.planning.schedulers.loads import Headroom
from distca.planning.schedulers.requests import HeldSpans, KeySources, Requests, Targets, merge
from distca.planning.spans import Floats, Ints, Span, as_ints

# In one evaluation, all requests have the width of those for the most servers. More than so many
# for a single piece are evaluated apart: this saves more than an evaluation takes.
APART = 16
NUM_SOURCES = 4  # owners of a document whose sent bytes limit a cut, the busiest; 2 do as well
INSIDE_NODE = 0.125  # weight of a byte inside a node: NVLink is about 8 times as fast as a NIC


class Request(NamedTuple):
    """Servers that should take all of a shard but a load that may stay at home."""

    shard: int
    keep: int
    servers: list[Headroom]
    half: int = 0  # see ``requests.Requests``


T = TypeVar("T")
Wanted = dict[int, list[Request]]  # rank -> its requests
Found = dict[int, list[tuple[Choices, int]]]  # rank -> choices that fit, and their rows
Question = tuple[Ledger, Wanted]
Shedding = Generator[Question, Found, T]  # yields questions to ``evaluate``


def evaluate(questions: Sequence[Question]) -> list[Found]:
    """Returns for each rank of each ledger the choices that fit."""
    found: list[Found] = [{rank: [] for rank in wanted} for _, wanted in questions]
    requests = (one for _, wanted in questions for asked in wanted.values() for one in asked)
    num_single = sum(len(request.servers) == 1 for request in requests)
    for single in ((True,), (False,)) if num_single > APART else ((True, False),):
        _evaluate(questions, single, found)
    return found


def _evaluate(questions: Sequence[Question], single: Sequence[bool], found: list[Found]) -> None:
    """Adds the choices that fit, of requests for a single piece, for several, or for both."""
    parts, origin, slots = [], [], 1
    for index, (ledger, wanted) in enumerate(questions):
        asked = [
            (rank, half)
            for rank, requests in wanted.items()
            for request in requests
            if (len(request.servers) == 1) in single
            for half in _halves(ledger, request)
        ]
        if asked:
            parts.append((ledger, [request for _, request in asked]))
            origin += [(index, rank) for rank, _ in asked]
            slots = max(slots, *(len(request.servers) for _, request in asked))
    if parts:
        merged = merge([_describe(ledger, requests, slots) for ledger, requests in parts])
        chosen = evaluate_requests(merged, parts[0][0].problem.shape)
        for row in np.flatnonzero(chosen.fits.any(axis=1)).tolist():
            index, rank = origin[row]
            found[index][rank].append((chosen, row))


def _halves(ledger: Ledger, request: Request) -> list[Request]:
    """Returns two requests for a single piece, because it has twice as many candidates.

    A short shard has not.
    """
    if len(request.servers) > 1:
        return [request]
    start, stop = ledger.shards.span(request.shard)
    is_short = stop - start < (NUM_TOPS - 1) * ledger.problem.grain.spacing
    return [request._replace(half=half) for half in ((1,) if is_short else (1, 2))]


def _describe(ledger: Ledger, wanted: Sequence[Request], num_slots: int) -> Requests:
    """Describes shards and servers of requests, all together.

    num_slots: the most servers that a request may have.
    """
    shards, placement = ledger.shards, ledger.problem.placement
    number = [request.shard for request in wanted]
    empty = Headroom(0, -1)
    slots = ([empty] * (num_slots - len(r.servers)) + r.servers for r in wanted)
    # One flat list takes a third of the time that nested ones take.
    flat = as_ints([number for row in slots for headroom in row for number in headroom])
    headroom, server = flat.reshape(len(wanted), num_slots, 2).transpose(2, 1, 0)[..., None]
    home = placement.worker[number, None]
    start, stop = placement.start[number, None], placement.stop[number, None]
    sources = [np.arange(len(number))[:, None], home, start, stop]
    # Several requests are for the same document.
    busiest_owners = cache(partial(_busiest_owners, ledger))
    others = list[tuple[int, ...]]()
    for index, shard in enumerate(number):
        if not shards.is_document[shard]:
            own = shards.home[shard], shards.span(shard)
            busiest = [owner for owner in busiest_owners(shards.document[shard]) if owner != own]
            others += [(index, worker, *span) for worker, span in busiest[: NUM_SOURCES - 1]]
    row, worker, start, stop = (
        np.concatenate([column, more[:, None]])
        for column, more in zip(sources, as_ints(others).reshape(-1, 4).T, strict=True)
    )
    row = row[:, 0]
    return Requests(
        shards=shards.cuttable(number),
        number=number,
        half=as_ints([request.half for request in wanted])[:, None],
        keep=as_ints([request.keep for request in wanted])[:, None],
        targets=Targets(
            server,
            headroom,
            np.where(server < 0, 0, ledger.free_bytes[server]),
            ledger.received[server],
            _byte_weight(ledger, server, home),
        ),
        sources=KeySources(
            row, worker, start, stop, ledger.sent[worker], _byte_weight(ledger, worker, home[row])
        ),
        held=_held(ledger, wanted, num_slots),
    )


def _byte_weight(ledger: Ledger, rank: Ints, home: Ints) -> Floats:
    """Returns what a byte between two ranks counts."""
    node = ledger.problem.devices.node
    return np.where((node[rank] == node[home]) & ledger.shards.several_nodes, INSIDE_NODE, 1.0)


def _busiest_owners(ledger: Ledger, document: int) -> list[tuple[int, Span]]:
    """Returns the shards of a document whose workers send the most.

    There is one more than a request looks at, since its own shard may be among them.
    """
    worker, owners = ledger.shards.owner_spans(document)
    busiest = np.argsort(-ledger.sent[worker], kind="stable")[:NUM_SOURCES]
    return [owners[index] for index in busiest.tolist()]


def _held(ledger: Ledger, wanted: Sequence[Request], num_slots: int) -> HeldSpans:
    """Returns the keys that servers of requests hold; of whole documents only home has any."""
    held_keys = cache(ledger.keys.held)
    held = [
        (num_slots - len(request.servers) + index, row, *span)
        for row, request in enumerate(wanted)
        if not ledger.shards.is_document[request.shard]
        for index, (_, server) in enumerate(request.servers)
        for span in held_keys(ledger.shards.document[request.shard], server)
    ]
    slot, row, start, stop = as_ints(held).reshape(-1, 4).T
    return HeldSpans(slot, row, start[:, None], stop[:, None])
