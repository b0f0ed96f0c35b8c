"""What transformers' masks ask for: causal documents or windows, or something that is refused.

transformers describes a mask as a function of (row, head, query, key), composed of causality,
windows, packed documents, padding and whatever a model adds. It says nowhere what it is, so it is
asked at a few keys of every query, among them all borders: O(tokens), once per forward.

Legend: B rows, S tokens in a row.
"""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import Tensor

from distca.planning.masks import CAUSAL

MaskFunction = Callable[[Tensor, Tensor, Tensor, Tensor], Tensor]


def document_starts(
    mask_function: MaskFunction, num_rows: int, num_tokens: int, reach: int, device: torch.device
) -> Tensor | None:
    """[B, S], true where the mask starts a document; None where the mask is of another kind.

    The kind: every query sees the keys of its document up to its own, the last ``reach`` of them.
    """
    q = torch.arange(num_tokens, device=device)[None]  # [1, S]
    row = torch.arange(num_rows, device=device)[:, None]
    head = torch.zeros((), dtype=torch.int64, device=device)

    def sees(keys: Tensor) -> Tensor:  # [B, S], of keys [B, S] or [1, S] that exist
        seen = mask_function(row, head, q, keys.clamp(0, num_tokens - 1))
        return seen.expand(num_rows, num_tokens)

    starts = ~sees(q - 1)
    starts[:, :1] = True
    first = torch.where(starts, q, 0).cummax(1).values  # of the document
    if reach < CAUSAL:
        first = torch.maximum(first, q - reach + 1)
    right = sees(q) & sees(first) & sees((first + q) // 2)
    for hidden in (q + 1, (q + num_tokens) // 2, first - 1, first // 2):
        beyond = (hidden > q) | (hidden < first)
        exists = (hidden >= 0) & (hidden < num_tokens)
        right &= ~(sees(hidden) & beyond & exists)
    return starts if bool(right.all()) else None
