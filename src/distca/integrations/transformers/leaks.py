"""Finds leaks between packed documents: changes one document and compares the outputs of others.

A model that does not know where documents begin trains on wrong numbers without an error. It is not
documented which models and settings have this fault, so this module tests it, for any causal model
of transformers with any attention implementation.

Legend: T tokens of all documents.
"""

from collections.abc import Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils._pytree import tree_leaves

LENGTHS = (19, 7, 1, 12)
# How much rounding may change a value, relative to the largest one of its tensor: the order of
# summation in experts and kernels may depend on the other documents.
_ROUNDING = {torch.float64: 1e-8, torch.float32: 1e-4}
_ROUNDING_16 = 3e-2

Key = tuple[str, int]  # a module's name and the number of the call


@dataclass(frozen=True)
class Leak:
    """A change of one document that changed others."""

    changed: int  # the number of the document that was changed
    moved: tuple[int, ...]  # the numbers of the documents that changed with it
    layer: str  # the innermost module whose outputs for them changed while its inputs did not
    by: float  # how much they changed there, relative to the largest value


def find_leaks(
    model: nn.Module,
    lengths: Sequence[int] = LENGTHS,
    *,
    cu_seq_lens: bool = False,
    gradients: bool = False,
    seed: int = 0,
    **keywords: Any,
) -> list[Leak]:
    """Changes each packed document in turn, and returns a leak for each that changed others.

    The model is called as in training: with packed tokens [1, T] and ``position_ids`` that restart.

    lengths: tokens of the documents.
    cu_seq_lens: also gives cumulative lengths, as flash attention takes them.
    gradients: leaves gradients on. All ranks that share their attention then call this function.
    keywords: further arguments of the model, such as ``use_cache=False``.
    """
    if len(lengths) < 2 or min(lengths) < 1:
        raise ValueError(
            f"documents of {list(lengths)} tokens: give two or more, none of them empty"
        )
    names = {module: name or type(model).__name__ for name, module in model.named_modules()}
    batch = packed(model, lengths, cu_seq_lens=cu_seq_lens, seed=seed) | keywords
    numbers = [number for number, length in enumerate(lengths) for _ in range(length)]
    documents = torch.tensor(numbers, device="cpu")
    with torch.set_grad_enabled(gradients):
        before = _Record(names, len(documents))
        _run(model, batch, before, seed)
        leaks = []
        for changed in range(len(lengths)):
            chosen = (documents == changed).to(batch["input_ids"].device)
            other = torch.where(chosen, _others(model, batch["input_ids"]), batch["input_ids"])
            after = _Record(names, len(documents))
            _run(model, batch | {"input_ids": other}, after, seed)
            leaks += _leak(before, after, documents, changed)
    return leaks


def packed(
    model: nn.Module, lengths: Sequence[int], *, cu_seq_lens: bool = False, seed: int = 0
) -> dict[str, Any]:
    """Returns random documents in one row, in the form of ``DataCollatorWithFlattening``."""
    device = next(model.parameters()).device
    draw, shape = torch.Generator().manual_seed(seed), (1, sum(lengths))
    tokens = torch.randint(_vocabulary(model), shape, generator=draw, device="cpu")
    positions = torch.cat([torch.arange(length, device=device) for length in lengths])[None]
    batch: dict[str, Any] = {"input_ids": tokens.to(device), "position_ids": positions.to(device)}
    if cu_seq_lens:
        ends = torch.tensor([0, *lengths], device=device).cumsum(0).to(torch.int32)
        batch |= {"cu_seq_lens_q": ends, "cu_seq_lens_k": ends}
        batch |= {"max_length_q": max(lengths), "max_length_k": max(lengths)}
    return batch


def load(folder: Path) -> nn.Module:
    """Loads a model in float32 from its folder, with random weights if that has only a config."""
    if not (folder / "config.json").is_file():
        raise ValueError(f"{folder} has no config.json: give the folder of a transformers model")
    try:
        return _load(folder)
    except (ValueError, OSError):  # whose words are meant for users
        raise
    except Exception as error:  # damaged files fail in any way
        first = next(iter(str(error).splitlines()), "")
        raise ValueError(
            f"{folder} cannot be loaded by transformers ({type(error).__name__}: {first}): download"
            " it again, or mend its config.json"
        ) from error


