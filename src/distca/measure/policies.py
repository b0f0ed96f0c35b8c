"""Compares policies by real training steps on the ranks at hand."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace

import numpy as np
import torch

from distca.attention.core import CoreAttention
from distca.data.documents import Batch, Document
from distca.data.length_names import names_distribution
from distca.data.lengths import distribution, take
from distca.data.readers import read_lengths
from distca.measure.sides import WAYS, PlannedSide, plan_step, planners
from distca.measure.steps import StepFigures, in_turns, train_step
from distca.model.config import ModelConfig
from distca.model.sizes import model_config
from distca.pipeline.step_planner import StepPlanner
from distca.runtime.batches import Step
from distca.runtime.mesh import RankContext
from distca.runtime.parallelize import Precision

VOCABULARY = 4096  # small, so that layers dominate as in a deep model
WARM_UP_SEED = 1 << 20  # of the first batch that does not count


@dataclass(frozen=True)
class Study:
    """What all policies have in common: a model, and batches of documents with random tokens.

    lengths: a distribution, or a file of lengths.
    context: the longest document.
    tokens: those of a rank in a step, on average.
    """

    ranks: int
    config: ModelConfig
    lengths: str
    context: int
    tokens: int
    cost: str
    seed: int
    recompute: bool

    def planners(self, name: str) -> list[StepPlanner]:
        """Returns the planners of a policy, the first of which is used where it can be."""
        ranks, tokens, cost = self.ranks, self.tokens, self.cost
        return planners(WAYS[name], self.config, ranks, tokens, cost, recompute=self.recompute)

    def batch(self, number: int) -> Batch:
        """Returns the documents of a step, the same on every rank."""
        seed = (self.seed, number) if number >= 0 else (self.seed, WARM_UP_SEED - number)
        rng, tokens = np.random.default_rng(seed), self.ranks * self.tokens
        if names_distribution(self.lengths):
            one = int(rng.integers(1 << 31))
            lengths = distribution(self.lengths, self.context).batch(tokens, one)
        else:  # in another order in every step
            known = np.minimum(read_lengths(self.lengths), self.context)
            repeated = np.tile(known, -(-tokens // int(known.sum())))
            lengths = take(rng.permutation(repeated), tokens)
        vocabulary = self.config.vocab_size
        return Batch(tuple(Document.from_tokens(rng.integers(0, vocabulary, n)) for n in lengths))


def layers_of(name: str, layers: int) -> ModelConfig:
    """Returns some layers of a model, with a small vocabulary."""
    named = model_config(name)
    vocabulary = min(named.vocab_size, VOCABULARY)
    return replace(named, layers=layers, vocab_size=vocabulary, tied=False)


def dtype_on(device: torch.device) -> torch.dtype:
    """Returns what layers compute in; bfloat16 takes far longer on a CPU."""
    return torch.bfloat16 if device.type == "cuda" else torch.float32


class Comparison:
    """Policies on the ranks of a context, each with a model of its own."""

    def __init__(
        self, study: Study, names: Sequence[str], context: RankContext, backend: str
    ) -> None:
        precision = Precision(dtype_on(context.device))
        group = context.attention_group
        attentions = CoreAttention(group, backend=backend), CoreAttention(group, backend=backend)
        self._study, self._context = study, context
        self._sides = {
            name: PlannedSide(
                study.config,
                context,
                precision,
                study.planners(name),
                attentions,
                recompute=study.recompute,
            )
            for name in names
        }
        self.refused: dict[str, str] = {}  # policies that cannot place a batch, and why

    def step(self, number: int) -> dict[str, StepFigures]:
        """Trains the batch of a step with each policy; negative steps are for warming up.

        Policies that cannot place it are left out from then on.
        """
        batch = self._study.batch(number)
        steps: dict[str, Step] = {}
        for name, side in self._sides.items():
            try:
                steps[name] = plan_step(side.choices, batch)
            except ValueError as error:  # on all ranks, since all make the same plans
                self.refused[name] = str(error)
        self._sides = {name: side for name, side in self._sides.items() if name in steps}
        figures = {}
        for name in in_turns(self._sides, number):
            side = self._sides[name]
            figures[name] = train_step(side, side.prepare_planned(steps[name]), self._context)
        return figures
