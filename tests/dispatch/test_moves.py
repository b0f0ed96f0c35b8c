"""Copies and sums against plain loops, with slices and with the kernels.

The kernels run on a GPU (``pytest -m gpu tests/dispatch/test_moves.py``), or in the interpreter of
Triton (``TRITON_INTERPRET=1 pytest tests/dispatch/test_moves.py``).
"""

from __future__ import annotations

import importlib
import os
from types import ModuleType

import numpy as np
import pytest
import torch
from torch import Tensor

from distca.dispatch import moves
from distca.dispatch.rows import Places
from distca.dispatch.tensors import wide
from distca.planning.spans import as_ints

INTERPRETED = os.environ.get("TRITON_INTERPRET") == "1"
DEVICE = torch.device("cpu" if INTERPRETED or not torch.cuda.is_available() else "cuda")
DTYPES = [torch.bfloat16, torch.float16, torch.float32, torch.float64]
SHAPES = [(1, 64), (3, 80), (2, 128), (8, 192), (1, 256), (5, 2)]  # heads and head size
kernels = pytest.param("kernels", marks=[] if INTERPRETED else pytest.mark.gpu)


@pytest.fixture(params=["slices", kernels], autouse=True)
def implementation(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> str:
    if request.param == "kernels":
        pytest.importorskip("triton")
    module: ModuleType = importlib.import_module(f"distca.dispatch.{request.param}")
    monkeypatch.setattr(moves, "_on", lambda device: module)
    return str(request.param)


def noise(seed: int, *shape: int, dtype: torch.dtype) -> Tensor:
    generator = torch.Generator().manual_seed(seed)
    return torch.randn(*shape, generator=generator, dtype=torch.float64).to(dtype).to(DEVICE)


def random_rows(rng: np.random.Generator, num_runs: int) -> tuple[list[range], int]:
    """Disjoint runs of rows in any order, most of them short, and how many rows there are."""
    sizes = np.where(rng.random(num_runs) < 0.9, 1 + rng.integers(0, 7, num_runs), 150)
    gaps = rng.integers(0, 3, num_runs)
    starts = np.cumsum(sizes + gaps) - sizes
    runs = [range(a, a + n) for a, n in zip(starts.tolist(), sizes.tolist(), strict=True)]
    rng.shuffle(runs)
    return runs, int(sizes.sum() + gaps.sum())


def as_places(memory: int, runs: list[range], width: int, base: int = 0) -> Places:
    columns = [[memory, base + run.start * width, len(run) * width] for run in runs]
    return Places(*as_ints(columns).reshape(-1, 3).T)


@pytest.mark.parametrize("num_runs", [0, 1, 40])
@pytest.mark.parametrize("shape", SHAPES, ids=str)
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_copies_are_bitwise_those_of_indices(
    dtype: torch.dtype, shape: tuple[int, int], num_runs: int
) -> None:
    """Rows of three tensors go into one buffer and back, the last of them of another dtype."""
    rng = np.random.default_rng(num_runs)
    rows = [(shape, dtype), (shape, dtype), (shape[:1], wide(dtype))]
    tensors, own, packed, start = [], [], [], 0
    for index, (size, kind) in enumerate(rows):
        runs, num_rows = random_rows(rng, num_runs)
        tensors.append(noise(index, num_rows, *size, dtype=kind))
        width = int(np.prod(size)) * kind.itemsize
        own.append((runs, as_places(index, runs, width)))
        packed.append(Places.packed(3, start, own[-1][1].size))
        start += -(-int(packed[-1].size.sum()) // 128) * 128
    buffer = torch.zeros(start, dtype=torch.uint8, device=DEVICE)
    here, there = Places.joined(places for _, places in own), Places.joined(packed)
    moves.copies(here, there, DEVICE)([*tensors, buffer])
    for tensor, (runs, _), places in zip(tensors, own, packed, strict=True):
        expected = tensor[[row for run in runs for row in run]]
        first = int(places.offset[:1].sum())
        found = buffer[first : first + expected.nbytes].view(expected.dtype)
        assert torch.equal(found.view(expected.shape), expected)
    back = [torch.zeros_like(tensor) for tensor in tensors]
    moves.copies(there, here, DEVICE)([*back, buffer])
    for tensor, copy, (runs, _) in zip(tensors, back, own, strict=True):
        chosen = torch.zeros(len(tensor), dtype=torch.bool, device=DEVICE)
        chosen[[row for run in runs for row in run]] = True
        assert torch.equal(copy[chosen], tensor[chosen])
        assert not copy[~chosen].any()


@pytest.mark.parametrize("offset", [1, 2, 4, 8])
def test_memories_need_no_alignment(offset: int) -> None:
    memory = torch.arange(300, device=DEVICE).to(torch.uint8)
    target = torch.zeros(300, dtype=torch.uint8, device=DEVICE)[offset:]
    source = Places(*as_ints([[0], [offset], [200]]))
    moves.copies(source, Places(*as_ints([[1], [0], [200]])), DEVICE)([memory, target])
    assert torch.equal(target[:200], memory[offset : offset + 200])
    assert not target[200:].any()


def summed(values: list[Tensor], runs: list[range], into: Tensor) -> Tensor:
    """Adds the packed rows of each run in order, in the wide dtype."""
    total = into.clone()
    for value, run in zip(values, runs, strict=True):
        total[run.start : run.stop] += value
    return total


def rounded(found: Tensor, expected: Tensor) -> bool:
    if INTERPRETED and found.dtype == torch.bfloat16:  # the interpreter truncates
        return torch.allclose(found, expected, rtol=2**-7)
    return torch.equal(found, expected)


@pytest.mark.parametrize("num_runs", [0, 1, 25])
@pytest.mark.parametrize("shape", SHAPES[1:4], ids=str)
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_sums_are_bitwise_those_of_a_loop(
    dtype: torch.dtype, shape: tuple[int, int], num_runs: int
) -> None:
    """Overlapping runs are added to totals, in order; others into a buffer, from zero."""
    rng, width = np.random.default_rng(num_runs), shape[0] * shape[1]
    starts, sizes = rng.integers(0, 150, num_runs), rng.integers(1, 90, num_runs)
    runs = [range(a, a + n) for a, n in zip(starts.tolist(), sizes.tolist(), strict=True)]
    num_rows, count = 240, sum(map(len, runs))
    dk, dv = (noise(seed, count, *shape, dtype=dtype) for seed in (0, 1))
    totals = noise(2, num_rows, *shape, dtype=wide(dtype))
    buffer = torch.zeros(num_rows, *shape, dtype=dtype, device=DEVICE)
    unused = torch.empty(0, dtype=dtype, device=DEVICE)
    split = [list(values.split([len(run) for run in runs])) if runs else [] for values in (dk, dv)]
    nothing = torch.zeros(num_rows, *shape, dtype=wide(dtype), device=DEVICE)
    expected = summed(split[0], runs, totals), summed(split[1], runs, nothing).to(dtype)

    own, sent = as_places(3, runs, width), as_places(6, runs, width)
    sources = [Places.packed(memory, 0, own.size) for memory in (1, 2)]
    initial = np.concatenate([np.full(num_runs, 3), np.full(num_runs, -1)])
    targets = Places.joined([own, sent])
    add = moves.sums(Places.joined(sources), targets, initial, dtype, DEVICE)
    add([unused, dk, dv, totals, unused, unused, buffer])
    assert torch.equal(totals, expected[0])
    assert rounded(buffer, expected[1])


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_sums_begin_in_memory_that_nobody_has_written(dtype: torch.dtype) -> None:
    """The first terms are stored, rows without one become zeros, and others stay as they are."""
    width, dk = 6, noise(0, 7, 6, dtype=dtype)
    totals = torch.full((9, 6), torch.nan, dtype=wide(dtype), device=DEVICE)
    unused = torch.empty(0, dtype=dtype, device=DEVICE)
    runs = [range(1, 4), range(2, 6)]  # rows 2 and 3 have two terms
    targets = as_places(4, [*runs, range(7, 8)], width)
    values = [Places.packed(1, 0, targets.size[:2]), Places.packed(-1, 0, targets.size[2:])]
    initial = np.full_like(targets.size, -1)
    add = moves.sums(Places.joined(values), targets, initial, dtype, DEVICE)
    add([unused, dk, unused, unused, totals])
    nothing = torch.zeros(9, 6, dtype=wide(dtype), device=DEVICE)
    expected = summed([dk[:3], dk[3:7]], runs, nothing)
    assert torch.equal(totals[[1, 2, 3, 4, 5, 7]], expected[[1, 2, 3, 4, 5, 7]])
    assert bool(totals[[0, 6, 8]].isnan().all())


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_sums_end_in_another_memory(dtype: torch.dtype) -> None:
    """Totals are rounded into the result; rows without a value are copied, rows of dq too."""
    width, received = 6, noise(0, 9, 6, dtype=dtype)
    totals = noise(1, 8, 6, dtype=wide(dtype))
    dk, dq = (torch.full((8, 6), 7.0, dtype=dtype, device=DEVICE) for _ in range(2))
    runs = [range(1, 4), range(2, 6)]  # rows 2 and 3 come from two servers
    targets = [as_places(6, [*runs, range(8)], width), as_places(5, [range(3, 5)], width)]
    values = [
        Places.packed(0, 0, targets[0].size[:2]),
        Places.packed(-1, 0, targets[0].size[2:]),
        Places.packed(0, 7 * width, targets[1].size),
    ]
    move = moves.sums(
        Places.joined(values), Places.joined(targets), as_ints([3, 3, 3, -1]), dtype, DEVICE
    )
    expected = summed([received[:3], received[3:7]], runs, totals).to(dtype)
    move([received, received, received, totals, totals, dq, dk])
    assert rounded(dk, expected)
    assert torch.equal(dq[3:5], received[7:9])
    assert bool((dq[[0, 1, 2, 5, 6, 7]] == 7).all())


def test_nothing_is_moved_by_empty_tables() -> None:
    nothing = Places.joined([])
    memory = torch.empty(0, device=DEVICE)
    moves.copies(nothing, nothing, DEVICE)([memory])
    moves.sums(nothing, nothing, nothing.size, torch.float32, DEVICE)([memory])
