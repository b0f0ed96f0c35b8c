"""What layers get in place of a mask.

[Note: tickets] transformers calls a mask function once per forward and kind of mask, before all
layers, and hands what it returns to every layer, also to one that is run again in backward. It
returns a ticket: the forward that a layer belongs to, with the plans of its batch, and its mask. So
a layer finds its plans again in a recomputation, whatever has run since.

Legend: B rows, S tokens in a row.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from itertools import accumulate
from typing import Any, NoReturn

import torch
from torch import Tensor

from distca.integrations.shared.planned import PlannedBatch
from distca.integrations.transformers.batches import PADDED
from distca.integrations.transformers.masks import document_starts
from distca.planning.masks import CAUSAL, Mask

OTHERWISE = "load this model with another attn_implementation, such as 'eager'"
_STRANGE = "has a mask that is neither causal nor a sliding window of documents"
STRANGE = f"{_STRANGE}: {OTHERWISE}"


class ForeignMaskError(AttributeError, TypeError, ValueError):
    """A model handles its masks itself."""


@dataclass(eq=False)
class Forward:
    """One call of a model."""

    config: object
    learns: bool  # gradients are on, seen from outside of layers that are run again
    num_rows: int
    num_tokens: int  # in a row
    batch: PlannedBatch | None = None  # known from the first layer on


class Ticket:
    """[Note: tickets] Not a dataclass: FSDP's first version copies those for every layer."""

    def __init__(self, forward: Forward, mask: Mask) -> None:
        self.forward, self.mask = forward, mask
        self.starts: Tensor | None = None  # [B, S], where transformers' mask starts a document
        self.complaint = ""  # why these layers cannot be attended

    def check(self, lengths: Sequence[int]) -> None:
        """Refuses documents that cannot be what transformers' mask shows, once they are known."""
        if self.starts is None:
            return
        starts, self.starts = self.starts.flatten().cpu(), None
        begins = list(accumulate(lengths, initial=0))
        if begins.pop() != len(starts):
            raise ValueError(
                f"is given {len(starts)} tokens, but documents of {sum(lengths)} were planned for:"
                " leave a batch as it is after plan_ahead"
            )
        starts[begins] = False
        if starts.any():  # it hides more than other documents
            raise ValueError(
                f"{_STRANGE}, or its position_ids restart where cu_seq_lens_q or the plan start no"
                f" document: give a batch that agrees with itself, or {OTHERWISE}"
            )

    def __getattr__(self, name: str) -> NoReturn:
        raise ForeignMaskError(
            f"this model does something to its masks ({name}) that distca cannot follow:"
            f" {OTHERWISE}"
        )

    def __getitem__(self, _: Any) -> NoReturn:
        self.__getattr__("indexing")

    def _compute(self, *_: Any) -> NoReturn:
        self.__getattr__("arithmetic")

    __add__ = __radd__ = __sub__ = __rsub__ = __mul__ = __rmul__ = __invert__ = _compute

    @classmethod
    def __torch_function__(cls, function: Any, *_: Any) -> NoReturn:
        cls.__new__(cls).__getattr__(getattr(function, "__name__", "arithmetic"))


class Tickets:
    """Called by transformers with the arguments of ``sdpa_mask``, some of which depend on its age.

    None where there are no gradients, and what is asked for is not attention of whole documents to
    themselves, or of a kind that cannot be planned.
    """

    def __init__(self) -> None:
        self._latest: Forward | None = None

    def __call__(self, asked: Mapping[str, Any]) -> Ticket | None:
        forward, window = self._forward(asked), asked.get("local_size")
        ticket = Ticket(forward, Mask(CAUSAL if window is None else window))
        num_keys, padding = asked["kv_length"], asked.get("attention_mask")
        if num_keys != forward.num_tokens or asked.get("q_offset"):
            ticket.complaint = (
                f"has {num_keys} keys for {forward.num_tokens} queries: train without a cache"
            )
        elif padding is not None and not bool(padding.all()):
            ticket.complaint = PADDED
        else:
            ticket.starts = _starts(asked, forward, ticket.mask)
            ticket.complaint = STRANGE if ticket.starts is None else ""
        return None if ticket.complaint and not forward.learns else ticket

    def _forward(self, asked: Mapping[str, Any]) -> Forward:
        """The one that masks are being made for: a model may ask for several kinds of them."""
        num_tokens = asked.get("q_length")
        if num_tokens is None:  # transformers 4
            num_tokens = asked["cache_position"].shape[0]
        new = Forward(asked.get("config"), torch.is_grad_enabled(), asked["batch_size"], num_tokens)
        if self._latest is None or vars(self._latest) != vars(new):  # or its layers have begun
            self._latest = new
        return self._latest


def _starts(asked: Mapping[str, Any], forward: Forward, mask: Mask) -> Tensor | None:
    if asked.get("use_vmap"):  # a model's own function, for one index at a time
        return None
    if mask.reach == getattr(forward.config, "attention_chunk_size", None):
        return None
    device = asked["device"] if "device" in asked else asked["cache_position"].device
    size = (forward.num_rows, forward.num_tokens)
    return document_starts(asked["mask_function"], *size, mask.reach, torch.device(device))