def _load(folder: Path) -> nn.Module:
    from transformers import AutoConfig, AutoModelForCausalLM, AutoModelForImageTextToText

    config = AutoConfig.from_pretrained(folder)
    kinds: list[Any] = [AutoModelForCausalLM, AutoModelForImageTextToText]
    own = getattr(config, "auto_map", {})  # classes whose code is in the folder
    known = (k for k in kinds if type(config) in k._model_mapping or k.__name__ in own)
    kind = next(known, None)
    if kind is None:
        raise ValueError(
            f"{folder} is of type {config.model_type}, which is not a causal language model"
        )
    if any(folder.glob("*.safetensors")) or any(folder.glob("*.bin")):
        loaded = kind.from_pretrained(folder, local_files_only=True)
    else:
        torch.manual_seed(0)
        loaded = kind.from_config(config)
    model: nn.Module = loaded.float().eval()
    return model


class _Record:
    """Inputs and outputs of modules as rows of tokens, in the order in which the modules end."""

    def __init__(self, names: Mapping[nn.Module, str], num_tokens: int) -> None:
        self._names, self._num_tokens = names, num_tokens
        self._calls: dict[str, int] = {}
        self._begun: list[list[Tensor]] = []  # inputs of the modules that have not ended
        self.into: dict[Key, list[Tensor]] = {}
        self.out_of: dict[Key, list[Tensor]] = {}

    @contextmanager
    def watching(self) -> Iterator[None]:
        with ExitStack() as hooks:
            for module in self._names:
                hooks.enter_context(module.register_forward_pre_hook(self._begin, with_kwargs=True))
                hooks.enter_context(module.register_forward_hook(self._end))
            yield

    def _begin(self, _: nn.Module, args: Any, kwargs: Any) -> None:
        self._begun.append(self._rows((args, kwargs)))

    def _end(self, module: nn.Module, _: Any, output: Any) -> None:
        name = self._names[module]
        key = (name, self._calls.setdefault(name, 0))
        self._calls[name] += 1
        self.into[key], self.out_of[key] = self._begun.pop(), self._rows(output)

    def _rows(self, values: Any) -> list[Tensor]:
        """Returns copies [T, ...] of the tensors that have tokens on their first axis, or on their
        second after a first one of size 1. Modules may change tensors in place later."""
        if hasattr(values, "to_tuple"):  # a ModelOutput of transformers
            values = values.to_tuple()
        found = []
        for value in tree_leaves(values):
            if isinstance(value, Tensor) and value.ndim:
                if value.ndim > 1 and value.shape[0] == 1:
                    value = value[0]
                if value.shape[0] == self._num_tokens:
                    rows = value.detach().to("cpu", copy=True)
                    found.append(rows.flatten(1) if rows.ndim > 1 else rows)
        return found


def _run(model: nn.Module, batch: Mapping[str, Any], record: _Record, seed: int) -> None:
    eagerly = torch.compiler.set_stance("force_eager")  # compiled modules do not run hooks
    with torch.random.fork_rng(), record.watching(), eagerly:
        torch.manual_seed(seed)  # so that dropout, if there is any, is the same
        model(**batch)


def _leak(before: _Record, after: _Record, documents: Tensor, changed: int) -> list[Leak]:
    for key in after.out_of:  # inner modules end first
        if key not in before.out_of:  # an expert that got no tokens
            continue
        inputs = _moves(before.into[key], after.into[key], documents, changed)
        outputs = _moves(before.out_of[key], after.out_of[key], documents, changed)
        moved = {doc: by for doc, by in outputs.items() if doc not in inputs}
        if moved and before.into[key]:
            return [Leak(changed, tuple(sorted(moved)), key[0], max(moved.values()))]
    return []


def _moves(
    before: Sequence[Tensor], after: Sequence[Tensor], documents: Tensor, changed: int
) -> dict[int, float]:
    """Returns the other documents whose rows differ, and how much they differ."""
    moves: dict[int, float] = {}
    for old, new in zip(before, after, strict=False):
        if old.shape != new.shape or old.dtype != new.dtype:
            continue
        rounding = _ROUNDING.get(old.dtype, _ROUNDING_16) if old.is_floating_point() else 0.0
        if old.is_complex():
            old, new = torch.view_as_real(old), torch.view_as_real(new)
        old, new = old.double().nan_to_num(), new.double().nan_to_num()
        scale = max(float(old.abs().max()), 1e-30)
        rows = (new - old).abs().reshape(len(documents), -1).amax(1) / scale
        for document in set(documents[rows > rounding].tolist()):
            if document != changed:
                by = float(rows[documents == document].max())
                moves[document] = max(moves.get(document, 0.0), by)
    return moves


def _vocabulary(model: nn.Module) -> int:
    config: Any = model.config
    size: int = config.get_text_config().vocab_size
    return size


def _others(model: nn.Module, tokens: Tensor) -> Tensor:
    """Returns a different token for each token."""
    return (tokens + _vocabulary(model) // 2) % _vocabulary(model)
