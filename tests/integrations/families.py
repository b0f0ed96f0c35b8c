"""Sweeps the model families of the installed transformers, and writes the page about them.

Each family is trained for one step on packed documents with ``attn_implementation="distca"``. The
reference is the same model with transformers' own attention, which gets each document as a row.

    PYTHONPATH=src:tests python -m integrations.families               # all of them
    PYTHONPATH=src:tests python -m integrations.families llama bert    # only the rows of these
"""

from __future__ import annotations

import logging
import multiprocessing
import sys
import warnings
from collections import Counter
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from integrations.family_models import CAUSAL, ENCODER, KINDS, VOCAB, cases, model_of
from torch import Tensor

PAGE = Path(__file__).parents[2] / "docs" / "integrations" / "transformers_families.md"
LENGTHS = (19, 7, 1, 12)
PADDED = "padding"
ERROR = 1e-5  # relative, of all logits and of all gradients
LIMIT_S = 600
RESULTS = {
    "exact": "logits and gradients are those of the reference, whatever is given",
    "refused": "one sentence says why, at the first training step at the latest",
    "warned": "a warning names `distca check`",
    "wrong": "none may be here",
    "not built": "could not be made small, or does not run with text alone, for the reason given",
}


@dataclass(frozen=True)
class Outcome:
    """What one family did. ``result`` is one of ``RESULTS``."""

    family: str
    kind: str
    result: str
    words: str = ""


def packed(lengths: tuple[int, ...] = LENGTHS) -> dict[str, Tensor]:
    draw = torch.Generator().manual_seed(0)
    tokens = torch.randint(3, VOCAB, (1, sum(lengths)), generator=draw)
    positions = torch.cat([torch.arange(length) for length in lengths])[None]
    return {"input_ids": tokens, "position_ids": positions}


def logits_by_document(model: Any, batch: dict[str, Tensor], given: dict[str, Any]) -> Tensor:
    """Returns the logits of each document as a row of its own."""
    parts = zip(*(batch[name].split(list(LENGTHS), dim=1) for name in batch), strict=True)
    rows = (dict(zip(batch, part, strict=True)) for part in parts)
    return torch.cat([model(**row, **given).logits for row in rows], 1)


def gradients(model: Any, logits: Tensor) -> Tensor:
    """Returns all gradients of a sum with random weights in one tensor."""
    model.zero_grad()
    draw = torch.Generator().manual_seed(1)
    (logits * torch.randn(logits.shape, generator=draw)).sum().backward()
    found = (p.grad if p.grad is not None else torch.zeros_like(p) for p in model.parameters())
    return torch.cat([grad.flatten() for grad in found])


def ways(kind: str, num_tokens: int) -> dict[str, dict[str, Any]]:
    """Returns further arguments with which trainers call models."""
    from transformers import DynamicCache

    ones = torch.ones(1, num_tokens, dtype=torch.int64)
    padded = ones.clone()
    padded[:, -3:] = 0
    if kind == ENCODER:
        return {
            "packed": {},
            "a mask of ones": {"attention_mask": ones},
            PADDED: {"attention_mask": padded},
        }
    return {
        "packed": {"use_cache": False},
        "a mask of ones": {"use_cache": False, "attention_mask": ones},
        "an empty cache": {"past_key_values": DynamicCache()},
        "use_cache=True": {"use_cache": True},
        PADDED: {"use_cache": False, "attention_mask": padded},
    }


def outcome(family: str, kind: str = CAUSAL, dtype: torch.dtype = torch.float32) -> Outcome:
    given_in_all_ways = ways(kind, sum(LENGTHS))
    try:
        model = model_of(family, "eager", kind).to(dtype)
        right = logits_by_document(model, packed(), given_in_all_ways["packed"])
        exact = gradients(model, right)
    except Exception as error:
        return Outcome(family, kind, "not built", f"{type(error).__name__}: {_first(error)}")
    words: dict[str, str] = {}
    with recorded_warnings() as warned:
        for way, given in given_in_all_ways.items():
            try:
                model = model_of(family, "distca", kind).to(dtype)
                logits = model(**packed() | given).logits
                error = max(_error(logits, right), _error(gradients(model, logits), exact))
                words[way] = "" if error < ERROR else f"{way}: off by {error:.1e}"
            except Exception as raised:
                words[way] = _first(raised)
                if way == "packed":
                    return Outcome(family, kind, "refused", words[way])
    wrong = [said for said in words.values() if ": off by " in said]
    if wrong and dtype == torch.float32:  # it may be rounding
        return outcome(family, kind, torch.float64)
    if not words[PADDED]:
        wrong.append(f"{PADDED} is computed")
    with suppress(ValueError), torch.no_grad():
        model_of(family, "distca", kind).eval()(**packed() | given_in_all_ways[PADDED])
        wrong.append(f"{PADDED} is computed without gradients")
    if wrong:
        return Outcome(family, kind, "wrong", "; ".join(wrong))
    if warned:
        return Outcome(family, kind, "warned", warned[0])
    raised = [f"with {way}: {said}" for way, said in words.items() if said and way != PADDED]
    return Outcome(family, kind, "exact", "; ".join(raised))


