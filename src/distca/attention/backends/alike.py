"""Which tasks of a backward call should have a call of their own.

[Note: empty blocks] The backward kernel of FlashAttention 2 launches, for every task, as many
thread blocks as the longest task has blocks of keys. Those of shorter tasks end at once, but take
time: 278 tasks, one of them with 121,736 keys, make 8 million for 32 heads. So tasks that are much
shorter than the longest are computed apart from it, where many of them are neighbours.
``benchmarks/empty_blocks.py`` measures what this saves.
"""

import numpy as np

from distca.planning.spans import Ints

BLOCK = 128  # keys of a thread block
ALIKE = 4  # times the keys of another task, up to which two are alike
WORTH_A_CALL = 4096  # empty blocks of a head, which take longer than another call


def alike(keys: Ints) -> list[tuple[int, int]]:
    """Returns the tasks [first, last) of each call, in order.

    keys: [tasks]
    """
    return _groups(-(-keys // BLOCK), 0, len(keys))


def _groups(blocks: Ints, first: int, last: int) -> list[tuple[int, int]]:
    longest = int(blocks[first:last].max())
    is_short = blocks[first:last] * ALIKE <= longest
    # Where short tasks begin and end; padded, so that they do both.
    edges = first + np.flatnonzero(np.diff(np.concatenate([[False], is_short, [False]])))
    groups, begin = [], first
    for low, high in edges.reshape(-1, 2).tolist():
        if (longest - int(blocks[low:high].max())) * (high - low) < WORTH_A_CALL:
            continue
        if begin < low:
            groups.append((begin, low))
        groups += _groups(blocks, low, high)
        begin = high
    return [*groups, (begin, last)] if begin < last else groups
