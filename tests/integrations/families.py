"""Sweeps the model families of the installed transformers.

Each family is trained for one step on packed documents with ``attn_implementation="distca"``. The
reference is the same model with transformers' own attention, which gets each document as a row.

    PYTHONPATH=src:tests python -m integrations.families
"""

from __future__ import annotations

import logging
import warnings
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from integrations.family_models import VOCAB, families, model_of
from torch import Tensor

PAGE = Path(__file__).parents[2] / "docs" / "integrations" / "transformers_families.md"
LENGTHS = (19, 7, 1, 12)
PADDED = "padding"
KINDS = {
    "equal": "Logits and gradients are those of the reference, whatever is given.",
    "refused": "One sentence says why, at the first training step at the latest.",
    "warned": "A warning names `distca check`.",
    "wrong": "None may be here.",
    "not built": "These could not be made small, or take no text alone.",
}


@dataclass(frozen=True)
class Outcome:
    """What one family did. ``kind`` is equal, refused, warned, wrong or not built."""

    family: str
    kind: str
    words: str = ""


def packed(lengths: tuple[int, ...] = LENGTHS) -> dict[str, Tensor]:
    draw = torch.Generator().manual_seed(0)
    tokens = torch.randint(3, VOCAB, (1, sum(lengths)), generator=draw)
    positions = torch.cat([torch.arange(length) for length in lengths])[None]
    return {"input_ids": tokens, "position_ids": positions}


def logits_by_document(model: Any, batch: dict[str, Tensor]) -> Tensor:
    """Returns the logits of each document as a row of its own."""
    parts = zip(*(batch[name].split(list(LENGTHS), dim=1) for name in batch), strict=True)
    given = (dict(zip(batch, part, strict=True)) for part in parts)
    return torch.cat([model(**one, use_cache=False).logits for one in given], 1)


def gradients(model: Any, logits: Tensor) -> Tensor:
    """Returns all gradients of a sum with random weights in one tensor."""
    model.zero_grad()
    draw = torch.Generator().manual_seed(1)
    (logits * torch.randn(logits.shape, generator=draw)).sum().backward()
    found = (p.grad if p.grad is not None else torch.zeros_like(p) for p in model.parameters())
    return torch.cat([grad.flatten() for grad in found])


def ways(num_tokens: int) -> dict[str, dict[str, Any]]:
    """Returns further arguments with which trainers call models."""
    from transformers import DynamicCache

    ones = torch.ones(1, num_tokens, dtype=torch.int64)
    padded = ones.clone()
    padded[:, -3:] = 0
    return {
        "packed": {"use_cache": False},
        "a mask of ones": {"use_cache": False, "attention_mask": ones},
        "an empty cache": {"past_key_values": DynamicCache()},
        "use_cache=True": {"use_cache": True},
        PADDED: {"use_cache": False, "attention_mask": padded},
    }


def outcome(family: str) -> Outcome:
    try:
        model = model_of(family, "eager")
        right = logits_by_document(model, packed())
        exact = gradients(model, right)
    except Exception as error:
        return Outcome(family, "not built", _first(error))
    words: dict[str, str] = {}
    with recorded_warnings() as warned:
        for way, given in ways(sum(LENGTHS)).items():
            try:
                model = model_of(family, "distca")
                logits = model(**packed() | given).logits
                error = max(_error(logits, right), _error(gradients(model, logits), exact))
                words[way] = "" if error < 1e-4 else f"{way}: off by {error:.0%}"
            except Exception as raised:
                words[way] = _first(raised)
                if way == "packed":
                    return Outcome(family, "refused", words[way])
    wrong = [said for said in words.values() if ": off by " in said]
    if not words[PADDED]:
        wrong.append(f"{PADDED} is computed")
    if warned:
        return Outcome(family, "warned", warned[0])
    if wrong:
        return Outcome(family, "wrong", "; ".join(wrong))
    raised = [f"{way}: {said}" for way, said in words.items() if said and way != PADDED]
    return Outcome(family, "equal", "; ".join(raised))


