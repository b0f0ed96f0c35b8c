"""On CUDA: bfloat16 kernels, masks on the device, and two ranks on one GPU over gloo.

Run where there is one: ``pytest -m gpu tests/integrations``.
"""

from __future__ import annotations

import pytest
import torch
from integrations.tiny import assert_close, gradients, loss_of, model_of, packed, reference
from ranks import RankPool

pytest.importorskip("transformers", reason="transformers is not installed")

from integrations import bodies

from distca.integrations.transformers import register

pytestmark = pytest.mark.gpu
LONG = {"head_dim": 64, "max_position_embeddings": 8192}


@pytest.mark.parametrize("name", ["llama", "gemma3"])
def test_bfloat16_against_sdpa(name: str) -> None:
    register()
    batch = {key: rows.cuda() for key, rows in packed([2500, 700, 1, 90]).items()}
    found = {}
    for attention in ("sdpa", "distca"):
        model = model_of(name, attention, **LONG).to("cuda", torch.bfloat16)
        loss = loss_of(model, batch)
        loss.backward()
        found[attention] = loss.item(), gradients(model)
    (right, exact), (loss, grads) = found["sdpa"], found["distca"]
    assert loss == pytest.approx(right, rel=2e-3)
    assert_close(grads, exact, 0.05)


@pytest.mark.parametrize("ahead", [False, True])
@pytest.mark.parametrize("name", ["llama", "gemma3"])
def test_two_ranks_on_one_gpu(pair: RankPool, name: str, ahead: bool) -> None:
    losses, exact = reference(name)
    answers = pair.run(bodies.learned_on_gpu, name, ahead, ranks=2)
    for (loss, found), right in zip(answers, losses, strict=True):
        assert loss == pytest.approx(right, rel=1e-4)
        assert_close(found, exact, 1e-4)
