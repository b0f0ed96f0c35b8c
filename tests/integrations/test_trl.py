"""TRL's trainers: the losses and gradients of its own attention on the same rows."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

import pytest
from integrations.tiny import assert_close
from ranks import RankPool

pytest.importorskip("trl", reason="trl is not installed")
pytest.importorskip("datasets", reason="datasets is not installed")

from integrations import trl_trainers
from integrations.trl_trainers import Stepped

SFT = {
    "packing": {"packing": True},
    "padding-free": {"padding_free": True, "max_length": None},
    "padded rows": {},
    "padding-free to a multiple": {
        "padding_free": True,
        "max_length": None,
        "pad_to_multiple_of": 64,
    },
    "wrapped packing": {"packing": True, "packing_strategy": "wrapped"},
}
GRPO = {
    "given completions": {},
    "reference model, old policy": {"beta": 0.1, "num_iterations": 2},
    "generated completions": {"max_completion_length": 20},
}


@pytest.fixture(scope="module")
def three() -> Iterator[RankPool]:
    """Three ranks of a gloo world."""
    pool = RankPool(3)
    yield pool
    pool.close()


def compared(
    pool: RankPool,
    train: Callable[..., Stepped],
    options: dict[str, Any],
    name: str = "llama",
    own: dict[str, Any] | None = None,
    ranks: int = 2,
) -> tuple[list[Stepped], list[Stepped]]:
    """Compares distca with TRL's own attention. own: the options of the latter."""
    right = pool.run(train, "sdpa", name, options if own is None else own, ranks=ranks)
    found = pool.run(train, "distca", name, options, ranks=ranks)
    for ours, exact in zip(found, right, strict=True):
        assert len(ours.losses) == 3
        assert ours.losses == pytest.approx(exact.losses, rel=1e-5, abs=1e-6)
        assert ours.norms == pytest.approx(exact.norms, rel=1e-5)
        assert min(ours.norms) > 0
        assert_close(ours.grads, exact.grads)
        assert ours.exchanges > 0
    return found, right


@pytest.mark.parametrize("options", SFT.values(), ids=SFT)
def test_sft(pair: RankPool, options: dict[str, Any]) -> None:
    """Without packing, TRL's own side is given padded rows, whatever ours is given."""
    found, _ = compared(pair, trl_trainers.sft, options, own=None if "packing" in options else {})
    planned_ahead = "distca/imbalance" in found[0].logged
    assert planned_ahead == ("strategy" not in str(options) and options != {})


@pytest.mark.parametrize("options", GRPO.values(), ids=GRPO)
def test_grpo(pair: RankPool, options: dict[str, Any]) -> None:
    """Rows that begin with the same prompt share it, on each rank."""
    for ours, own in zip(*compared(pair, trl_trainers.grpo, options), strict=True):
        assert ours.tokens < own.tokens / 2


def test_dpo(pair: RankPool) -> None:
    for ours, own in zip(*compared(pair, trl_trainers.dpo, {}), strict=True):
        assert ours.tokens < own.tokens / 2
