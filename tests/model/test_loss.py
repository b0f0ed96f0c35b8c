from typing import Any

import pytest
import torch
import torch.nn.functional as F
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode

from distca.data.documents import IGNORE
from distca.model.loss import cross_entropy


def draw(
    tokens: int, vocabulary: int, width: int = 6, ignored: float = 0.3, dtype: Any = torch.float64
) -> tuple[Tensor, Tensor, Tensor]:
    generator = torch.Generator().manual_seed(tokens)
    hidden = torch.randn(tokens, width, generator=generator, dtype=torch.float64)
    weight = torch.randn(vocabulary, width, generator=generator, dtype=torch.float64)
    labels = torch.randint(vocabulary, (tokens,), generator=generator)
    labels[torch.rand(tokens, generator=generator) < ignored] = IGNORE
    return hidden.to(dtype).requires_grad_(), weight.to(dtype).requires_grad_(), labels


@given(tokens=st.integers(0, 20), vocabulary=st.integers(1, 9), chunk=st.integers(1, 25))
def test_it_is_torchs_cross_entropy(tokens: int, vocabulary: int, chunk: int) -> None:
    hidden, weight, labels = draw(tokens, vocabulary)
    want = F.cross_entropy(hidden @ weight.t(), labels, reduction="none", ignore_index=IGNORE)
    got = cross_entropy(hidden, weight, labels, chunk_tokens=chunk)
    torch.testing.assert_close(got.each, want)
    torch.testing.assert_close(got.total, want.sum())
    want_grads = torch.autograd.grad(want.sum() * 0.3, (hidden, weight))
    torch.testing.assert_close(torch.autograd.grad(got.total * 0.3, (hidden, weight)), want_grads)


def test_gradients_by_differences() -> None:
    hidden, weight, labels = draw(7, 5)
    total = lambda h, w: cross_entropy(h, w, labels, chunk_tokens=3).total  # noqa: E731
    assert torch.autograd.gradcheck(total, (hidden, weight))


def test_no_targets_at_all() -> None:
    hidden, weight, labels = draw(5, 4, ignored=1.0)
    loss = cross_entropy(hidden, weight, labels, chunk_tokens=2)
    loss.total.backward()
    assert loss.total == 0
    assert not hidden.grad.any()
    assert not weight.grad.any()


def test_each_has_no_gradient_and_a_frozen_side_gets_none() -> None:
    hidden, weight, labels = draw(5, 4)
    loss = cross_entropy(hidden, weight.detach(), labels)
    assert not loss.each.requires_grad
    loss.total.backward()
    assert hidden.grad is not None
    hidden, weight, labels = draw(5, 4)
    cross_entropy(hidden.detach(), weight, labels).total.backward()
    assert weight.grad is not None


def test_bfloat16_loses_nothing_in_the_sums() -> None:
    """Many chunks: the gradient of the weight is as good as from one product."""
    hidden, weight, labels = draw(512, 11, dtype=torch.bfloat16)
    loss = cross_entropy(hidden, weight, labels, chunk_tokens=4)
    assert (loss.total.dtype, loss.each.dtype) == (torch.float32, torch.float32)
    loss.total.backward()
    exact = [t.detach().double().requires_grad_() for t in (hidden, weight)]
    want = F.cross_entropy(exact[0] @ exact[1].t(), labels, reduction="sum", ignore_index=IGNORE)
    want.backward()
    assert abs(loss.total.item() / want.item() - 1) < 2e-3
    for got, right in zip((hidden, weight), exact, strict=True):
        assert got.grad.dtype == torch.bfloat16
        assert (got.grad - right.grad).norm() < 5e-3 * right.grad.norm()


class Largest(TorchDispatchMode):
    """Elements of the largest tensor that any operation returned."""

    def __init__(self) -> None:
        super().__init__()
        self.elements = 0

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        out = func(*args, **(kwargs or {}))
        for tensor in out if isinstance(out, tuple | list) else (out,):
            if isinstance(tensor, Tensor):
                self.elements = max(self.elements, tensor.numel())
        return out


def test_logits_of_all_tokens_never_exist() -> None:
    tokens, vocabulary, width, chunk = 64, 50, 6, 8
    hidden, weight, labels = draw(tokens, vocabulary, width)
    with Largest() as largest:
        cross_entropy(hidden, weight, labels, chunk_tokens=chunk).total.backward()
    assert largest.elements == chunk * vocabulary
    with Largest() as largest:
        F.cross_entropy(hidden @ weight.t(), labels.abs() % vocabulary).backward()
    assert largest.elements == tokens * vocabulary  # so the measure does see them


@pytest.mark.parametrize("label", [-1, 4])
def test_a_label_outside_the_vocabulary_fails(label: int) -> None:
    hidden, weight, labels = draw(5, 4)
    labels[2] = label
    with pytest.raises(RuntimeError, match="out of bounds"):
        cross_entropy(hidden, weight, labels)


def test_what_does_not_fit_is_refused() -> None:
    hidden, weight, labels = draw(5, 4)
    with pytest.raises(ValueError, match=r"labels \(4,\): they must be \[T, width\]"):
        cross_entropy(hidden, weight, labels[1:])
    with pytest.raises(ValueError, match="chunk_tokens = 0: it must be at least 1"):
        cross_entropy(hidden, weight, labels, chunk_tokens=0)
