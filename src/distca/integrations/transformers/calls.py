"""The calls of models that are in progress, with what they were given.

[Note: watched models] transformers tells a layer and the function that makes its mask only a part
of what a model was given: many layers get no ``position_ids``, the mask ignores them if there is a
cache or an ``attention_mask``, and a model that computes its attention itself calls neither. So
``watch`` extends two methods of ``PreTrainedModel``: the one that checks an
``attn_implementation``, to refuse models that cannot use ours, and ``__call__``, to record the
arguments of models with ours. Models themselves are not changed: they can be copied and pickled.
"""

from __future__ import annotations

import inspect
from collections.abc import Callable
from contextlib import suppress
from contextvars import ContextVar
from dataclasses import dataclass, field
from functools import cache, partial
from typing import Any, NamedTuple

import torch
from torch import nn
from transformers import PreTrainedModel

from distca.integrations.shared.documents import num_tokens
from distca.integrations.transformers import latents, natures, refusals
from distca.integrations.transformers.batches import (
    DOCUMENTS,
    PLANNED,
    documents,
    tells_documents,
)


class PreparedMask:
    """A mask of ours, which a model may pass on to a model inside it."""


@dataclass(eq=False)
class CallInProgress:
    """A call of a model that has not returned yet."""

    model: nn.Module
    given: dict[str, Any]  # arguments by name
    attended: set[nn.Module] = field(default_factory=set)  # modules that called our attention
    packed: bool = False  # some row holds several documents
    prepared: PreparedMask | None = None  # a mask that the model outside has made for it
    took_prepared: bool = False
    lengths: tuple[int, ...] | None = None  # of its documents, once a layer has asked

    @property
    def takes_positions(self) -> bool:
        return "position_ids" in _parameters(type(self.model).forward)

    @property
    def uses_positions(self) -> bool:
        return self.takes_positions and self.given.get("position_ids") is not None

    @property
    def tokens(self) -> Any:
        """Token ids [B, S] or embeddings [B, S, ...], if it was given any."""
        given = (self.given.get(name) for name in ("input_ids", "inputs_embeds"))
        return next((tokens for tokens in given if tokens is not None), None)

    def is_of(self, num_rows: int, row_tokens: int) -> bool:
        """Tells whether it was given tokens in so many rows."""
        return self.tokens is not None and self.tokens.shape[:2] == (num_rows, row_tokens)


Calls = tuple[CallInProgress, ...]  # the outermost first


class _Hooks(NamedTuple):
    before: Callable[[nn.Module], None]
    after: Callable[[], None]


_CHOOSE = "get_correct_attn_implementation"  # a method of PreTrainedModel
_names: dict[str, _Hooks] = {}  # by attn_implementation
_calls: ContextVar[Calls] = ContextVar("distca_calls", default=())


def in_progress() -> Calls:
    return _calls.get()


def told_lengths(num_rows: int, row_tokens: int) -> tuple[int, ...]:
    """Returns the tokens of each document, by what the outermost model that tells was given.

    They are read once for all layers.
    """
    of_tokens = (call for call in in_progress() if call.is_of(num_rows, row_tokens))
    call = next((call for call in of_tokens if tells_documents(call.given)), None)
    if call is None:
        return (row_tokens,) * num_rows
    if call.lengths is None:
        call.lengths = (row_tokens,) * num_rows
        with suppress(ValueError):  # which the attention layers raise on all ranks
            found = documents(num_rows, row_tokens, call.given)
            call.lengths = tuple(map(num_tokens, found))
    return call.lengths


def within(calls: Calls, function: Callable[..., Any], *args: Any) -> Any:
    """Calls a function as if these calls of models were in progress."""
    token = _calls.set(calls)
    try:
        return function(*args)
    finally:
        _calls.reset(token)


def watch(name: str, before: Callable[[nn.Module], None], after: Callable[[], None]) -> None:
    """Watches the models with ``attn_implementation=name``. [Note: watched models]

    before: is given each model before it is called; not those inside another.
    after: is called when such a call has launched everything.
    """
    _names[name] = _Hooks(before, after)
    if PreTrainedModel.__call__ is not _watched_call:
        PreTrainedModel.__call__ = _watched_call
        choose = getattr(PreTrainedModel, _CHOOSE, None)
        if choose is None:  # an older transformers
            return

        def checked_choose(self: Any, *args: Any, **kwargs: Any) -> str:
            chosen: str = choose(self, *args, **kwargs)
            if chosen in _names:
                refusals.refuse_own_attention(type(self), chosen)
            return chosen

        setattr(PreTrainedModel, _CHOOSE, checked_choose)


@torch.compiler.disable(recursive=False)  # type: ignore[untyped-decorator, no-untyped-call]
def _watched_call(self: Any, *args: Any, **kwargs: Any) -> Any:
    hooks = _names.get(self.config._attn_implementation)
    if hooks is None:
        return nn.Module.__call__(self, *args, **kwargs)
    outer, learns = _calls.get(), torch.is_grad_enabled()
    call = CallInProgress(
        self, dict(zip(_parameters(type(self).forward), args, strict=False)) | kwargs
    )
    for name in (PLANNED, DOCUMENTS):  # not every model takes arguments that it does not know
        kwargs.pop(name, None)
    if not outer:
        refusals.refuse_arguments(call)
        hooks.before(self)
        latents.remember(self)
    elif isinstance(prepared := kwargs.get("attention_mask"), PreparedMask):
        # transformers recognizes prepared masks as tensors; without one it asks us for a mask.
        call.prepared = prepared
        kwargs["attention_mask"] = call.given["attention_mask"] = None
    run = partial(nn.Module.__call__, self, **kwargs)
    result = within((*outer, call), run, *args)
    if call.prepared is not None and not call.took_prepared:
        refusals.refuse_own_mask(call)
    if not outer:
        hooks.after()
    if not outer and (learns or (not call.attended and _holds_several(call))):
        refusals.check_use(call)
    return result


def _holds_several(call: CallInProgress) -> bool:
    """Tells whether a row holds several documents, which no layer of the model keeps apart."""
    if call.tokens is None or any(map(natures.keeps_apart, call.model.modules())):
        return False
    num_rows, row_tokens = call.tokens.shape[:2]
    return bool(len(within((call,), told_lengths, num_rows, row_tokens)) > num_rows)


@cache
def _parameters(forward: Callable[..., Any]) -> tuple[str, ...]:
    return tuple(inspect.signature(forward).parameters)[1:]
