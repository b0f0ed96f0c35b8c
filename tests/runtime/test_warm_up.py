"""Warm-up where ranks share a GPU: the kernels of a step are loaded before it begins."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import pytest
import torch
from runtime.bodies import TINY, Case, batch_of
from torch.utils._python_dispatch import TorchDispatchMode

from distca.model.initialize import initialize
from distca.model.llama import Arriving, on_meta, plainly
from distca.runtime import warm_up

CPU = torch.device("cpu")
Shapes = set[tuple[str, tuple[torch.Size, ...]]]


@contextmanager
def products() -> Iterator[Shapes]:
    """Collects the shapes of all matrix products."""
    shapes: Shapes = set()

    class Recorder(TorchDispatchMode):
        def __torch_dispatch__(
            self, func: Any, types: Any, args: Any = (), kwargs: Any = None
        ) -> Any:
            if func is torch.ops.aten.mm.default or func is torch.ops.aten.mm.out:
                shapes.add(("mm", tuple(one.shape for one in args[:2])))
            return func(*args, **(kwargs or {}))

    with Recorder():
        yield shapes


@pytest.mark.parametrize("recompute", [False, True])
@pytest.mark.parametrize("tokens", [0, 1, 2049])
def test_warm_up_makes_the_products_of_a_step(tokens: int, recompute: bool) -> None:
    warm_up._warm_up.cache_clear()
    with torch.no_grad(), products() as warmed:  # evaluation may come first
        warm_up._warm_up(TINY, 1, tokens, torch.float32, CPU, recompute)
    model = on_meta(TINY)
    initialize(model, seed=1)
    zeros = torch.zeros(tokens, dtype=torch.int64)
    with products() as made:
        attend = plainly(lambda _, q, k, v: q + (k + v).repeat_interleave(2, 1))
        (out,) = model([Arriving(zeros, zeros, labels=zeros)], attend, recompute=recompute)
        assert out.loss is not None
        out.loss.total.backward()
    assert made
    assert made == warmed


def test_a_number_of_tokens_is_warmed_up_once(monkeypatch: pytest.MonkeyPatch) -> None:
    warm_up._warm_up.cache_clear()
    warm_up._warm_up(TINY, 1, 5, torch.float32, CPU, False)
    with products() as made:
        warm_up._warm_up(TINY, 1, 5, torch.float32, CPU, False)
    assert not made


def test_every_half_of_every_micro_batch_is_warmed_up(monkeypatch: pytest.MonkeyPatch) -> None:
    counts: list[int] = []
    monkeypatch.setattr(warm_up, "_warm_up", lambda config, tp, tokens, *_: counts.append(tokens))
    monkeypatch.setattr(torch.cuda, "synchronize", lambda: None)
    plan = Case(ping_pong=True, micro_batches=2).planner().plan(batch_of().lengths)

    class Context:
        parallel, worker, device = Case().parallel, 0, CPU

    model = on_meta(TINY)
    warm_up.warm_up_step(model, plan, Context(), torch.float32, recompute=False)  # type: ignore[arg-type]
    assert sum(counts) == batch_of().num_tokens
    assert len(counts) == 4
