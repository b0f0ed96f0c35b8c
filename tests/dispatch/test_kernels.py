"""Kernels are loaded when moves are made: on a GPU, or in Triton's interpreter."""

from __future__ import annotations

import os
from collections.abc import Callable

import pytest
import torch

from distca.dispatch.moves import sum_tables
from distca.dispatch.rows import Places
from distca.planning.spans import as_ints

INTERPRETED = os.environ.get("TRITON_INTERPRET") == "1"
DEVICE = torch.device("cpu" if INTERPRETED else "cuda")
pytestmark = [] if INTERPRETED else pytest.mark.gpu


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32], ids=str)
@pytest.mark.parametrize("width", [1, 4, 64])
def test_kernels_are_loaded_before_they_move_anything(
    dtype: torch.dtype, width: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    pytest.importorskip("triton")
    from distca.dispatch import kernels

    launched: list[tuple[str, dict[str, object]]] = []

    class Recorded:
        def __init__(self, name: str) -> None:
            self.name, self.kernel = name, getattr(kernels, name)

        def __getitem__(self, grid: tuple[int, ...]) -> Callable[..., None]:
            def launch(*arguments: object, **options: object) -> None:
                launched.append((self.name, options))
                self.kernel[grid](*arguments, **options)

            return launch

    for name in ("_copy", "_sum"):
        monkeypatch.setattr(kernels, name, Recorded(name))
    for load in (kernels._load_copy, kernels._load_sum):
        load.cache_clear()
    # 1. Making moves loads what they need.
    size = dtype.itemsize
    copy = kernels.Copies(as_ints([[0, 3 * width * size, 1, 0, 5 * width * size]]), DEVICE)
    source, target = (Places(*as_ints([[n], [3 * width], [5 * width]])) for n in (0, 6))
    add = kernels.Sums(*sum_tables(source, target, as_ints([-1])), dtype, DEVICE)
    loaded = launched[:]
    assert {name for name, _ in loaded} == {"_copy", "_sum"}
    # 2. Running them needs nothing else.
    ones = torch.ones(9 * width, dtype=dtype, device=DEVICE)
    copied, total = torch.zeros_like(ones), torch.zeros_like(ones)
    copy([ones, copied])
    add([ones, *[ones] * 5, total])
    assert copied.sum() == total.sum() == 5 * width
    assert len(launched) == len(loaded) + 2
    assert all(each in loaded for each in launched[len(loaded) :])
