"""Moves with Triton: one kernel launch for a whole table, on a GPU.

Each program takes one entry of the table; long stretches are divided among several. Memories are
passed as addresses, since their number and dtypes differ from move to move. A kernel is compiled
when the first move that needs it is made, and not in a layer, where other ranks would wait for it.
"""

from collections.abc import Sequence
from functools import cache, reduce
from operator import or_
from typing import Any

import numpy as np
import torch
import triton
import triton.language as tl
from torch import Tensor

from distca.dispatch.tensors import to_device, wide
from distca.planning.spans import Ints, expand

_COPY_BYTES = 32768  # of one program
_SUM_ELEMENTS = 4096  # of one program
_BLOCK = 1024  # words or elements that a program moves at once
_MEMORIES = 8
_WORD = 16  # bytes that a thread can load at once
_WORDS = {1: tl.int8, 2: tl.int16, 4: tl.int32, 8: tl.int64, 16: tl.int64}  # by alignment
_TYPES: dict[torch.dtype, Any] = {
    torch.bfloat16: tl.bfloat16,
    torch.float16: tl.float16,
    torch.float32: tl.float32,
    torch.float64: tl.float64,
}


class _Table:
    """A table on the device, and what all its offsets and sizes are multiples of, in bytes."""

    def __init__(self, table: Ints, units: Ints, device: torch.device) -> None:
        self._table = to_device(table, torch.int64, device)
        self._alignment = int(np.bitwise_or.reduce(units, axis=None, initial=_WORD))

    def _aligned(self, memories: Sequence[Tensor]) -> tuple[int, list[int]]:
        """Returns the alignment of everything, and the addresses of the memories."""
        assert len(memories) <= _MEMORIES
        assert all(memory.is_contiguous() for memory in memories)
        addresses = [memory.data_ptr() for memory in memories]
        unused = self._table.data_ptr()  # any address, so that all arguments have 64 bits
        used = [address or unused for address in addresses]
        used += [unused] * (_MEMORIES - len(used))
        return _power_of_two(reduce(or_, addresses, self._alignment)), used


class Copies(_Table):
    """See ``distca.dispatch.moves.copies``."""

    def __init__(self, table: Ints, device: torch.device) -> None:
        entry, skipped, size = _divided(table[:, 4], _COPY_BYTES)
        table = np.stack([*table[entry, :4].T, size], 1)
        table[:, [1, 3]] += skipped[:, None]
        super().__init__(table, table[:, [1, 3, 4]], device)
        _load_copy(_power_of_two(self._alignment), device)

    def __call__(self, memories: Sequence[Tensor]) -> None:
        if not len(self._table):
            return
        alignment, addresses = self._aligned(memories)
        with torch.cuda.device_of(self._table):  # type: ignore[no-untyped-call]
            _copy[(len(self._table),)](self._table, *addresses, **_copy_options(alignment))


class Sums(_Table):
    """See ``distca.dispatch.moves.sums``."""

    def __init__(
        self, stretches: Ints, terms: Ints, dtype: torch.dtype, device: torch.device
    ) -> None:
        entry, skipped, size = _divided(stretches[:, 3], _SUM_ELEMENTS)
        initial, memory, offset, _, first, last = stretches[entry].T
        table = np.stack([initial, memory, offset + skipped, skipped, size, first, last], 1)
        units = np.concatenate([table[:, [2, 3, 4]].ravel(), terms[:, 1]]) * dtype.itemsize
        super().__init__(table, units, device)
        self._terms, self._dtype = to_device(terms, torch.int64, device), dtype
        _load_sum(_power_of_two(self._alignment), dtype, device)

    def __call__(self, memories: Sequence[Tensor]) -> None:
        if not len(self._table):
            return
        alignment, addresses = self._aligned(memories)
        options = _sum_options(alignment, self._dtype)
        with torch.cuda.device_of(self._table):  # type: ignore[no-untyped-call]
            _sum[(len(self._table),)](self._table, self._terms, *addresses, **options)


def try_on(device: torch.device) -> None:
    """Copies a few bytes; raises if Triton cannot compile or run here."""
    memory = torch.arange(64, dtype=torch.uint8, device=device)
    Copies(np.array([[0, 0, 0, 32, 32]]), device)([memory])
    if memory[32:].tolist() != list(range(32)):
        raise RuntimeError("a copy of 32 bytes was wrong")


def _power_of_two(alignment: int) -> int:
    """Returns the largest power of two that divides a number."""
    return alignment & -alignment


def _copy_options(alignment: int) -> dict[str, Any]:
    word = _WORDS[alignment]
    num_bytes = word.primitive_bitwidth // 8
    return {"WORD": word, "NUM_BYTES": num_bytes, "ALIGNMENT": alignment, "BLOCK": _BLOCK}


def _sum_options(alignment: int, dtype: torch.dtype) -> dict[str, Any]:
    return {
        "NARROW": _TYPES[dtype],
        "NUM_BYTES": dtype.itemsize,
        "WIDE": _TYPES[wide(dtype)],
        "ALIGNMENT": alignment,
        "BLOCK": _BLOCK,
    }


