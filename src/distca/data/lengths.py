"""Distributions of document lengths by name, and seeded batches of lengths."""

from collections.abc import Callable
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

from distca.data.length_names import FORMS

Lengths = npt.NDArray[np.int64]
Floats = npt.NDArray[np.float64]
Draw = Callable[[np.random.Generator, int], Floats]

PROLONG_SHARE = 0.135
BLOCK = 1024  # documents drawn at once; another number changes the batch of a seed


@dataclass(frozen=True)
class LengthDistribution:
    """A distribution of lengths, clipped to [1, ``context``] tokens."""

    name: str
    context: int
    draw: Draw

    def __post_init__(self) -> None:
        if self.context < 1:
            raise ValueError(f"a context of {self.context} tokens: it must be at least 1")

    def sample(self, num_documents: int, rng: np.random.Generator) -> Lengths:
        drawn = np.rint(self.draw(rng, num_documents))
        return np.clip(drawn, 1, self.context).astype(np.int64)  # numbers may exceed 64 bits

    def batch(self, num_tokens: int, seed: int) -> Lengths:
        """Returns lengths that add up to ``num_tokens``; the last document is cut."""
        rng = np.random.default_rng(seed)
        blocks: list[Lengths] = []
        missing = num_tokens
        while missing > 0:
            blocks.append(self.sample(BLOCK, rng))
            missing -= int(blocks[-1].sum())
        return take(np.concatenate([np.zeros(0, np.int64), *blocks]), num_tokens)


def take(lengths: Lengths, num_tokens: int) -> Lengths:
    """Returns the first documents up to ``num_tokens`` tokens in total; the last one is cut."""
    ends = np.cumsum(lengths)
    total = int(ends[-1]) if len(ends) else 0
    if total < num_tokens:
        raise ValueError(
            f"the documents hold {total} tokens but {num_tokens} are needed: ask for fewer tokens"
            " or give more documents"
        )
    stops = ends[: np.searchsorted(ends, num_tokens) + 1].clip(max=num_tokens)
    return np.diff(stops, prepend=0)


def pretrain(context: int) -> LengthDistribution:
    """Up-samples long documents: 6 % of the documents hold about half of the tokens."""

    def draw(rng: np.random.Generator, n: int) -> Floats:
        short = rng.lognormal(np.log(0.046 * context), 0.75, n)
        long = np.where(rng.random(n) < 0.3, context, rng.uniform(context / 2, context, n))
        return np.where(rng.random(n) < 0.06, long, short)

    return LengthDistribution("pretrain", context, draw)


def prolong(context: int, share: float = PROLONG_SHARE) -> LengthDistribution:
    """Draws mostly short documents for any context; long ones hold ``share`` of the tokens."""
    if not 0 <= share <= 1:
        raise ValueError(f"prolong:{share:g}: the share of the tokens must be from 0 to 1")
    short_mean, long_mean = 2900.0, 0.75 * context
    chance = share * short_mean / (share * short_mean + (1 - share) * long_mean)

    def draw(rng: np.random.Generator, n: int) -> Floats:
        short = rng.lognormal(np.log(1900.0), 0.92, n)
        return np.where(rng.random(n) < chance, rng.uniform(context / 2, context, n), short)

    name = "prolong" if share == PROLONG_SHARE else f"prolong:{share:g}"
    return LengthDistribution(name, context, draw)


def reasoning(context: int) -> LengthDistribution:
    """Draws completions of a reasoning model in RL, one in ten of which reaches the limit.

    The lengths with which TRL's dynamic batching was measured (huggingface/trl pull request 6092):
    log-normal, with a median of 700 of at most 4,096 tokens and sigma 0.9, and 10 % cut off at the
    limit. Their prompts are left out.
    """

    def draw(rng: np.random.Generator, n: int) -> Floats:
        ended = rng.lognormal(np.log(context * 700 / 4096), 0.9, n)
        return np.where(rng.random(n) < 0.1, context, ended)

    return LengthDistribution("reasoning", context, draw)


def agent(context: int) -> LengthDistribution:
    """Draws traces of a coding agent with many turns, for any context.

    Fitted to what ai-dynamo/aiperf issue 1019 states of the 67,074 traces of
    nebius/SWE-rebench-openhands-trajectories: a mean of about 27K tokens and at most 131K.
    """
    return LengthDistribution(
        "agent", context, lambda rng, n: rng.lognormal(np.log(24_900), 0.4, n)
    )


def chat(context: int) -> LengthDistribution:
    """Draws conversations of supervised fine-tuning, for any context: one prompt and one reply.

    Replies are fitted to the published lengths of 781,924 replies of the Tulu 3 mixture
    (Korea-MES/Tulu3-Multiturn-MLT), of which half are shorter than 190 tokens. 97 % of the
    conversations have one turn. Prompts have the median of TRL's measurement (see ``reasoning``).
    """

    def draw(rng: np.random.Generator, n: int) -> Floats:
        return rng.lognormal(np.log(256), 0.9, n) + rng.lognormal(np.log(190), 1.2, n)

    return LengthDistribution("chat", context, draw)


def lognormal(context: int, median: float, sigma: float) -> LengthDistribution:
    name = f"lognormal:{median:g}:{sigma:g}"
    if not (0 < median < np.inf and 0 <= sigma < np.inf):
        raise ValueError(f"{name}: the median must be above 0 and sigma at least 0")
    return LengthDistribution(name, context, lambda rng, n: rng.lognormal(np.log(median), sigma, n))


def fixed(context: int, length: int) -> LengthDistribution:
    if not 1 <= length <= context:
        raise ValueError(
            f"fixed:{length} with a context of {context} tokens:"
            " the length must be at least 1 and at most the context"
        )
    return LengthDistribution(
        f"fixed:{length}", context, lambda _, n: np.full(n, length, dtype=np.float64)
    )


def distribution(spec: str, context: int) -> LengthDistribution:
    """Parses one of ``FORMS``."""
    name, *words = spec.split(":")
    try:
        numbers = [float(word) for word in words]
    except ValueError:
        numbers = [np.nan]  # matches no case below
    match name, numbers:
        case "pretrain", []:
            return pretrain(context)
        case "prolong", []:
            return prolong(context)
        case "prolong", [share] if not np.isnan(share):
            return prolong(context, share)
        case "reasoning", []:
            return reasoning(context)
        case "agent", []:
            return agent(context)
        case "chat", []:
            return chat(context)
        case "lognormal", [median, sigma]:
            return lognormal(context, median, sigma)
        case "fixed", [length] if length.is_integer():
            return fixed(context, int(length))
    raise ValueError(f"length distribution {spec!r} is unknown: choose {FORMS}")
