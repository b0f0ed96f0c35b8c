"""Recognizes the masks of transformers that distca supports: causal documents and windows.

transformers describes a mask as a function of (row, head, query, key), composed of causality,
windows, packed documents, padding and whatever a model adds, and does not name the result. So the
function is evaluated at a few keys of every query, among them all boundaries: O(tokens), once per
forward pass.

Legend: B rows, S tokens in a row.
"""

from collections.abc import Callable

import torch
from torch import Tensor

from distca.planning.masks import CAUSAL

MaskFunction = Callable[[Tensor, Tensor, Tensor, Tensor], Tensor]


def document_starts(
    mask_function: MaskFunction, num_rows: int, num_tokens: int, reach: int, device: torch.device
) -> Tensor | None:
    """Returns [B, S], true where the mask starts a document; None if it is not a supported mask.

    In a supported mask every query attends to the keys of its document up to its own position, or
    to the last ``reach`` of them.
    """
    q = torch.arange(num_tokens, device=device)[None]  # [1, S]
    row = torch.arange(num_rows, device=device)[:, None]
    head = torch.zeros((), dtype=torch.int64, device=device)

    def visible(keys: Tensor) -> Tensor:  # [B, S], of keys [B, S] or [1, S], clamped to the row
        seen = mask_function(row, head, q, keys.clamp(0, num_tokens - 1))
        return seen.expand(num_rows, num_tokens)

    starts = ~visible(q - 1)
    starts[:, :1] = True
    first = torch.where(starts, q, 0).cummax(1).values  # the first key of each query
    if reach < CAUSAL:
        first = torch.maximum(first, q - reach + 1)
    supported = visible(q) & visible(first) & visible((first + q) // 2)
    for key in (q + 1, (q + num_tokens) // 2, first - 1, first // 2):
        outside = (key > q) | (key < first)
        exists = (key >= 0) & (key < num_tokens)
        supported &= ~(visible(key) & outside & exists)
    return starts if bool(supported.all()) else None