@cache  # what is loaded once stays
def _load_copy(alignment: int, device: torch.device) -> None:
    """Copies nothing, which compiles and loads the kernel for an alignment."""
    nothing = torch.zeros(1, 5, dtype=torch.int64, device=device)
    with torch.cuda.device_of(nothing):  # type: ignore[no-untyped-call]
        _copy[(1,)](nothing, *[nothing.data_ptr()] * _MEMORIES, **_copy_options(alignment))


@cache
def _load_sum(alignment: int, dtype: torch.dtype, device: torch.device) -> None:
    """Adds up nothing, likewise."""
    nothing = torch.zeros(1, 7, dtype=torch.int64, device=device)
    options = _sum_options(alignment, dtype)
    with torch.cuda.device_of(nothing):  # type: ignore[no-untyped-call]
        _sum[(1,)](nothing, nothing, *[nothing.data_ptr()] * _MEMORIES, **options)


def _divided(size: Ints, most: int) -> tuple[Ints, Ints, Ints]:
    """Divides stretches into chunks: of which stretch each one is, what it skips, its size."""
    count = -(-size // most)
    entry = np.repeat(np.arange(len(size)), count)
    skipped = expand(np.zeros_like(count), count) * most
    return entry, skipped, np.minimum(size[entry] - skipped, most)


@triton.jit
def _address(memory, a0, a1, a2, a3, a4, a5, a6, a7):  # type: ignore[no-untyped-def]
    low = tl.where(memory < 2, tl.where(memory == 0, a0, a1), tl.where(memory == 2, a2, a3))
    high = tl.where(memory < 6, tl.where(memory == 4, a4, a5), tl.where(memory == 6, a6, a7))
    return tl.where(memory < 4, low, high)


_ADDRESSES = [f"a{number}" for number in range(_MEMORIES)]


@triton.jit(do_not_specialize=_ADDRESSES)  # type: ignore[untyped-decorator]
def _copy(  # type: ignore[no-untyped-def]
    table, a0, a1, a2, a3, a4, a5, a6, a7,
    WORD: tl.constexpr, NUM_BYTES: tl.constexpr, ALIGNMENT: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    """Copies one entry: source memory and offset, target memory and offset, size; in bytes."""
    entry = table + 5 * tl.program_id(0).to(tl.int64)
    source = _address(tl.load(entry), a0, a1, a2, a3, a4, a5, a6, a7) + tl.load(entry + 1)
    target = _address(tl.load(entry + 2), a0, a1, a2, a3, a4, a5, a6, a7) + tl.load(entry + 3)
    # These tell the compiler how many bytes a thread can load at once.
    words = tl.multiple_of(tl.load(entry + 4) // NUM_BYTES, ALIGNMENT // NUM_BYTES)
    source = tl.multiple_of(source.to(tl.pointer_type(WORD)), ALIGNMENT)
    target = tl.multiple_of(target.to(tl.pointer_type(WORD)), ALIGNMENT)
    for done in range(0, words, BLOCK):
        word = done + tl.arange(0, BLOCK)
        tl.store(target + word, tl.load(source + word, mask=word < words), mask=word < words)


@triton.jit(do_not_specialize=_ADDRESSES)  # type: ignore[untyped-decorator]
def _sum(  # type: ignore[no-untyped-def]
    table, all_terms, a0, a1, a2, a3, a4, a5, a6, a7,
    NARROW: tl.constexpr, NUM_BYTES: tl.constexpr, WIDE: tl.constexpr,
    ALIGNMENT: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    """Adds up one entry: initial and target memory, offset, skipped, size, first and last term."""
    entry = table + 7 * tl.program_id(0).to(tl.int64)
    initial, memory = tl.load(entry), tl.load(entry + 1)
    offset, skipped = tl.load(entry + 2), tl.load(entry + 3)
    size = tl.multiple_of(tl.load(entry + 4), ALIGNMENT // NUM_BYTES)
    first, last = tl.load(entry + 5), tl.load(entry + 6)
    is_wide = (memory == 3) | (memory == 4)  # the sums; others are results
    number = tl.where(is_wide, memory, initial)
    totals = tl.where(number == 3, a3, a4).to(tl.pointer_type(WIDE)) + offset
    totals = tl.multiple_of(totals, ALIGNMENT)
    target = _address(memory, a0, a1, a2, a3, a4, a5, a6, a7)
    for done in range(0, size, BLOCK):
        element = done + tl.arange(0, BLOCK)
        inside = element < size
        total = tl.zeros((BLOCK,), WIDE)
        if initial >= 0:
            total = tl.load(totals + element, mask=inside, other=0.0)
        for number in range(first, last):
            term = all_terms + 2 * number
            source = _address(tl.load(term), a0, a1, a2, a2, a2, a2, a2, a2)
            start = source.to(tl.pointer_type(NARROW)) + tl.load(term + 1) + skipped
            start = tl.multiple_of(start, ALIGNMENT)
            total += tl.load(start + element, mask=inside, other=0.0).to(WIDE)
        if is_wide:
            tl.store(totals + element, total, mask=inside)
        else:
            start = tl.multiple_of(target.to(tl.pointer_type(NARROW)) + offset, ALIGNMENT)
            tl.store(start + element, total.to(NARROW), mask=inside)
