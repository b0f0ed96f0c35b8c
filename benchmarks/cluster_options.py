"""The options of ``cluster_gpu.py``, and what they determine: a model, batches and planners."""

from __future__ import annotations

import argparse
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path

import numpy as np
from cluster_sides import WAYS

from distca.data.documents import Batch, Document
from distca.data.length_names import FORMS, names_distribution
from distca.data.lengths import distribution, take
from distca.data.readers import read_lengths
from distca.measure.sides import LIMITS, Way, planners
from distca.model.config import ModelConfig
from distca.model.sizes import model_config
from distca.pipeline.step_planner import StepPlanner

RESULTS = Path(__file__).parent / "results"
VOCABULARY = 4096  # small, so that layers dominate as in a deep model
STEP_LIMIT_S = 120  # a step that takes longer hangs: its stacks go to the log of the rank
EVEN_DOCUMENTS = 8  # of a rank, with lengths "even"


def options_of(arguments: Sequence[str] | None = None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(
        description="Trains with all policies on a little cluster on one GPU."
    )
    parser.add_argument("--ranks", type=int, default=4)
    parser.add_argument(
        "--lengths", default="pretrain", help=f"even, {FORMS}; or a file of lengths"
    )
    parser.add_argument("--context", default="128K")
    parser.add_argument("--backend", default="flash")
    parser.add_argument("--steps", type=int, default=20)
    parser.add_argument("--model", default="llama3.2-1b", help="whose layers are trained")
    parser.add_argument("--layers", type=int, default=2)
    parser.add_argument("--sides", default=",".join(WAYS))
    parser.add_argument(
        "--dynamic-cp-limits",
        type=float,
        nargs="*",
        default=(),
        help="tokens of a rank over the mean; the first that can be kept. Default: none",
    )
    parser.add_argument("--keep-activations", action="store_true", help="recompute nothing")
    parser.add_argument("--profile", help="of `distca profile --share-gpu`, to predict steps")
    parser.add_argument("--warm-up", type=int, default=2, help="steps of a side that do not count")
    parser.add_argument("--step-limit", type=float, default=STEP_LIMIT_S, help="seconds")
    parser.add_argument("--resume", action="store_true")
    parser.add_argument("--minutes", type=float, default=1e9, help="after which no round starts")
    parser.add_argument("--trace", action="store_true", help="then profile a step of each side")
    parser.add_argument("--cpu", action="store_true", help="2 ranks, context 512, 2 steps, gloo")
    parser.add_argument("--out", type=Path, default=RESULTS)
    options = parser.parse_args(arguments)
    if options.cpu:
        tiny = {"ranks": 2, "context": "512", "backend": "auto", "steps": 2, "model": "debug"}
        vars(options).update(tiny)
    unknown = set(options.sides.split(",")) - set(WAYS)
    if unknown:
        parser.error(f"sides {', '.join(sorted(unknown))} are unknown: choose of {', '.join(WAYS)}")
    options.tokens = tokens_of(options.context)
    return options


def tokens_of(text: str) -> int:
    return int(text[:-1]) * 1024 if text[-1] in "Kk" else int(text)


def model_of(options: argparse.Namespace) -> ModelConfig:
    named = model_config(options.model)
    if options.cpu:
        return replace(named, layers=options.layers)
    return replace(named, layers=options.layers, vocab_size=VOCABULARY, tied=False)


def batch_of(options: argparse.Namespace, seed: int) -> Batch:
    """Returns the documents of a step, the same on every rank; their tokens are random."""
    spec = options.lengths
    if spec == "even":
        spec = f"fixed:{options.tokens // EVEN_DOCUMENTS}"
    rng, tokens = np.random.default_rng(seed), options.ranks * options.tokens
    if names_distribution(spec):
        lengths = distribution(spec, options.tokens).batch(tokens, seed)
    else:  # in another order in every step
        known = np.minimum(read_lengths(spec), options.tokens)
        lengths = take(rng.permutation(np.tile(known, -(-tokens // int(known.sum())))), tokens)
    vocabulary = 256 if options.cpu else VOCABULARY
    return Batch(tuple(Document.from_tokens(rng.integers(0, vocabulary, n)) for n in lengths))


def planners_of(options: argparse.Namespace, config: ModelConfig, way: Way) -> list[StepPlanner]:
    """Returns planners of a side, the first of which is used where it can be."""
    shipped = "cpu" if options.cpu else {"flash": "h200-flash"}.get(options.backend, "h200")
    return planners(
        way,
        config,
        options.ranks,
        options.tokens,
        options.profile or shipped,
        recompute=not options.keep_activations,
        limits={**LIMITS, "dynamic-cp": options.dynamic_cp_limits},
    )
