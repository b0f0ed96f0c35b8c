"""``attn_implementation="distca"`` for models of transformers.

    from distca.integrations.transformers import register

    distca = register()
    model = AutoModelForCausalLM.from_pretrained(path, attn_implementation="distca")
    loader = distca.plan_ahead(loader)          # or Trainer(..., callbacks=[distca.callback()])

[Note: local] Without gradients (evaluation, ``generate``) attention is this rank's own affair, so
that ranks may evaluate different numbers of batches, or one of them generate: by distca's kernels
where there are whole documents, by transformers' sdpa where there is a cache or padding. A batch
that brings its plans is shared by all ranks in any case.

Legend: B rows, S tokens in a row, H heads, G key/value heads, D head size.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn

try:
    from transformers import AttentionInterface, TrainerCallback
    from transformers.integrations.sdpa_attention import sdpa_attention_forward
    from transformers.masking_utils import AttentionMaskInterface, sdpa_mask
except ImportError as error:
    raise ImportError(
        "distca.integrations.transformers needs transformers 4.53 or newer, with what it asks for:"
        " pip install 'distca[transformers]'"
    ) from error

from distca.integrations.shared.planned import TIMEOUT_S, PlannedAttention, PlannedBatch
from distca.integrations.shared.prefetch import Ahead
from distca.integrations.transformers.batches import (
    PLANNED,
    attach,
    documents,
    filler,
    lengths_of,
)
from distca.integrations.transformers.tickets import OTHERWISE, Ticket, Tickets

_REFUSED = {  # keywords by which layers ask for more than softmax(QK^T)V
    "softcap": "caps its scores (softcap)",
    "s_aux": "has attention sinks (s_aux)",
    "position_bias": "adds a bias to its scores (position_bias)",
    "indices": "attends to keys of its choice (indices)",
    "block_indices": "attends to keys of its choice (block_indices)",
    "cache": "attends to a paged cache",
}


def register(
    name: str = "distca",
    *,
    group: dist.ProcessGroup | None = None,
    backend: str = "auto",
    deterministic: bool = False,
    policy: str = "distca",
    timeout_s: float = TIMEOUT_S,
    **plan_options: Any,
) -> Registered:
    """Makes ``attn_implementation=name`` known to transformers: the attention and its mask.

    Once in every process, before a model is loaded. Without a ``group`` torch.distributed may be
    set up later. Arguments as of ``PlannedAttention``. A second call under the same name takes the
    place of the first.
    """
    if "flash" in name:
        raise ValueError(
            f"name {name!r}: transformers takes every name with flash in it for a kernel of its"
            " own, so choose another"
        )
    attention = PlannedAttention(
        group,
        backend=backend,
        deterministic=deterministic,
        policy=policy,
        timeout_s=timeout_s,
        **plan_options,
    )
    registered = Registered(name, attention)
    AttentionInterface.register(name, registered.attend)
    AttentionMaskInterface.register(name, registered.mask)
    return registered


class Registered:
    """What transformers calls, and what loaders are wrapped with."""

    def __init__(self, name: str, attention: PlannedAttention) -> None:
        self.name, self.attention = name, attention
        self._tickets = Tickets()

    def plan_ahead(self, loader: Iterable[Any]) -> Any:
        """The loader, whose batches are gathered over the ranks and planned in the background.

        On every rank, for loaders of mappings as models take them. All ranks then get equally many
        batches: one that has no more gets fillers of one ignored token. A loader that Accelerate
        has prepared is changed in place, since it reads ahead itself.
        """
        ways: dict[str, Any] = {"lengths_of": lengths_of, "attach": attach, "filler": filler}
        if _can_be_changed(loader):
            inner = vars(loader)["base_dataloader"]
            if not isinstance(inner, Ahead):
                vars(loader)["base_dataloader"] = Ahead(inner, self.attention, depth=0, **ways)
            return loader
        reads_ahead = hasattr(loader, "end_of_dataloader")  # as all of Accelerate's do
        return Ahead(loader, self.attention, depth=0 if reads_ahead else 1, **ways)

    def callback(self) -> PlanAhead:
        """For a ``Trainer``: its training batches are planned ahead."""
        return PlanAhead(self)

    @torch.compiler.disable  # type: ignore[untyped-decorator]
    def mask(self, **asked: Any) -> Ticket | Tensor | None:
        """In place of transformers' masks; arguments as ``sdpa_mask`` takes them."""
        ticket = self._tickets(asked)
        return sdpa_mask(**asked) if ticket is None else ticket

    @torch.compiler.disable  # type: ignore[untyped-decorator]
    def attend(
        self,
        module: nn.Module,
        query: Tensor,
        key: Tensor,
        value: Tensor,
        attention_mask: Ticket | Tensor | None,
        dropout: float = 0.0,
        scaling: float | None = None,
        **given: Any,
    ) -> tuple[Tensor, None]:
        """query [B, H, S, D], key and value [B, G, S, D] -> [B, S, H, D]."""
        where = f"layer {getattr(module, 'layer_idx', '?')} ({type(module).__name__})"
        _refuse(where, dropout, given)
        if not isinstance(attention_mask, Ticket):
            _refuse_mask(where, module, attention_mask, given)
            options = {"dropout": dropout, "scaling": scaling, **given}
            out, _ = sdpa_attention_forward(module, query, key, value, attention_mask, **options)
            return out, None
        mask, window = attention_mask.mask, given.get("sliding_window")
        # sdpa goes by the mask, flash attention by the window.
        if window not in (None, mask.reach) and not attention_mask.complaint:
            raise ValueError(
                f"{where} wants a window of {window} keys, but its mask is {mask}: {OTHERWISE}"
            )
        batch = self._batch(attention_mask, where, given)
        q, k, v = (x.transpose(1, 2).flatten(0, 1) for x in (query, key, value))  # [B x S, ...]
        out = self.attention.attend(q, k, v, batch, mask=mask, scale=scaling)
        return out.view(query.shape[0], query.shape[2], *out.shape[1:]), None

    def _batch(self, ticket: Ticket, where: str, given: Mapping[str, Any]) -> PlannedBatch:
        """Of all ranks, or of this one alone; whatever one rank complains of, all raise."""
        forward, complaint, lengths = ticket.forward, "", list[int]()
        if forward.batch is None and given.get(PLANNED) is not None:
            forward.batch = self.attention.wait(given[PLANNED])
        try:
            if ticket.complaint:
                raise ValueError(ticket.complaint)
            if forward.batch is None:
                lengths = documents(forward.num_rows, forward.num_tokens, given, ticket.starts)
                if forward.learns and len(lengths) == forward.num_rows:
                    _refuse_blindness(forward.config, given)
            ticket.check(forward.batch.lengths if forward.batch else lengths)
        except ValueError as error:
            complaint = f"{where} {error}"
            if forward.batch is not None or not forward.learns:
                raise ValueError(complaint) from None
        if forward.batch is None:
            if forward.learns:
                forward.batch = self.attention.gather(lengths, complaint)
            else:
                forward.batch = self.attention.alone(lengths)
        return forward.batch


