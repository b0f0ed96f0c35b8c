"""Head sizes of DeepSeek-V2 and V3, and latents that travel, on a GPU in bfloat16.

Run on a machine with CUDA: ``pytest -m gpu tests/attention/test_latent_gpu.py``.
"""

from __future__ import annotations

import pytest
import torch
from attention.oracle import Case, check
from attention.test_exact import on_all_ranks
from attention.tokens import Heads, Tokens, errors
from strategies import Batch

from distca.attention.backends.base import Traits
from distca.attention.backends.choice import backends, choose
from distca.dispatch.tensors import TensorSpec
from distca.planning.masks import Mask

pytestmark = pytest.mark.gpu
HEADS: Heads = (4, 4, 192, 128)
LATENT = (512, 64)
GRAIN = {"tile": 128, "min_shard": 128}


def traits_of(dtype: torch.dtype = torch.bfloat16) -> Traits:
    spec = TensorSpec(*HEADS, dtype, torch.device("cuda"))
    return Traits.of(spec, [Mask.parse("causal")], deterministic=True)


@pytest.fixture(params=["fa4", "flash", "sdpa"])
def backend(request: pytest.FixtureRequest) -> str:
    """A backend that takes 192 / 128 heads in bfloat16 on this machine."""
    chosen = next(b for b in backends() if b.name == request.param)
    if refusal := chosen.refusal(traits_of()):
        pytest.skip(refusal)
    return chosen.name


@pytest.mark.parametrize("mask", ["causal", "full", "window:100"])
def test_kernels(backend: str, mask: str) -> None:
    tasks = ((300, 300), (130, 513), (1, 77))
    heads, kv_heads, size, values = HEADS
    case = Case(tasks, mask, heads, kv_heads, size, size**-0.5, v_head_dim=values)
    chosen = choose(backend, traits_of())
    check(chosen, case, torch.bfloat16, 1e-2, "cuda", lse_tolerance=1e-3)


@pytest.mark.parametrize("options", [{}, {"servers": 2}, {"mask": "window:300"}], ids=str)
def test_latents_are_within_the_error_of_one_device(
    backend: str, options: dict[str, object]
) -> None:
    documents = [[1500], [640, 70, 1], [500, 331]]
    plan = Batch(documents, GRAIN | options).plan()
    together = [[length for rank in documents for length in rank]]
    alone = Batch(together, GRAIN | {"mask": options.get("mask", "causal")}).plan()
    assert plan.traffic.total
    found, whole = (
        errors(on_all_ranks(p, tokens, backend, "steps", "cuda"), tokens.expected())
        for p, tokens in ((p, tokens_of(p)) for p in (plan, alone))
    )
    for name, error in found.items():  # what travels is rounded once more
        assert error <= 1.5 * whole[name] + 1e-3, f"{name}: {error:.1e}, alone {whole[name]:.1e}"
        assert whole[name] < 1e-2


def tokens_of(plan: object) -> Tokens:
    """Keys and values of about the size of queries."""
    tokens = Tokens(plan, torch.bfloat16, HEADS, latent=LATENT)  # type: ignore[arg-type]
    assert tokens.latent is not None
    weight = tokens.latent.weight * LATENT[0] ** -0.5
    tokens.q = tokens.q * 0.25  # so that the softmax is not sharp
    tokens.latent = tokens.latent._replace(weight=weight)
    tokens.k, tokens.v = tokens.latent.expand(
        TensorSpec(*HEADS, torch.bfloat16, torch.device("cpu"), *LATENT)
    )
    return tokens
