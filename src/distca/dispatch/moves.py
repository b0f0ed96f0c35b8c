"""Moves: many copies, or many additions, in one launch.

A move is made once for a plan and runs in every layer: ``move(memories)`` copies or adds between
tensors that are contiguous, numbered as its places number them. On a GPU, a table of all stretches
lies on the device, and one Triton kernel works through it (``distca.dispatch.kernels``). Elsewhere,
stretch by stretch is copied with slices (``distca.dispatch.slices``). This is the only place where
rows are gathered, scattered and added.
"""

import logging
from collections.abc import Callable, Sequence
from functools import cache
from types import ModuleType

import numpy as np
import torch
from torch import Tensor

from distca.dispatch.rows import Places
from distca.planning.spans import Ints, as_ints, cumulative, expand

Move = Callable[[Sequence[Tensor]], None]

_MEMORY = 1 << 48  # more than any memory has elements

_log = logging.getLogger(__name__)


def copies(source: Places, target: Places, device: torch.device) -> Move:
    """Returns the move that copies bytes from one list of places to another.

    There are up to 8 memories; targets are disjoint.
    """
    assert np.array_equal(source.size, target.size)
    if not len(source.size):
        return lambda _: None
    table = np.stack([source.memory, source.offset, target.memory, target.offset, target.size], 1)
    move: Move = _on(device).Copies(table, device)
    return move


def sums(
    source: Places, target: Places, initial: Ints, dtype: torch.dtype, device: torch.device
) -> Move:
    """Returns the move that adds up all values for each target element, in the order of places.

    There are up to 8 memories, of which 0, 1 and 2 have the values. Memories 3 and 4 are in
    ``wide(dtype)``, in which all sums are computed; the others are in ``dtype``.

    initial: the memory, 3 or 4, whose elements at the offset of the target are added first; -1 if
        there is none: a sum begins with zero, and its target is not read.
    """
    assert np.array_equal(source.size, target.size)
    move: Move = _on(device).Sums(*sum_tables(source, target, initial), dtype, device)
    return move


def sum_tables(source: Places, target: Places, initial: Ints) -> tuple[Ints, Ints]:
    """Returns the stretches of target elements that have the same terms, and all their terms.

    Stretches are [n, 6]: initial memory, target memory, offset, size, first and last term; terms
    are [m, 2]: the memory and the offset of a value for the first element of the stretch.
    """
    # 1. Cut the targets wherever one begins or ends.
    begin, end = (target.memory * _MEMORY + target.offset + size for size in (0, target.size))
    bounds = np.unique(np.concatenate([begin, end]))
    # 2. All pairs of a stretch and a place that covers it, by stretch; places keep their order.
    first, last = np.searchsorted(bounds, begin), np.searchsorted(bounds, end)
    place, stretch = np.repeat(np.arange(len(begin)), last - first), expand(first, last - first)
    order = np.argsort(stretch, kind="stable")
    place, stretch = place[order], stretch[order]
    # 3. The terms are the pairs that have a value.
    valued = source.memory[place] >= 0
    offset = source.offset[place] + bounds[stretch] - begin[place]
    terms = np.stack([source.memory[place], offset], 1)[valued]
    used, pair = np.unique(stretch, return_index=True)
    before = cumulative(as_ints(valued))[np.append(pair, len(place))]
    memory, offset = np.divmod(bounds[used], _MEMORY)
    size = np.append(bounds, 0)[used + 1] - bounds[used]
    columns = [initial[place[pair]], memory, offset, size, before[:-1], before[1:]]
    return np.stack(columns, 1), terms


@cache
def _on(device: torch.device) -> ModuleType:
    """Returns the module that moves on a device."""
    from distca.dispatch import slices

    if device.type != "cuda":
        return slices
    try:
        from distca.dispatch import kernels

        kernels.try_on(device)
    except Exception as error:  # no Triton, or none that compiles here
        _log.warning(
            "rows are copied run by run, which is slow for plans with many pieces, since Triton"
            " does not work here: %s",
            error,
        )
        return slices
    return kernels
