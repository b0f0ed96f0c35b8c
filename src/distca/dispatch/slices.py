"""Moves with slices, one operation for each stretch: on the CPU, and where there is no Triton."""

from collections.abc import Sequence

import torch
from torch import Tensor

from distca.dispatch.tensors import wide
from distca.planning.spans import Ints


class Copies:
    def __init__(self, table: Ints, device: torch.device) -> None:
        self._table: list[list[int]] = table.tolist()

    def __call__(self, memories: Sequence[Tensor]) -> None:
        if not self._table:
            return
        data = [memory.view(-1).view(torch.uint8) for memory in memories]
        for source, start, target, first, size in self._table:
            data[target][first : first + size].copy_(data[source][start : start + size])


class Sums:
    def __init__(
        self, stretches: Ints, terms: Ints, dtype: torch.dtype, device: torch.device
    ) -> None:
        self._stretches: list[list[int]] = stretches.tolist()
        self._terms: list[list[int]] = terms.tolist()
        self._wide = wide(dtype)

    def __call__(self, memories: Sequence[Tensor]) -> None:
        data = [memory.view(-1) for memory in memories]
        for initial, memory, start, size, first, last in self._stretches:
            target = data[memory][start : start + size]
            terms = [data[source][at : at + size] for source, at in self._terms[first:last]]
            if initial < 0 and len(terms) == 1:
                target.copy_(terms[0])
                continue
            if initial < 0:
                total = torch.zeros_like(target, dtype=self._wide)
            else:
                total = data[initial][start : start + size]
            for term in terms:
                total.add_(term)
            if initial != memory:
                target.copy_(total)
