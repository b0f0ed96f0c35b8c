"""Recognizes the masks of transformers that distca supports.

transformers describes a mask as a function of (row, head, query, key), composed of causality,
windows, packed documents, padding and whatever a model adds, and does not name the result. A
function that consists of transformers' own parts for packed documents is recognized by these parts
(``read_parts``), as in most causal models. Any other one is evaluated at a few keys of every query,
among them all boundaries (``read_mask``): a few hundred operations on the device, once per forward
pass.

Legend: B rows, S tokens in a row.
"""

from collections.abc import Callable
from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch._dynamo._trace_wrapped_higher_order_op import TransformGetItemToIndex
from transformers import masking_utils

from distca.planning.masks import BAND, CAUSAL, FULL, Mask

MaskFunction = Callable[[Tensor, Tensor, Tensor, Tensor], Tensor]
Visible = Callable[[Tensor], Tensor]  # of keys [B, S] or [1, S], which key each query sees: [B, S]


# Functions of transformers that return parts of masks. The parts that one of them returns have the
# same code, and another value in their closure. An older transformers does not have all of them.
_MAKERS = ("and_masks", "sliding_window_overlay", "packed_sequence_mask_function")
_PARTS = {
    getattr(masking_utils, name)(lambda *_: None).__code__: name
    for name in _MAKERS
    if hasattr(masking_utils, name)
}


class ReadMask(NamedTuple):
    """What a mask shows besides its kind, in the memory of the host."""

    starts: Tensor  # [B, S] where it starts a document
    ahead: Tensor  # [B, S] queries that see the next key of their document, as in two-way spans


def read_parts(mask_function: MaskFunction, mask: Mask, size: tuple[int, int]) -> ReadMask | None:
    """Returns the documents of a causal mask or a window by the parts that it consists of.

    None if it has other parts, or if they may be of another kind: ``read_mask`` is for any mask.
    """
    found: dict[str, list[Any]] = {name: [] for name in (*_MAKERS, "causal")}
    parts: list[Any] = [mask_function]
    while parts:
        part = parts.pop()
        if part is masking_utils.causal_mask_function:
            found["causal"].append(part)
        elif (name := _PARTS.get(getattr(part, "__code__", None))) is None:
            return None
        else:
            (enclosed,) = (cell.cell_contents for cell in part.__closure__)
            found[name].append(enclosed)
            parts += enclosed if name == "and_masks" else ()
    _, windows, packed = (found[name] for name in _MAKERS)
    # Under a window of one key, no query tells where its document starts.
    expected = [] if mask.reach == CAUSAL else [mask.reach]
    if not found["causal"] or windows != expected or 1 in windows or len(packed) > 1:
        return None
    starts = torch.zeros(size, dtype=torch.bool, device="cpu")
    for number in packed:  # of the document of each token
        step = number.diff(dim=1).sign().to(torch.int8).cpu()  # waits for the device
        if bool((step < 0).any()):  # a document may continue behind another one
            return None
        starts[:, 1:] = step > 0
    starts[:, :1] = True
    return ReadMask(starts, torch.zeros_like(starts))


def visibility(
    mask_function: MaskFunction, size: tuple[int, int], device: torch.device, *, one_by_one: bool
) -> Visible:
    """Returns a function of keys, which are clamped to their row.

    one_by_one: whether the mask function takes one index at a time.
    """
    num_rows, num_tokens = size
    q = torch.arange(num_tokens, device=device)[None]  # [1, S]
    row = torch.arange(num_rows, device=device)[:, None]
    head = torch.zeros((), dtype=torch.int64, device=device)

    def visible(keys: Tensor) -> Tensor:
        indices = (row, head, q, keys.clamp(0, num_tokens - 1))
        if not one_by_one:
            return mask_function(*indices).expand(size)
        points = [index.expand(size).flatten() for index in indices]
        with TransformGetItemToIndex():
            return torch.vmap(mask_function)(*points).view(size)

    return visible


def read_mask(visible: Visible, mask: Mask, told: Tensor) -> ReadMask | None:
    """Returns what documents and two-way spans a mask shows; None if it is not of this kind.

    In a mask of some kind, every query sees the keys of its document that this kind shows it and,
    if that is causal or a window, those behind it in its two-way span. transformers counts chunks
    from the beginning of the row.

    told: [B, S] where the caller starts documents. What a query sees of others does not matter
        then: transformers ignores documents if there is a cache, and in encoders.
    """
    num_tokens, reach = told.shape[1], mask.reach
    q = torch.arange(num_tokens, device=told.device)[None]  # [1, S]
    starts = ~visible(q - 1)
    if reach < 0:
        starts = starts & (q % -reach != 0)
    starts[:, :1] = True
    first, last = _bounds(starts | told)
    ahead = visible(q + 1) & (q + 1 < last)
    if reach == FULL:
        low, high, next_span = first, last, last
    elif reach > BAND:
        low = torch.maximum(first, q - (reach - BAND))
        high, next_span = torch.minimum(last, q + (reach - BAND) + 1), last
    else:
        low = first if reach == CAUSAL else torch.maximum(first, q - reach + 1)
        low = low if reach > 0 else torch.maximum(first, q // -reach * -reach)
        _, high = _bounds(~ahead.roll(1, 1))  # a span ends where its last query sees no more
        begins = ahead & ~ahead.roll(1, 1)
        next_span = torch.cat([_next(begins), torch.full_like(first[:, :1], num_tokens)], 1)
        next_span = next_span.gather(1, high)
    supported = visible(q)
    for key in (low, (low + q) // 2, (q + high) // 2, high - 1):
        supported = supported & visible(key)
    from_told, to_told = _at(told, first), _at(told, last)
    for key in (
        *(low - 1, (first + low) // 2, high, (high + last) // 2, next_span),
        *(first - 1, first // 2, (q + num_tokens) // 2),
    ):
        hidden = (key >= first) & (key < last) & ((key < low) | (key >= high))
        hidden |= ((key < first) & ~from_told) | ((key >= last) & ~to_told)
        exists = (key >= 0) & (key < num_tokens)
        supported = supported & ~(visible(key) & hidden & exists)
    supported, starts, ahead = torch.stack([supported, starts, ahead]).cpu()  # at once: it waits
    return ReadMask(starts, ahead) if bool(supported.all()) else None


def _bounds(starts: Tensor) -> tuple[Tensor, Tensor]:
    """Returns the first and one past the last index of the part that each index belongs to.

    starts: [B, S] where a part starts, besides the beginning of a row
    """
    num_tokens = starts.shape[1]
    index = torch.arange(num_tokens, device=starts.device).expand_as(starts)
    first = torch.where(starts, index, 0).cummax(1).values
    behind = torch.cat([starts[:, 1:], torch.ones_like(starts[:, :1])], 1)
    return first, _next(behind) + 1


def _next(marked: Tensor) -> Tensor:
    """Returns the first marked index at or behind each index; S if there is none."""
    num_tokens = marked.shape[1]
    index = torch.arange(num_tokens, device=marked.device).expand_as(marked)
    return torch.where(marked, index, num_tokens).flip(1).cummin(1).values.flip(1)


def _at(told: Tensor, index: Tensor) -> Tensor:
    """Returns whether documents start at indices; every row starts one, and ends one."""
    ends = torch.ones_like(told[:, :1])
    return torch.cat([ends, told[:, 1:], ends], 1).gather(1, index)
