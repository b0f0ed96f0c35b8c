"""Requests for cuts: shards, the servers that may take pieces of them, and who holds their keys.

Arrays describe many requests at once. Shapes: R requests, S servers of each; the last dimension is
1, and stands for the tops of ``cuts``.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import NamedTuple

import numpy as np

from distca.planning.schedulers.cuttable import CuttableShards
from distca.planning.spans import Floats, Ints, as_ints, cumulative


class Targets(NamedTuple):
    """Servers that may take pieces, [S, R, 1]. Requests for fewer servers have empty ones first."""

    server: Ints  # -1: empty
    headroom: Ints
    free_bytes: Ints  # memory
    received: Ints  # bytes so far
    byte_weight: Floats  # of a byte between it and the queries


class KeySources(NamedTuple):
    """Workers that hold keys, [sources, 1]. The first R are the homes of the shards."""

    row: Ints  # [sources] the request
    worker: Ints
    start: Ints
    stop: Ints
    sent: Ints  # bytes so far
    byte_weight: Floats


class HeldSpans(NamedTuple):
    """Keys [start, stop) that targets have already, [held, 1]; disjoint for each target."""

    slot: Ints  # [held] the server of the request
    row: Ints  # [held] the request
    start: Ints
    stop: Ints


@dataclass(frozen=True, eq=False)
class Requests:
    """Shards from which pieces are to be cut."""

    shards: CuttableShards  # R of them
    number: Sequence[int]  # [R] of each shard
    half: Ints  # [R, 1] of the tops that it tries: 1 or 2 if there is a single server, else 0
    keep: Ints  # [R, 1] the load that may stay at home
    targets: Targets
    sources: KeySources
    held: HeldSpans


def merge(parts: Sequence[Requests]) -> Requests:
    """Joins requests for equally many servers."""
    if len(parts) == 1:
        return parts[0]
    counts = [len(part.number) for part in parts]
    first = cumulative(as_ints(counts))[:-1].tolist()
    homes = [
        [column[:count] for column in p.sources] for p, count in zip(parts, counts, strict=True)
    ]
    others = [
        [column[count:] for column in p.sources] for p, count in zip(parts, counts, strict=True)
    ]
    for row, part_homes, part_others in zip(first, homes, others, strict=True):
        part_homes[0], part_others[0] = part_homes[0] + row, part_others[0] + row
    held = [
        part.held._replace(row=part.held.row + row) for part, row in zip(parts, first, strict=True)
    ]
    return Requests(
        shards=CuttableShards.join([part.shards for part in parts]),
        number=[number for part in parts for number in part.number],
        half=np.concatenate([part.half for part in parts]),
        keep=np.concatenate([part.keep for part in parts]),
        targets=Targets(
            *(np.concatenate(c, axis=1) for c in zip(*(p.targets for p in parts), strict=True))
        ),
        sources=KeySources(*map(np.concatenate, zip(*homes, *others, strict=True))),
        held=HeldSpans(*map(np.concatenate, zip(*held, strict=True))),
    )
