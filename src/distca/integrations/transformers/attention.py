"""``attn_implementation="distca"`` for models of transformers.

    from distca.integrations.transformers import register

    distca = register()
    model = AutoModelForCausalLM.from_pretrained(path, attn_implementation="distca")
    loader = distca.plan_ahead(loader)          # or distca.adopt(trainer)

[Note: local] Without gradients (evaluation, ``generate``) attention is computed on each rank
without any exchange, so that ranks may evaluate different numbers of batches, or one of them may
generate. Whole documents use distca's kernels; with a cache or padding it is transformers' sdpa or,
for sinks and soft caps, plain arithmetic.
A batch that carries its plans is always shared by all ranks.

Legend: B rows, S tokens in a row, H heads, G key/value heads, D head size of queries and keys, V
that of values and outputs.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from functools import wraps
from typing import TYPE_CHECKING, Any

import torch
import torch.distributed as dist
from torch import Tensor, nn

try:
    from transformers import AttentionInterface, TrainerCallback
    from transformers.masking_utils import AttentionMaskInterface, sdpa_mask
except ImportError as error:
    raise ImportError(
        "distca.integrations.transformers needs transformers 4.53 or newer and its dependencies:"
        " pip install 'distca[transformers]'"
    ) from error

from distca.integrations.shared.planned import PlannedAttention
from distca.integrations.shared.planned_batch import PlannedBatch
from distca.integrations.transformers.calls import in_progress, told_lengths, watch
from distca.integrations.transformers.latents import latent_of
from distca.integrations.transformers.loader import plan_ahead, wraps_loader
from distca.integrations.transformers.masked import attend_masked
from distca.integrations.transformers.packed_mask import PackedMask, PackedMaskFactory
from distca.integrations.transformers.refusals import WAY_OUT, refuse_layer, refuse_mask
from distca.integrations.transformers.states import separate_states
from distca.integrations.transformers.trl import adopt_models, gives_documents, is_of_trl
from distca.planning.entries import Entry
from distca.planning.masks import BAND

if TYPE_CHECKING:
    from transformers import Trainer


def register(
    name: str = "distca", *, group: dist.ProcessGroup | None = None, **options: Any
) -> Registered:
    """Registers ``attn_implementation=name`` with transformers: the attention and its mask.

    Call it once in every process, before a model is loaded. Without a ``group`` torch.distributed
    may be initialized later. A second call with the same name replaces the first.

    group, options: arguments of ``PlannedAttention``.
    """
    if "flash" in name:
        raise ValueError(
            f"name {name!r}: transformers takes every name that contains flash for one of its own"
            " kernels, so choose another"
        )
    registered = Registered(name, PlannedAttention(group, **options))
    AttentionInterface.register(name, registered.attend)
    AttentionMaskInterface.register(name, registered.mask)
    # The next batches are planned while the device computes this one.
    watch(name, separate_states, registered.attention.start)
    return registered


class Registered:
    """The functions that transformers calls, and the preparation of loaders."""

    def __init__(self, name: str, attention: PlannedAttention) -> None:
        self.name, self.attention = name, attention
        self._masks = PackedMaskFactory()

    def plan_ahead(self, loader: Iterable[Any]) -> Any:
        """Returns the loader with batches that are gathered and planned in the background.

        Every rank calls it, for a loader of mappings with the arguments of a model. All ranks then
        get equally many batches: a rank without more batches gets fillers of one ignored token. A
        loader that Accelerate has prepared is changed in place.
        """
        return plan_ahead(loader, self.attention)

    def adopt(self, trainer: Trainer) -> Trainer:
        """Lets a ``Trainer`` plan its training batches in advance, and log figures of attention.

        They join the other figures of each logging step, in every place to which it reports. The
        models of a TRL trainer pack the rows that it pads; it plans in advance if it pads none.
        """
        if is_of_trl(trainer):
            adopt_models(trainer)
        if gives_documents(trainer):
            trainer.add_callback(PrefetchCallback(self))
        trainer.log = _with_figures(trainer.log, self.attention)
        return trainer

    @torch.compiler.disable  # type: ignore[untyped-decorator]
    def mask(self, **asked: Any) -> PackedMask | Tensor | None:
        """Replaces ``sdpa_mask``, whose arguments it takes. [Note: packed masks]"""
        packed = self._masks(asked)
        return sdpa_mask(**asked) if packed is None else packed

    @torch.compiler.disable  # type: ignore[untyped-decorator]
    def attend(
        self,
        module: nn.Module,
        query: Tensor,
        key: Tensor,
        value: Tensor,
        attention_mask: PackedMask | Tensor | None,
        dropout: float = 0.0,
        scaling: float | None = None,
        **given: Any,
    ) -> tuple[Tensor, None]:
        """Returns [B, S, H, V] of query [B, H, S, D], key [B, G, S, D] and value [B, G, S, V]."""
        number = getattr(module, "layer_idx", None)  # which some models set to None
        layer = "a layer" if number is None else f"layer {number}"
        where = f"{layer} ({type(module).__name__})"
        for call in in_progress():
            call.attended.add(module)
        refuse_layer(where, dropout, given)
        if not isinstance(attention_mask, PackedMask):
            num_rows, _, num_queries, _ = query.shape
            several = False
            # Without a mask, or with the same one for all queries, nothing can be told apart.
            alike = attention_mask is None or attention_mask.shape[-2] == 1
            if alike and num_queries > 1:
                several = len(told_lengths(num_rows, num_queries)) > num_rows
            refuse_mask(where, module, attention_mask, given, several=several)
            out = attend_masked(module, query, key, value, attention_mask, scaling, given)
            return out, None
        mask, window = attention_mask.mask, given.get("sliding_window")
        # sdpa uses the mask and flash attention uses the window: they must agree.
        if window not in (None, mask.reach, mask.reach - BAND + 1) and not attention_mask.error:
            raise ValueError(
                f"{where} has a window of {window} keys, but its mask is {mask}: {WAY_OUT}"
            )
        batch = self._batch(attention_mask, where, given)
        q, k, v = (x.transpose(1, 2).flatten(0, 1) for x in (query, key, value))  # [B x S, ...]
        softcap, sinks = given.get("softcap") or 0.0, given.get("s_aux")
        out = self.attention.attend(
            q,
            k,
            v,
            batch,
            mask=mask,
            scale=scaling,
            softcap=softcap,
            sinks=sinks,
            latent=latent_of(key),
        )
        return out.view(query.shape[0], query.shape[2], *out.shape[1:]), None

    def _batch(self, packed: PackedMask, where: str, given: Mapping[str, Any]) -> PlannedBatch:
        """Returns the batch of all ranks or the local one; an error of one rank is raised on all.

        The first layer of a model call finds it, and the others take it from there.
        """
        call, error, documents = packed.call, "", list[Entry]()
        first = call.batch is None
        if first and (planned := call.planned(given)) is not None:
            call.batch = self.attention.wait(planned)
        try:
            if packed.error:
                raise ValueError(packed.error)
            if call.batch is None:
                documents = call.documents(given, packed.starts)
            packed.check(call.batch.documents if call.batch else documents)
            if first:  # the same on all ranks if they share the batch
                call.check_packed(call.batch.ranks if call.batch else [documents])
        except ValueError as raised:
            error = f"{where} {raised}"
            if call.batch is not None or not call.grad_enabled:
                raise ValueError(error) from None
        if call.batch is None:
            if call.grad_enabled:
                call.batch = self.attention.gather(documents, error)
            else:
                call.batch = self.attention.local(documents)
        return call.batch


class PrefetchCallback(TrainerCallback):  # type: ignore[misc]
    """Plans the training batches of a ``Trainer`` in advance."""

    def __init__(self, registered: Registered) -> None:
        self._registered = registered

    def on_train_begin(self, *_: Any, train_dataloader: Any = None, **__: Any) -> None:
        if wraps_loader(train_dataloader):
            self._registered.plan_ahead(train_dataloader)


def _with_figures(log: Callable[..., None], attention: PlannedAttention) -> Callable[..., None]:
    """Returns a ``Trainer.log`` that adds the figures of attention to those of training steps."""

    @wraps(log)
    def logging(logs: dict[str, Any], *args: Any, **options: Any) -> None:
        if "loss" in logs:  # not for the results of an evaluation, or those at the end
            logs = logs | attention.take_figures()
        log(logs, *args, **options)

    return logging
