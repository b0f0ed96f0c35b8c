"""Cross entropy of the output head without the logits of all tokens at once.

Legend: T tokens, V vocabulary, hidden the width of the model.

With a vocabulary of 128K, the logits of 64K tokens take 32 GB in float32. Here they are computed
for one chunk of tokens at a time, in forward and again in backward. The alternative, gradients
during forward, saves one of four products. But it keeps a [V, hidden] gradient for ping and one for
pong until backward, computes them twice if the head is checkpointed, and computes them even for
evaluation.
"""

from collections.abc import Iterator
from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch.autograd.function import once_differentiable

from distca.data.documents import IGNORE
from distca.dispatch.tensors import wide


class Loss(NamedTuple):
    """Losses in float32, or in float64 for float64 inputs."""

    total: Tensor  # [], the sum over targets; the trainer divides by the global count
    each: Tensor  # [T], 0 where the label is IGNORE; has no gradient


def cross_entropy(
    hidden: Tensor, weight: Tensor, labels: Tensor, *, chunk_tokens: int = 2048
) -> Loss:
    """Computes -log softmax(hidden weight')[label] of every token that has a label.

    hidden [T, hidden], weight [V, hidden], labels [T] of int64: plain tensors, not DTensors.
    chunk_tokens: fewer need less memory; more need fewer passes over the weight's gradient.
    """
    if hidden.shape[:-1] != labels.shape or hidden.shape[-1:] != weight.shape[1:]:
        raise ValueError(
            f"hidden {tuple(hidden.shape)}, weight {tuple(weight.shape)}, labels"
            f" {tuple(labels.shape)}: they must be [T, width], [vocabulary, width] and [T]"
        )
    if chunk_tokens < 1:
        raise ValueError(f"chunk_tokens = {chunk_tokens}: it must be at least 1")
    return Loss(*_CrossEntropy.apply(hidden, weight, labels, chunk_tokens))  # type: ignore[no-untyped-call]


class _CrossEntropy(torch.autograd.Function):
    """Reads and writes the logits of a chunk as rarely as possible: they are its largest tensors.

    So each direction has one softmax over them, computed in the wide type, and whatever is the same
    for all logits of a token is applied to its hidden state instead.
    """

    @staticmethod
    def forward(
        ctx: Any, hidden: Tensor, weight: Tensor, labels: Tensor, chunk_tokens: int
    ) -> tuple[Tensor, Tensor]:
        each = hidden.new_empty(len(hidden), dtype=wide(hidden.dtype))
        for rows in _chunks(len(hidden), chunk_tokens):
            log_p = (hidden[rows] @ weight.t()).log_softmax(-1, dtype=each.dtype)
            each[rows] = -log_p.gather(1, _target(labels[rows])).squeeze(1)
        each.masked_fill_(labels == IGNORE, 0.0)
        ctx.save_for_backward(hidden, weight, labels, each)
        ctx.chunk_tokens = chunk_tokens
        ctx.mark_non_differentiable(each)
        return each.sum(), each

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad_total: Tensor, _: Tensor) -> tuple[Tensor | None, ...]:
        """dlogits = softmax - one-hot; dhidden = dlogits W, dW = dlogits' hidden."""
        hidden, weight, labels, each = ctx.saved_tensors
        wants_hidden, wants_weight = ctx.needs_input_grad[:2]
        dhidden = torch.empty_like(hidden) if wants_hidden else None
        # A sum over T / chunk_tokens parts, of which each would be rounded to 8 bits in bfloat16.
        dweight = torch.zeros_like(weight, dtype=wide(weight.dtype)) if wants_weight else None
        for rows in _chunks(len(hidden), ctx.chunk_tokens):
            dlogits = (hidden[rows] @ weight.t()).softmax(-1)
            # The probability of the label less 1, which would lose its digits in a narrow type.
            of_label = torch.expm1(-each[rows, None]).to(dlogits.dtype)
            dlogits.scatter_(1, _target(labels[rows]), of_label)
            counts = labels[rows, None] != IGNORE
            if dhidden is not None:
                dhidden[rows] = (dlogits @ weight) * (grad_total * counts)
            if dweight is not None:
                dweight += dlogits.t() @ (hidden[rows] * counts)
        if dweight is not None:
            dweight = (dweight * grad_total).to(weight.dtype)
        return dhidden, dweight, None, None


def _chunks(tokens: int, size: int) -> Iterator[slice]:
    return (slice(start, start + size) for start in range(0, tokens, size))


def _target(labels: Tensor) -> Tensor:
    """Returns labels [rows, 1] with 0 for IGNORE; other negative labels stay, and fail."""
    return labels.masked_fill(labels == IGNORE, 0)[:, None]