def _error(found: Tensor, right: Tensor) -> float:
    if found.shape != right.shape:
        return float("inf")
    return float((found - right).norm() / right.norm())


def _first(error: Exception) -> str:
    lines = str(error).strip().splitlines() or [""]
    return f"{type(error).__name__}: {lines[0][:200]}"


@contextmanager
def recorded_warnings() -> Iterator[list[str]]:
    """Records the warnings of distca, of every model anew."""
    from distca.integrations.transformers import refusals

    found: list[str] = []
    handler = logging.Handler()
    handler.emit = lambda record: found.append(record.getMessage())  # type: ignore[method-assign]
    refusals._log.addHandler(handler)
    refusals._checked.clear()
    try:
        yield found
    finally:
        refusals._log.removeHandler(handler)


REASONS = {  # what is said, and its short form on the page
    "computes its attention itself": "compute their attention themselves; refused at load",
    "ignores position_ids": "ignore `position_ids`; refused with several documents in a row",
    "carries a state": "carry a state from token to token; refused with several documents in a row",
    "has not called": "never call the attention that they are given",
    "bias to its scores": "add a bias to their scores",
    "none of those that distca supports": "have another kind of mask",
    "computes with its masks": "compute with their masks",
    "mask of its own": "give layers a mask of their own",
    "do not call distca's": "have layers that were not called (cross attention, without images)",
    "million parameters": "are too large at their smallest",
    "pixel_values": "need images",
    "requires the timm library": "need timm",
}

INTRODUCTION = """# Families of transformers

Each family of transformers {version} with a causal or an image-text model is trained for one step on four
packed documents, as a tiny model with random weights and with text alone. Its logits and gradients are
compared with those of transformers' `eager` attention, which gets each document as a row. Besides plain
packed batches it is given an `attention_mask` of ones, an empty cache and `use_cache=True`; padding must be
refused. `tests/integrations/test_transformers_families.py` (`-m slow`) compares this page with a new sweep.
It is written by

```
PYTHONPATH=src:tests python -m integrations.families
```
"""  # noqa: E501


def page(outcomes: list[Outcome]) -> str:
    import transformers

    lines = [INTRODUCTION.format(version=transformers.__version__)]
    for kind, meaning in KINDS.items():
        found = [one for one in outcomes if one.kind == kind]
        if not found:
            continue
        lines += [f"## {kind.capitalize()}: {len(found)}", "", meaning, ""]
        if kind == "equal":
            lines += [_listed(found), ""]
            lines += [
                f"`{one.family}` raises an error with {one.words}" for one in found if one.words
            ]
        else:
            lines += ["| families | |", "|---|---|", *_rows(found)]
        lines += [""]
    return "\n".join(lines)


def _rows(outcomes: list[Outcome]) -> Iterator[str]:
    """Yields one row for each reason, and one for each family that has a reason of its own."""
    left = outcomes
    for words, reason in REASONS.items():
        found = [one for one in left if words in one.words]
        left = [one for one in left if words not in one.words]
        if found:
            yield f"| {_listed(found)} | {reason} |"
    yield from (f"| {_listed([one])} | {one.words.replace('|', ' ')} |" for one in left)


def _listed(outcomes: list[Outcome]) -> str:
    return ", ".join(f"`{one.family}`" for one in outcomes)


def documented() -> dict[str, str]:
    """Returns the kind of each family on the page."""
    kinds: dict[str, str] = {}
    for section in PAGE.read_text().split("\n## ")[1:]:
        kind = section.partition(":")[0].lower()
        for line in section.splitlines()[4:]:
            names = line.split("|")[1] if line.startswith("|") else line
            kinds |= dict.fromkeys(names.replace("`", " ").replace(",", " ").split(), kind)
    return kinds


if __name__ == "__main__":
    import transformers

    from distca.integrations.transformers import register

    register(cost="pairs")
    transformers.logging.set_verbosity_error()
    warnings.simplefilter("ignore")
    found = []
    for number, family in enumerate(families(), 1):
        found.append(outcome(family))
        print(number, found[-1], flush=True)
    PAGE.write_text(page(found))