class PlanAhead(TrainerCallback):  # type: ignore[misc]
    def __init__(self, registered: Registered) -> None:
        self._registered = registered

    def on_train_begin(self, *_: Any, train_dataloader: Any = None, **__: Any) -> None:
        if _can_be_changed(train_dataloader):
            self._registered.plan_ahead(train_dataloader)


def _can_be_changed(loader: Any) -> bool:
    """Whether it is one of Accelerate's that reads, on each rank, from a loader inside of it."""
    return type(loader).__name__ == "DataLoaderShard" and "base_dataloader" in vars(loader)


def _refuse(where: str, dropout: float, given: Mapping[str, Any]) -> None:
    if dropout:
        raise ValueError(
            f"{where} drops attention weights (dropout {dropout}), which distca does not: set"
            " attention_dropout to 0 in the model's config"
        )
    for keyword, what in _REFUSED.items():
        if given.get(keyword) is not None:
            raise ValueError(f"{where} {what}, which distca does not: {OTHERWISE}")


def _refuse_blindness(config: Any, given: Mapping[str, Any]) -> None:
    """Layers without positions rely on transformers' mask, which does not look at them either where
    there is a cache, or where a model has several for each token (Qwen2-VL)."""
    if any(given.get(name) is not None for name in ("position_ids", "cu_seq_lens_q")):
        return
    several, caches = "position_ids" in given, getattr(config, "use_cache", False)
    if several or caches:
        way = "give cu_seq_lens_q" if several else "set use_cache to False in the model's config"
        raise ValueError(
            f"is not told where documents begin: wrap the loader with plan_ahead, or {way}"
        )


def _refuse_mask(
    where: str, module: nn.Module, mask: Tensor | None, given: Mapping[str, Any]
) -> None:
    """Causal layers learn by tickets alone; encoders, such as those of images, are local."""
    causal = given.get("is_causal")
    if causal is None:
        causal = getattr(module, "is_causal", True)
    if causal and torch.is_grad_enabled():
        raise ValueError(
            f"{where} is given {'no mask' if mask is None else 'a mask of its own'}, so that"
            f" documents cannot be told apart: {OTHERWISE}"
        )
