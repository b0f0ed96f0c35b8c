"""DeepSeek-V2 and V3 of transformers on two ranks: losses and gradients of their own attention."""

from __future__ import annotations

import pytest
import torch
from integrations import mla
from ranks import RankPool

pytest.importorskip("transformers", minversion="5")


@pytest.mark.parametrize(
    ("name", "how"),
    [
        ("deepseek_v2", "latents"),
        ("deepseek_v3", "latents"),
        ("deepseek_v3", "checkpointed"),
        ("deepseek_v3", "fsdp"),
        ("deepseek_v3", "expanded"),
        ("deepseek_v3", "biased"),
    ],
)
def test_learns_what_its_own_attention_does(pair: RankPool, name: str, how: str) -> None:
    losses, right = mla.by_eager(name)
    for (loss, found, sent), expected in zip(
        pair.run(mla.learned, name, how, ranks=2), losses, strict=True
    ):
        assert loss == pytest.approx(expected, rel=1e-5)
        assert set(sent) == {how not in ("expanded", "biased")}
        assert len(sent) == (6 if how == "checkpointed" else 3)
        assert found.keys() == right.keys()
        for weight, grad in right.items():
            error = (found[weight] - grad).norm() / grad.norm().clamp_min(1e-3)
            assert error < 1e-5, f"{weight}: {error:.1e}"
            assert torch.isfinite(found[weight]).all()