def _error(found: Tensor, right: Tensor) -> float:
    if found.shape != right.shape:
        return float("inf")
    return float(((found - right).norm() / right.norm()).detach())


def _first(error: Exception) -> str:
    lines = str(error).strip().splitlines() or [""]
    return lines[0][:400].replace("|", " ")


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


def outcome_in_process(family: str, kind: str) -> Outcome:
    """Returns the outcome from a process of its own, which may crash or take too long."""
    context = multiprocessing.get_context("fork")  # what is imported need not be imported again
    receiver, sender = context.Pipe(duplex=False)
    process = context.Process(target=_send_outcome, args=(sender, family, kind))
    process.start()
    sender.close()
    try:
        if not receiver.poll(LIMIT_S):
            return Outcome(family, kind, "not built", f"takes more than {LIMIT_S} s")
        found: Outcome = receiver.recv()
    except EOFError:
        process.join()
        return Outcome(family, kind, "not built", f"its process ends with {process.exitcode}")
    else:
        return found
    finally:
        process.kill()
        process.join()
        receiver.close()


def _send_outcome(sender: Any, family: str, kind: str) -> None:
    import transformers

    from distca.integrations.transformers import register

    torch.set_num_threads(1)  # the threads of the process above do not exist here
    transformers.logging.set_verbosity_error()
    warnings.simplefilter("ignore")
    register(cost="pairs")
    sender.send(outcome(family, kind))


INTRODUCTION = """# Families of transformers

All families of transformers {version} with a causal model, an image-text model or an encoder (a
masked language model): each is trained for one step on four packed documents of 19, 7, 1 and 12
tokens, as a tiny model with random weights and with text alone. Its logits and gradients are
compared with those of transformers' `eager` attention, which gets each document as a row: both are
within {error:g}, relative to their norm, in float32 or, if they are not, in float64. Besides plain
packed batches it is given an `attention_mask` of ones and, if it is no encoder, an empty cache and
`use_cache=True`; padding must be refused, without gradients too.

`tests/integrations/test_transformers_families.py` (`-m slow`) compares each row of this page with a
new sweep, so that a release of transformers shows what has changed. The page is written by

```
PYTHONPATH=src:tests python -m integrations.families
```

| result | | {kinds} |
|---|---|{lines}|
"""
HEADER = "| family | kind | result | sentence |"


def page(outcomes: list[Outcome]) -> str:
    import transformers

    lines = INTRODUCTION.format(
        version=transformers.__version__,
        error=ERROR,
        kinds=" | ".join(KINDS),
        lines="|".join(["---"] * len(KINDS)),
    ).splitlines()
    counts = Counter((one.result, one.kind) for one in outcomes)
    for result, meaning in RESULTS.items():
        cells = [str(counts[result, kind]) for kind in KINDS]
        lines.append(f"| {result} | {meaning} | {' | '.join(cells)} |")
    lines += ["", HEADER, "|---|---|---|---|"]
    found = sorted(outcomes, key=lambda one: (one.family, one.kind))
    # Errors quote Python, whose brackets would be links.
    words = [one.words.replace("[", r"\[") for one in found]
    lines += [
        f"| {o.family} | {o.kind} | {o.result} | {w} |" for o, w in zip(found, words, strict=True)
    ]
    return "\n".join(lines) + "\n"


def documented() -> dict[tuple[str, str], Outcome]:
    """Returns the rows of the page, by family and kind."""
    if HEADER not in (text := PAGE.read_text()):
        return {}
    rows = text.partition(HEADER)[2].replace(r"\[", "[").splitlines()[2:]
    cells = ([cell.strip() for cell in row.split("|")[1:-1]] for row in rows)
    return {(family, kind): Outcome(family, kind, *rest) for family, kind, *rest in cells}


if __name__ == "__main__":
    import distca.integrations.transformers  # noqa: F401  # once for all processes

    wanted = set(sys.argv[1:])
    swept = documented() if wanted else {}
    for number, case in enumerate(cases(), 1):
        if not wanted or case[0] in wanted:
            swept[case] = outcome_in_process(*case)
            print(number, swept[case], flush=True)
    PAGE.write_text(page([*swept.values()]))
