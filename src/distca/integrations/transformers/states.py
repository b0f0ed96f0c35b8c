"""Layers that carry a state from token to token, such as Mamba, linear attention and convolutions.

[Note: states] The state of such a layer must not pass from a document to the next one in its row.
Kernels that can be told where documents begin are installed on few machines, and transformers' own
code ignores it. So the layers are given each document as a row of its own: documents of similar
length together, each filled up with copies of its last token, which comes too late to change
anything. Nothing is exchanged for that, since documents stay whole and on their rank.

As in [Note: watched models], the classes are extended and their objects are not changed: outside a
call of a model with our attention a layer computes as ever. Layers that transformers recomputes in
the backward pass know the call that they belong to.

Legend: B rows, S tokens in a row, T = B x S.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Sequence
from functools import lru_cache, partial, wraps
from typing import Any, NamedTuple
from weakref import WeakSet

import torch
from torch import Tensor, nn
from torch.utils._pytree import tree_flatten, tree_map, tree_unflatten
from transformers import Cache

from distca.integrations.transformers.calls import in_progress, told_lengths, within
from distca.integrations.transformers.natures import class_of, keeps_apart

_OF_PACKED = re.compile(r"cu_seq_lens|max_length|seq_idx")  # arguments for documents in one row
_CHECKPOINT = "_gradient_checkpointing_func"  # an attribute of layers that are recomputed

_extended: set[type[nn.Module]] = set()
_stateless: WeakSet[nn.Module] = WeakSet()  # models without such layers, searched once
_separated: WeakSet[nn.Module] = WeakSet()  # layers that have been given several documents


def separate_states(model: nn.Module) -> None:
    """Makes the layers with a state keep packed documents apart. [Note: states]"""
    if model in _stateless:
        return
    kinds = {class_of(module) for module in model.modules() if keeps_apart(module)}
    for kind in kinds - _extended:
        kind.forward = _by_document(kind.forward)
        _extended.add(kind)
    if not kinds:
        _stateless.add(model)
        return
    for module in model.modules():
        run = getattr(module, _CHECKPOINT, None)
        if run is not None and getattr(run, "func", None) is not _recomputed:
            setattr(module, _CHECKPOINT, partial(_recomputed, run))


def _recomputed(run: Any, layer: Any, *args: Any) -> Any:
    """Checkpoints a layer, which is in the same calls of models when it is computed again."""
    return run(partial(within, in_progress(), layer), *args)


def _by_document(forward: Callable[..., Any]) -> Callable[..., Any]:
    """Returns the forward of a layer that is given each document in a row of its own."""

    @wraps(forward)
    def separated(self: nn.Module, *args: Any, **kwargs: Any) -> Any:
        if not in_progress():
            if self in _separated and torch._C._current_graph_task_id() != -1:
                raise ValueError(
                    f"{type(self).__name__} is recomputed where its documents are not known:"
                    " checkpoint layers by model.gradient_checkpointing_enable()"
                )
            return forward(self, *args, **kwargs)
        rows = next(x for x in (*args, *kwargs.values()) if isinstance(x, Tensor) and x.ndim == 3)
        lengths = told_lengths(rows.shape[0], rows.shape[1])
        if len(lengths) <= rows.shape[0]:
            return forward(self, *args, **kwargs)
        _separated.add(self)
        return _run(partial(forward, self), args, kwargs, rows, lengths)

    return torch.compiler.disable(separated, recursive=False)  # type: ignore[no-untyped-call, no-any-return]


class Rows(NamedTuple):
    """Documents of similar length as rows of equal length."""

    tokens: Tensor  # [rows, length] the token in each place; the last one is repeated
    is_own: Tensor  # [rows, length] whether it is not repeated


@lru_cache(maxsize=4)
def rows_of(lengths: tuple[int, ...], device: torch.device) -> tuple[tuple[Rows, ...], Tensor]:
    """Returns the documents as rows, and for each token [T] its place among the rows' own tokens.

    A row is less than twice as long as its document.
    """
    begins = torch.tensor([0, *lengths]).cumsum(0)[:-1]
    sizes = torch.tensor(lengths)
    groups: dict[int, list[int]] = {}
    for number, length in enumerate(lengths):
        groups.setdefault(length.bit_length(), []).append(number)
    found = []
    for members in groups.values():
        size = sizes[members, None]
        places = torch.arange(int(size.max()))
        tokens = begins[members, None] + torch.minimum(places, size - 1)
        found.append(Rows(tokens.to(device), (places < size).to(device)))
    order = torch.cat([rows.tokens[rows.is_own] for rows in found])
    return tuple(found), order.argsort()


def _run(
    forward: Callable[..., Any],
    args: tuple[Any, ...],
    kwargs: dict[str, Any],
    rows: Tensor,
    lengths: tuple[int, ...],
) -> Any:
    """Computes a layer with each document in a row, and returns what it returns for packed ones."""
    kwargs = {name: value for name, value in kwargs.items() if not _OF_PACKED.match(name)}
    if "use_cache" in kwargs:
        kwargs["use_cache"] = False
    groups, places = rows_of(lengths, rows.device)
    results, structure = [], None
    for group in groups:
        in_rows = partial(_in_rows, group, rows.shape[:2])
        of_group, named = tree_map(in_rows, (args, kwargs), is_leaf=_is_cache)
        leaves, structure = tree_flatten(forward(*of_group, **named))
        results.append([_own(leaf, group) for leaf in leaves])
    joined = [_joined(parts, places, rows.shape[:2]) for parts in zip(*results, strict=True)]
    assert structure is not None  # there are documents
    return tree_unflatten(joined, structure)


def _is_cache(value: Any) -> bool:
    return isinstance(value, Cache)


def _in_rows(group: Rows, size: torch.Size, value: Any) -> Any:
    """Returns the tokens of an argument [B, S, ...] in the rows of a group; caches become None."""
    if isinstance(value, Cache):
        return None
    if not isinstance(value, Tensor) or value.ndim < 2 or value.shape[1] != size[1]:
        return value
    return value.expand(size[0], *value.shape[1:]).flatten(0, 1)[group.tokens]


def _own(value: Any, group: Rows) -> Any:
    """Returns the tokens of a result [rows, length, ...] that are not repeated, if it has any."""
    is_tokens = isinstance(value, Tensor) and value.shape[:2] == group.tokens.shape
    return value[group.is_own] if is_tokens else None


def _joined(parts: Sequence[Any], places: Tensor, size: torch.Size) -> Any:
    """Returns a result [B, S, ...]. What is not of tokens, such as a last state, is None."""
    if any(part is None for part in parts):
        return None
    rows = torch.cat([*parts])[places]
    return rows.view(*size, *rows.shape[1:])
