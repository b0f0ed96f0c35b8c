"""Which cuts the ranks of one or several ledgers ask for, all evaluated at once."""

from collections.abc import Generator, Sequence
from typing import TypeVar

import numpy as np

from distca.planning.schedulers.cuts import NUM_TOPS, Choices, evaluate_requests
from distca.planning.schedulers.ledger import Ledger, Request
from distca.planning.schedulers.requests import merge

# In one evaluation, all requests have the width of those for the most servers. More than so many
# for a single piece are evaluated apart: this saves more than an evaluation takes.
APART = 16

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
        merged = merge([ledger.requests(requests, slots) for ledger, requests in parts])
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
